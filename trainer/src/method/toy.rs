//! A method for tests that uses what no other does yet: two followers, heads that read patches and other heads, and the
//! student's own scores before the loss.
//!
//! ```text
//! s = scores(x)  g = guess(s)                pooled, [B, V, K]      p = cells(patches)       [B, V·N, K]
//! t = mean_v s_average(x) - mean_batch(s)    targets, centered by the student's scores and what was seen before
//! loss = mean (g - t + seen)² + mean (p - p_past)²
//! ```

use augment::MultiCrop;
use burn_tensor::{Tensor, TensorData};
use networks::features::Outputs;
use networks::head::mlp::Mlp;
use networks::head::{Head, On, Reads};
use ranks::EngineError;
use ranks::peers::Peers;
use serde::{Deserialize, Serialize};

use super::{BatchLoss, BatchOutputs, Follower, Method, MethodContext, MethodRecipe, MicroBatchLoss, Moves};

/// The toy, as a recipe writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Scores, K.
    pub scores: usize,
}

impl MethodRecipe for Config {
    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        let (views, width) = (cx.views.clone(), cx.width);
        Ok(Box::new(Toy { k: self.scores, views, width, seen: vec![0.0; self.scores] }))
    }

    fn examples() -> Vec<(Self, MultiCrop)> {
        vec![(Self { scores: 5 }, MultiCrop::dino(16, 8, 2))]
    }
}

struct Toy {
    k: usize,
    views: MultiCrop,
    width: usize,
    seen: Vec<f32>,
}

struct ToyLoss {
    /// By micro-batch, `[B, 1, K]`.
    targets: Vec<Tensor<3>>,
    /// By micro-batch, `[B, V·N, K]`.
    past: Vec<Tensor<3>>,
    mean: Tensor<1>,
}

impl Method for Toy {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn student_sees(&self) -> Vec<usize> {
        vec![0, 1]
    }

    fn followers(&self) -> Vec<Follower> {
        vec![
            Follower { name: "average", sees: vec![0, 1], moves: Moves::Average },
            Follower { name: "past", sees: vec![0], moves: Moves::Snapshot { every_steps: 2 } },
        ]
    }

    fn heads(&self) -> Vec<Head> {
        let head = |name: &'static str, reads, on, input| {
            let mlp = Mlp { name: format!("{name}.mlp"), input, hidden: 7, output: self.k, init_std: 0.5 };
            Head { name, reads, on, units: vec![Box::new(mlp)] }
        };
        vec![
            head("scores", Reads::Pooled, On::Both, self.width),
            head("guess", Reads::Head("scores"), On::Student, self.k),
            head("cells", Reads::Patches, On::Both, self.width),
        ]
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
        let mean_of = |outputs: &Outputs| {
            let [b, v, k] = outputs.head("scores")[0].dims();
            let sum = outputs.head("scores")[0].clone().reshape([b * v, k]).sum_dim(0).reshape([k]);
            sum / (b * v) as f64
        };
        let own: Vec<Tensor<1>> = batch.student.iter().map(mean_of).collect();
        let mean = peers.sum("scores", &own)? / peers.n_micro_batches() as f64;
        let seen = Tensor::<1>::from_data(TensorData::new(self.seen.clone(), [self.k]), &mean.device());
        let shift: Tensor<3> = (mean.clone() + seen).unsqueeze();
        let target = |outputs: &Outputs| outputs.head("scores")[1].clone().mean_dim(1) - shift.clone();
        Ok(Box::new(ToyLoss {
            targets: batch.followers[0].iter().map(target).collect(),
            past: batch.followers[1].iter().map(|outputs| outputs.head("cells")[0].clone()).collect(),
            mean,
        }))
    }

    fn after_step(&mut self, observed: &[f32]) {
        self.seen.iter_mut().zip(observed).for_each(|(seen, mean)| *seen = 0.5 * *seen + 0.5 * mean);
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
    fn of(&self, number: usize, student: &Outputs) -> MicroBatchLoss {
        let (targets, past) = (&self.targets[number], &self.past[number]);
        let guesses = student.head("guess").iter();
        let terms = guesses.map(|guess| (guess.clone() - targets.clone().autodiff()).powi_scalar(2).mean());
        // Every method has a group of views.
        let guessing = terms.reduce(|a, b| a + b).expect("a group of views");
        let cells = (student.head("cells")[0].clone() - past.clone().autodiff()).powi_scalar(2).mean();
        let gauges = vec![("train/cells", cells.clone().inner())];
        MicroBatchLoss { loss: guessing + cells, gauges }
    }

    fn observed(&self) -> Tensor<1> {
        self.mean.clone()
    }
}
