//! Self-supervised methods. Each owns its views, heads, targets, loss and any state that is updated
//! without gradients; none touches loader, optimizer, sharding or checkpoint.
//!
//! A new method is one file, with a `Config` that is a [`MethodRecipe`], and one line in `registry`.

mod dino;
mod lejepa;
pub(crate) mod loss;
mod registry;
mod simclr;
mod swav;
#[cfg(test)]
mod toy;
mod views;

pub(crate) use registry::MethodConfig;
pub(crate) use views::ViewsConfig;

use augment::MultiCrop;
use burn_tensor::Tensor;
use networks::features::Outputs;
use networks::head::Head;
use networks::unit::StatSets;
use ranks::EngineError;
use ranks::peers::Peers;

use crate::schedule::RunLength;

/// Gauge of the part of the loss in which the student follows a teacher. A method whose loss has
/// no other part leaves it out.
pub(crate) const MATCH_LOSS: &str = "train/match_loss";

/// Named numbers of a step, for the metrics row.
pub(crate) type Gauges = Vec<(&'static str, f64)>;

/// A self-supervised method.
pub trait Method: Send + Sync {
    /// The views that it wants of each image.
    fn views(&self) -> &MultiCrop;

    /// Which sizes of views the student sees.
    fn student_sees(&self) -> Vec<usize> {
        (0..self.views().groups().len()).collect()
    }

    /// Copies of the student that follow it without gradients, such as an EMA teacher.
    fn followers(&self) -> Vec<Follower> {
        Vec::new()
    }

    /// Its heads; one that reads another comes after it.
    fn heads(&self) -> Vec<Head>;

    /// Which sizes of views share statistics over the batch.
    fn stat_sets(&self) -> StatSets {
        StatSets::per_size(self.views().groups().len())
    }

    /// The same within heads.
    fn head_stat_sets(&self) -> StatSets {
        StatSets::joint(self.views().groups().len())
    }

    /// Whether [`Method::prepare`] wants to see what the student's heads give, at the price of a second pass through
    /// them.
    fn prepares_with_heads(&self) -> bool {
        false
    }

    /// Finds out what the loss of each micro-batch needs of the whole batch: targets that are balanced over images,
    /// neighbors. `peers` knows the micro-batches of other ranks.
    ///
    /// # Errors
    /// [`EngineError`].
    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        step: u64,
        peers: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError>;

    /// Updates state that has no gradient, such as a center, from what the loss of an accepted step observed.
    fn after_step(&mut self, observed: &[f32]) {
        let _ = observed;
    }

    /// Scheduled values, such as temperatures, for the metrics row.
    fn knobs(&self, step: u64) -> Gauges {
        let _ = step;
        Vec::new()
    }

    /// The value that [`MATCH_LOSS`] has when the student knows nothing, if there is one.
    fn uninformed_loss(&self) -> Option<f64> {
        None
    }

    /// Name of the gauge with the mean entropy of the targets over prototypes, if the method has such targets: a run whose
    /// targets become uniform has collapsed, whatever the gauge is called.
    fn target_entropy(&self) -> Option<&'static str> {
        None
    }

    /// What a checkpoint must hold: names and values.
    fn state(&self) -> Vec<(String, Vec<f32>)> {
        Vec::new()
    }

    /// Takes what a checkpoint held. Unknown names are ignored.
    ///
    /// # Errors
    /// The name of a value of the wrong length.
    fn load_state(&mut self, state: &[(String, Vec<f32>)]) -> Result<(), String> {
        let _ = state;
        Ok(())
    }
}

/// A network that follows the student.
#[derive(Debug, Clone, PartialEq)]
pub struct Follower {
    /// Its name: that of its weights in checkpoints and in metrics.
    pub name: &'static str,
    /// Which sizes of views it sees.
    pub sees: Vec<usize>,
    /// How it moves.
    pub moves: Moves,
}

/// How a follower moves after each step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moves {
    /// As a moving average of the student, by the decay of the recipe's `[teacher]`.
    Average,
    /// To the student's weights, every so many steps.
    Snapshot {
        /// Between two of them.
        every_steps: u64,
    },
}

impl Moves {
    /// The share of the old weights that stays when the step before `next_step` has been taken; `decay` is the
    /// recipe's.
    pub fn decay(self, next_step: u64, decay: f64) -> f64 {
        match self {
            Self::Average => decay,
            Self::Snapshot { every_steps } if next_step.is_multiple_of(every_steps) => 0.0,
            Self::Snapshot { .. } => 1.0,
        }
    }
}

/// What the networks give for this rank's micro-batches, without a graph.
pub struct BatchOutputs<'a> {
    /// The student, by micro-batch; without heads unless [`Method::prepares_with_heads`].
    pub student: &'a [Outputs],
    /// The followers in their order, by micro-batch.
    pub followers: &'a [Vec<Outputs>],
    /// What the student's head of a name makes of vectors `[n, V, D]` that are none of this batch, without a graph.
    pub score: &'a dyn Fn(&str, Tensor<3>) -> Tensor<3>,
}

/// The loss of a batch, once everything that depends on the whole batch is known.
pub trait BatchLoss {
    /// The loss of this rank's micro-batch `number`.
    fn of(&self, number: usize, student: &Outputs) -> MicroBatchLoss;

    /// What [`Method::after_step`] needs of the whole batch, `[n]`: the same on all ranks.
    fn observed(&self) -> Tensor<1>;
}

/// What a method says of a micro-batch.
pub struct MicroBatchLoss {
    /// Mean loss of the micro-batch `[1]`, with its graph.
    pub loss: Tensor<1>,
    /// What to report, `[1]` each without a graph: means over the micro-batch. They stay on the device, which is
    /// asked for them when it has nothing else to do.
    pub gauges: Vec<(&'static str, Tensor<1>)>,
}

/// What a recipe writes under `[method]` for one method.
pub(crate) trait MethodRecipe {
    /// The method.
    ///
    /// # Errors
    /// The key and what is wrong with it, the views among them.
    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String>;

    /// Small ones that between them use everything that the method can do, each with its views, for the conformance
    /// tests.
    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)>
    where
        Self: Sized;
}

/// What a method is built for.
#[derive(Debug, Clone)]
pub struct MethodContext {
    /// The views of an image.
    pub views: MultiCrop,
    /// Channels of the backbone's features.
    pub width: usize,
    /// How long the run is.
    pub length: RunLength,
    /// Seed of the run.
    pub seed: u64,
}
