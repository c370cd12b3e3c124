//! DINO: self-distillation with no labels (Caron et al. 2021).
//!
//! ```text
//! views  x_1, x_2 (global), x_3.. (local)
//! S_u = head(student(x_u))  all views      T_v = head(teacher(x_v))  global views
//! P_v = softmax((T_v - c) / τ_t)           or sinkhorn(T / τ_t), over the whole batch
//! loss = mean over v, u≠v of H(P_v, softmax(S_u / τ_s))
//!      + w · koleo(student(x_1), student(x_2))       w = 0 in the paper
//! after the step: c ← m · c + (1 - m) · mean(T);   teacher ← λ · teacher + (1 - λ) · student
//! ```

use augment::MultiCrop;
use burn_tensor::{Device, Tensor, TensorData};
use kernels::ops::{sharpness, softmax_rows};
use networks::features::Outputs;
use networks::head::mlp::Mlp;
use networks::head::prototypes::Prototypes;
use networks::head::{Head, Reads};
use ranks::EngineError;
use ranks::peers::Peers;
use serde::{Deserialize, Serialize};

use super::loss::cross_entropy::between_views;
use super::loss::koleo::{Neighbors, by_view, view};
use super::loss::mean::{batch_means, in_use};
use super::loss::sinkhorn;
use super::network::{Moves, NetworkSpec};
use super::{
    BatchLoss, BatchOutputs, Gauges, MATCH_LOSS, Method, MethodContext, MethodRecipe, MicroBatchLoss,
    TargetDistribution,
};
use crate::schedule::{Duration, Ramp, Schedule};

/// Gauge of the mean entropy of the targets.
const TARGET_ENTROPY: &str = "health/teacher_entropy";

/// Name of the head.
const HEAD: &str = "head";

/// Name of the trained network.
const STUDENT: &str = "student";

/// Name of the trained network's moving average.
const TEACHER: &str = "teacher";

/// Name of the mean teacher logits, from which the center is updated.
const MEAN: &str = "mean";

/// Iterations of [`Centering::Sinkhorn`], as in SwAV and DINOv2.
const SINKHORN_ITERATIONS: usize = 3;

/// Settings of DINO, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Number of prototypes, K.
    pub prototypes: usize,
    /// Channels of the head's hidden layers; 2048 by default.
    #[serde(default = "default_hidden")]
    pub head_hidden: usize,
    /// Channels between the head's MLP and its prototypes; 256 by default.
    #[serde(default = "default_bottleneck")]
    pub head_bottleneck: usize,
    /// Standard deviation of the head's initial weights, 0.02 by default; see `model.init_std`.
    #[serde(default = "default_head_init_std")]
    pub head_init_std: f32,
    /// Whether the rows of the last layer keep length one, the default. DINO's released small models and its longest runs
    /// train the lengths as well, and so does DINOv2.
    #[serde(default = "default_norm_last_layer")]
    pub norm_last_layer: bool,
    /// Length of time at the start during which the last layer is frozen; 1 epoch by default.
    #[serde(default = "default_freeze")]
    pub freeze_last_layer: Duration,
    /// Temperature of the student's softmax; 0.1 by default.
    #[serde(default = "default_student_temp")]
    pub student_temp: f64,
    /// Temperature of the teacher's softmax at the start, and after its warm-up.
    pub teacher_temp: [f64; 2],
    /// Length of the warm-up of the teacher's temperature.
    pub teacher_temp_warmup: Duration,
    /// Decay of the teacher's moving average at the start and at the end of the run; 0.996 and 1 by default.
    #[serde(default = "default_teacher_decay")]
    pub teacher_decay: [f64; 2],
    /// Rule that balances the teacher's outputs over prototypes, so that it does not use one alone; `mean` by default.
    #[serde(default)]
    pub centering: Centering,
    /// Decay of the center's moving average; 0.9 by default.
    #[serde(default = "default_center_decay")]
    pub center_decay: f64,
    /// Weight of the KoLeo regularizer on the student's global embeddings; 0, the default, for none, as in DINO.
    /// DINOv2 uses 0.1. It keeps short runs on few images from collapsing.
    #[serde(default)]
    pub koleo_weight: f64,
    /// Number of consecutive images of the batch among which KoLeo searches for neighbors; 0, the default, for the whole
    /// batch. DINOv2's code searches among the images of one GPU.
    #[serde(default)]
    pub koleo_group: usize,
}

/// Rule that balances the teacher's outputs over prototypes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Centering {
    /// Subtraction of a moving mean of the logits: DINO.
    #[default]
    Mean,
    /// Three iterations of Sinkhorn and Knopp, which balance every batch: SwAV, DINOv2's long
    /// recipes. Steadier than the mean where batches and runs are small.
    Sinkhorn,
}

fn default_hidden() -> usize {
    2048
}

fn default_bottleneck() -> usize {
    256
}

fn default_head_init_std() -> f32 {
    0.02
}

fn default_norm_last_layer() -> bool {
    true
}

fn default_freeze() -> Duration {
    Duration::Epochs(1.0)
}

fn default_student_temp() -> f64 {
    0.1
}

fn default_teacher_decay() -> [f64; 2] {
    [0.996, 1.0]
}

fn default_center_decay() -> f64 {
    0.9
}

impl Config {
    fn validate(&self, cx: &MethodContext) -> Result<(), String> {
        let sizes = [
            ("prototypes", self.prototypes),
            ("head_hidden", self.head_hidden),
            ("head_bottleneck", self.head_bottleneck),
        ];
        if let Some((key, value)) = sizes.iter().find(|(_, value)| *value < 2) {
            return Err(format!("method.{key} is {value}, must be at least 2"));
        }
        let temperatures = [self.student_temp, self.teacher_temp[0], self.teacher_temp[1]];
        if let Some(value) = temperatures.iter().find(|value| !(**value > 0.0 && **value <= 1e3)) {
            return Err(format!(
                "method.student_temp and method.teacher_temp must lie above 0 and not above 1000, not at {value}"
            ));
        }
        let [first, last] = self.teacher_decay.map(|decay| ("teacher_decay", decay, 1.0));
        let koleo = ("koleo_weight", self.koleo_weight, 1e6);
        let std = ("head_init_std", f64::from(self.head_init_std), 1.0);
        let shares = [std, first, last, ("center_decay", self.center_decay, 1.0), koleo];
        if let Some((key, value, most)) =
            shares.iter().find(|(_, value, most)| !(0.0..=*most).contains(value))
        {
            return Err(format!("method.{key} is {value} and must lie in 0..={most}"));
        }
        let batch_size = cx.length.batch_size;
        if self.koleo_group == 1 || (self.koleo_group > 0 && !batch_size.is_multiple_of(self.koleo_group)) {
            return Err(format!(
                "method.koleo_group {} must be 0, or at least 2 and divide optim.batch_size {batch_size}",
                self.koleo_group
            ));
        }
        match cx.views.groups().first() {
            Some(group) if group.n_views >= 2 => Ok(()),
            _ => Err("views: the first size needs two views or more, one to predict the other".into()),
        }
    }
}

impl MethodRecipe for Config {
    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        self.validate(cx)?;
        let ramp_steps = cx.length.steps("method.teacher_temp_warmup", &self.teacher_temp_warmup)?;
        Ok(Box::new(Dino {
            teacher_temp: Ramp { from: self.teacher_temp[0], to: self.teacher_temp[1], ramp_steps },
            frozen_steps: cx.length.steps("method.freeze_last_layer", &self.freeze_last_layer)?,
            center: vec![0.0; self.prototypes],
            decay: Schedule::cosine(self.teacher_decay[0], self.teacher_decay[1], cx.length.total_steps),
            config: self.clone(),
            views: cx.views.clone(),
            width: cx.model.width(),
        }))
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let mean = Self {
            prototypes: 24,
            head_hidden: 16,
            head_bottleneck: 8,
            head_init_std: 0.3,
            norm_last_layer: true,
            freeze_last_layer: Duration::Steps(0),
            student_temp: 0.1,
            teacher_temp: [0.04, 0.07],
            teacher_temp_warmup: Duration::Steps(4),
            teacher_decay: [0.9, 1.0],
            centering: Centering::Mean,
            center_decay: 0.9,
            koleo_weight: 0.0,
            koleo_group: 0,
        };
        let sinkhorn = Self {
            centering: Centering::Sinkhorn,
            norm_last_layer: false,
            koleo_weight: 0.1,
            koleo_group: 4,
            ..mean.clone()
        };
        let views = MultiCrop::dino(16, 8, 3);
        vec![(mean, views.clone()), (sinkhorn, views)]
    }
}

struct Dino {
    config: Config,
    views: MultiCrop,
    width: usize,
    teacher_temp: Ramp,
    decay: Schedule,
    frozen_steps: u64,
    center: Vec<f32>,
}

impl Dino {
    /// The head, which both networks have.
    fn heads(&self) -> Vec<Head> {
        let mlp = Mlp {
            name: "head.mlp".into(),
            input: self.width,
            hidden: self.config.head_hidden,
            output: self.config.head_bottleneck,
            init_std: self.config.head_init_std,
        };
        let prototypes = Prototypes {
            name: "head.last_layer".into(),
            input: self.config.head_bottleneck,
            count: self.config.prototypes,
            trains_gain: !self.config.norm_last_layer,
            frozen_steps: self.frozen_steps,
        };
        let units = vec![Box::new(mlp) as _, Box::new(prototypes) as _];
        vec![Head { name: HEAD, reads: Reads::Pooled, units }]
    }

    fn center_tensor(&self, device: &Device) -> Tensor<1> {
        Tensor::from_data(TensorData::new(self.center.clone(), [self.center.len()]), device)
    }
}

impl Method for Dino {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let moves = Moves::Average { of: STUDENT, decay: self.decay, moves_first: false };
        let teacher = NetworkSpec { moves, ..NetworkSpec::trained(TEACHER, self.heads(), 1) };
        vec![teacher, NetworkSpec::trained(STUDENT, self.heads(), self.views.groups().len())]
    }

    fn evaluated(&self) -> &'static str {
        TEACHER
    }

    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        step: u64,
        peers: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        let temperature = self.teacher_temp.at(step);
        let logits: Vec<Tensor<3>> =
            batch.of(TEACHER).iter().map(|teacher| teacher.head(HEAD)[0].clone()).collect();
        let targets: Vec<Tensor<3>> = match self.config.centering {
            Centering::Mean => {
                let center = self.center_tensor(&logits[0].device());
                let of = |logits: &Tensor<3>| softmax_rows(logits.clone(), Some(center.clone()), temperature);
                logits.iter().map(of).collect()
            }
            Centering::Sinkhorn => {
                let [b, v, _] = logits[0].dims();
                let n_rows = b * v * peers.n_micro_batches();
                sinkhorn::targets(&logits, n_rows, temperature, SINKHORN_ITERATIONS, peers)?
            }
        };
        let [mean, mean_target] = batch_means("center", [&logits, &targets], peers)?;
        let prototypes_in_use = in_use(mean_target);
        let neighbors = match self.config.koleo_weight {
            0.0 => Vec::new(),
            _ => by_view(batch.trained, self.config.koleo_group, peers)?,
        };
        let [b, _, _] = logits[0].dims();
        let positions = peers.positions(b);
        let (student_temp, koleo_weight) = (self.config.student_temp, self.config.koleo_weight);
        Ok(Box::new(DinoLoss {
            targets,
            mean,
            prototypes_in_use,
            neighbors,
            positions,
            student_temp,
            koleo_weight,
        }))
    }

    fn after_step(&mut self, observed: &[(&'static str, Vec<f32>)]) {
        let stays = self.config.center_decay as f32;
        let mean = observed.iter().filter(|(name, _)| *name == MEAN).flat_map(|(_, mean)| mean);
        for (center, mean) in self.center.iter_mut().zip(mean) {
            *center = *center * stays + mean * (1.0 - stays);
        }
    }

    fn scheduled_values(&self, step: u64) -> Gauges {
        vec![("knobs/teacher_decay", self.decay.at(step)), ("knobs/teacher_temp", self.teacher_temp.at(step))]
    }

    fn uninformed_loss(&self) -> Option<f64> {
        Some((self.config.prototypes as f64).ln())
    }

    fn target_distributions(&self) -> Vec<TargetDistribution> {
        vec![TargetDistribution::over(self.config.prototypes, TARGET_ENTROPY, "method.teacher_temp")]
    }

    fn state(&self) -> Vec<(String, Vec<f32>)> {
        vec![("center".into(), self.center.clone())]
    }

    fn load_state(&mut self, state: &[(String, Vec<f32>)]) -> Result<(), String> {
        for (_, values) in state.iter().filter(|(name, _)| name == "center") {
            if values.len() != self.center.len() {
                return Err(format!("center has {} values, not {}", values.len(), self.center.len()));
            }
            self.center.clone_from(values);
        }
        Ok(())
    }
}

/// DINO's loss of a batch.
struct DinoLoss {
    /// Teacher probabilities by micro-batch, `[B, V, K]`.
    targets: Vec<Tensor<3>>,
    /// Mean teacher logits, `[K]`.
    mean: Tensor<1>,
    /// Effective number of prototypes in use in the whole batch, `[1]`.
    prototypes_in_use: Tensor<1>,
    /// Neighbors by global view; none where KoLeo has no weight.
    neighbors: Vec<Neighbors>,
    /// Positions in the batch of the images of each micro-batch.
    positions: Vec<Vec<usize>>,
    student_temp: f64,
    koleo_weight: f64,
}

impl BatchLoss for DinoLoss {
    fn of(&self, number: usize, student: &Outputs) -> MicroBatchLoss {
        let targets = &self.targets[number];
        let [entropy, max_prob] = sharpness(targets);
        let mut gauges = vec![
            (TARGET_ENTROPY, entropy),
            ("health/teacher_max_prob", max_prob),
            ("health/prototypes_in_use", self.prototypes_in_use.clone()),
        ];
        let mut loss = between_views(student.head(HEAD), targets, self.student_temp);
        let globals = student.pooled(0);
        let of_view = |(i, n): (usize, &Neighbors)| n.koleo(view(&globals, i), &self.positions[number]);
        if let Some(spread) = self.neighbors.iter().enumerate().map(of_view).reduce(|sum, term| sum + term) {
            gauges.push((MATCH_LOSS, loss.clone().inner()));
            gauges.push(("train/koleo_loss", spread.clone().inner()));
            loss = loss + spread * self.koleo_weight;
        }
        MicroBatchLoss { loss, gauges }
    }

    fn observed(&self) -> Vec<(&'static str, Tensor<1>)> {
        vec![(MEAN, self.mean.clone())]
    }
}
