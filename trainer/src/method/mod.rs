//! Methods: what a run learns. Each owns its multi-crop, its head, its targets, its loss and what
//! moves without gradients; none touches loader, optimizer, sharding or checkpoint.
//!
//! A new method is one file and one variant of [`MethodConfig`].

mod dino;
pub mod loss;

pub use dino::DinoConfig;

use augment::MultiCrop;
use burn_tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::comm::engine::EngineError;
use crate::comm::peers::Peers;
use crate::model::unit::Unit;
use crate::schedule::Knobs;

/// What a network gives for a batch, by group of views.
#[derive(Debug, Clone)]
pub struct Outputs {
    /// What the backbone gives: class tokens `[B, V, D]`.
    pub embeddings: Vec<Tensor<3>>,
    /// What the head makes of them, `[B, V, K]`.
    pub logits: Vec<Tensor<3>>,
}

/// Gauge of the part of the loss in which the student follows the teacher. A method whose loss has
/// no other part leaves it out.
pub const MATCH_LOSS: &str = "train/match_loss";

/// Named numbers of a step, for the metrics row.
pub type Gauges = Vec<(&'static str, f64)>;

/// What a method says of a part of a batch.
pub struct PartLoss {
    /// Mean loss of the part `[1]`, with its graph.
    pub loss: Tensor<1>,
    /// What to report, `[1]` each without a graph: means over the part. They stay on the device, which is asked for
    /// them when it has nothing else to do.
    pub gauges: Vec<(&'static str, Tensor<1>)>,
}

/// A batch that is being scored: what its parts share is known.
pub trait Scoring {
    /// Scores this rank's part `part`.
    fn loss(&self, part: usize, student: &Outputs) -> PartLoss;

    /// What [`Method::after_step`] needs of the whole batch, `[n]`: the same on all ranks.
    fn observed(&self) -> Tensor<1>;
}

/// A self-supervised method.
pub trait Method: Send + Sync {
    /// The views it wants of each image.
    fn multicrop(&self) -> &MultiCrop;

    /// How many of the multi-crop's groups the teacher sees, from the first on.
    fn n_teacher_groups(&self) -> usize {
        1
    }

    /// The units of its head, which student and teacher have one of each.
    fn head(&self) -> Vec<Box<dyn Unit>>;

    /// Starts to score a batch with what spans all of it: targets that are balanced over images, neighbors.
    /// `teacher` and the student's embeddings `student` (by part, then by group, `[B / N, V, D]`, without a
    /// graph) are of this rank's parts; `peers` knows the others.
    ///
    /// # Errors
    /// [`EngineError`].
    fn score(
        &self,
        teacher: &[Outputs],
        student: &[Vec<Tensor<3>>],
        knobs: &Knobs,
        peers: Peers<'_>,
    ) -> Result<Box<dyn Scoring>, EngineError>;

    /// Moves what moves without gradients, by what the accepted step's loss observed.
    fn after_step(&mut self, observed: &[f32]);

    /// The value that [`MATCH_LOSS`] has when the student knows nothing, if there is one.
    fn uninformed_loss(&self) -> Option<f64>;

    /// What a checkpoint must hold: names and values.
    fn state(&self) -> Vec<(String, Vec<f32>)>;

    /// Takes what a checkpoint held. Unknown names are ignored.
    ///
    /// # Errors
    /// The name of a value of the wrong length.
    fn load_state(&mut self, state: &[(String, Vec<f32>)]) -> Result<(), String>;
}

/// A method, as a recipe writes it under `[method]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum MethodConfig {
    /// Self-distillation with no labels.
    Dino(DinoConfig),
}

impl MethodConfig {
    /// The method, for a backbone of `width` channels.
    pub fn build(&self, multicrop: MultiCrop, width: usize) -> Box<dyn Method> {
        match self {
            Self::Dino(config) => Box::new(dino::Dino::new(config.clone(), multicrop, width)),
        }
    }

    /// Checks what the method relies on.
    ///
    /// # Errors
    /// The key and what is wrong with it.
    pub fn validate(&self) -> Result<(), String> {
        match self {
            Self::Dino(config) => config.validate(),
        }
    }
}
