//! Results of a step: gradients before its update, and a report after it.

use burn_tensor::Tensor;
use networks::outputs::Outputs;
use ranks::EngineError;
use ranks::fixed::FixedPoint;

use super::agreement::Votes;
use super::phases::Phases;
use super::scalars::Scalars;
use super::sharded::Observation;
use crate::method::Gauges;

/// Gradients of a step whose update has not been applied.
pub struct Gradients {
    /// Shards of the mean gradients on this rank, by unit of the trained network.
    pub(super) shards: Vec<Tensor<1>>,
    /// Loss and gauges of this rank.
    pub(super) scalars: Vec<Scalars>,
    /// Values that the method needs after the step, by name.
    pub(super) observed: Vec<(&'static str, Tensor<1>)>,
    /// Values of parameters that were constrained before the step.
    pub(super) constrained: Vec<Observation>,
    /// New values of running parameters, from the step's statistics.
    pub(super) observations: Vec<Observation>,
    /// Embeddings, as in [`StepReport::embeddings`].
    pub(super) embeddings: Vec<Tensor<2>>,
    /// Time of the step by phase, without the update.
    pub(super) phases: Phases,
}

impl Gradients {
    /// Returns this rank's share of the loss.
    ///
    /// # Errors
    /// [`EngineError::Device`] when the device has failed.
    pub fn loss(&self) -> Result<f64, EngineError> {
        Ok(FixedPoint::from_limbs(&Scalars::read_loss(&self.scalars)?.limbs()))
    }

    /// Returns the shards of the mean gradients on this rank, by unit.
    pub fn shards(&self) -> &[Tensor<1>] {
        &self.shards
    }

    /// Returns the embeddings, as in [`StepReport::embeddings`].
    pub fn embeddings(&self) -> &[Tensor<2>] {
        &self.embeddings
    }

    /// Sets every gradient to NaN, for drills.
    pub fn fill_nan(&mut self) {
        for shard in &mut self.shards {
            *shard = shard.full_like(f32::NAN);
        }
    }
}

/// Report of a step.
#[derive(Debug, Clone)]
pub struct StepReport {
    /// Mean loss of the global batch.
    pub loss: f64,
    /// Norm of all gradients, before clipping.
    pub grad_norm: f64,
    /// Whether the update was applied; false if loss or gradient was not finite.
    pub finite: bool,
    /// Time of the step by phase.
    pub phases: Phases,
    /// Gauges of the method, over the global batch.
    pub gauges: Gauges,
    /// Embeddings of the first view size by micro-batch, one row per image, `[B, V · D]`, of the
    /// network that is evaluated.
    pub embeddings: Vec<Tensor<2>>,
    /// Votes of all ranks.
    pub votes: Votes,
}

/// Returns copies of the embeddings of the network `evaluated`, by micro-batch. `others` are the
/// outputs of the networks without gradients, `trained` those of the trained network.
pub(super) fn embeddings(
    evaluated: &str,
    others: &[(&'static str, Vec<Outputs>)],
    trained: &[Outputs],
) -> Vec<Tensor<2>> {
    let outputs: &[Outputs] = match others.iter().find(|(name, _)| *name == evaluated) {
        Some((_, outputs)) => outputs,
        None => trained,
    };
    outputs.iter().map(|outputs| outputs.image_rows().mul_scalar(1.0)).collect()
}
