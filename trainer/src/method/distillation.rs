//! Distillation of a frozen network's features, as lightly-train has it by default.
//!
//! ```text
//! t, T = teacher(x)      one vector and a map of patches per view, D_t channels, without a graph
//! s, S = student(x)      the same of the trained network, D_s channels
//! loss = a · d(W s + b, t) + c · d(R(V S + v), T)       R resamples the student's grid to the teacher's
//! d(x, y) = mean (x - y)², or mean (1 - x̂ · ŷ)          x̂ = x / |x|
//! ```
//!
//! The teacher sees the same views as the student and may have another kind of backbone, size of
//! patches and width. Each image is seen by itself: its normalizations use running statistics.

use augment::MultiCrop;
use burn_tensor::Tensor;
use kernels::ops::unit_rows;
use networks::features::{Features, Outputs};
use networks::head::projection::{Normalizes, Projection};
use networks::head::{Head, Reads};
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::loss::resample::resampled;
use super::network::{Backbone, FrozenEntry, FrozenWeights, Moves, NetworkSpec};
use super::{BatchLoss, BatchOutputs, Method, MethodContext, MethodRecipe, MicroBatchLoss};

/// Name of the trained network.
const STUDENT: &str = "student";

/// Name of the frozen network.
const TEACHER: &str = "teacher";

/// Name of the head on one vector per view.
const POOLED: &str = "pooled";

/// Name of the head on patches.
const PATCHES: &str = "patches";

/// Keeps a norm away from zero, as in PyTorch's `normalize`.
const NORM_EPSILON: f64 = 1e-12;

/// Settings of distillation, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Frozen network that is distilled.
    pub teacher: FrozenWeights,
    /// Distance between features; `squared` by default.
    #[serde(default)]
    pub distance: Distance,
    /// Weight of the distance between the vectors of whole views, a; 1 by default.
    #[serde(default = "default_weight")]
    pub pooled_weight: f64,
    /// Weight of the distance between maps of patches, c; 1 by default.
    #[serde(default = "default_weight")]
    pub patch_weight: f64,
}

/// A distance between features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Distance {
    /// Mean squared difference, channel by channel.
    #[default]
    Squared,
    /// One minus the cosine of the angle: lengths do not matter.
    Cosine,
}

fn default_weight() -> f64 {
    1.0
}

impl MethodRecipe for Config {
    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        let FrozenWeights { model: Some(model), normalization: Some(normalization), .. } = &self.teacher
        else {
            return Err("method.teacher.weights: the file has not been read".into());
        };
        for (key, weight) in [("pooled_weight", self.pooled_weight), ("patch_weight", self.patch_weight)] {
            if !(0.0..=1e6).contains(&weight) {
                return Err(format!("method.{key} is {weight} and must lie in 0..=1e6"));
            }
        }
        if self.pooled_weight == 0.0 && self.patch_weight == 0.0 {
            return Err(
                "method.pooled_weight and method.patch_weight are both 0: nothing would be learned".into()
            );
        }
        model.validate().map_err(|reason| format!("method.teacher.{reason}"))?;
        normalization.validate().map_err(|reason| format!("method.teacher.normalization: {reason}"))?;
        let stride_px = model.stride_px() as u32;
        if let Some(crop) = cx.views.crops.iter().find(|crop| !crop.size_px.is_multiple_of(stride_px)) {
            return Err(format!(
                "views: a view of {} px is not a multiple of the {stride_px} px that a token of the teacher covers \
                 (method.teacher.weights)",
                crop.size_px
            ));
        }
        Ok(Box::new(Distillation {
            teacher: Backbone::Own(Box::new(model.clone()), normalization.clone()),
            widths: [cx.model.width(), model.width()],
            config: self.clone(),
            views: cx.views.clone(),
        }))
    }

    fn frozen(&mut self) -> Vec<FrozenEntry<'_>> {
        vec![FrozenEntry { name: TEACHER, weights: &mut self.teacher, has_heads: false }]
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        use networks::ModelConfig;

        // The first and the last kind: attention without statistics over the batch, and statistics
        // without attention.
        let models = ModelConfig::examples();
        let example = |model: &ModelConfig, distance| {
            let normalization = Some(networks::Normalization::half(3));
            let model = Some(model.clone());
            let teacher = FrozenWeights {
                weights: "w".into(),
                fingerprint: "f".into(),
                model,
                normalization,
                heads: Default::default(),
                saw_masks: false,
            };
            Self { teacher, distance, pooled_weight: 0.7, patch_weight: 0.4 }
        };
        let [first, last] = [&models[0], &models[models.len() - 1]];
        vec![
            (example(first, Distance::Cosine), MultiCrop::dino(16, 8, 2)),
            (example(last, Distance::Squared), MultiCrop::single(16)),
        ]
    }
}

struct Distillation {
    config: Config,
    views: MultiCrop,
    teacher: Backbone,
    /// Channels of the student and of the teacher.
    widths: [usize; 2],
}

impl Distillation {
    /// A linear layer into the teacher's width.
    fn head(&self, name: &'static str, reads: Reads) -> Head {
        let unit = Projection {
            name: format!("{name}.linear"),
            widths: self.widths.to_vec(),
            normalizes: Normalizes::Nothing,
            has_biases: true,
        };
        Head::new(name, reads, vec![Box::new(unit)])
    }
}

impl Method for Distillation {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let n_sizes = self.views.groups().len();
        let heads = [
            (POOLED, Reads::Pooled, self.config.pooled_weight),
            (PATCHES, Reads::Patches, self.config.patch_weight),
        ];
        let used = heads.into_iter().filter(|(.., weight)| *weight > 0.0);
        let heads = used.map(|(name, reads, _)| self.head(name, reads)).collect();
        let frozen = NetworkSpec::trained(TEACHER, Vec::new(), n_sizes);
        vec![
            NetworkSpec { backbone: self.teacher.clone(), moves: Moves::Frozen, ..frozen },
            NetworkSpec::trained(STUDENT, heads, n_sizes),
        ]
    }

    fn evaluated(&self) -> &'static str {
        STUDENT
    }

    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        _: u64,
        _: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        let targets = batch.of(TEACHER).iter().map(|outputs| outputs.features.clone()).collect();
        let Config { distance, pooled_weight, patch_weight, .. } = self.config;
        Ok(Box::new(DistillationLoss { targets, distance, pooled_weight, patch_weight }))
    }
}

/// Distillation loss of a batch.
struct DistillationLoss {
    /// Features of the teacher, by micro-batch and view size.
    targets: Vec<Vec<Features>>,
    distance: Distance,
    pooled_weight: f64,
    patch_weight: f64,
}

impl DistillationLoss {
    /// Returns the distance between the output of the head `name` and the teacher's features that
    /// `reads` selects: the mean over all views, `[1]`; `None` if there is no such head.
    fn term(&self, number: usize, student: &Outputs, name: &str, reads: Reads) -> Option<Tensor<1>> {
        let has_head = student.heads.by_name.contains_key(name);
        let given = has_head.then(|| student.heads.on_all_views(name))?;
        let n_views = |group: usize| student.pooled(group).dims()[1] as f64;
        let all: f64 = (0..given.len()).map(n_views).sum();
        given
            .into_iter()
            .enumerate()
            .map(|(group, given)| {
                let features = &student.features[group];
                let target = &self.targets[number][group];
                let read = reads.select(features);
                let target = reads.select(target);
                let [views, _, d] = target.x.dims();
                let [_, n, _] = read.x.dims();
                let given = given.reshape([views, n, d]);
                let given =
                    if reads == Reads::Patches { resampled(given, read.grid, target.grid) } else { given };
                self.between(given, target.x.autodiff()) * (n_views(group) / all)
            })
            .reduce(|sum, term| sum + term)
    }

    /// Returns the mean distance of `x` and `y`, `[B, N, D]` both: `[1]`.
    fn between(&self, x: Tensor<3>, y: Tensor<3>) -> Tensor<1> {
        let [b, n, d] = x.dims();
        match self.distance {
            Distance::Squared => {
                let off = x - y;
                (off.clone() * off).mean()
            }
            Distance::Cosine => {
                let unit = |x: Tensor<3>| unit_rows(x.reshape([b * n, d]), NORM_EPSILON);
                (unit(x) * unit(y)).sum_dim(1).mean() * -1.0 + 1.0
            }
        }
    }
}

impl BatchLoss for DistillationLoss {
    fn of(&self, number: usize, student: &Outputs) -> MicroBatchLoss {
        let pooled = self.term(number, student, POOLED, Reads::Pooled);
        let patches = self.term(number, student, PATCHES, Reads::Patches);
        let named = [("train/pooled_loss", &pooled), ("train/patch_loss", &patches)];
        let gauges =
            named.iter().filter_map(|(name, term)| Some((*name, term.as_ref()?.clone().inner()))).collect();
        let weighted =
            [pooled.map(|term| term * self.pooled_weight), patches.map(|term| term * self.patch_weight)];
        // One of the weights is above zero, so at least one head exists.
        let loss =
            weighted.into_iter().flatten().reduce(|sum, term| sum + term).expect("a head of the method");
        MicroBatchLoss { loss, gauges }
    }
}
