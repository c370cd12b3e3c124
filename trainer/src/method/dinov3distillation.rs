//! Distillation of a large network that DINOv3, DINOv2 or iBOT trained, with its heads, into the
//! recipe's backbone (Siméoni et al. 2025, section 5.2).
//!
//! ```text
//! T, S  scores of the frozen teacher, and of the student, on class tokens and on patches, by heads of their own
//! loss = mean over v, u≠v of w_uv · H(Sinkhorn(T_v / τ_t), softmax(S_u / τ_s))      w_uv = w_l for the smaller views u, else 1
//!      + w_p · 1/(B V) Σ_views mean over selected patches of H(Sinkhorn(T_p / τ_t), softmax(S_p / τ_s))
//!      + w_k · (koleo(student(x_1)) + koleo(student(x_2)))
//! ```
//!
//! The patches are selected as DINOv3 masks them, and nothing is hidden from the student. Its
//! moving average is evaluated. The teacher is a run of this program: published weights have no
//! heads.

#[cfg(test)]
use augment::MultiCrop;
use networks::mask::{BlockMasks, Spread};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::network::{FrozenEntry, FrozenWeights};
use super::prototype_group::default_prototype_group;
use super::self_distillation::heads::HeadSizes;
use super::self_distillation::settings::{
    SMALLEST_BLOCK, Teacher, default_freeze, default_head_init_std, default_koleo_weight,
    default_large_batch_teacher_decay, default_local_weight, default_mask_ratio, default_masked_share,
    default_patch_weight, default_student_temp, fit_group, includes_end,
};
use super::self_distillation::targets::Centering;
use super::self_distillation::{FrozenTeacher, SelfDistillation};
use super::{Method, MethodContext, MethodRecipe};
use crate::schedule::Duration;

/// Settings of the distillation, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Frozen network that is distilled: a run of this program.
    pub teacher: FrozenWeights,
    /// Channels of the hidden layers of the student's heads; those of the teacher's by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_hidden: Option<usize>,
    /// Channels between the MLP of the student's heads and its prototypes; those of the teacher's
    /// by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_bottleneck: Option<usize>,
    /// The same for the student's head of patches, where it differs from that of views; that of
    /// views by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patch_head: Option<StudentPatchHead>,
    /// Standard deviation of the initial weights of heads, 0.02 by default; see `model.init_std`.
    #[serde(default = "default_head_init_std")]
    pub head_init_std: f32,
    /// Length of time at the start during which the learning rate of the last layers is 0, while
    /// moments follow their gradients; 1 epoch by default.
    #[serde(default = "default_freeze")]
    pub freeze_last_layer: Duration,
    /// Temperature of the student's softmax; 0.1 by default.
    #[serde(default = "default_student_temp")]
    pub student_temp: f64,
    /// Temperature of the teacher's softmax at the start, and after its warm-up.
    pub teacher_temp: [f64; 2],
    /// Length of the warm-up of the teacher's temperature.
    pub teacher_temp_warmup: Duration,
    /// Whether the last step of the warm-up already has the final temperature, as in the runs on
    /// ImageNet-1k; true by default. In the runs on LVD-1689M, the step after it is the first to
    /// have it.
    #[serde(default = "includes_end")]
    pub teacher_temp_warmup_includes_end: bool,
    /// Decay of the student's moving average at the start and at the end of the run; 0.992 and 1 by
    /// default.
    #[serde(default = "default_large_batch_teacher_decay")]
    pub average_decay: [f64; 2],
    /// Weight of the pairs with views of other sizes than the first; 1 by default.
    #[serde(default = "default_local_weight")]
    pub local_weight: f64,
    /// Share of the views of the first size of which patches are compared; 0.5 by default.
    #[serde(default = "default_masked_share")]
    pub masked_share: f64,
    /// Smallest and largest share of such a view's patches that are compared; 0.1 and 0.5 by
    /// default.
    #[serde(default = "default_mask_ratio")]
    pub mask_ratio: [f64; 2],
    /// Number of consecutive images of the batch over whose views the mask ratios are spread
    /// evenly; 0, the default, for the whole batch. The published runs spread them over the images
    /// of one GPU.
    #[serde(default)]
    pub mask_group: usize,
    /// Weight of the patches' part of the loss; 1 by default.
    #[serde(default = "default_patch_weight")]
    pub patch_weight: f64,
    /// Weight of the KoLeo regularizer on the student's global embeddings; 0.1 by default.
    #[serde(default = "default_koleo_weight")]
    pub koleo_weight: f64,
    /// Number of consecutive images of the batch among which KoLeo searches for neighbors; 0, the
    /// default, for the whole batch. The published runs search among the images of one GPU.
    #[serde(default)]
    pub koleo_group: usize,
    /// Number of ranks that divide the prototypes of every head, the teacher's as well, among
    /// themselves; with 1, the default, each rank scores all of them. A rank scores its part for
    /// the images of the whole group, and gathers only that part: with many prototypes, this takes
    /// less memory and traffic. It must divide the prototypes and the ranks of a shard group, and
    /// the number of parameters of a prototype layer must be a multiple of 64 times the number of
    /// these ranks. Losses differ only by rounding.
    #[serde(default = "default_prototype_group")]
    pub prototype_group: usize,
}

/// Sizes of the student's head of patches; those of the teacher's where absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StudentPatchHead {
    /// Channels of the hidden layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden: Option<usize>,
    /// Channels between the MLP and the prototypes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bottleneck: Option<usize>,
}

impl Config {
    /// Returns the sizes of the student's head for the prototypes of `teacher_head`. Sizes that are
    /// absent in `sizes` are those of `teacher_head`.
    fn student_head(
        &self,
        teacher_head: &HeadSizes,
        sizes: &StudentPatchHead,
        frozen_steps: u64,
    ) -> HeadSizes {
        HeadSizes {
            hidden: sizes.hidden.unwrap_or(teacher_head.hidden),
            bottleneck: sizes.bottleneck.unwrap_or(teacher_head.bottleneck),
            init_std: self.head_init_std,
            frozen_steps,
            warms_moments: true,
            ..teacher_head.clone()
        }
    }
}

/// Returns the shapes of the weights of the teacher's head `name`, by name.
#[cfg(test)]
fn head_shapes(name: &str, prototypes: usize, hidden: usize, bottleneck: usize) -> [(String, Vec<usize>); 2] {
    [
        (format!("{name}.mlp.0.weight"), vec![hidden, 16]),
        (format!("{name}.last_layer.weight"), vec![prototypes, bottleneck]),
    ]
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "DINOv3's distillation";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        let frozen = FrozenTeacher::from_weights(&self.teacher)?;
        let frozen_steps = cx.length.steps("method.freeze_last_layer", &self.freeze_last_layer)?;
        let sizes = StudentPatchHead { hidden: self.head_hidden, bottleneck: self.head_bottleneck };
        let head = self.student_head(&frozen.head, &sizes, frozen_steps);
        let patch_sizes = self.patch_head.clone().unwrap_or(sizes);
        let patch_head = frozen
            .patch_head
            .as_ref()
            .map(|teacher_head| self.student_head(teacher_head, &patch_sizes, frozen_steps));
        let teacher = Teacher {
            temperature: self.teacher_temp,
            temperature_key: "method.teacher_temp",
            warmup: &self.teacher_temp_warmup,
            warmup_includes_end: self.teacher_temp_warmup_includes_end,
            decay: self.average_decay,
            decay_key: "average_decay",
            centering: Centering::Sinkhorn,
            center_decay: 0.0,
        };
        let masks = BlockMasks {
            masked_share: self.masked_share,
            ratio: self.mask_ratio,
            spread: Spread::Exact,
            group: self.mask_group,
            smallest_block: SMALLEST_BLOCK,
        };
        let method = SelfDistillation::new(head, &teacher, self.student_temp, cx)?
            .with_patches(patch_head, &teacher, masks, self.patch_weight, cx)?
            .with_koleo(self.koleo_weight, self.koleo_group, cx)?
            .with_local_weight(self.local_weight)?
            .with_column_group(self.prototype_group)?
            .with_frozen_teacher(frozen, cx)?;
        Ok(Box::new(method))
    }

    fn frozen(&mut self) -> Vec<FrozenEntry<'_>> {
        vec![FrozenEntry { name: "teacher", weights: &mut self.teacher, has_heads: true }]
    }

    fn fit_batch(&mut self, batch_size: usize) {
        fit_group(&mut self.koleo_group, batch_size);
        fit_group(&mut self.mask_group, batch_size);
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let teacher = FrozenWeights {
            weights: "runs/large".into(),
            fingerprint: "f".into(),
            model: networks::ModelConfig::examples().into_iter().next(),
            normalization: Some(networks::Normalization::half(3)),
            heads: head_shapes("head", 24, 16, 8)
                .into_iter()
                .chain(head_shapes("patch_head", 20, 12, 6))
                .collect(),
            saw_masks: true,
        };
        let config = Self {
            teacher,
            head_hidden: Some(10),
            patch_head: Some(StudentPatchHead { hidden: Some(14), bottleneck: None }),
            head_bottleneck: None,
            head_init_std: 0.3,
            freeze_last_layer: Duration::Steps(0),
            student_temp: 0.1,
            teacher_temp: [0.04, 0.07],
            teacher_temp_warmup: Duration::Steps(4),
            teacher_temp_warmup_includes_end: false,
            average_decay: [0.9, 1.0],
            local_weight: 0.5,
            masked_share: 0.5,
            mask_ratio: [0.1, 0.5],
            mask_group: 2,
            patch_weight: 1.0,
            koleo_weight: 0.1,
            koleo_group: 4,
            prototype_group: 1,
        };
        vec![(config, MultiCrop::dino(16, 8, 2))]
    }
}
