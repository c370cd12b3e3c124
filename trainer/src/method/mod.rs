//! Methods, self-supervised or with labels. A method defines its views, heads, targets, loss and
//! any state that is updated without gradients. It does not access the loader, optimizer, sharding
//! or checkpoint.
//!
//! To add a method, write one file with a `Config` that implements [`MethodRecipe`], and list it
//! here and in `registry`; CONTRIBUTING.md has everything else that belongs to one. `toymasked`, a
//! method of tests, is a short example with masked patches.
//!
//! # What a method reads
//!
//! Each with a method that shows it:
//!
//! - [`Outputs::features`], of every network: vectors of views in `loss::koleo`, masked patches in
//!   `ijepa`, all patches in `distillation`. Where a head reads cells, or a network without
//!   gradients has no heads, these are all tokens, else one vector per view
//!   ([`NetworkSpec::readout`]).
//! - [`Outputs::levels`], of networks with [`NetworkSpec::n_levels`]: `data2vec`.
//! - [`Outputs::heads`], by what they read ([`Reads`](networks::head::Reads)): vectors of views in
//!   `simclr`, patches in `toy`, masked patches in `data2vec`, all patches and the masked ones in
//!   `self_distillation::patches`, another head in `byol`, all tokens in `mae`, whose head is a
//!   network of its own.
//! - [`HeadOutputs::masked`], the masked cells of [`Method::masks`] and their weights: `toymasked`.
//! - [`Outputs::pixels`], with [`Method::reads_pixels`]: `mae`.
//! - Heads of the trained network before the loss, with [`Method::prepares_with_heads`]: `simclr`.
//!   [`BatchOutputs::score`] applies one to other vectors: `swav`, to its queue.
//! - Columns of heads that are divided among ranks, such as those of prototypes:
//!   [`BatchOutputs::columns`] and [`BatchLoss::column_loss`], in `swav` by way of `prototypes`.
//! - Values of the whole batch, with [`Peers`]: rows are gathered in `loss::nt_xent`, and sums are
//!   made in `vicreg`. [`Method::collectives`] lists them.
//! - Values of earlier steps, with [`BatchLoss::observed`], [`Method::after_step`] and
//!   [`Method::state`]: `toy`.
//! - A network of another run, with [`MethodRecipe::frozen`]: `distillation`.
//! - Labels of images, with [`MethodRecipe::labels`], several for each with
//!   [`MethodRecipe::is_multi_label`], and images that are mixed in pairs, with [`Method::mixing`]:
//!   `classification`.
//! - Classes of the pixels of views, with [`MethodRecipe::pixel_labels`] and
//!   [`Method::reads_pixel_classes`]: `segmentation`.

mod barlowtwins;
mod bounds;
mod byol;
pub(crate) mod check;
mod classification;
mod collective;
mod data2vec;
mod dino;
mod dinov2;
mod dinov3;
mod dinov3distillation;
mod distillation;
mod feature_regression;
mod ibot;
mod ijepa;
mod lejepa;
pub(crate) mod loss;
mod mae;
mod mocov3;
pub(crate) mod network;
mod prototype_group;
pub(crate) mod prototypes;
mod registry;
mod segmentation;
mod self_distillation;
mod simclr;
mod swav;
#[cfg(test)]
mod toy;
#[cfg(test)]
mod toymasked;
mod two_views;
mod vicreg;
mod views;

pub(crate) use collective::Collective;
pub(crate) use registry::MethodConfig;
#[cfg(test)]
pub(crate) use views::CustomViews;
pub(crate) use views::ViewsConfig;

use augment::{Mixing, MultiCrop, SoftLabel, ViewMasks};
use burn_tensor::Tensor;
use networks::backbone::ModelConfig;
use networks::head::pixels::PixelDecoder;
use networks::mask::MaskRule;
use networks::outputs::{HeadOutputs, Outputs};
use networks::unit::StatSets;
use ranks::EngineError;
use ranks::column_group::ColumnGroup;
use ranks::peers::Peers;

use self::network::{FrozenEntry, NetworkSpec};
use crate::schedule::RunLength;

/// Gauge of the part of the loss in which the trained network predicts targets. A method whose loss
/// has no other part does not report it.
pub(crate) const MATCH_LOSS: &str = "train/match_loss";

/// Named numbers of a step, for the metrics row.
pub(crate) type Gauges = Vec<(&'static str, f64)>;

/// A method.
pub trait Method: Send + Sync {
    /// Views that the method needs of each image.
    fn views(&self) -> &MultiCrop;

    /// Mixing of the images of a batch and of their labels, if they are mixed. A method that mixes
    /// has views of one size, and learns from labels.
    fn mixing(&self) -> Option<Mixing> {
        None
    }

    /// Networks of the method, in the order in which they run. The trained network always runs
    /// last, wherever it is listed.
    fn networks(&self) -> Vec<NetworkSpec>;

    /// Name of the network that is evaluated and exported.
    fn evaluated(&self) -> &'static str;

    /// Number of ranks among which the columns of divided heads are divided; 1 if no head is
    /// divided.
    fn column_group_size(&self) -> usize {
        1
    }

    /// Returns the key of a setting whose value does not allow a run to start from random weights,
    /// if there is one.
    fn needs_trained_weights(&self) -> Option<&'static str> {
        None
    }

    /// Rule for masks of the views of one size. [`SeenViews::masking`](network::SeenViews) is what
    /// each network sees of masked patches.
    fn masks(&self) -> Option<MaskRule> {
        None
    }

    /// Sets of view sizes that share statistics over the batch.
    fn stat_sets(&self) -> StatSets {
        StatSets::per_size(self.views().groups().len())
    }

    /// Sets of view sizes that share statistics over the batch in heads.
    fn head_stat_sets(&self) -> StatSets {
        StatSets::joint(self.views().groups().len())
    }

    /// Returns whether [`Method::prepare`] needs the output of the trained network's heads, which
    /// costs a second pass through them.
    fn prepares_with_heads(&self) -> bool {
        false
    }

    /// Returns whether the loss needs the pixels of the views that the trained network sees, as
    /// [`Outputs::pixels`].
    fn reads_pixels(&self) -> bool {
        false
    }

    /// Returns whether the loss needs the classes of the views' pixels, as [`BatchOutputs::masks`].
    fn reads_pixel_classes(&self) -> bool {
        false
    }

    /// Computes the values of the global batch that the loss of each micro-batch needs, such as
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

    /// Returns, in order, the collectives that [`Method::prepare`] issues once everything that
    /// starts late in a run has started, such as a queue; used by `ocelli plan`. Exchanges within
    /// column groups are not included.
    fn collectives(&self) -> Vec<Collective> {
        Vec::new()
    }

    /// Updates state that has no gradient, such as a center, from the named values that the loss of
    /// an accepted step observed.
    fn after_step(&mut self, observed: &[(&'static str, Vec<f32>)]) {
        let _ = observed;
    }

    /// Scheduled values, such as temperatures, for the metrics row.
    fn scheduled_values(&self, step: u64) -> Gauges {
        let _ = step;
        Vec::new()
    }

    /// Returns whether embeddings of a batch that are nearly equal, or that vary along few
    /// directions, are signs of a collapse.
    fn judges_embeddings(&self) -> bool {
        true
    }

    /// Value of [`MATCH_LOSS`] at chance level, for a trained network that has learned nothing, if
    /// it is defined.
    fn uninformed_loss(&self) -> Option<f64> {
        None
    }

    /// Targets that are distributions over prototypes. A run whose targets become uniform has
    /// collapsed.
    fn target_distributions(&self) -> Vec<TargetDistribution> {
        Vec::new()
    }

    /// Values that a checkpoint must contain, with their names.
    fn state(&self) -> Vec<(String, Vec<f32>)> {
        Vec::new()
    }

    /// Restores values from a checkpoint. Unknown names are ignored.
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
    /// Outputs of the trained network, by micro-batch; without those of heads unless
    /// [`Method::prepares_with_heads`].
    pub trained: &'a [Outputs],
    /// Outputs of the other networks by name, by micro-batch.
    pub others: &'a [(&'static str, Vec<Outputs>)],
    /// Labels of the images, by micro-batch, in the order of the rows of outputs; empty lists
    /// unless the method learns from labels.
    pub labels: &'a [Vec<SoftLabel>],
    /// Classes of the pixels of the images' views, by micro-batch, in the order of the rows of
    /// outputs; empty lists unless [`Method::reads_pixel_classes`].
    pub masks: &'a [Vec<ViewMasks>],
    /// This rank's columns of divided heads; `None` if no head is divided.
    pub columns: Option<ColumnOutputs<'a>>,
    /// Applies the trained network's head of the given name, which must not have statistics over
    /// the batch, to vectors `[n, V, D]` that are not part of this batch, without a graph.
    pub score: &'a dyn Fn(&str, Tensor<3>) -> Tensor<3>,
}

impl BatchOutputs<'_> {
    /// Outputs of the network `name`, which is not the trained one, by micro-batch.
    ///
    /// # Panics
    /// If there is no such network: a bug in the method, which lists its networks itself.
    pub fn network_outputs(&self, name: &str) -> &[Outputs] {
        let entry = self.others.iter().find(|(network, _)| *network == name);
        &entry.unwrap_or_else(|| panic!("the method has no network {name}")).1
    }
}

/// This rank's columns of the outputs of divided heads, by micro-batch of the column group, without
/// a graph: `[B, V, K / C]`, and `[R, 1, K / C]` for masked cells.
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
    pub fn network_outputs(&self, name: &str) -> &[HeadOutputs] {
        let entry = self.others.iter().find(|(network, _)| *network == name);
        &entry.unwrap_or_else(|| panic!("the method has no network {name}")).1
    }
}

/// The loss of a batch, after everything that depends on the global batch has been computed.
pub trait BatchLoss {
    /// Returns the loss of this rank's micro-batch `index`, given the outputs of the trained
    /// network with their graph. Terms that depend on divided heads are not included.
    ///
    /// The loss of the batch is the mean over the micro-batches of all ranks, which have equally
    /// many images. It must not depend on how the batch is divided: means over micro-batches must
    /// average to the mean over the batch. A mean over masked patches does not where views have
    /// different numbers of them; there, each patch has the
    /// [weight](networks::mask::MaskedCells::weights) of its view, and the sum is divided by the
    /// number of views, as in `toymasked`.
    fn micro_batch_loss(&self, index: usize, trained: &Outputs) -> MicroBatchLoss;

    /// Returns this rank's share of the terms of micro-batch `index` of the column group that
    /// depend on divided heads, given the outputs of these heads with their graph. Losses and
    /// gauges of the group's ranks add up to those of the micro-batch. All ranks of the group call
    /// this method for the same micro-batches in the same order.
    ///
    /// # Errors
    /// [`EngineError`].
    ///
    /// # Panics
    /// In a method that divides no head.
    fn column_loss(
        &self,
        index: usize,
        scores: &HeadOutputs,
        group: ColumnGroup<'_>,
    ) -> Result<MicroBatchLoss, EngineError> {
        let _ = (index, scores, group);
        panic!("a method that divides a head has a loss by columns");
    }

    /// Values of the global batch for [`Method::after_step`], by name, `[n]` each, equal on all
    /// ranks.
    fn observed(&self) -> Vec<(&'static str, Tensor<1>)> {
        Vec::new()
    }
}

/// Description of targets that are distributions over prototypes, for warnings of collapse.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetDistribution {
    /// Gauge with the mean entropy of the targets.
    pub entropy: &'static str,
    /// Entropy of uniform targets, the logarithm of the number of prototypes.
    pub uniform_entropy: f64,
    /// Key of the recipe whose lower values make the targets sharper.
    pub sharpness_key: &'static str,
}

impl TargetDistribution {
    /// Creates the description of targets over `n_prototypes`, with the gauge of their entropy and
    /// the key that sharpens them.
    pub fn new(n_prototypes: usize, entropy: &'static str, sharpness_key: &'static str) -> Self {
        Self { entropy, uniform_entropy: (n_prototypes as f64).ln(), sharpness_key }
    }
}

/// Loss and gauges of a micro-batch.
pub struct MicroBatchLoss {
    /// Mean loss of the micro-batch `[1]`, with its graph.
    pub loss: Tensor<1>,
    /// Gauges to report, `[1]` each without a graph: means over the micro-batch. All micro-batches
    /// on all ranks have the same gauges in the same order. They stay on the device until the host
    /// synchronizes with it for another reason.
    pub gauges: Vec<(&'static str, Tensor<1>)>,
}

/// Facts about the labels of the images, or of their pixels, which the recipe of a run records
/// under `[method]`.
pub struct LabelFacts<'a> {
    /// Names of the classes, by number.
    pub classes: &'a mut Vec<String>,
    /// Fingerprint of the labels of all images, or of their masks; empty until they have been read.
    pub fingerprint: &'a mut String,
}

/// Settings that a recipe writes under `[method]` for one method.
pub(crate) trait MethodRecipe {
    /// Name of the method as publications write it.
    const TITLE: &'static str;

    /// Builds the method. This comes before its networks are compared with the backbone: that a
    /// backbone has no tokens to mask ([`check::check_masks_fit`]) is told only if this function
    /// succeeds, so its own checks of patches must not refuse such a backbone.
    ///
    /// # Errors
    /// A message with the key and the reason; views are checked as well.
    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String>;

    /// Returns the frozen networks that the recipe names.
    fn frozen(&mut self) -> Vec<FrozenEntry<'_>> {
        Vec::new()
    }

    /// Returns the names of the classes, by number, if the method learns from labels: none before
    /// the labels have been read, unless the recipe lists them.
    fn classes(&self) -> Option<&[String]> {
        None
    }

    /// Returns whether an image may have several classes, or none, if the method learns from
    /// labels.
    fn is_multi_label(&self) -> bool {
        false
    }

    /// Returns the facts about labels that are to be recorded, if the method learns from labels.
    fn labels(&mut self) -> Option<LabelFacts<'_>> {
        None
    }

    /// Returns the names of the classes of pixels, by their values in masks, if the method learns
    /// from masks: none before the masks have been read, unless the recipe lists them.
    fn pixel_classes(&self) -> Option<&[String]> {
        None
    }

    /// Returns the layers of the decoder that scores the classes of pixels, if the method learns
    /// from masks.
    fn pixel_decoder(&self) -> Option<PixelDecoder> {
        None
    }

    /// Returns the facts about masks that are to be recorded, if the method learns from masks.
    fn pixel_labels(&mut self) -> Option<LabelFacts<'_>> {
        None
    }

    /// Adapts settings that count images to a batch of `batch_size`, which differs from that of the
    /// recipe: for benchmarks.
    fn fit_batch(&mut self, batch_size: usize) {
        let _ = batch_size;
    }

    /// Settings of small models that together use every feature of the method, each with its views,
    /// for the conformance tests.
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
