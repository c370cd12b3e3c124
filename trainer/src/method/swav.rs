//! SwAV: every view predicts the prototypes to which another view of its image is assigned (Caron et al. 2020); with a
//! head without batch normalization it is SEER's objective (Goyal et al. 2021).
//!
//! ```text
//! z_v = head(student(x_v))      s_v = ẑ_v · Cᵀ      ẑ = z / |z|, prototypes C of length one
//! Q_a = sinkhorn(s_a / ε)       for a view a of the first size, over the whole batch and the queue, each a by itself
//! loss = mean over a, v≠a of H(Q_a, softmax(s_v / τ))
//! ```
//!
//! There is no teacher. The queue holds ẑ of earlier batches by view, so that small batches are assigned among more
//! images; it is used once it is full.

use augment::MultiCrop;
use burn_tensor::{Device, Tensor, TensorData};
use kernels::ops::{sharpness, unit_rows};
use networks::features::Outputs;
use networks::head::projection::Projection;
use networks::head::unit_prototypes::UnitPrototypes;
use networks::head::{Head, Reads};
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::loss::cross_entropy::between_views;
use super::loss::mean::{batch_means, in_use};
use super::loss::rows::Rows;
use super::loss::sinkhorn;
use super::network::NetworkSpec;
use super::{
    BatchLoss, BatchOutputs, Method, MethodContext, MethodRecipe, MicroBatchLoss, TargetDistribution,
};
use crate::schedule::Duration;

/// Gauge of the mean entropy of the targets.
const TARGET_ENTROPY: &str = "health/target_entropy";

/// Name of the head that outputs z.
const PROJECTION: &str = "projection";

/// Name of the head that outputs scores.
const SCORES: &str = "scores";

/// Keeps a norm away from zero.
const NORM_EPSILON: f64 = 1e-12;

/// Name of the queue's rows among observed values and in checkpoints.
const QUEUE: &str = "queue";

/// Name of the network.
const STUDENT: &str = "student";

/// Settings of SwAV, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Number of prototypes, K.
    pub prototypes: usize,
    /// Channels of the head's hidden layers; one layer of 2048 by default.
    #[serde(default = "default_hidden")]
    pub head_hidden: Vec<usize>,
    /// Channels of the head's output, the embedding; 128 by default.
    #[serde(default = "default_output")]
    pub head_output: usize,
    /// Whether the head's hidden layers are normalized over the batch, the default: SwAV's are, SEER's are not.
    #[serde(default = "default_batch_norm")]
    pub head_batch_norm: bool,
    /// Temperature of the predictions, τ; 0.1 by default.
    #[serde(default = "default_temperature")]
    pub temperature: f64,
    /// Temperature of the assignments, ε: smaller is sharper; 0.05 by default.
    #[serde(default = "default_epsilon")]
    pub epsilon: f64,
    /// Number of iterations of Sinkhorn and Knopp; 3 by default.
    #[serde(default = "default_iterations")]
    pub sinkhorn_iterations: usize,
    /// Length of time at the start during which the prototypes are frozen; 313 steps by default.
    #[serde(default = "default_freeze")]
    pub freeze_prototypes: Duration,
    /// Number of images in the queue; 0, the default, for no queue.
    #[serde(default)]
    pub queue: usize,
    /// Length of time before the queue begins to fill; 15 epochs by default.
    #[serde(default = "default_queue_start")]
    pub queue_start: Duration,
}

fn default_hidden() -> Vec<usize> {
    vec![2048]
}

fn default_output() -> usize {
    128
}

fn default_batch_norm() -> bool {
    true
}

fn default_temperature() -> f64 {
    0.1
}

fn default_epsilon() -> f64 {
    0.05
}

fn default_iterations() -> usize {
    3
}

fn default_freeze() -> Duration {
    Duration::Steps(313)
}

fn default_queue_start() -> Duration {
    Duration::Epochs(15.0)
}

impl Config {
    fn validate(&self, cx: &MethodContext) -> Result<(), String> {
        if self.prototypes < 2 || self.head_output == 0 || self.head_hidden.contains(&0) {
            return Err(
                "method.prototypes must be at least 2, method.head_output and every number of method.head_hidden at \
                 least 1"
                    .into(),
            );
        }
        for (key, value) in [("temperature", self.temperature), ("epsilon", self.epsilon)] {
            if !(value > 0.0 && value <= 1e3) {
                return Err(format!("method.{key} {value} must lie above 0 and not above 1000"));
            }
        }
        if self.sinkhorn_iterations == 0 {
            return Err("method.sinkhorn_iterations must be at least 1".into());
        }
        let batch_size = cx.length.batch_size;
        if batch_size < 2 {
            return Err("optim.batch_size 1: assignments are balanced over two images or more".into());
        }
        if self.queue > 1 << 24 {
            return Err(format!("method.queue {} must not be above {}", self.queue, 1 << 24));
        }
        if self.queue > 0 && self.queue < batch_size {
            return Err(format!(
                "method.queue {} is smaller than optim.batch_size {batch_size}: it must hold a batch, or be 0",
                self.queue
            ));
        }
        let n_views: usize = cx.views.groups().iter().map(|group| group.n_views).sum();
        if n_views < 2 {
            return Err("views: SwAV needs two views or more, one to predict the other".into());
        }
        Ok(())
    }
}

impl MethodRecipe for Config {
    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        self.validate(cx)?;
        let queue_from = cx.length.steps("method.queue_start", &self.queue_start)?;
        let is_full = queue_from.saturating_add(self.queue.div_ceil(cx.length.batch_size) as u64);
        if self.queue > 0 && is_full >= cx.length.total_steps {
            return Err(format!(
                "method.queue is full at step {is_full} of {}, too late to count: let it begin earlier \
                 (method.queue_start)",
                cx.length.total_steps
            ));
        }
        Ok(Box::new(Swav {
            frozen_steps: cx.length.steps("method.freeze_prototypes", &self.freeze_prototypes)?,
            queue_from,
            queue: Vec::new(),
            config: self.clone(),
            views: cx.views.clone(),
            width: cx.model.width(),
        }))
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let plain = Self {
            prototypes: 10,
            head_hidden: vec![12],
            head_output: 6,
            head_batch_norm: true,
            temperature: 0.1,
            epsilon: 0.05,
            sinkhorn_iterations: 3,
            freeze_prototypes: Duration::Steps(0),
            queue: 0,
            queue_start: Duration::Steps(0),
        };
        let views = MultiCrop::dino(16, 8, 2);
        let queue = Self { queue: 13, head_hidden: vec![9, 12], head_batch_norm: false, ..plain.clone() };
        vec![(plain, views.clone()), (queue, views)]
    }
}

struct Swav {
    config: Config,
    views: MultiCrop,
    width: usize,
    frozen_steps: u64,
    /// First step whose embeddings enter the queue.
    queue_from: u64,
    /// Queue: ẑ of all assigned views of an image one after another, the newest image first.
    queue: Vec<f32>,
}

impl Swav {
    /// Number of views that are assigned to prototypes.
    fn n_assigned(&self) -> usize {
        self.views.groups()[0].n_views
    }

    /// Number of values that the queue holds of an image.
    fn n_each(&self) -> usize {
        self.n_assigned() * self.config.head_output
    }

    fn fills_queue(&self, step: u64) -> bool {
        self.config.queue > 0 && step >= self.queue_from
    }

    /// Returns the queue's share of micro-batch `number` of the global batch, `[n, V, D]`; `None` while it is not full.
    fn queued(&self, number: usize, n_micro_batches: usize, device: &Device) -> Option<Tensor<3>> {
        let n_each = self.n_each();
        if self.config.queue == 0 || self.queue.len() < self.config.queue * n_each {
            return None;
        }
        let images = self.queue.chunks_exact(n_each).skip(number).step_by(n_micro_batches);
        let values: Vec<f32> = images.flatten().copied().collect();
        let shape = [values.len() / n_each, self.n_assigned(), self.config.head_output];
        (!values.is_empty()).then(|| Tensor::from_data(TensorData::new(values, shape), device))
    }

    /// Computes the assignments of the views.
    fn assign(&self, batch: &BatchOutputs<'_>, peers: Peers<'_>) -> Result<Rows, EngineError> {
        let scores: Vec<Tensor<3>> =
            batch.trained.iter().map(|outputs| outputs.head(SCORES)[0].clone()).collect();
        let ([b, v, _], n) = (scores[0].dims(), peers.n_micro_batches());
        let with_queue = |(i, scores): (usize, &Tensor<3>)| {
            // Micro-batches are told apart by the position of their first image.
            match self.queued(peers.position(i, 0), n, &scores.device()) {
                Some(queued) => Tensor::cat(vec![scores.clone(), (batch.score)(SCORES, queued)], 0),
                None => scores.clone(),
            }
        };
        let all: Vec<Tensor<3>> = scores.iter().enumerate().map(with_queue).collect();
        let is_full = self.config.queue > 0 && self.queue.len() >= self.config.queue * self.n_each();
        let n_rows = b * n + if is_full { self.config.queue } else { 0 };
        let of_view = |view: usize| {
            let of_view = |all: &Tensor<3>| all.clone().narrow(1, view, 1);
            let logits = Rows::with_number(all.iter().map(of_view).collect(), n_rows);
            sinkhorn::targets(&logits, self.config.epsilon, self.config.sinkhorn_iterations, peers)
        };
        let by_view: Vec<Rows> = (0..v).map(of_view).collect::<Result<_, _>>()?;
        let of_batch = |number: usize| {
            let views = by_view.iter().filter_map(|targets| targets.of(number));
            Tensor::cat(views.map(|targets| targets.clone().slice(0..b)).collect(), 1)
        };
        Ok(Rows::even((0..scores.len()).map(of_batch).collect(), peers))
    }

    /// Gathers ẑ of the assigned views of the whole batch, if the queue fills.
    fn for_queue(
        &self,
        batch: &BatchOutputs<'_>,
        step: u64,
        peers: Peers<'_>,
    ) -> Result<Option<Tensor<1>>, EngineError> {
        let rows = |outputs: &Outputs| {
            let z = outputs.head(PROJECTION)[0].clone();
            let [b, v, d] = z.dims();
            unit_rows(z.reshape([b * v, d]), NORM_EPSILON).reshape([b, v * d])
        };
        if !self.fills_queue(step) {
            return Ok(None);
        }
        let rows: Vec<Tensor<2>> = batch.trained.iter().map(rows).collect();
        let all = peers.gather("queue", &rows)?;
        let [n, d] = all.dims();
        Ok(Some(all.reshape([n * d])))
    }
}

impl Method for Swav {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let Config { head_hidden, head_output, head_batch_norm, .. } = &self.config;
        let projection = Projection::of_head(self.width, head_hidden, *head_output, *head_batch_norm);
        let prototypes = UnitPrototypes {
            name: "head.prototypes".into(),
            input: self.config.head_output,
            count: self.config.prototypes,
            frozen_steps: self.frozen_steps,
        };
        let projection: Vec<Box<dyn networks::unit::Unit>> = vec![Box::new(projection)];
        let heads = vec![
            Head { name: PROJECTION, reads: Reads::Pooled, units: projection },
            Head { name: SCORES, reads: Reads::Head(PROJECTION), units: vec![Box::new(prototypes)] },
        ];
        vec![NetworkSpec::trained(STUDENT, heads, self.views.groups().len())]
    }

    fn evaluated(&self) -> &'static str {
        STUDENT
    }

    fn prepares_with_heads(&self) -> bool {
        true
    }

    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        step: u64,
        peers: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        let targets = self.assign(batch, peers)?;
        let for_queue = self.for_queue(batch, step, peers)?;
        let [mean_target] = batch_means("prototypes in use", [&targets], peers)?;
        let prototypes_in_use = in_use(mean_target);
        Ok(Box::new(SwavLoss { targets, for_queue, prototypes_in_use, temperature: self.config.temperature }))
    }

    fn after_step(&mut self, observed: &[(&'static str, Vec<f32>)]) {
        for (_, newest) in observed.iter().filter(|(name, _)| *name == QUEUE) {
            let mut queue = newest.clone();
            queue.append(&mut self.queue);
            queue.truncate(self.config.queue * self.n_each());
            self.queue = queue;
        }
    }

    fn uninformed_loss(&self) -> Option<f64> {
        Some((self.config.prototypes as f64).ln())
    }

    fn target_distributions(&self) -> Vec<TargetDistribution> {
        vec![TargetDistribution::over(self.config.prototypes, TARGET_ENTROPY, "method.epsilon")]
    }

    fn state(&self) -> Vec<(String, Vec<f32>)> {
        if self.config.queue == 0 { Vec::new() } else { vec![(QUEUE.into(), self.queue.clone())] }
    }

    fn load_state(&mut self, state: &[(String, Vec<f32>)]) -> Result<(), String> {
        for (name, values) in state {
            if name == QUEUE {
                let most = self.config.queue * self.n_each();
                if values.len() > most || !values.len().is_multiple_of(self.n_each()) {
                    return Err(format!(
                        "the queue has {} values; expected a multiple of {}, at most {most}",
                        values.len(),
                        self.n_each()
                    ));
                }
                self.queue.clone_from(values);
            }
        }
        Ok(())
    }
}

/// SwAV's loss of a batch.
struct SwavLoss {
    /// Assignments of the views.
    targets: Rows,
    /// ẑ of the assigned views of the whole batch, if the queue fills.
    for_queue: Option<Tensor<1>>,
    /// Effective number of prototypes in use in the whole batch, `[1]`.
    prototypes_in_use: Tensor<1>,
    temperature: f64,
}

impl BatchLoss for SwavLoss {
    fn of(&self, number: usize, student: &Outputs) -> MicroBatchLoss {
        let targets = self.targets.even_of(number);
        let [entropy, max_prob] = sharpness(targets);
        let gauges = vec![
            (TARGET_ENTROPY, entropy),
            ("health/target_max_prob", max_prob),
            ("health/prototypes_in_use", self.prototypes_in_use.clone()),
        ];
        MicroBatchLoss { loss: between_views(student.head(SCORES), targets, self.temperature), gauges }
    }

    fn observed(&self) -> Vec<(&'static str, Tensor<1>)> {
        self.for_queue.iter().map(|rows| (QUEUE, rows.clone())).collect()
    }
}
