//! BYOL: every view predicts the projection that a moving average computes for another view of the
//! image, without a contrast with other images (Grill et al. 2020).
//!
//! ```text
//! q_v = predictor(projector(online(x_v)))    z_v = projector(target(x_v))    v = 1, 2; length one
//! loss = mean over the batch of d(q_1, z_2) + d(q_2, z_1)      d(q, z) = |q - z|² = 2 - 2 q · z
//! after a step: target ← τ · target + (1 - τ) · online         τ by a cosine to 1
//! ```
//!
//! The target network has no predictor. Each view has statistics of its own in every batch
//! normalization, as in the authors' code. Their hidden layers have biases, which a normalization
//! cancels, and which are left out here.

use augment::MultiCrop;
use burn_tensor::Tensor;
use kernels::ops::total;
use networks::head::Head;
use networks::head::projection::Normalizes;
use networks::outputs::Outputs;
use networks::unit::StatSets;
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::check_decay;
use super::network::{NetworkSpec, UpdateRule};
use super::two_views::{
    PREDICTOR, PROJECTOR, check_projector, check_two_views, predictor, projector, unit_output,
};
use super::{BatchLoss, BatchOutputs, Gauges, Method, MethodContext, MethodRecipe, MicroBatchLoss};
use crate::schedule::Schedule;

/// Name of the trained network.
const ONLINE: &str = "online";

/// Name of the trained network's moving average.
const TARGET: &str = "target";

/// Settings of BYOL, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Decay of the target network's moving average, τ, at the start and at the end of the run;
    /// 0.996 and 1 by default, as for 1,000 epochs of ImageNet-1k.
    #[serde(default = "default_target_decay")]
    pub target_decay: [f64; 2],
    /// Channels of the projector's hidden layers; one layer of 4096 by default.
    #[serde(default = "default_hidden")]
    pub projector_hidden: Vec<usize>,
    /// Channels of the predictor's hidden layers; one layer of 4096 by default.
    #[serde(default = "default_hidden")]
    pub predictor_hidden: Vec<usize>,
    /// Channels of projections and predictions; 256 by default.
    #[serde(default = "default_output")]
    pub output: usize,
}

fn default_target_decay() -> [f64; 2] {
    [0.996, 1.0]
}

fn default_hidden() -> Vec<usize> {
    vec![4096]
}

fn default_output() -> usize {
    256
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "BYOL";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        let [start, end] = self.target_decay;
        check_decay("target_decay", self.target_decay)?;
        check_projector(&self.projector_hidden, Some(&self.predictor_hidden), self.output)?;
        check_two_views(&cx.views, Self::TITLE)?;
        let decay = Schedule::cosine(start, end, cx.length.total_steps);
        let config = self.clone();
        let views = cx.views.clone();
        let width = cx.model.width();
        Ok(Box::new(Byol { config, views, width, decay }))
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let config = Self {
            target_decay: [0.9, 1.0],
            projector_hidden: vec![12],
            predictor_hidden: vec![9],
            output: 6,
        };
        vec![(config, MultiCrop::moco_v3(16, [0.2, 1.0]))]
    }
}

struct Byol {
    config: Config,
    views: MultiCrop,
    width: usize,
    decay: Schedule,
}

impl Byol {
    fn projector(&self) -> Head {
        projector(self.width, &self.config.projector_hidden, self.config.output, Normalizes::Hidden)
    }
}

impl Method for Byol {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let predictor = predictor(&self.config.predictor_hidden, self.config.output, Normalizes::Hidden);
        let update_rule =
            UpdateRule::Average { source: ONLINE, decay: self.decay, updates_before_step: false };
        vec![
            NetworkSpec { update_rule, ..NetworkSpec::trained(TARGET, vec![self.projector()], 2) },
            NetworkSpec::trained(ONLINE, vec![self.projector(), predictor], 2),
        ]
    }

    fn evaluated(&self) -> &'static str {
        ONLINE
    }

    fn head_stat_sets(&self) -> StatSets {
        self.stat_sets()
    }

    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        _: u64,
        _: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        let mut targets = Vec::new();
        for outputs in batch.network_outputs(TARGET) {
            targets.push([0, 1].map(|view| unit_output(outputs, PROJECTOR, view)));
        }
        Ok(Box::new(ByolLoss { targets }))
    }

    fn scheduled_values(&self, step: u64) -> Gauges {
        vec![("knobs/target_decay", self.decay.at(step))]
    }
}

/// BYOL's loss of a batch.
struct ByolLoss {
    /// Projections of the target network by micro-batch and by view, `[B, D]`, of length one.
    targets: Vec<[Tensor<2>; 2]>,
}

impl BatchLoss for ByolLoss {
    fn micro_batch_loss(&self, index: usize, online: &Outputs) -> MicroBatchLoss {
        let [first, second] = [0, 1].map(|view| {
            // Each view predicts the projection of the other.
            distance(unit_output(online, PREDICTOR, view), &self.targets[index][1 - view])
        });
        MicroBatchLoss { loss: first + second, gauges: Vec::new() }
    }
}

/// Returns the mean squared distance of the predictions `q` `[B, D]`, with a graph, from the
/// projections `z` `[B, D]`, both of length one: `[1]`.
fn distance(q: Tensor<2>, z: &Tensor<2>) -> Tensor<1> {
    let [b, _] = q.dims();
    total(q * z.clone().autodiff()) * (-2.0 / b as f64) + 2.0
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;

    use super::*;

    #[test]
    fn distance_is_the_mean_of_squared_chords() {
        let device = Device::flex();
        // Angles of 0 and 90 degrees.
        let q: Tensor<2> =
            Tensor::<1>::from_floats([1.0f32, 0.0, 0.6, 0.8].as_slice(), &device).reshape([2, 2]);
        let z: Tensor<2> =
            Tensor::<1>::from_floats([1.0f32, 0.0, -0.8, 0.6].as_slice(), &device).reshape([2, 2]);
        let value = distance(q.autodiff(), &z).into_scalar::<f32>();
        assert!((value - 1.0).abs() < 1e-6, "{value}");
    }
}
