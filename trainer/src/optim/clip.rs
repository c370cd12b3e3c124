//! Clip norms: norms of gradients, by group.
//!
//! ```text
//! n_G = √ Σ_{g in G} g²        clipped: g · min(1, c / (n_G + ε))      ε = 1e-6, as in DINO
//! ```
//!
//! On a device, squares are summed in the order of its kernels, so that norms have the same bits
//! for any number of ranks on CPUs only.

use std::collections::HashMap;
use std::ops::Range;

use burn_tensor::Tensor;
use kernels::device::host::{is_host, with_slice};
use multiversion::multiversion;
use networks::layout::ALIGNMENT;
use ranks::fixed::FixedPoint;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::runs::joined;
use super::state::UnitShard;

/// Keeps the clip factor finite, as in DINO.
const CLIP_EPSILON: f64 = 1e-6;

/// Parameters that share a clip norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClipRule {
    /// Every parameter tensor separately: DINO.
    #[default]
    PerTensor,
    /// The backbone, and each head: DINOv2.
    PerModule,
}

/// Squared gradient norms by clip group. Groups are numbered over all units.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ClipNorms<T = f64> {
    /// Sum of squares of each group.
    pub(super) squares: Vec<T>,
    /// Group of each parameter, by unit.
    groups: Vec<Vec<usize>>,
}

/// Squared norms whose computation is queued.
#[derive(Debug, Clone)]
pub(super) struct QueuedNorms {
    /// Sums of the parts that are on the host.
    squares: Vec<FixedPoint>,
    groups: Vec<Vec<usize>>,
    /// Parts on the device.
    parts: Option<PartialSums>,
}

/// Sums of squares on a device, each of a part of a clip group.
#[derive(Debug, Clone)]
struct PartialSums {
    /// The sums, `[parts]`.
    sums: Tensor<1>,
    /// Group of each.
    groups: Vec<usize>,
}

impl QueuedNorms {
    /// Queues the computation of this rank's share of the norms of `grads`, or of tensors of the
    /// same layout; `modules` has the index of each unit's module.
    pub(super) fn queue(
        rule: ClipRule,
        shards: &[UnitShard],
        grads: &[Tensor<1>],
        modules: &[usize],
    ) -> Self {
        let groups = match rule {
            ClipRule::PerTensor => groups_by_tensor(shards),
            ClipRule::PerModule => groups_by_module(shards, modules),
        };
        let n = groups.iter().flatten().max().map_or(0, |last| last + 1);
        let mut squares = vec![FixedPoint::default(); n];
        if grads.iter().all(is_host) {
            add_on_host(shards, grads, &groups, &mut squares);
            return Self { squares, groups, parts: None };
        }
        let parts = partial_sums(shards, grads, &groups);
        Self { squares, groups, parts }
    }

    /// Returns the sums whose values [`QueuedNorms::read`] needs, if any are on a device.
    pub(super) fn tensor(&self) -> Option<Tensor<1>> {
        Some(self.parts.as_ref()?.sums.clone())
    }

    /// Returns the norms, given the values of [`QueuedNorms::tensor`].
    pub(super) fn read(self, values: &mut impl Iterator<Item = Vec<f32>>) -> ClipNorms<FixedPoint> {
        let Self { mut squares, groups, parts } = self;
        if let Some(parts) = parts {
            let sums = values.next().expect("the caller has read `tensor`");
            for (group, sum) in parts.groups.into_iter().zip(sums) {
                squares[group].add(f64::from(sum));
            }
        }
        ClipNorms { squares, groups }
    }

    /// Lets the device of the sums compute the clip factors, and whether they and `losses`, `[1]`
    /// each, are finite; `None` where it has no kernel for that.
    #[cfg(feature = "cuda")]
    pub(super) fn decide(&self, losses: Vec<Tensor<1>>, clip_norm: f64) -> Option<Decision> {
        let parts = self.parts.as_ref()?;
        let kernels = super::native::kernels(&parts.sums)?;
        let mut sums_of_groups = vec![Vec::new(); self.squares.len()];
        for (index, group) in parts.groups.iter().enumerate() {
            sums_of_groups[*group].push(index);
        }
        let losses = Tensor::cat(losses, 0);
        let factors = kernels.clip_factors(&parts.sums, &sums_of_groups, &losses, clip_norm, CLIP_EPSILON);
        Some(Decision { factors, groups: self.groups.clone() })
    }
}

/// Clip factors on the device, which skips the update where they are not finite.
#[derive(Debug, Clone)]
pub struct Decision {
    #[cfg(feature = "cuda")]
    pub(super) factors: kernels::native::update::ClipFactors,
    /// Group of each parameter, by unit.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(super) groups: Vec<Vec<usize>>,
}

impl Decision {
    /// Returns the tensor whose values tell [`Decision::is_finite`] whether the update was made.
    pub(crate) fn tensor(&self) -> Option<Tensor<1>> {
        #[cfg(feature = "cuda")]
        return Some(self.factors.values());
        #[cfg(not(feature = "cuda"))]
        None
    }

    /// Returns whether the update was made, given the values of [`Decision::tensor`].
    pub(crate) fn is_finite(values: &[f32]) -> bool {
        values.iter().all(|factor| *factor >= 0.0)
    }
}

impl ClipNorms<FixedPoint> {
    /// Returns the norms over all ranks, whose squares are `squares`.
    pub(super) fn with_squares(self, squares: &[f64]) -> ClipNorms {
        ClipNorms { squares: squares.to_vec(), groups: self.groups }
    }
}

/// Returns a group for each parameter; rows of one parameter in several parts of a divided unit are
/// in one group.
fn groups_by_tensor(shards: &[UnitShard]) -> Vec<Vec<usize>> {
    let mut n_groups = 0;
    let mut groups_of_slices: HashMap<String, usize> = HashMap::new();
    let mut groups = Vec::with_capacity(shards.len());
    for shard in shards {
        let mut unit_groups = Vec::with_capacity(shard.layout.params.len());
        for slot in &shard.layout.params {
            let group = match slot.spec.slice {
                Some(_) => *groups_of_slices.entry(shard.layout.full_name(slot)).or_insert(n_groups),
                None => n_groups,
            };
            n_groups = n_groups.max(group + 1);
            unit_groups.push(group);
        }
        groups.push(unit_groups);
    }
    groups
}

/// Returns, by unit, the clip group of each parameter: the index of its unit's module.
fn groups_by_module(shards: &[UnitShard], modules: &[usize]) -> Vec<Vec<usize>> {
    let units = shards.iter().zip(modules);
    units.map(|(shard, module)| vec![*module; shard.layout.params.len()]).collect()
}

/// Adds the squares of `grads` to those of their groups.
fn add_on_host(shards: &[UnitShard], grads: &[Tensor<1>], groups: &[Vec<usize>], squares: &mut [FixedPoint]) {
    for ((shard, grad), groups) in shards.iter().zip(grads).zip(groups) {
        with_slice(grad, |grad| {
            for segment in shard.segments() {
                let sum = &mut squares[groups[segment.param]];
                blocks(segment.start, segment.end, |range| sum.add(sum_of_squares(&grad[range])));
            }
        });
    }
}

/// Queues the sums on the device that holds `grads`; `None` if there is nothing but padding.
fn partial_sums(shards: &[UnitShard], grads: &[Tensor<1>], groups: &[Vec<usize>]) -> Option<PartialSums> {
    let mut ranges_by_unit = Vec::new();
    let mut group_of_range = Vec::new();
    for (shard, groups) in shards.iter().zip(groups) {
        let segments = shard.segments().map(|segment| (segment.start..segment.end, groups[segment.param]));
        let mut ranges = Vec::new();
        for (range, group) in joined(segments) {
            ranges.push(range);
            group_of_range.push(group);
        }
        ranges_by_unit.push(ranges);
    }
    if group_of_range.is_empty() {
        return None;
    }
    let (sums, range_of_sum) = range_squares(grads, &ranges_by_unit);
    let groups = range_of_sum.into_iter().map(|range| group_of_range[range]).collect();
    Some(PartialSums { sums, groups })
}

/// Returns sums of squares over parts of the ranges of each unit, on the device, and for each sum
/// the index of its range.
fn range_squares(grads: &[Tensor<1>], ranges: &[Vec<Range<usize>>]) -> (Tensor<1>, Vec<usize>) {
    #[cfg(feature = "cuda")]
    if let Some(kernels) = super::native::kernels(&grads[0]) {
        return super::native::squares(&kernels, grads, ranges);
    }
    #[cfg(feature = "cube")]
    if grads.iter().all(super::cube::is_cube) {
        return super::cube::squares(grads, ranges);
    }
    let mut sums = Vec::new();
    for (grad, ranges) in grads.iter().zip(ranges) {
        for range in ranges {
            let part = grad.clone().slice([range.clone()]);
            sums.push((part.clone() * part).sum());
        }
    }
    let indices = (0..sums.len()).collect();
    (Tensor::cat(sums, 0), indices)
}

/// Calls `f` with the parts of `start..end` between multiples of [`ALIGNMENT`], to which the ends
/// of a shard are aligned: the same elements are summed together on any number of ranks.
fn blocks(mut start: usize, end: usize, mut f: impl FnMut(Range<usize>)) {
    while start < end {
        let next = ((start / ALIGNMENT + 1) * ALIGNMENT).min(end);
        f(start..next);
        start = next;
    }
}

impl ClipNorms {
    /// Norm of all gradients together, before clipping.
    pub(super) fn total(&self) -> f64 {
        self.squares.iter().sum::<f64>().sqrt()
    }

    /// Norm of the clip group that a parameter belongs to.
    pub(super) fn norm(&self, unit: usize, param: usize) -> f64 {
        self.squares[self.groups[unit][param]].sqrt()
    }

    /// Factor by which the gradient of a parameter is multiplied.
    pub(super) fn factor(&self, unit: usize, param: usize, clip_norm: f64) -> f32 {
        if clip_norm == 0.0 {
            return 1.0;
        }
        (clip_norm / (self.norm(unit, param) + CLIP_EPSILON)).min(1.0) as f32
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn sum_of_squares(block: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    for chunk in block.chunks(8) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*value) * f64::from(*value);
        }
    }
    lanes.iter().sum()
}

/// Returns the squares of one unit's groups, computed by tensor operations.
#[cfg(test)]
pub(super) fn on_device_for_tests(shards: &[UnitShard], grads: &[Tensor<1>]) -> Vec<f64> {
    let n = shards[0].layout.params.len();
    let parts = partial_sums(shards, grads, &[(0..n).collect()]);
    let values = parts.iter().map(|parts| kernels::device::host::to_host(parts.sums.clone()));
    let values: Vec<Vec<f32>> = values.collect();
    let queued = QueuedNorms { squares: vec![FixedPoint::default(); n], groups: Vec::new(), parts };
    let norms = queued.read(&mut values.into_iter());
    norms.squares.iter().map(|square| FixedPoint::from_limbs(&square.limbs())).collect()
}
