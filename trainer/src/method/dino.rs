//! DINO: self-distillation with no labels (Caron et al. 2021).
//!
//! ```text
//! views  x_1, x_2 (global), x_3.. (local)
//! S_u = head(student(x_u))  all views      T_v = head(teacher(x_v))  global views
//! loss = loss::dino(S, softmax((T - c) / τ_t), τ_s)        or sinkhorn(T / τ_t) as targets
//!      + w · loss::koleo(student(x_1), student(x_2))       w = 0 in the paper
//! after the step: c ← m · c + (1 - m) · mean(T);   teacher ← λ · teacher + (1 - λ) · student
//! ```

use augment::MultiCrop;
use burn_tensor::{Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::loss::dino as loss;
use super::loss::koleo::{Neighbors, directions};
use super::{MATCH_LOSS, Method, Outputs, PartLoss, Scoring};
use crate::comm::engine::EngineError;
use crate::comm::peers::Peers;
use crate::model::head;
use crate::model::head::HeadSizes;
use crate::model::unit::Unit;
use crate::schedule::Knobs;

/// DINO as a recipe writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DinoConfig {
    /// Prototypes, K.
    pub prototypes: usize,
    /// Hidden channels of the head.
    #[serde(default = "default_hidden")]
    pub head_hidden: usize,
    /// Channels between the head's MLP and its prototypes.
    #[serde(default = "default_bottleneck")]
    pub head_bottleneck: usize,
    /// Deviation of the head's initial weights; see `model.init_std`.
    #[serde(default = "default_head_init_std")]
    pub head_init_std: f32,
    /// Temperature of the student's softmax.
    #[serde(default = "default_student_temp")]
    pub student_temp: f64,
    /// What keeps the teacher from giving everything to one prototype.
    #[serde(default)]
    pub centering: Centering,
    /// Share of the old center that stays.
    #[serde(default = "default_center_decay")]
    pub center_decay: f64,
    /// Weight of the KoLeo regularizer on the student's global embeddings; 0 for none, as in DINO.
    /// DINOv2 uses 0.1. It keeps short runs on few images from collapsing.
    #[serde(default)]
    pub koleo_weight: f64,
}

/// How the teacher's outputs are balanced over prototypes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Centering {
    /// A moving mean of the logits is subtracted: DINO.
    #[default]
    Mean,
    /// Every batch is balanced by three iterations of Sinkhorn and Knopp: SwAV, DINOv2's long
    /// recipes. Steadier than the mean where batches and runs are small.
    Sinkhorn,
}

/// Iterations of [`Centering::Sinkhorn`], as in SwAV and DINOv2.
const SINKHORN_ITERATIONS: usize = 3;

fn default_hidden() -> usize {
    2048
}

fn default_bottleneck() -> usize {
    256
}

fn default_head_init_std() -> f32 {
    0.02
}

fn default_student_temp() -> f64 {
    0.1
}

fn default_center_decay() -> f64 {
    0.9
}

impl DinoConfig {
    /// Checks what the method relies on.
    ///
    /// # Errors
    /// The key and what is wrong with it.
    pub fn validate(&self) -> Result<(), String> {
        let sizes = [
            ("prototypes", self.prototypes),
            ("head_hidden", self.head_hidden),
            ("head_bottleneck", self.head_bottleneck),
        ];
        if let Some((key, value)) = sizes.iter().find(|(_, value)| *value < 2) {
            return Err(format!("method.{key} is {value}, must be at least 2"));
        }
        if !(self.student_temp > 0.0 && self.student_temp.is_finite()) {
            return Err(format!("method.student_temp {} must be positive", self.student_temp));
        }
        if !(0.0..=1.0).contains(&self.head_init_std) {
            return Err(format!("method.head_init_std {} must lie in 0..=1", self.head_init_std));
        }
        if !(0.0..=1.0).contains(&self.center_decay) {
            return Err(format!("method.center_decay {} must lie in 0..=1", self.center_decay));
        }
        if !(self.koleo_weight >= 0.0 && self.koleo_weight.is_finite()) {
            return Err(format!("method.koleo_weight {} must not be negative", self.koleo_weight));
        }
        Ok(())
    }
}

pub(super) struct Dino {
    config: DinoConfig,
    multicrop: MultiCrop,
    width: usize,
    center: Vec<f32>,
}

impl Dino {
    pub(super) fn new(config: DinoConfig, multicrop: MultiCrop, width: usize) -> Self {
        let center = vec![0.0; config.prototypes];
        Self { config, multicrop, width, center }
    }

    fn center_tensor(&self, device: &Device) -> Tensor<1> {
        Tensor::from_data(TensorData::new(self.center.clone(), [self.center.len()]), device)
    }
}

impl Method for Dino {
    fn multicrop(&self) -> &MultiCrop {
        &self.multicrop
    }

    fn head(&self) -> Vec<Box<dyn Unit>> {
        head::units(HeadSizes {
            input: self.width,
            hidden: self.config.head_hidden,
            bottleneck: self.config.head_bottleneck,
            prototypes: self.config.prototypes,
            init_std: self.config.head_init_std,
        })
    }

    fn score(
        &self,
        teacher: &[Outputs],
        student: &[Vec<Tensor<3>>],
        knobs: &Knobs,
        peers: Peers<'_>,
    ) -> Result<Box<dyn Scoring>, EngineError> {
        let logits: Vec<Tensor<3>> = teacher.iter().map(|part| part.logits[0].clone()).collect();
        let targets = match self.config.centering {
            Centering::Mean => {
                let center = self.center_tensor(&logits[0].device());
                let of_part =
                    |part: &Tensor<3>| loss::targets(part.clone(), center.clone(), knobs.teacher_temp);
                logits.iter().map(of_part).collect()
            }
            Centering::Sinkhorn => {
                loss::sinkhorn_targets(&logits, knobs.teacher_temp, SINKHORN_ITERATIONS, peers)?
            }
        };
        let mean = loss::batch_center(&logits, peers)?;
        let mut neighbors = Vec::new();
        if self.config.koleo_weight > 0.0 {
            let globals: Vec<&Tensor<3>> = student.iter().map(|groups| &groups[0]).collect();
            neighbors = neighbors_of(&globals, peers)?;
        }
        let [b, _, _] = logits[0].dims();
        let positions = |part| (0..b).map(|i| peers.position(part, i)).collect();
        let positions = (0..logits.len()).map(positions).collect();
        let (student_temp, koleo_weight) = (self.config.student_temp, self.config.koleo_weight);
        Ok(Box::new(DinoScoring { targets, mean, neighbors, positions, student_temp, koleo_weight }))
    }

    fn after_step(&mut self, mean: &[f32]) {
        let keep = self.config.center_decay as f32;
        for (center, mean) in self.center.iter_mut().zip(mean) {
            *center = *center * keep + mean * (1.0 - keep);
        }
    }

    fn uninformed_loss(&self) -> Option<f64> {
        Some((self.config.prototypes as f64).ln())
    }

    fn state(&self) -> Vec<(String, Vec<f32>)> {
        vec![("center".into(), self.center.clone())]
    }

    fn load_state(&mut self, state: &[(String, Vec<f32>)]) -> Result<(), String> {
        for (name, values) in state {
            if name == "center" {
                if values.len() != self.center.len() {
                    return Err(format!("center has {} values, not {}", values.len(), self.center.len()));
                }
                self.center.clone_from(values);
            }
        }
        Ok(())
    }
}

/// A batch under DINO's loss.
struct DinoScoring {
    /// Teacher probabilities by part, `[B / N, V, K]`.
    targets: Vec<Tensor<3>>,
    /// Mean teacher logits, `[K]`.
    mean: Tensor<1>,
    /// By global view; none where KoLeo has no weight.
    neighbors: Vec<Neighbors>,
    /// Positions in the batch of the images of each part.
    positions: Vec<Vec<usize>>,
    student_temp: f64,
    koleo_weight: f64,
}

impl Scoring for DinoScoring {
    fn loss(&self, part: usize, student: &Outputs) -> PartLoss {
        let targets = &self.targets[part];
        let mut gauges = vec![
            ("health/teacher_entropy", mean_entropy(targets)),
            ("health/teacher_max_prob", targets.clone().max_dim(2).mean()),
        ];
        let mut loss = loss::loss(&student.logits, targets, self.student_temp);
        if self.koleo_weight > 0.0 {
            gauges.push((MATCH_LOSS, loss.clone().inner()));
            let globals = &student.embeddings[0];
            let of_view = |(i, n): (usize, &Neighbors)| n.koleo(view(globals, i), &self.positions[part]);
            let spread = self.neighbors.iter().enumerate().map(of_view).reduce(|sum, term| sum + term);
            // The plan was refused without a global view.
            let spread = spread.expect("at least one global view");
            gauges.push(("train/koleo_loss", spread.clone().inner()));
            loss = loss + spread * self.koleo_weight;
        }
        PartLoss { loss, gauges }
    }

    fn observed(&self) -> Tensor<1> {
        self.mean.clone()
    }
}

/// View `i` of embeddings `[B, V, D]`, `[B, D]`.
fn view(embeddings: &Tensor<3>, i: usize) -> Tensor<2> {
    let [b, _, d] = embeddings.dims();
    embeddings.clone().slice([0..b, i..i + 1, 0..d]).reshape([b, d])
}

/// Neighbors over the whole batch for each view of `parts`, `[B / N, V, D]` each.
fn neighbors_of(parts: &[&Tensor<3>], peers: Peers<'_>) -> Result<Vec<Neighbors>, EngineError> {
    let [_, v, _] = parts[0].dims();
    let of_view = |i: usize| {
        let rows: Vec<Tensor<2>> = parts.iter().map(|part| directions(view(part, i))).collect();
        Neighbors::of(peers.gather("neighbors", &rows)?)
    };
    (0..v).map(of_view).collect()
}

/// Mean entropy of the rows of `probs` `[B, V, K]`, in nats, `[1]`.
fn mean_entropy(probs: &Tensor<3>) -> Tensor<1> {
    let logs = probs.clone().clamp_min(1e-30).log();
    -(probs.clone() * logs).sum_dim(2).mean()
}
