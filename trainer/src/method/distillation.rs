//! Distillation of a frozen network's features, as in lightly-train by default.
//!
//! ```text
//! t, T = teacher(x)      one vector and a map of patches per view, D_t channels, without a graph
//! s, S = student(x)      the same of the trained network, D_s channels
//! loss = a · d(W s + b, t) + c · d(R(V S + v), T)       R resamples the student's grid to the teacher's
//! d(x, y) = mean (x - y)², or mean (1 - x̂ · ŷ)          x̂ = x / |x|
//! ```
//!
//! The teacher sees the same views as the student and may have another kind of backbone, patch size
//! and width. Its normalizations use running statistics, so that images do not affect one another.

use augment::MultiCrop;
use burn_tensor::Tensor;
use kernels::ops::{NORM_EPSILON, add_term, unit_rows};
use networks::head::projection::{Normalizes, Projection};
use networks::head::{Head, Reads};
use networks::outputs::Outputs;
use networks::tokens::Tokens;
use ranks::EngineError;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::loss::resample::resample_bilinear;
use super::network::{Backbone, FrozenEntry, FrozenWeights, NetworkSpec, UpdateRule};
use super::{BatchLoss, BatchOutputs, Method, MethodContext, MethodRecipe, MicroBatchLoss};

/// Name of the trained network.
const STUDENT: &str = "student";

/// Name of the frozen network.
const TEACHER: &str = "teacher";

/// Name of the head on one vector per view.
const POOLED: &str = "pooled";

/// Name of the head on patches.
const PATCHES: &str = "patches";

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
    const TITLE: &'static str = "distillation";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        let FrozenWeights { model: Some(model), normalization: Some(normalization), .. } = &self.teacher
        else {
            return Err("method.teacher.weights: the file has not been read".into());
        };
        for (key, weight) in [("pooled_weight", self.pooled_weight), ("patch_weight", self.patch_weight)] {
            if !(0.0..=1e6).contains(&weight) {
                return Err(format!("method.{key} is {weight} but must lie in 0..=1e6"));
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
                "views: {} px is not a multiple of {stride_px} px, the token size of the teacher \
                 (method.teacher.weights)",
                crop.size_px
            ));
        }
        Ok(Box::new(Distillation {
            teacher: Backbone::Custom(Box::new(model.clone()), normalization.clone()),
            student_width: cx.model.width(),
            teacher_width: model.width(),
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

        let mut models = ModelConfig::examples();
        // The first and the last example: attention without statistics over the batch, and
        // statistics without attention.
        let last = models.pop();
        let first = models.into_iter().next();
        let cosine_teacher = FrozenWeights {
            weights: "w".into(),
            fingerprint: "f".into(),
            model: first,
            normalization: Some(networks::Normalization::half(3)),
            heads: Default::default(),
            saw_masks: false,
        };
        let squared_teacher = FrozenWeights { model: last, ..cosine_teacher.clone() };
        let cosine = Self {
            teacher: cosine_teacher,
            distance: Distance::Cosine,
            pooled_weight: 0.7,
            patch_weight: 0.4,
        };
        let squared = Self { teacher: squared_teacher, distance: Distance::Squared, ..cosine.clone() };
        vec![(cosine, MultiCrop::dino(16, 8, 2)), (squared, MultiCrop::single(16))]
    }
}

struct Distillation {
    config: Config,
    views: MultiCrop,
    teacher: Backbone,
    /// Channels of the student's features.
    student_width: usize,
    /// Channels of the teacher's features.
    teacher_width: usize,
}

impl Distillation {
    /// Returns a head that is a linear layer to the teacher's width.
    fn head(&self, name: &'static str, reads: Reads) -> Head {
        let unit = Projection {
            name: format!("{name}.linear"),
            widths: vec![self.student_width, self.teacher_width],
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
        let mut heads = Vec::new();
        if self.config.pooled_weight > 0.0 {
            heads.push(self.head(POOLED, Reads::Pooled));
        }
        if self.config.patch_weight > 0.0 {
            heads.push(self.head(PATCHES, Reads::Patches));
        }
        let frozen = NetworkSpec::trained(TEACHER, Vec::new(), n_sizes);
        vec![
            NetworkSpec { backbone: self.teacher.clone(), update_rule: UpdateRule::Frozen, ..frozen },
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
        let targets = batch.network_outputs(TEACHER).iter().map(|outputs| outputs.features.clone()).collect();
        let Config { distance, pooled_weight, patch_weight, .. } = self.config;
        Ok(Box::new(DistillationLoss { targets, distance, pooled_weight, patch_weight }))
    }
}

/// Distillation loss of a batch.
struct DistillationLoss {
    /// Features of the teacher, by micro-batch and view size.
    targets: Vec<Vec<Tokens>>,
    distance: Distance,
    pooled_weight: f64,
    patch_weight: f64,
}

impl DistillationLoss {
    /// Returns the distance between the output of the head `name` and the teacher's features that
    /// `reads` selects: the mean over all views, `[1]`; `None` if there is no such head.
    fn term(&self, index: usize, student: &Outputs, name: &str, reads: Reads) -> Option<Tensor<1>> {
        if !student.heads.by_name.contains_key(name) {
            return None;
        }
        let outputs = student.heads.on_all_views(name);
        let n_views: Vec<f64> =
            (0..outputs.len()).map(|group| student.pooled(group).dims()[1] as f64).collect();
        let n_all_views: f64 = n_views.iter().sum();
        let mut total: Option<Tensor<1>> = None;
        for (group, output) in outputs.into_iter().enumerate() {
            let features = reads.select(&student.features[group]);
            let target = reads.select(&self.targets[index][group]);
            let target_values = target.by_sequence();
            let [views, _, d] = target_values.dims();
            let [n_tokens, _] = features.x.dims();
            let mut output = output.reshape([views, n_tokens / views, d]);
            if reads == Reads::Patches {
                output = resample_bilinear(output, features.grid(), target.grid());
            }
            let term = self.mean_distance(output, target_values.autodiff()) * (n_views[group] / n_all_views);
            total = Some(add_term(total, term));
        }
        total
    }

    /// Returns the mean distance between `x` and `y`, `[B, N, D]` each, `[1]`.
    fn mean_distance(&self, x: Tensor<3>, y: Tensor<3>) -> Tensor<1> {
        let [b, n, d] = x.dims();
        match self.distance {
            Distance::Squared => {
                let difference = x - y;
                (difference.clone() * difference).mean()
            }
            Distance::Cosine => {
                let x = unit_rows(x.reshape([b * n, d]), NORM_EPSILON);
                let y = unit_rows(y.reshape([b * n, d]), NORM_EPSILON);
                (x * y).sum_dim(1).mean() * -1.0 + 1.0
            }
        }
    }
}

impl BatchLoss for DistillationLoss {
    fn micro_batch_loss(&self, index: usize, student: &Outputs) -> MicroBatchLoss {
        let mut loss: Option<Tensor<1>> = None;
        let mut gauges = Vec::new();
        if let Some(pooled) = self.term(index, student, POOLED, Reads::Pooled) {
            gauges.push(("train/pooled_loss", pooled.clone().inner()));
            loss = Some(pooled * self.pooled_weight);
        }
        if let Some(patches) = self.term(index, student, PATCHES, Reads::Patches) {
            gauges.push(("train/patch_loss", patches.clone().inner()));
            loss = Some(add_term(loss, patches * self.patch_weight));
        }
        // One of the weights is above zero, so that at least one head exists.
        MicroBatchLoss { loss: loss.expect("a head of the method"), gauges }
    }
}
