//! Clip norms: the length of gradients, by group.
//!
//! ```text
//! n_G = √ Σ_{g in G} g²        clipped: g · min(1, c / (n_G + ε))      ε = 1e-6, as in DINO
//! ```

use std::collections::HashMap;
use std::ops::Range;

use burn_tensor::Tensor;
use kernels::device::host::{is_host, with_slice};
use kernels::device::readback::read_back;
use multiversion::multiversion;
use networks::layout::{ALIGNMENT, ParamSlot, UnitLayout};
use ranks::EngineError;
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
    /// Every parameter tensor by itself: DINO.
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

impl ClipNorms<FixedPoint> {
    /// Computes this rank's share of the norms of `grads`, or of tensors laid out like them; `modules` has each unit's module.
    ///
    /// # Errors
    /// [`EngineError::Device`] when the device of the gradients has failed.
    pub(super) fn of(
        rule: ClipRule,
        shards: &[UnitShard],
        grads: &[Tensor<1>],
        modules: &[usize],
    ) -> Result<Self, EngineError> {
        let groups: Vec<Vec<usize>> = match rule {
            ClipRule::PerTensor => groups_of_tensors(shards),
            ClipRule::PerModule => shards
                .iter()
                .zip(modules)
                .map(|(shard, module)| vec![*module; shard.layout.params.len()])
                .collect(),
        };
        let n = groups.iter().flatten().max().map_or(0, |last| last + 1);
        let mut squares = vec![FixedPoint::default(); n];
        match grads.iter().all(is_host) {
            true => add_on_host(shards, grads, &groups, &mut squares),
            false => add_on_device(shards, grads, &groups, &mut squares)?,
        }
        Ok(Self { squares, groups })
    }

    /// Returns the norms over all ranks, whose squares are `squares`.
    pub(super) fn agreed(self, squares: &[f64]) -> ClipNorms {
        ClipNorms { squares: squares.to_vec(), groups: self.groups }
    }
}

/// Returns a group for each parameter; rows of one parameter in several parts of a divided unit are in one group.
fn groups_of_tensors(shards: &[UnitShard]) -> Vec<Vec<usize>> {
    let mut n_groups = 0;
    let mut new_group = || {
        n_groups += 1;
        n_groups - 1
    };
    let mut of_slices: HashMap<String, usize> = HashMap::new();
    let mut group = |layout: &UnitLayout, slot: &ParamSlot| match slot.spec.slice {
        Some(_) => *of_slices.entry(layout.full_name(slot)).or_insert_with(&mut new_group),
        None => new_group(),
    };
    let of_shard =
        |shard: &UnitShard| shard.layout.params.iter().map(|slot| group(&shard.layout, slot)).collect();
    shards.iter().map(of_shard).collect()
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

/// Adds the squares on the device that holds `grads`, with one transfer to the host for all of them.
fn add_on_device(
    shards: &[UnitShard],
    grads: &[Tensor<1>],
    groups: &[Vec<usize>],
    squares: &mut [FixedPoint],
) -> Result<(), EngineError> {
    let mut n_ranges = 0;
    let mut ranges_by_unit = Vec::new();
    let mut group_of_range = Vec::new();
    for (shard, groups) in shards.iter().zip(groups) {
        let of_param = shard.segments().map(|segment| (segment.start..segment.end, groups[segment.param]));
        let (ranges, of_range): (Vec<_>, Vec<_>) = joined(of_param).into_iter().unzip();
        n_ranges += ranges.len();
        ranges_by_unit.push(ranges);
        group_of_range.extend(of_range);
    }
    if n_ranges == 0 {
        // Nothing but padding.
        return Ok(());
    }
    let (sums, range_of_sum) = range_squares(grads, &ranges_by_unit);
    for (range, sum) in range_of_sum.into_iter().zip(read_back(sums)?) {
        squares[group_of_range[range]].add(f64::from(sum));
    }
    Ok(())
}

/// Returns sums of squares over parts of the ranges of each unit, on the device, and the number of
/// the range that each is a part of.
fn range_squares(grads: &[Tensor<1>], ranges: &[Vec<Range<usize>>]) -> (Tensor<1>, Vec<usize>) {
    #[cfg(feature = "cube")]
    if grads.iter().all(super::cube::is_cube) {
        return super::cube::squares(grads, ranges);
    }
    let square = |(grad, range): (&Tensor<1>, &Range<usize>)| {
        let part = grad.clone().slice([range.clone()]);
        (part.clone() * part).sum()
    };
    let all =
        grads.iter().zip(ranges).flat_map(|(grad, ranges)| ranges.iter().map(move |range| (grad, range)));
    let sums: Vec<Tensor<1>> = all.map(square).collect();
    let numbers = (0..sums.len()).collect();
    (Tensor::cat(sums, 0), numbers)
}

/// Cuts `start..end` at multiples of [`ALIGNMENT`], to which the ends of a shard are aligned: whatever the
/// number of ranks, the same elements are summed together.
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

    /// Norm of a parameter's gradient, or of its group's.
    pub(super) fn length(&self, unit: usize, param: usize) -> f64 {
        self.squares[self.groups[unit][param]].sqrt()
    }

    /// Factor by which gradients of a parameter are multiplied.
    pub(super) fn factor(&self, unit: usize, param: usize, clip_norm: f64) -> f32 {
        if clip_norm == 0.0 {
            return 1.0;
        }
        (clip_norm / (self.length(unit, param) + CLIP_EPSILON)).min(1.0) as f32
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
    let mut squares = vec![FixedPoint::default(); n];
    add_on_device(shards, grads, &[(0..n).collect()], &mut squares).expect("the device works");
    squares.iter().map(|square| FixedPoint::from_limbs(&square.limbs())).collect()
}
