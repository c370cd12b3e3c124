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

#[cfg(test)]
use augment::MultiCrop;
use networks::head::prototypes::Lengths;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::prototype_group::default_prototype_group;
use super::self_distillation::SelfDistillation;
use super::self_distillation::heads::HeadSizes;
use super::self_distillation::settings::{
    Teacher, default_bottleneck, default_center_decay, default_freeze, default_head_init_std, default_hidden,
    default_student_temp, default_teacher_decay, fit_group,
};
use super::self_distillation::targets::Centering;
use super::{Method, MethodContext, MethodRecipe};
use crate::schedule::Duration;

/// Settings of DINO, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
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
    /// Whether the rows of the last layer keep unit length; true by default. DINO's released small
    /// models and its longest runs train the lengths as well, and so does DINOv2.
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
    /// Decay of the teacher's moving average at the start and at the end of the run; 0.996 and 1 by
    /// default.
    #[serde(default = "default_teacher_decay")]
    pub teacher_decay: [f64; 2],
    /// Rule that balances the teacher's outputs over prototypes, so that it does not use only one;
    /// `mean` by default.
    #[serde(default)]
    pub centering: Centering,
    /// Decay of the center's moving average; 0.9 by default.
    #[serde(default = "default_center_decay")]
    pub center_decay: f64,
    /// Weight of the KoLeo regularizer on the student's global embeddings; 0, the default, for
    /// none, as in DINO. DINOv2 uses 0.1. It keeps short runs on few images from collapsing.
    #[serde(default)]
    pub koleo_weight: f64,
    /// Number of consecutive images of the batch among which KoLeo searches for neighbors; 0, the
    /// default, for the whole batch. DINOv2's code searches among the images of one GPU.
    #[serde(default)]
    pub koleo_group: usize,
    /// Number of ranks that divide the prototypes among themselves; with 1, the default, each rank
    /// scores all of them. A rank scores its part for the images of the whole group, and gathers
    /// only that part: with many prototypes, this takes less memory and traffic. It must divide the
    /// prototypes and the ranks of a shard group, and the number of parameters of a prototype layer
    /// must be a multiple of 64 times the number of these ranks. Losses differ only by rounding.
    #[serde(default = "default_prototype_group")]
    pub prototype_group: usize,
}

fn default_norm_last_layer() -> bool {
    true
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "DINO";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        let head = HeadSizes {
            prototypes: self.prototypes,
            hidden: self.head_hidden,
            bottleneck: self.head_bottleneck,
            init_std: self.head_init_std,
            lengths: if self.norm_last_layer { Lengths::One } else { Lengths::Gain },
            frozen_steps: cx.length.steps("method.freeze_last_layer", &self.freeze_last_layer)?,
            warms_moments: false,
        };
        let teacher = Teacher {
            temperature: self.teacher_temp,
            temperature_key: "method.teacher_temp",
            warmup: &self.teacher_temp_warmup,
            warmup_includes_end: false,
            decay: self.teacher_decay,
            centering: self.centering,
            center_decay: self.center_decay,
            decay_key: "teacher_decay",
        };
        let method = SelfDistillation::new(head, &teacher, self.student_temp, cx)?;
        let method = method.with_koleo(self.koleo_weight, self.koleo_group, cx)?;
        Ok(Box::new(method.with_column_group(self.prototype_group)?))
    }

    fn fit_batch(&mut self, batch_size: usize) {
        fit_group(&mut self.koleo_group, batch_size);
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
            prototype_group: 1,
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
