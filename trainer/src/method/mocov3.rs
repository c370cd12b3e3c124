//! MoCo v3: every view predicts the key that a moving average computes for another view, among all
//! keys of the batch (Chen, Xie and He 2021).
//!
//! ```text
//! q_v = predictor(projector(base(x_v)))      k_v = projector(momentum(x_v))      v = 1, 2; each of length one
//! loss = nce(q_1, k_2) + nce(q_2, k_1)       nce(q, k) = 2τ · mean_i H(i, softmax_j(q_i · k_j / τ))
//! before a step: momentum ← m · momentum + (1 - m) · base      m by a cosine to 1
//! ```
//!
//! The momentum network has no predictor. Each view has statistics of its own in every batch
//! normalization.

use augment::MultiCrop;
use burn_tensor::Tensor;
use networks::head::Head;
use networks::head::projection::Normalizes;
use networks::outputs::Outputs;
use networks::unit::StatSets;
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bounds::{check_decay, check_positive};
use super::loss::info_nce::{self, Keys};
use super::network::{NetworkSpec, UpdateRule};
use super::two_views::{
    PREDICTOR, PROJECTOR, check_projector, check_two_views, predictor, projector, unit_output,
};
use super::{
    BatchLoss, BatchOutputs, Collective, Gauges, Method, MethodContext, MethodRecipe, MicroBatchLoss,
};
use crate::schedule::Schedule;

/// Name of the trained network.
const BASE: &str = "base";

/// Name of the trained network's moving average.
const MOMENTUM: &str = "momentum";

/// Settings of MoCo v3, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Temperature, τ: 0.2, the default, for transformers; 1 for ResNet-50.
    #[serde(default = "default_temperature")]
    pub temperature: f64,
    /// Decay of the momentum network's moving average at the start and at the end of the run; 0.99
    /// and 1 by default.
    #[serde(default = "default_momentum")]
    pub momentum: [f64; 2],
    /// Channels of the projector's hidden layers: two of 4096, the default, for transformers; one
    /// for ResNet-50.
    #[serde(default = "default_projector_hidden")]
    pub projector_hidden: Vec<usize>,
    /// Channels of the predictor's hidden layers; one layer of 4096 by default.
    #[serde(default = "default_predictor_hidden")]
    pub predictor_hidden: Vec<usize>,
    /// Channels of queries and keys; 256 by default.
    #[serde(default = "default_output")]
    pub output: usize,
    /// Whether the predictor's output is normalized over the batch: true, the default, for
    /// transformers; false for ResNet-50.
    #[serde(default = "default_predictor_output_norm")]
    pub predictor_output_norm: bool,
}

fn default_temperature() -> f64 {
    0.2
}

fn default_momentum() -> [f64; 2] {
    [0.99, 1.0]
}

fn default_projector_hidden() -> Vec<usize> {
    vec![4096, 4096]
}

fn default_predictor_hidden() -> Vec<usize> {
    vec![4096]
}

fn default_output() -> usize {
    256
}

fn default_predictor_output_norm() -> bool {
    true
}

impl Config {
    fn validate(&self, cx: &MethodContext) -> Result<(), String> {
        check_positive("temperature", self.temperature, 1e3)?;
        check_decay("momentum", self.momentum)?;
        check_projector(&self.projector_hidden, Some(&self.predictor_hidden), self.output)?;
        if cx.length.batch_size < 2 {
            return Err(
                "optim.batch_size 1: must be at least 2, because MoCo v3 compares each image with others"
                    .into(),
            );
        }
        check_two_views(&cx.views, Self::TITLE)
    }
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "MoCo v3";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        self.validate(cx)?;
        let decay = Schedule::cosine(self.momentum[0], self.momentum[1], cx.length.total_steps);
        let config = self.clone();
        let views = cx.views.clone();
        let width = cx.model.width();
        Ok(Box::new(MocoV3 { config, views, width, decay, batch_size: cx.length.batch_size }))
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let deep = Self {
            temperature: 0.2,
            momentum: [0.9, 1.0],
            projector_hidden: vec![12, 10],
            predictor_hidden: vec![9],
            output: 6,
            predictor_output_norm: true,
        };
        let shallow = Self { projector_hidden: vec![12], predictor_output_norm: false, ..deep.clone() };
        let views = MultiCrop::moco_v3(16, [0.2, 1.0]);
        vec![(deep, views.clone()), (shallow, views)]
    }
}

struct MocoV3 {
    config: Config,
    views: MultiCrop,
    width: usize,
    decay: Schedule,
    batch_size: usize,
}

impl MocoV3 {
    fn projector(&self) -> Head {
        projector(self.width, &self.config.projector_hidden, self.config.output, Normalizes::All)
    }

    /// Gathers the keys of view `view` of the global batch.
    fn keys(&self, momentum: &[Outputs], view: usize, peers: Peers<'_>) -> Result<Keys, EngineError> {
        let rows: Vec<Tensor<2>> =
            momentum.iter().map(|outputs| unit_output(outputs, PROJECTOR, view)).collect();
        Keys::new(&rows, self.config.temperature, peers)
    }
}

impl Method for MocoV3 {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let normalizes = if self.config.predictor_output_norm { Normalizes::All } else { Normalizes::Hidden };
        let predictor = predictor(&self.config.predictor_hidden, self.config.output, normalizes);
        let update_rule = UpdateRule::Average { source: BASE, decay: self.decay, updates_before_step: true };
        vec![
            NetworkSpec { update_rule, ..NetworkSpec::trained(MOMENTUM, vec![self.projector()], 2) },
            NetworkSpec::trained(BASE, vec![self.projector(), predictor], 2),
        ]
    }

    fn evaluated(&self) -> &'static str {
        BASE
    }

    fn head_stat_sets(&self) -> StatSets {
        self.stat_sets()
    }

    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        _: u64,
        peers: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        let momentum = batch.network_outputs(MOMENTUM);
        let keys = [self.keys(momentum, 0, peers)?, self.keys(momentum, 1, peers)?];
        let n_images = momentum.first().map_or(0, |outputs| outputs.n_images());
        Ok(Box::new(MocoV3Loss { keys, positions: peers.positions(n_images) }))
    }

    fn collectives(&self) -> Vec<Collective> {
        vec![info_nce::collective(self.config.output); 2]
    }

    fn scheduled_values(&self, step: u64) -> Gauges {
        vec![("knobs/momentum", self.decay.at(step))]
    }

    fn uninformed_loss(&self) -> Option<f64> {
        Some(4.0 * self.config.temperature * (self.batch_size as f64).ln())
    }
}

/// MoCo v3's loss of a batch.
struct MocoV3Loss {
    /// Keys by view.
    keys: [Keys; 2],
    /// Positions in the batch of the images of each micro-batch.
    positions: Vec<Vec<usize>>,
}

impl BatchLoss for MocoV3Loss {
    fn micro_batch_loss(&self, index: usize, base: &Outputs) -> MicroBatchLoss {
        let [first, second] = [0, 1].map(|view| {
            // Each view predicts the key of the other.
            self.keys[1 - view].loss(unit_output(base, PREDICTOR, view), &self.positions[index])
        });
        MicroBatchLoss { loss: first + second, gauges: Vec::new() }
    }
}
