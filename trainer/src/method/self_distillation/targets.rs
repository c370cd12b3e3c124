//! Targets: the teacher's scores, balanced over prototypes and sharpened.
//!
//! ```text
//! mean       P = softmax((T - c) / τ)       c ← m · c + (1 - m) · mean(T) after the step
//! sinkhorn   P = Sinkhorn(T / τ)            over the whole batch
//! ```

use burn_tensor::{Device, Tensor, TensorData};
use ranks::EngineError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::method::Collective;
use crate::method::prototypes::mean::{self, batch_means, prototypes_in_use};
use crate::method::prototypes::{PrototypeExchange, PrototypeTargets, Rows, sinkhorn};
use crate::schedule::Ramp;

/// Number of iterations of [`Centering::Sinkhorn`], as in SwAV and DINOv2.
const SINKHORN_ITERATIONS: usize = 3;

/// Rule that balances the teacher's outputs over prototypes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Centering {
    /// Subtraction of a moving mean of the logits: DINO.
    #[default]
    Mean,
    /// Three Sinkhorn-Knopp iterations, which balance every batch: SwAV, DINOv2's long recipes.
    /// Steadier than the mean where batches and runs are small.
    Sinkhorn,
}

/// Rule by which targets are computed from scores, with its center.
#[derive(Debug, Clone)]
pub(super) struct TargetRule {
    /// Name of the center in checkpoints and among observed values.
    pub(super) name: &'static str,
    pub(super) centering: Centering,
    /// Decay of the center's moving average.
    pub(super) center_decay: f64,
    /// Key of the recipe that sets the temperature.
    pub(super) temperature_key: &'static str,
    /// Temperature of the teacher's softmax.
    pub(super) temperature: Ramp,
    /// The center, `[K]`.
    pub(super) center: Vec<f32>,
}

/// Balanced targets of a batch, with statistics over the global batch.
pub(super) struct Balanced {
    pub(super) targets: PrototypeTargets,
    /// Mean of the teacher's scores `[K]`, with the name of the center; `None` without a center,
    /// and for a batch without rows.
    pub(super) mean: Option<(&'static str, Tensor<1>)>,
    /// Effective number of prototypes in use in the global batch, `[1]`, or this rank's share of
    /// it.
    pub(super) prototypes_in_use: Tensor<1>,
}

impl TargetRule {
    /// Computes the targets for the `scores` of a batch. `subject` is their name in messages.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(super) fn balance(
        &self,
        subject: &str,
        scores: &Rows,
        step: u64,
        exchange: PrototypeExchange<'_>,
    ) -> Result<Balanced, EngineError> {
        let temperature = self.temperature.at(step);
        match self.centering {
            Centering::Mean => {
                let center = self.center_tensor(scores.device());
                let targets = PrototypeTargets::softmax(scores, center, temperature, exchange)?;
                let [mean, mean_target] = batch_means(subject, [scores, targets.rows()], exchange)?;
                let mean = (scores.n() > 0).then_some((self.name, mean));
                let prototypes_in_use = exchange.share(prototypes_in_use(mean_target));
                Ok(Balanced { targets, mean, prototypes_in_use })
            }
            Centering::Sinkhorn => {
                let targets = sinkhorn::targets(scores, temperature, SINKHORN_ITERATIONS, exchange)?;
                let [mean_target] = batch_means(subject, [targets.rows()], exchange)?;
                let prototypes_in_use = exchange.share(prototypes_in_use(mean_target));
                Ok(Balanced { targets, mean: None, prototypes_in_use })
            }
        }
    }

    /// Returns the collectives of [`TargetRule::balance`].
    pub(super) fn collectives(&self) -> Vec<Collective> {
        let k = self.center.len();
        match self.centering {
            Centering::Mean => vec![mean::collective(2, k)],
            Centering::Sinkhorn => {
                let mut collectives = sinkhorn::collectives(k, SINKHORN_ITERATIONS);
                collectives.push(mean::collective(1, k));
                collectives
            }
        }
    }

    /// Updates the center with the mean that an accepted step observed.
    pub(super) fn observe(&mut self, observed: &[(&'static str, Vec<f32>)]) {
        let decay = self.center_decay as f32;
        let mean = observed.iter().filter(|(name, _)| *name == self.name).flat_map(|(_, mean)| mean);
        for (center, mean) in self.center.iter_mut().zip(mean) {
            *center = *center * decay + mean * (1.0 - decay);
        }
    }

    /// Returns the center with its name.
    pub(super) fn state(&self) -> (String, Vec<f32>) {
        (self.name.into(), self.center.clone())
    }

    /// Restores the center.
    ///
    /// # Errors
    /// A message if it has another length.
    pub(super) fn load(&mut self, state: &[(String, Vec<f32>)]) -> Result<(), String> {
        for (name, values) in state.iter().filter(|(name, _)| name == self.name) {
            if values.len() != self.center.len() {
                return Err(format!("{name} has {} values, not {}", values.len(), self.center.len()));
            }
            self.center.clone_from(values);
        }
        Ok(())
    }

    fn center_tensor(&self, device: &Device) -> Tensor<1> {
        Tensor::from_data(TensorData::new(self.center.clone(), [self.center.len()]), device)
    }
}
