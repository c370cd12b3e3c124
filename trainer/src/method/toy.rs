//! A method for tests of features that no other method uses yet: a moving average that is copied
//! from some step on, heads that read patches or the output of another head, and scores of the
//! trained network before the loss.
//!
//! ```text
//! s = scores(x)  g = guess(s)                pooled, [B, V, K]      p = cells(patches)       [B, V·N, K]
//! t = mean_v s_average(x) - mean_batch(s)    targets, centered by the scores of this and earlier batches
//! loss = mean (g - t + seen)² + mean (p - p_past)²
//! ```

use augment::MultiCrop;
use burn_tensor::{Tensor, TensorData};
use networks::head::mlp::Mlp;
use networks::head::{Head, Reads};
use networks::outputs::Outputs;
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::network::{NetworkSpec, UpdateRule};
use super::{BatchLoss, BatchOutputs, Collective, Method, MethodContext, MethodRecipe, MicroBatchLoss};
use crate::schedule::Schedule;

/// Settings of the toy method.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Number of scores, K.
    pub scores: usize,
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "toy";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        let views = cx.views.clone();
        let width = cx.model.width();
        let decay = Schedule::cosine(0.9, 1.0, cx.length.total_steps);
        Ok(Box::new(Toy { k: self.scores, views, width, decay, seen: vec![0.0; self.scores] }))
    }

    fn examples() -> Vec<(Self, MultiCrop)> {
        vec![(Self { scores: 5 }, MultiCrop::dino(16, 8, 2))]
    }
}

struct Toy {
    k: usize,
    views: MultiCrop,
    width: usize,
    decay: Schedule,
    seen: Vec<f32>,
}

struct ToyLoss {
    /// Targets by micro-batch, `[B, 1, K]`.
    targets: Vec<Tensor<3>>,
    /// Outputs of the copy's head on patches by micro-batch, `[B, V·N, K]`.
    past: Vec<Tensor<3>>,
    mean: Tensor<1>,
}

impl Toy {
    fn head(&self, name: &'static str, reads: Reads, input: usize) -> Head {
        let mlp = Mlp { name: format!("{name}.mlp"), input, hidden: 7, output: self.k, init_std: 0.5 };
        Head::new(name, reads, vec![Box::new(mlp)])
    }

    fn scores_head(&self) -> Head {
        self.head("scores", Reads::Pooled, self.width)
    }

    fn cells_head(&self) -> Head {
        self.head("cells", Reads::Patches, self.width)
    }
}

impl Method for Toy {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let average_heads = vec![self.scores_head(), self.cells_head()];
        let past_heads = vec![self.cells_head()];
        let guess_head = self.head("guess", Reads::Head("scores"), self.k);
        let learner_heads = vec![self.scores_head(), guess_head, self.cells_head()];
        let average = UpdateRule::Average { source: "learner", decay: self.decay, updates_before_step: true };
        let past = UpdateRule::Copy { source: "average", every_steps: 2, from_step: 2, max_updates: None };
        vec![
            NetworkSpec { update_rule: average, ..NetworkSpec::trained("average", average_heads, 2) },
            NetworkSpec { update_rule: past, ..NetworkSpec::trained("past", past_heads, 1) },
            NetworkSpec::trained("learner", learner_heads, 2),
        ]
    }

    fn evaluated(&self) -> &'static str {
        "average"
    }

    fn prepares_with_heads(&self) -> bool {
        true
    }

    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        _: u64,
        peers: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        let mut micro_batch_means = Vec::with_capacity(batch.trained.len());
        for outputs in batch.trained {
            let scores = outputs.heads.on_views("scores", 0);
            let [b, v, k] = scores.dims();
            let sum = scores.reshape([b * v, k]).sum_dim(0).reshape([k]);
            micro_batch_means.push(sum / (b * v) as f64);
        }
        let mean = peers.sum("scores", &micro_batch_means)? / peers.n_micro_batches() as f64;
        let seen = Tensor::<1>::from_data(TensorData::new(self.seen.clone(), [self.k]), &mean.device());
        let shift: Tensor<3> = (mean.clone() + seen).unsqueeze();
        let mut targets = Vec::new();
        for outputs in batch.network_outputs("average") {
            targets.push(outputs.heads.on_views("scores", 1).mean_dim(1) - shift.clone());
        }
        let past = batch.network_outputs("past").iter();
        let past = past.map(|outputs| outputs.heads.on_views("cells", 0)).collect();
        Ok(Box::new(ToyLoss { targets, past, mean }))
    }

    fn collectives(&self) -> Vec<Collective> {
        vec![Collective::Sum(self.k)]
    }

    fn after_step(&mut self, observed: &[(&'static str, Vec<f32>)]) {
        let [("mean", mean), ("twice", twice)] = observed else { panic!("what it has observed") };
        for ((seen, mean), twice) in self.seen.iter_mut().zip(mean).zip(twice) {
            *seen = 0.5 * *seen + 0.25 * mean + 0.125 * twice;
        }
    }

    fn uninformed_loss(&self) -> Option<f64> {
        None
    }

    fn state(&self) -> Vec<(String, Vec<f32>)> {
        vec![("seen".into(), self.seen.clone())]
    }

    fn load_state(&mut self, state: &[(String, Vec<f32>)]) -> Result<(), String> {
        state.iter().for_each(|(_, values)| self.seen.clone_from(values));
        Ok(())
    }
}

impl BatchLoss for ToyLoss {
    fn micro_batch_loss(&self, index: usize, student: &Outputs) -> MicroBatchLoss {
        let targets = &self.targets[index];
        let past = &self.past[index];
        let guesses = student.heads.on_all_views("guess").into_iter();
        let terms = guesses.map(|guess| (guess - targets.clone().autodiff()).powi_scalar(2).mean());
        // Every method has a group of views.
        let guess_loss = terms.reduce(|a, b| a + b).expect("a group of views");
        let cells_loss = (student.heads.on_views("cells", 0) - past.clone().autodiff()).powi_scalar(2).mean();
        let gauges = vec![("train/cells", cells_loss.clone().inner())];
        MicroBatchLoss { loss: guess_loss + cells_loss, gauges }
    }

    fn observed(&self) -> Vec<(&'static str, Tensor<1>)> {
        vec![("mean", self.mean.clone()), ("twice", self.mean.clone() * 2.0)]
    }
}
