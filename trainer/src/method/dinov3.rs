//! DINOv3: self-distillation of views and of masked patches, with Gram anchoring, which preserves
//! similarities between patches (Siméoni et al. 2025).
//!
//! ```text
//! half of the 2·B first views are masked, in shares spread evenly over 0.1..0.5 of their patches, to an exact number
//! S, T  scores on class tokens and on masked patches by heads of their own, of the student and of its moving average
//! loss = mean over v, u≠v of w_uv · H(Sinkhorn(T_v / τ_t), softmax(S_u / τ_s))      w_uv = w_l for the smaller views u, else 1
//!      + w_p · 1/(B V) Σ_views mean over masked patches of H(Sinkhorn(T_p / τ_t), softmax(S_p / τ_s))
//!      + w_k · (koleo(student(x_1)) + koleo(student(x_2)))
//!      + w_g · gram(student's patches of x_1 and x_2, earlier teacher's patches of the same boxes at another size)
//! ```
//!
//! The earlier teacher is a copy of the moving average, taken after `gram.from` and again every
//! `gram.every`: in a run that starts from weights with `gram.from` at 0, these weights. It sees
//! the last views of the recipe, which have the boxes of the first ones (`like = 0`), at another
//! size and without distortion of colors.

#[cfg(test)]
use augment::MultiCrop;
use networks::head::prototypes::Lengths;
use networks::mask::{BlockMasks, Spread};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::prototype_group::default_prototype_group;
use super::self_distillation::heads::HeadSizes;
use super::self_distillation::settings::{
    PatchHead, SMALLEST_BLOCK, Teacher, default_bottleneck, default_freeze, default_head_init_std,
    default_hidden, default_koleo_weight, default_large_batch_teacher_decay, default_local_weight,
    default_mask_ratio, default_masked_share, default_patch_weight, default_student_temp, fit_group,
    includes_end,
};
use super::self_distillation::targets::Centering;
use super::self_distillation::{GramAnchor, SelfDistillation};
use super::{Method, MethodContext, MethodRecipe};
use crate::schedule::Duration;

/// Settings of DINOv3, as a recipe writes them.
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
    /// Head of masked patches.
    pub patch_head: PatchHead,
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
    /// Decay of the teacher's moving average at the start and at the end of the run; 0.992 and 1 by
    /// default.
    #[serde(default = "default_large_batch_teacher_decay")]
    pub teacher_decay: [f64; 2],
    /// Weight of the pairs with views of other sizes than the first; 1 by default, 0.5 in the last
    /// stages of ViT-7B.
    #[serde(default = "default_local_weight")]
    pub local_weight: f64,
    /// Share of the views of the first size that are masked; 0.5 by default.
    #[serde(default = "default_masked_share")]
    pub masked_share: f64,
    /// Smallest and largest share of a masked view's patches that is hidden; 0.1 and 0.5 by
    /// default.
    #[serde(default = "default_mask_ratio")]
    pub mask_ratio: [f64; 2],
    /// Number of consecutive images of the batch over whose views the mask ratios are spread
    /// evenly; 0, the default, for the whole batch. The published runs spread them over the images
    /// of one GPU: fewer images have slightly more masked patches.
    #[serde(default)]
    pub mask_group: usize,
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
    /// Anchoring of similarities between patches; none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gram: Option<GramConfig>,
}

/// Anchoring of similarities between patches to those of an earlier teacher.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GramConfig {
    /// Weight of its part of the loss; 2 in the published run.
    pub weight: f64,
    /// Length of time before the teacher is first copied, and the loss begins.
    pub from: Duration,
    /// Length of time between two copies; if absent, there is only one copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every: Option<Duration>,
    /// Largest number of copies after the first one; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_updates: Option<u64>,
    /// Length of the half cosine after `from` over which the weight rises from 0, and
    /// `local_weight` moves from 1 to its value; 0, the default, for none.
    #[serde(default = "default_ramp", skip_serializing_if = "is_default_ramp")]
    pub ramp: Duration,
}

fn default_ramp() -> Duration {
    Duration::Steps(0)
}

fn is_default_ramp(ramp: &Duration) -> bool {
    *ramp == default_ramp()
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
            lengths: Lengths::Free,
            frozen_steps,
            warms_moments: true,
        }
    }

    /// Converts the settings of the anchoring from lengths of time to steps.
    fn gram_anchor(&self, cx: &MethodContext) -> Result<Option<GramAnchor>, String> {
        let Some(GramConfig { weight, from, every, max_updates, ramp }) = &self.gram else { return Ok(None) };
        Ok(Some(GramAnchor {
            weight: *weight,
            from_step: cx.length.steps("method.gram.from", from)?,
            every_steps: match every {
                Some(every) => cx.length.steps("method.gram.every", every)?,
                None => u64::MAX,
            },
            max_updates: *max_updates,
            ramp_steps: cx.length.steps("method.gram.ramp", ramp)?,
        }))
    }
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "DINOv3";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        let frozen_steps = cx.length.steps("method.freeze_last_layer", &self.freeze_last_layer)?;
        let head = self.head_sizes(self.prototypes, self.head_hidden, self.head_bottleneck, frozen_steps);
        let PatchHead { prototypes, hidden, bottleneck } = self.patch_head;
        let patch_head = self.head_sizes(prototypes, hidden, bottleneck, frozen_steps);
        let teacher = Teacher {
            temperature: self.teacher_temp,
            temperature_key: "method.teacher_temp",
            warmup: &self.teacher_temp_warmup,
            warmup_includes_end: self.teacher_temp_warmup_includes_end,
            decay: self.teacher_decay,
            centering: Centering::Sinkhorn,
            center_decay: 0.0,
            decay_key: "teacher_decay",
        };
        let masks = BlockMasks {
            masked_share: self.masked_share,
            ratio: self.mask_ratio,
            spread: Spread::Exact,
            group: self.mask_group,
            smallest_block: SMALLEST_BLOCK,
        };
        let method = SelfDistillation::new(head, &teacher, self.student_temp, cx)?
            .with_patches(Some(patch_head), &teacher, masks, self.patch_weight, cx)?
            .with_koleo(self.koleo_weight, self.koleo_group, cx)?
            .with_local_weight(self.local_weight)?
            .with_gram(self.gram_anchor(cx)?)?
            .with_column_group(self.prototype_group)?;
        Ok(Box::new(method))
    }

    fn fit_batch(&mut self, batch_size: usize) {
        fit_group(&mut self.koleo_group, batch_size);
        fit_group(&mut self.mask_group, batch_size);
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let plain = Self {
            prototypes: 24,
            head_hidden: 16,
            head_bottleneck: 8,
            head_init_std: 0.3,
            patch_head: PatchHead { prototypes: 20, hidden: 12, bottleneck: 6 },
            freeze_last_layer: Duration::Steps(0),
            student_temp: 0.1,
            teacher_temp: [0.04, 0.07],
            teacher_temp_warmup: Duration::Steps(4),
            teacher_temp_warmup_includes_end: false,
            teacher_decay: [0.9, 1.0],
            local_weight: 0.5,
            masked_share: 0.5,
            mask_ratio: [0.1, 0.5],
            mask_group: 0,
            patch_weight: 1.0,
            koleo_weight: 0.1,
            koleo_group: 4,
            prototype_group: 1,
            gram: None,
        };
        let gram = GramConfig {
            weight: 2.0,
            from: Duration::Steps(1),
            every: Some(Duration::Steps(2)),
            max_updates: Some(3),
            ramp: Duration::Steps(3),
        };
        let anchored = Self { gram: Some(gram), ..plain };
        let mut views = MultiCrop::dino(16, 8, 2);
        let first = views.crops[0].clone();
        // The first views are one crop, which the last views repeat at another size.
        views.crops.retain(|crop| crop.size_px != first.size_px);
        views.crops.insert(0, augment::CropSpec { count: 2, ..first.clone() });
        views.crops.push(augment::CropSpec { count: 2, size_px: 24, like: Some(0), ..first });
        vec![(anchored, views)]
    }
}
