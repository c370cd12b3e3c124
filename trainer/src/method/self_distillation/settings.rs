//! Settings that the methods of self-distillation share, with their defaults and checks.

use augment::MultiCrop;
use networks::mask::{BlockMasks, SmallestBlock};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::targets::{Centering, TargetRule};
use crate::method::MethodContext;
use crate::method::bounds::{check_bounds, check_decay};
use crate::schedule::{Duration, Ramp, Schedule};

/// Smallest masked block of DINOv2 and DINOv3, in patches.
pub(in crate::method) const SMALLEST_BLOCK: SmallestBlock = SmallestBlock::Cells(4);

/// Anchoring of similarities between patches to those of an earlier teacher.
#[derive(Debug, Clone, Copy)]
pub(in crate::method) struct GramAnchor {
    /// Weight of the anchoring's part of the loss.
    pub(in crate::method) weight: f64,
    /// Step before which the earlier teacher is first copied, and from which the loss is added.
    pub(in crate::method) from_step: u64,
    /// Number of steps between two copies of the teacher.
    pub(in crate::method) every_steps: u64,
    /// Maximum number of copies after the first one; `None` for any number.
    pub(in crate::method) max_updates: Option<u64>,
    /// Number of steps of the ramps of the weight and of that of pairs with views of other sizes.
    pub(in crate::method) ramp_steps: u64,
}

impl GramAnchor {
    /// Returns the weights in `step`. `local_weight` is the final weight of pairs with views of
    /// other sizes than the first.
    ///
    /// ```text
    /// w = w_end + (w_start - w_end) (cos(π i / (n - 1)) + 1) / 2,   i = step - from, for i < n
    /// ```
    pub(super) fn weights_at(&self, step: u64, local_weight: f64) -> GramWeights {
        let Some(i) = step.checked_sub(self.from_step) else {
            let local = if self.ramp_steps > 0 { 1.0 } else { local_weight };
            return GramWeights { gram: 0.0, local };
        };
        if i >= self.ramp_steps {
            return GramWeights { gram: self.weight, local: local_weight };
        }
        let n_intervals = self.ramp_steps.saturating_sub(1).max(1) as f64;
        let remaining = ((std::f64::consts::PI * i as f64 / n_intervals).cos() + 1.0) / 2.0;
        GramWeights {
            gram: self.weight * (1.0 - remaining),
            local: local_weight + (1.0 - local_weight) * remaining,
        }
    }
}

/// Weights of a step that depend on a Gram anchor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct GramWeights {
    /// Weight of the anchoring.
    pub(super) gram: f64,
    /// Weight of the pairs with views of other sizes than the first.
    pub(super) local: f64,
}

/// Settings of the teacher and of its targets.
#[derive(Debug, Clone, Copy)]
pub(in crate::method) struct Teacher<'a> {
    /// Temperature of the softmax at the start, and after the warm-up.
    pub(in crate::method) temperature: [f64; 2],
    /// Key of the recipe that sets the temperature.
    pub(in crate::method) temperature_key: &'static str,
    /// Length of the temperature's warm-up.
    pub(in crate::method) warmup: &'a Duration,
    /// Whether the last step of the warm-up has the final temperature, as in DINOv2, instead of the
    /// step after it.
    pub(in crate::method) warmup_includes_end: bool,
    /// Decay of the moving average at the start and at the end of the run.
    pub(in crate::method) decay: [f64; 2],
    /// Key of the recipe, under `method`, that sets the decay.
    pub(in crate::method) decay_key: &'static str,
    pub(in crate::method) centering: Centering,
    /// Decay of centers' moving averages.
    pub(in crate::method) center_decay: f64,
}

impl Teacher<'_> {
    /// Returns the target rule for a head with `n_prototypes`; its center is saved as `name`.
    ///
    /// # Errors
    /// A message with the key and the reason.
    pub(super) fn target_rule(
        &self,
        name: &'static str,
        n_prototypes: usize,
        cx: &MethodContext,
    ) -> Result<TargetRule, String> {
        check_temperatures(self.temperature_key, &self.temperature)?;
        check_bounds(&[("center_decay", self.center_decay, [0.0, 1.0])])?;
        let [from, to] = self.temperature;
        let steps = cx.length.steps("method.teacher_temp_warmup", self.warmup)?;
        let ramp_steps = steps.saturating_sub(u64::from(self.warmup_includes_end));
        Ok(TargetRule {
            name,
            centering: self.centering,
            center_decay: self.center_decay,
            temperature_key: self.temperature_key,
            temperature: Ramp { from, to, ramp_steps },
            center: vec![0.0; n_prototypes],
        })
    }

    /// Returns the decay of the moving average by step.
    ///
    /// # Errors
    /// A message with the key and the reason.
    pub(super) fn decay(&self, cx: &MethodContext) -> Result<Schedule, String> {
        let [from, to] = self.decay;
        check_decay(self.decay_key, self.decay)?;
        Ok(Schedule::cosine(from, to, cx.length.total_steps))
    }
}

/// Head of masked patches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PatchHead {
    /// Number of prototypes.
    pub prototypes: usize,
    /// Channels of the hidden layers; 2048 by default.
    #[serde(default = "default_hidden")]
    pub hidden: usize,
    /// Channels between the MLP and the prototypes; 256 by default.
    #[serde(default = "default_bottleneck")]
    pub bottleneck: usize,
}

pub(in crate::method) fn default_hidden() -> usize {
    2048
}

pub(in crate::method) fn default_bottleneck() -> usize {
    256
}

pub(in crate::method) fn default_head_init_std() -> f32 {
    0.02
}

pub(in crate::method) fn default_freeze() -> Duration {
    Duration::Epochs(1.0)
}

pub(in crate::method) fn default_student_temp() -> f64 {
    0.1
}

/// Whether the last step of a warm-up has the final value.
pub(in crate::method) fn includes_end() -> bool {
    true
}

/// Weight of the pairs with smaller views in DINOv3.
pub(in crate::method) fn default_local_weight() -> f64 {
    1.0
}

/// Decay of the teacher in DINO and iBOT.
pub(in crate::method) fn default_teacher_decay() -> [f64; 2] {
    [0.996, 1.0]
}

/// Decay of the teacher in DINOv2 and DINOv3, whose batches have thousands of images.
pub(in crate::method) fn default_large_batch_teacher_decay() -> [f64; 2] {
    [0.992, 1.0]
}

/// Weight of KoLeo in DINOv2 and DINOv3.
pub(in crate::method) fn default_koleo_weight() -> f64 {
    0.1
}

pub(in crate::method) fn default_center_decay() -> f64 {
    0.9
}

pub(in crate::method) fn default_masked_share() -> f64 {
    0.5
}

pub(in crate::method) fn default_mask_ratio() -> [f64; 2] {
    [0.1, 0.5]
}

pub(in crate::method) fn default_patch_weight() -> f64 {
    1.0
}

/// Checks the rule for masks and the weight of the patches' part of the loss.
///
/// # Errors
/// A message with the key.
pub(super) fn check_masks(masks: &BlockMasks, weight: f64) -> Result<(), String> {
    let [low, high] = masks.ratio;
    check_bounds(&[
        ("masked_share", masks.masked_share, [0.0, 1.0]),
        ("mask_ratio", high, [0.0, 1.0]),
        ("mask_ratio", low, [0.0, high]),
        ("patch_weight", weight, [0.0, 1e6]),
    ])
}

/// Checks the temperature of the student.
///
/// # Errors
/// A message with the key.
pub(super) fn check_student_temp(temperature: f64) -> Result<(), String> {
    check_temperatures("method.student_temp", &[temperature])
}

fn check_temperatures(key: &str, temperatures: &[f64]) -> Result<(), String> {
    match temperatures.iter().find(|value| !(**value > 0.0 && **value <= 1e3)) {
        Some(value) => Err(format!("{key} must be above 0 and at most 1000, not {value}")),
        None => Ok(()),
    }
}

/// Checks the weight of KoLeo, and that the batch size is divisible by the group size.
///
/// # Errors
/// A message with the key.
pub(super) fn check_koleo(weight: f64, group: usize, cx: &MethodContext) -> Result<(), String> {
    check_bounds(&[("koleo_weight", weight, [0.0, 1e6])])?;
    let batch_size = cx.length.batch_size;
    if group == 1 || (group > 0 && !batch_size.is_multiple_of(group)) {
        return Err(format!(
            "method.koleo_group {group} must be 0, or at least 2 and divide optim.batch_size {batch_size}"
        ));
    }
    Ok(())
}

/// Sets `group` to 0, the whole batch, if `batch_size` is not divisible by it.
pub(in crate::method) fn fit_group(group: &mut usize, batch_size: usize) {
    if *group > 0 && !batch_size.is_multiple_of(*group) {
        *group = 0;
    }
}

/// Checks that there are two views of the first size.
///
/// # Errors
/// A message with the key.
pub(super) fn check_views(cx: &MethodContext) -> Result<(), String> {
    match cx.views.groups().first() {
        Some(group) if group.n_views >= 2 => Ok(()),
        _ => Err("views: the first size needs at least two views, one to predict the other".into()),
    }
}

/// Returns whether the views of the last size repeat those of the first size: there are as many,
/// and each has the box of the corresponding view.
pub(super) fn repeats_first(views: &MultiCrop) -> bool {
    let groups = views.groups();
    let n_first = groups[0].n_views;
    let n_last = groups[groups.len() - 1].n_views;
    // Index of the view whose box each view has, if it has one of another view.
    let mut sources: Vec<Option<usize>> = Vec::new();
    for crop in &views.crops {
        let first: Option<usize> =
            crop.like.map(|like| views.crops[..like].iter().map(|crop| crop.count).sum());
        sources.extend((0..crop.count).map(|i| first.map(|first| first + i)));
    }
    groups.len() > 1 && sources[sources.len() - n_last..].iter().copied().eq((0..n_first).map(Some))
}

#[cfg(test)]
mod tests {
    use augment::CropSpec;

    use super::*;

    fn crop(count: usize, size_px: u32, like: Option<usize>) -> CropSpec {
        CropSpec { count, size_px, like, ..MultiCrop::dino(32, 16, 2).crops[0].clone() }
    }

    /// Returns crops of one view each, except for the smaller size. The last two have the boxes of
    /// crops `a` and `b`.
    fn single_crops(a: usize, b: usize) -> Vec<CropSpec> {
        vec![
            crop(1, 32, None),
            crop(1, 32, None),
            crop(2, 16, None),
            crop(1, 64, Some(a)),
            crop(1, 64, Some(b)),
        ]
    }

    fn repeats(crops: Vec<CropSpec>) -> bool {
        repeats_first(&MultiCrop { crops })
    }

    #[test]
    fn last_views_repeat_the_first_if_number_and_order_are_equal() {
        assert!(repeats(vec![crop(2, 32, None), crop(4, 16, None), crop(2, 64, Some(0))]));
        assert!(repeats(single_crops(0, 1)));
        assert!(!repeats(single_crops(1, 0)));
        assert!(!repeats(vec![crop(1, 32, None), crop(1, 32, None), crop(1, 64, Some(0))]));
        assert!(!repeats(vec![crop(2, 32, None), crop(2, 16, None)]));
        // Repeats have the size of other views, and belong to the same group as these.
        assert!(!repeats(vec![crop(2, 32, None), crop(4, 16, None), crop(2, 16, Some(0))]));
        assert!(!repeats(vec![crop(2, 32, None), crop(2, 32, Some(0))]));
    }
}
