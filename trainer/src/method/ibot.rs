//! iBOT: self-distillation of views and of masked patches (Zhou et al. 2022).
//!
//! ```text
//! each view of the first size is masked by blocks with probability 1/2, in a share of U(0.1, 0.5) of its patches
//! S, T  scores of one head on class tokens and on masked patches, of the student and of its moving average
//! loss = mean over v, u≠v of H(softmax((T_v - c) / τ_t), softmax(S_u / τ_s))
//!      + w · 1/(B V) Σ_views mean over masked patches of H(softmax((T_p - c') / τ_t'), softmax(S_p / τ_s))
//! after the step: centers c of views and c' of patches, and the teacher, follow their means
//! ```
//!
//! The authors' code averages c' over all patches of the views (`patch_center = "all_patches"`);
//! over the masked patches, as in DINOv2, the teacher scores a quarter as many.

#[cfg(test)]
use augment::MultiCrop;
use networks::head::prototypes::Lengths;
use networks::mask::{BlockMasks, SmallestBlock, Spread};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::prototype_group::default_prototype_group;
use super::self_distillation::SelfDistillation;
use super::self_distillation::heads::HeadSizes;
use super::self_distillation::patches::CenteredOn;
use super::self_distillation::settings::{
    Teacher, default_bottleneck, default_center_decay, default_freeze, default_head_init_std, default_hidden,
    default_mask_ratio, default_masked_share, default_patch_weight, default_student_temp,
    default_teacher_decay,
};
use super::self_distillation::targets::Centering;
use super::{Method, MethodContext, MethodRecipe};
use crate::schedule::Duration;

/// Settings of iBOT, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Number of prototypes of class tokens and patches, K; 8192 by default.
    #[serde(default = "default_prototypes")]
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
    /// Whether the rows of the last layer keep unit length; their lengths are trained by default,
    /// as in the published runs of small models.
    #[serde(default)]
    pub norm_last_layer: bool,
    /// Length of time at the start during which the last layer is frozen; 1 epoch by default.
    #[serde(default = "default_freeze")]
    pub freeze_last_layer: Duration,
    /// Temperature of the student's softmax; 0.1 by default.
    #[serde(default = "default_student_temp")]
    pub student_temp: f64,
    /// Temperature of the teacher's softmax of views at the start, and after its warm-up.
    pub teacher_temp: [f64; 2],
    /// Temperature of the teacher's softmax of patches at the start, and after its warm-up; that of
    /// views by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher_patch_temp: Option<[f64; 2]>,
    /// Length of the warm-up of the teacher's temperatures.
    pub teacher_temp_warmup: Duration,
    /// Decay of the teacher's moving average at the start and at the end of the run; 0.996 and 1 by
    /// default.
    #[serde(default = "default_teacher_decay")]
    pub teacher_decay: [f64; 2],
    /// Decay of the centers' moving averages; 0.9 by default.
    #[serde(default = "default_center_decay")]
    pub center_decay: f64,
    /// Patches whose scores are averaged into the center of patches: the masked ones, the default,
    /// or all, as in the published runs, where the teacher's head scores all of them.
    #[serde(default, skip_serializing_if = "is_default_patch_center")]
    pub patch_center: CenteredOn,
    /// Probability with which a view of the first size is masked; 0.5 by default.
    #[serde(default = "default_masked_share")]
    pub masked_share: f64,
    /// Smallest and largest share of a masked view's patches that is hidden; 0.1 and 0.5 by
    /// default.
    #[serde(default = "default_mask_ratio")]
    pub mask_ratio: [f64; 2],
    /// Weight of the masked patches' part of the loss; 1 by default.
    #[serde(default = "default_patch_weight")]
    pub patch_weight: f64,
    /// Number of ranks that divide the prototypes among themselves; with 1, the default, each rank
    /// scores all of them. A rank scores its part for the images of the whole group, and gathers
    /// only that part: with many prototypes, this takes less memory and traffic. It must divide the
    /// prototypes and the ranks of a shard group, and the number of parameters of a prototype layer
    /// must be a multiple of 64 times the number of these ranks. Losses differ only by rounding.
    #[serde(default = "default_prototype_group")]
    pub prototype_group: usize,
}

fn default_prototypes() -> usize {
    8192
}

fn is_default_patch_center(centered_on: &CenteredOn) -> bool {
    *centered_on == CenteredOn::MaskedPatches
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "iBOT";

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
            centering: Centering::Mean,
            center_decay: self.center_decay,
            decay_key: "teacher_decay",
        };
        let patch_teacher = match self.teacher_patch_temp {
            Some(temperature) => {
                Teacher { temperature, temperature_key: "method.teacher_patch_temp", ..teacher }
            }
            None => teacher,
        };
        let method = SelfDistillation::new(head, &teacher, self.student_temp, cx)?;
        let masks = BlockMasks {
            masked_share: self.masked_share,
            ratio: self.mask_ratio,
            spread: Spread::Independent,
            group: 0,
            smallest_block: SmallestBlock::ThirdOfSide,
        };
        let method = method.with_patches(None, &patch_teacher, masks, self.patch_weight, cx)?;
        let method = method.with_patch_center(self.patch_center);
        Ok(Box::new(method.with_column_group(self.prototype_group)?))
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let config = Self {
            prototypes: 24,
            head_hidden: 16,
            head_bottleneck: 8,
            head_init_std: 0.3,
            norm_last_layer: false,
            freeze_last_layer: Duration::Steps(0),
            student_temp: 0.1,
            teacher_temp: [0.04, 0.07],
            teacher_patch_temp: Some([0.05, 0.08]),
            teacher_temp_warmup: Duration::Steps(4),
            teacher_decay: [0.9, 1.0],
            center_decay: 0.9,
            patch_center: CenteredOn::MaskedPatches,
            masked_share: 0.5,
            mask_ratio: [0.1, 0.5],
            patch_weight: 1.0,
            prototype_group: 1,
        };
        let published = Self { patch_center: CenteredOn::AllPatches, ..config.clone() };
        let views = MultiCrop::dino(16, 8, 2);
        vec![(config, views.clone()), (published, views)]
    }
}
