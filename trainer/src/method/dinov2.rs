//! DINOv2: self-distillation of views and of masked patches, with KoLeo, which spreads embeddings
//! (Oquab et al. 2023).
//!
//! ```text
//! half of the 2·B first views are masked by blocks, in shares spread evenly over 0.1..0.5 of their patches
//! S, T  scores on class tokens and on masked patches, of the student and of its moving average
//! loss = w_v · mean over v, u≠v of H(P_v, softmax(S_u / τ_s))
//!      + w_p · 1/(B V) Σ_views mean over masked patches of H(P_p, softmax(S_p / τ_s))
//!      + w_k · (koleo(student(x_1)) + koleo(student(x_2)))
//! P = softmax((T - c) / τ_t) with a center each for views and patches, or Sinkhorn(T / τ_t), each apart, over the whole batch
//! ```
//!
//! The published runs score patches by the head of the views (ViT-L/16 on ImageNet-1k, centers) or
//! by one of their own (ViT-L/14 on ImageNet-22k and ViT-g/14 on LVD-142M, Sinkhorn-Knopp). Blocks
//! may mask fewer patches than a view's share, as in the released code. The center of patches is
//! their mean over the whole batch; the released code averages the means of ranks.

#[cfg(test)]
use augment::MultiCrop;
use networks::head::prototypes::Lengths;
use networks::mask::{BlockMasks, Spread};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::prototype_group::default_prototype_group;
use super::self_distillation::SelfDistillation;
use super::self_distillation::heads::HeadSizes;
use super::self_distillation::settings::{
    PatchHead, SMALLEST_BLOCK, Teacher, default_bottleneck, default_center_decay, default_freeze,
    default_head_init_std, default_hidden, default_koleo_weight, default_large_batch_teacher_decay,
    default_mask_ratio, default_masked_share, default_patch_weight, default_student_temp, fit_group,
};
use super::self_distillation::targets::Centering;
use super::{Method, MethodContext, MethodRecipe};
use crate::schedule::Duration;

/// Settings of DINOv2, as a recipe writes them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Number of prototypes of views, K.
    pub prototypes: usize,
    /// Channels of the hidden layers of the head of views; 2048 by default.
    #[serde(default = "default_hidden")]
    pub head_hidden: usize,
    /// Channels between the MLP of the head of views and its prototypes; 256 by default.
    #[serde(default = "default_bottleneck")]
    pub head_bottleneck: usize,
    /// Standard deviation of the initial weights of heads, 0.02 by default; see `model.init_std`.
    #[serde(default = "default_head_init_std")]
    pub head_init_std: f32,
    /// Head of masked patches; absent if the head of views scores them, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patch_head: Option<PatchHead>,
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
    /// Decay of the teacher's moving average at the start and at the end of the run; 0.992 and 1 by
    /// default.
    #[serde(default = "default_large_batch_teacher_decay")]
    pub teacher_decay: [f64; 2],
    /// Rule that balances the teacher's outputs over prototypes; `mean` by default.
    #[serde(default)]
    pub centering: Centering,
    /// Decay of the centers' moving averages; 0.9 by default.
    #[serde(default = "default_center_decay")]
    pub center_decay: f64,
    /// Share of the views of the first size that are masked; 0.5 by default.
    #[serde(default = "default_masked_share")]
    pub masked_share: f64,
    /// Smallest and largest share of a masked view's patches that is hidden; 0.1 and 0.5 by
    /// default.
    #[serde(default = "default_mask_ratio")]
    pub mask_ratio: [f64; 2],
    /// Weight of the masked patches' part of the loss; 1 by default.
    #[serde(default = "default_patch_weight")]
    pub patch_weight: f64,
    /// Weight of the KoLeo regularizer on the student's global embeddings; 0.1 by default.
    #[serde(default = "default_koleo_weight")]
    pub koleo_weight: f64,
    /// Number of consecutive images of the batch among which KoLeo searches for neighbors; 0, the
    /// default, for the whole batch. The published runs search among the images of one GPU.
    #[serde(default)]
    pub koleo_group: usize,
    /// Number of ranks that divide the prototypes of every head among themselves; with 1, the
    /// default, each rank scores all of them. A rank scores its part for the images of the whole
    /// group, and gathers only that part: with many prototypes, this takes less memory and traffic.
    /// It must divide the prototypes and the ranks of a shard group, and the number of parameters
    /// of a prototype layer must be a multiple of 64 times the number of these ranks. Losses differ
    /// only by rounding.
    #[serde(default = "default_prototype_group")]
    pub prototype_group: usize,
}

impl Config {
    /// Returns the sizes of a head whose last layer is frozen for `frozen_steps`.
    fn head_sizes(
        &self,
        prototypes: usize,
        hidden: usize,
        bottleneck: usize,
        frozen_steps: u64,
    ) -> HeadSizes {
        HeadSizes {
            prototypes,
            hidden,
            bottleneck,
            init_std: self.head_init_std,
            lengths: Lengths::Gain,
            frozen_steps,
            warms_moments: true,
        }
    }
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "DINOv2";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        let frozen_steps = cx.length.steps("method.freeze_last_layer", &self.freeze_last_layer)?;
        let head = self.head_sizes(self.prototypes, self.head_hidden, self.head_bottleneck, frozen_steps);
        let patch_head = self
            .patch_head
            .as_ref()
            .map(|head| self.head_sizes(head.prototypes, head.hidden, head.bottleneck, frozen_steps));
        let teacher = Teacher {
            temperature: self.teacher_temp,
            temperature_key: "method.teacher_temp",
            warmup: &self.teacher_temp_warmup,
            warmup_includes_end: true,
            decay: self.teacher_decay,
            centering: self.centering,
            center_decay: self.center_decay,
            decay_key: "teacher_decay",
        };
        let masks = BlockMasks {
            masked_share: self.masked_share,
            ratio: self.mask_ratio,
            spread: Spread::Even,
            group: 0,
            smallest_block: SMALLEST_BLOCK,
        };
        let method = SelfDistillation::new(head, &teacher, self.student_temp, cx)?
            .with_patches(patch_head, &teacher, masks, self.patch_weight, cx)?
            .with_koleo(self.koleo_weight, self.koleo_group, cx)?
            .with_column_group(self.prototype_group)?;
        Ok(Box::new(method))
    }

    fn fit_batch(&mut self, batch_size: usize) {
        fit_group(&mut self.koleo_group, batch_size);
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let shared = Self {
            prototypes: 24,
            head_hidden: 16,
            head_bottleneck: 8,
            head_init_std: 0.3,
            patch_head: None,
            freeze_last_layer: Duration::Steps(0),
            student_temp: 0.1,
            teacher_temp: [0.04, 0.07],
            teacher_temp_warmup: Duration::Steps(4),
            teacher_decay: [0.9, 1.0],
            centering: Centering::Mean,
            center_decay: 0.9,
            masked_share: 0.5,
            mask_ratio: [0.1, 0.5],
            patch_weight: 1.0,
            koleo_weight: 0.1,
            koleo_group: 0,
            prototype_group: 1,
        };
        let separate = Self {
            patch_head: Some(PatchHead { prototypes: 20, hidden: 12, bottleneck: 6 }),
            centering: Centering::Sinkhorn,
            koleo_group: 4,
            ..shared.clone()
        };
        // With few masked views, some micro-batches have none.
        let few = Self { masked_share: 0.1, ..shared.clone() };
        let views = MultiCrop::dino(16, 8, 2);
        vec![(shared, views.clone()), (separate, views.clone()), (few, views)]
    }
}
