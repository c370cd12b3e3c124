//! What a step gives: gradients before its update, and a report after it.

use burn_tensor::Tensor;
use ranks::EngineError;
use ranks::fixed::Fixed;

use super::agreement::Votes;
use super::phases::Phases;
use super::scalars::Scalars;
use super::sharded::Observation;
use crate::method::Gauges;

/// A step whose gradients are known and whose update is not made.
pub struct Gradients {
    /// This rank's shards of the mean gradients, by unit of the trained network.
    pub(super) shards: Vec<Tensor<1>>,
    pub(super) scalars: Scalars,
    pub(super) observed: Vec<(&'static str, Tensor<1>)>,
    /// Where parameters have been put before the step.
    pub(super) constrained: Vec<Observation>,
    /// What the step's statistics make of running parameters.
    pub(super) observations: Vec<Observation>,
    pub(super) embeddings: Vec<Tensor<2>>,
    pub(super) phases: Phases,
}

impl Gradients {
    /// This rank's share of the loss.
    ///
    /// # Errors
    /// [`EngineError::Device`] when the device has failed.
    pub fn loss(&self) -> Result<f64, EngineError> {
        Ok(Fixed::from_limbs(&self.scalars.read()?.0.limbs()))
    }

    /// This rank's shards of the mean gradients, by unit.
    pub fn shards(&self) -> &[Tensor<1>] {
        &self.shards
    }

    /// Embeddings, as in [`StepReport::embeddings`].
    pub fn embeddings(&self) -> &[Tensor<2>] {
        &self.embeddings
    }

    /// Makes every gradient a NaN: a drill for what follows.
    pub fn poison(&mut self) {
        self.shards.iter_mut().for_each(|shard| *shard = shard.full_like(f32::NAN));
    }
}

/// What a step says of itself.
#[derive(Debug, Clone)]
pub struct StepReport {
    /// Mean loss of the global batch.
    pub loss: f64,
    /// Norm of all gradients, before clipping.
    pub grad_norm: f64,
    /// False if the step was skipped because loss or gradient was not finite.
    pub finite: bool,
    /// Where the time went.
    pub phases: Phases,
    /// The method's own numbers, over the global batch.
    pub gauges: Gauges,
    /// Embeddings of the first size of views by micro-batch, a row an image, `[B, V · D]`, of the network that evaluation
    /// looks at.
    pub embeddings: Vec<Tensor<2>>,
    /// What the ranks have said.
    pub votes: Votes,
}
