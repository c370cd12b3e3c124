//! Self-supervised methods. Each owns its views, heads, targets, loss and any state that is updated
//! without gradients; none touches loader, optimizer, sharding or checkpoint.
//!
//! A new method is one file, with a `Config` that is a [`MethodRecipe`], and one line in
//! `registry`.

pub(crate) mod check;
mod collective;
mod dino;
mod dinov2;
mod dinov3;
mod dinov3distillation;
mod distillation;
mod ibot;
mod lejepa;
pub(crate) mod loss;
mod mocov3;
pub(crate) mod network;
mod prototype_group;
mod registry;
mod self_distillation;
mod simclr;
mod swav;
#[cfg(test)]
mod toy;
#[cfg(test)]
mod toymasked;
mod views;

pub(crate) use collective::Collective;
pub(crate) use registry::MethodConfig;
#[cfg(test)]
pub(crate) use views::CustomViews;
pub(crate) use views::ViewsConfig;

use augment::MultiCrop;
use burn_tensor::Tensor;
use networks::backbone::ModelConfig;
use networks::features::{HeadOutputs, Outputs};
use networks::mask::MaskRule;
use networks::unit::StatSets;
use ranks::EngineError;
use ranks::column_group::ColumnGroup;
use ranks::peers::Peers;

use self::network::{FrozenEntry, NetworkSpec};
use crate::schedule::RunLength;

/// Gauge of the part of the loss in which the trained network predicts targets. A method whose loss
/// has no other part leaves it out.
pub(crate) const MATCH_LOSS: &str = "train/match_loss";

/// Named numbers of a step, for the metrics row.
pub(crate) type Gauges = Vec<(&'static str, f64)>;

/// A self-supervised method.
pub trait Method: Send + Sync {
    /// Views that the method needs of each image.
    fn views(&self) -> &MultiCrop;

    /// Networks of the method, in the order in which they run; the trained network runs last,
    /// wherever it is listed.
    fn networks(&self) -> Vec<NetworkSpec>;

    /// Name of the network that is evaluated and exported.
    fn evaluated(&self) -> &'static str;

    /// Number of ranks among which the columns of divided heads are divided; 1 without such heads.
    fn column_group_size(&self) -> usize {
        1
    }

    /// Returns the key of a setting with which a run does not start from random weights, if it is
    /// set so.
    fn needs_trained_weights(&self) -> Option<&'static str> {
        None
    }

    /// Masks of views of one size; [`Sight::masked`](network::Sight) says for which networks masked
    /// patches are hidden.
    fn masks(&self) -> Option<MaskRule> {
        None
    }

    /// Sets of view sizes that share statistics over the batch.
    fn stat_sets(&self) -> StatSets {
        StatSets::per_size(self.views().groups().len())
    }

    /// Sets of view sizes that share statistics over the batch within heads.
    fn head_stat_sets(&self) -> StatSets {
        StatSets::joint(self.views().groups().len())
    }

    /// Returns whether [`Method::prepare`] needs the output of the trained network's heads, at the
    /// cost of a second pass through them.
    fn prepares_with_heads(&self) -> bool {
        false
    }

    /// Computes the values of the whole batch that the loss of each micro-batch needs, such as
    /// targets that are balanced over images, or neighbors. `peers` exchanges data with the
    /// micro-batches of other ranks.
    ///
    /// # Errors
    /// [`EngineError`].
    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        step: u64,
        peers: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError>;

    /// Returns the collectives of [`Method::prepare`] in a step late in the run, in their order:
    /// plans count them. Exchanges within column groups are left out.
    fn collectives(&self) -> Vec<Collective> {
        Vec::new()
    }

    /// Updates state that has no gradient, such as a center, from the values that the loss of an
    /// accepted step observed, by their names.
    fn after_step(&mut self, observed: &[(&'static str, Vec<f32>)]) {
        let _ = observed;
    }

    /// Scheduled values, such as temperatures, for the metrics row.
    fn scheduled_values(&self, step: u64) -> Gauges {
        let _ = step;
        Vec::new()
    }

    /// Value of [`MATCH_LOSS`] at chance level, for a trained network that has learned nothing, if
    /// there is one.
    fn uninformed_loss(&self) -> Option<f64> {
        None
    }

    /// Targets that are distributions over prototypes: a run whose targets become uniform has
    /// collapsed.
    fn target_distributions(&self) -> Vec<TargetDistribution> {
        Vec::new()
    }

    /// Values that a checkpoint must hold, with their names.
    fn state(&self) -> Vec<(String, Vec<f32>)> {
        Vec::new()
    }

    /// Restores values that a checkpoint held. Unknown names are ignored.
    ///
    /// # Errors
    /// A message with the name of a value of the wrong length.
    fn load_state(&mut self, state: &[(String, Vec<f32>)]) -> Result<(), String> {
        let _ = state;
        Ok(())
    }
}

/// Outputs of the networks for this rank's micro-batches, without a graph.
pub struct BatchOutputs<'a> {
    /// Outputs of the trained network, by micro-batch; without heads unless
    /// [`Method::prepares_with_heads`].
    pub trained: &'a [Outputs],
    /// Outputs of the other networks by name, by micro-batch.
    pub others: &'a [(&'static str, Vec<Outputs>)],
    /// This rank's columns of divided heads; `None` if no head is divided.
    pub columns: Option<ColumnOutputs<'a>>,
    /// Applies the trained network's head of the given name, which has no statistics over the
    /// batch, to vectors `[n, V, D]` that are not part of this batch, without a graph.
    pub score: &'a dyn Fn(&str, Tensor<3>) -> Tensor<3>,
}

impl BatchOutputs<'_> {
    /// Outputs of the network `name`, which is not the trained one, by micro-batch.
    ///
    /// # Panics
    /// If there is no such network: a bug in the method, which lists its networks itself.
    pub fn of(&self, name: &str) -> &[Outputs] {
        let found = self.others.iter().find(|(of, _)| *of == name);
        &found.unwrap_or_else(|| panic!("the method has no network {name}")).1
    }
}

/// This rank's columns of divided heads, `[B, V, K / C]` and for masked cells `[R, 1, K / C]`
/// without a graph, by micro-batch of the column group.
#[derive(Clone, Copy)]
pub struct ColumnOutputs<'a> {
    /// The column group.
    pub group: ColumnGroup<'a>,
    /// Outputs of the trained network; empty unless [`Method::prepares_with_heads`].
    pub trained: &'a [HeadOutputs],
    /// Outputs of the other networks by name.
    pub others: &'a [(&'static str, Vec<HeadOutputs>)],
}

impl ColumnOutputs<'_> {
    /// Outputs of the network `name`, which is not the trained one.
    ///
    /// # Panics
    /// If there is no such network: a bug in the method, which lists its networks itself.
    pub fn of(&self, name: &str) -> &[HeadOutputs] {
        let found = self.others.iter().find(|(of, _)| *of == name);
        &found.unwrap_or_else(|| panic!("the method has no network {name}")).1
    }
}

/// The loss of a batch, once everything that depends on the whole batch is known.
pub trait BatchLoss {
    /// Returns the loss of this rank's micro-batch `number`, given the outputs of the trained
    /// network with their graph; where heads are divided, without the terms that depend on them.
    fn of(&self, number: usize, trained: &Outputs) -> MicroBatchLoss;

    /// Returns the part that this rank's columns add to the terms of micro-batch `number` of the
    /// column group that depend on divided heads, given their outputs with their graph. The sum
    /// over the group's ranks is the loss, and the sum of their gauges is that of the micro-batch.
    /// All ranks of the group call it for the same micro-batches in the same order.
    ///
    /// # Errors
    /// [`EngineError`].
    ///
    /// # Panics
    /// In a method that divides no head.
    fn of_columns(
        &self,
        number: usize,
        scores: &HeadOutputs,
        group: ColumnGroup<'_>,
    ) -> Result<MicroBatchLoss, EngineError> {
        let _ = (number, scores, group);
        panic!("a method that divides a head has a loss by columns");
    }

    /// Values of the whole batch for [`Method::after_step`], by name, `[n]` each: the same on all
    /// ranks.
    fn observed(&self) -> Vec<(&'static str, Tensor<1>)> {
        Vec::new()
    }
}

/// Targets that are distributions over prototypes, as warnings of collapse see them.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetDistribution {
    /// Gauge with the mean entropy of the targets.
    pub entropy: &'static str,
    /// Entropy of uniform targets, the logarithm of the number of prototypes.
    pub uniform_entropy: f64,
    /// Key of the recipe that makes the targets sharper when it is lowered.
    pub sharpness_key: &'static str,
}

impl TargetDistribution {
    /// Describes targets over `n_prototypes`, with the gauge of their entropy and the key that
    /// sharpens them.
    pub fn over(n_prototypes: usize, entropy: &'static str, sharpness_key: &'static str) -> Self {
        Self { entropy, uniform_entropy: (n_prototypes as f64).ln(), sharpness_key }
    }
}

/// Loss and gauges of a micro-batch.
pub struct MicroBatchLoss {
    /// Mean loss of the micro-batch `[1]`, with its graph.
    pub loss: Tensor<1>,
    /// Gauges to report, `[1]` each without a graph: means over the micro-batch. All micro-batches
    /// on all ranks have the same gauges in the same order. They stay on the device until the host
    /// waits for it anyway.
    pub gauges: Vec<(&'static str, Tensor<1>)>,
}

/// Settings that a recipe writes under `[method]` for one method.
pub(crate) trait MethodRecipe {
    /// Builds the method.
    ///
    /// # Errors
    /// A message with the key and what is wrong with it; views are checked as well.
    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String>;

    /// Returns the frozen networks that the recipe names.
    fn frozen(&mut self) -> Vec<FrozenEntry<'_>> {
        Vec::new()
    }

    /// Changes settings that count images to fit a batch of `batch_size`, which is not that of the
    /// recipe: for benchmarks.
    fn fit_batch(&mut self, batch_size: usize) {
        let _ = batch_size;
    }

    /// Small settings that together use every feature of the method, each with its views, for the
    /// conformance tests.
    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)>
    where
        Self: Sized;
}

/// Data from which a method is built.
#[derive(Debug, Clone)]
pub struct MethodContext {
    /// The views of an image.
    pub views: MultiCrop,
    /// The recipe's backbone.
    pub model: ModelConfig,
    /// Length of the run.
    pub length: RunLength,
    /// Seed of the run.
    pub seed: u64,
}
