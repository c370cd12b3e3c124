//! AdamW by the kernels for NVIDIA GPUs, which update all units of a network at once. They are
//! compared with the loop on the host before they are used.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use burn_tensor::{Device, Tensor};
use half::bf16;
use kernels::device::readback::read_back;
use kernels::native::update::{
    AdamWConstants, Block, ClipFactors, FollowingUnit, MovedUnit, MovedWeights, Segment, Unit, UpdateKernels,
};
use kernels::product_kernels;

use super::adamw::{self, AdamW, EPSILON};
use super::follow::{Follower, follow_all};
use super::state::UnitShard;
use super::weights::ShardWeights;

/// Elements whose squares are added up by one block.
const BLOCK: usize = 8192;

/// Returns the kernels for tensors like `tensor`, after a check of their results at the first use.
pub(super) fn kernels(tensor: &Tensor<1>) -> Option<UpdateKernels> {
    static CHECKED: Mutex<Vec<Device>> = Mutex::new(Vec::new());
    let kernels = UpdateKernels::on_device_of(tensor)?;
    let device = tensor.device();
    // A device is added whole, so that the list stays valid if a holder panics.
    let mut checked = CHECKED.lock().unwrap_or_else(PoisonError::into_inner);
    if checked.contains(&device) || product_kernels::are_checks_disabled() {
        return Some(kernels);
    }
    if let Err(fault) = check(&kernels, &device) {
        UpdateKernels::discard(tensor, &fault);
        return None;
    }
    checked.push(device);
    Some(kernels)
}

/// Returns sums of squares of blocks of the ranges of each unit, on the device, and for each block
/// the index of its range.
pub(super) fn squares(
    kernels: &UpdateKernels,
    grads: &[Tensor<1>],
    ranges: &[Vec<Range<usize>>],
) -> (Tensor<1>, Vec<usize>) {
    let mut blocks = Vec::new();
    let mut range_of_block = Vec::new();
    let mut index = 0;
    for (tensor, ranges) in ranges.iter().enumerate() {
        for range in ranges {
            for start in range.clone().step_by(BLOCK) {
                blocks.push(Block { tensor, start, end: (start + BLOCK).min(range.end) });
                range_of_block.push(index);
            }
            index += 1;
        }
    }
    (kernels.sum_squares(grads, &blocks), range_of_block)
}

/// Updates every shard that has moments and its followers, with the clip factors of the `segments`
/// of each shard, or with those of the device.
pub(super) fn step(
    kernels: &UpdateKernels,
    rule: AdamW,
    shards: &mut [UnitShard],
    segments: Vec<Vec<Segment>>,
    grads: Vec<Tensor<1>>,
    factors: Option<&ClipFactors>,
    followers: Vec<Vec<Follower<'_>>>,
) {
    let lengths: Vec<usize> = shards.iter().map(UnitShard::len).collect();
    let mut work = shards.iter_mut().zip(segments).zip(grads).zip(followers);
    let mut first = 0;
    while first < lengths.len() {
        let n_units = UpdateKernels::n_units_of_launch(&lengths[first..]);
        first += n_units;
        let mut units = Vec::with_capacity(n_units);
        let mut moving = Vec::with_capacity(n_units);
        for (((shard, segments), grad), followers) in work.by_ref().take(n_units) {
            if shard.moments.is_empty() {
                continue;
            }
            units.push(Unit {
                grad,
                weights: shard.weights.values().clone(),
                is_rounded: shard.is_rounded,
                // AdamW::MOMENTS are two.
                exp_avg: shard.moments[0].values.clone(),
                exp_avg_sq: shard.moments[1].values.clone(),
                follower: followers.first().map(|follower| FollowingUnit {
                    weights: follower.weights.values().clone(),
                    decay: follower.decay,
                    is_rounded: follower.is_rounded,
                }),
                segments: with_padding(segments, shard.len()),
            });
            moving.push((shard, followers));
        }
        if units.is_empty() {
            continue;
        }
        // The inputs of a launch are freed before the next one allocates memory.
        let moved = kernels.adam_w(units, constants(rule), factors);
        for ((shard, mut followers), moved) in moving.into_iter().zip(moved) {
            shard.weights = ShardWeights::updated(moved.weights.values, moved.weights.in_bf16);
            shard.moments[0].values = moved.exp_avg;
            shard.moments[1].values = moved.exp_avg_sq;
            if let Some(average) = moved.follower {
                let average = ShardWeights::updated(average.values, average.in_bf16);
                *followers.remove(0).weights = average;
            }
            follow_all(followers, &shard.weights);
        }
    }
}

/// Adds a segment for the padding after the last parameter, which stays zero.
fn with_padding(mut segments: Vec<Segment>, len: usize) -> Vec<Segment> {
    if segments.last().map_or(0, |last| last.end) < len {
        segments.push(Segment {
            end: len,
            shrink: 1.0,
            clip: 1.0,
            group: 0,
            rate: 0.0,
            root: 1.0,
            is_frozen: true,
        });
    }
    segments
}

fn constants(rule: AdamW) -> AdamWConstants {
    let [first, second] = rule.betas;
    AdamWConstants { first: first as f32, second: second as f32, epsilon: EPSILON }
}

/// A unit of the check, on the host, before and after an update.
struct CheckedUnit {
    grad: Vec<f32>,
    weights: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
    average: Option<Vec<f32>>,
    /// Whether the weights are rounded, in place of the average.
    is_rounded: bool,
    segments: Vec<Segment>,
    after: HostUnit,
}

/// Weights, moments and average on the host.
#[derive(Debug, Clone, PartialEq)]
struct HostUnit {
    weights: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
    average: Option<Vec<f32>>,
}

/// Decay of an average in the check.
const DECAY: f64 = 0.996;

/// Rule of the check.
const RULE: AdamW = AdamW { betas: [0.9, 0.99] };

impl CheckedUnit {
    /// Creates unit `index` with the gradient `grad`, which is multiplied by `factor`, the clip
    /// factor of `group`. Every third unit has an average, every fifth a frozen segment.
    fn new(index: usize, grad: Vec<f32>, group: usize, factor: f32) -> Self {
        let n = grad.len();
        let seed = 5 * index as u64;
        let weights = values(n, seed + 1, 1.0);
        let exp_avg = values(n, seed + 2, 0.01);
        let exp_avg_sq: Vec<f32> = values(n, seed + 3, 0.1).iter().map(|x| x * x).collect();
        let average = index.is_multiple_of(3).then(|| values(n, seed + 4, 1.0));
        let mut after = HostUnit {
            weights: weights.clone(),
            exp_avg: exp_avg.clone(),
            exp_avg_sq: exp_avg_sq.clone(),
            average: average.clone(),
        };
        let mut segments = Vec::new();
        for (range, is_frozen) in [(0..100, false), (100..n - 50, index % 5 == 1), (n - 50..n, false)] {
            let decay = if range.start == 0 { 0.0 } else { 0.04 };
            let constants = RULE.constants(3, 1e-2, decay, factor);
            segments.push(Segment {
                end: range.end,
                shrink: constants.shrink,
                clip: constants.clip,
                group,
                rate: constants.rate,
                root: constants.root,
                is_frozen,
            });
            if !is_frozen {
                adamw::adam(
                    constants,
                    &mut after.weights[range.clone()],
                    &mut after.exp_avg[range.clone()],
                    &mut after.exp_avg_sq[range.clone()],
                    &grad[range],
                );
            }
        }
        if let Some(average) = &mut after.average {
            super::follow::average(average, &after.weights, DECAY as f32, (1.0 - DECAY) as f32);
        }
        let is_rounded = index.is_multiple_of(2);
        Self { grad, weights, exp_avg, exp_avg_sq, average, is_rounded, segments, after }
    }

    fn on_device(&self, device: &Device) -> Unit {
        let follower = self.average.as_ref().map(|average| FollowingUnit {
            weights: to_device(average, device),
            decay: DECAY,
            is_rounded: !self.is_rounded,
        });
        Unit {
            grad: to_device(&self.grad, device),
            weights: to_device(&self.weights, device),
            is_rounded: self.is_rounded,
            exp_avg: to_device(&self.exp_avg, device),
            exp_avg_sq: to_device(&self.exp_avg_sq, device),
            follower,
            segments: self.segments.clone(),
        }
    }

    fn before(&self) -> HostUnit {
        HostUnit {
            weights: self.weights.clone(),
            exp_avg: self.exp_avg.clone(),
            exp_avg_sq: self.exp_avg_sq.clone(),
            average: self.average.clone(),
        }
    }
}

impl HostUnit {
    fn read(moved: MovedUnit) -> Result<Self, String> {
        Ok(Self {
            weights: read_weights(moved.weights)?,
            exp_avg: read(moved.exp_avg)?,
            exp_avg_sq: read(moved.exp_avg_sq)?,
            average: moved.follower.map(read_weights).transpose()?,
        })
    }
}

fn to_device(values: &[f32], device: &Device) -> Tensor<1> {
    Tensor::from_floats(values, device)
}

fn read(tensor: Tensor<1>) -> Result<Vec<f32>, String> {
    read_back(tensor).map_err(|error| format!("cannot be read: {error}"))
}

/// Reads weights, and compares their copy in bf16 with the host's.
fn read_weights(moved: MovedWeights) -> Result<Vec<f32>, String> {
    let values = read(moved.values)?;
    if let Some(in_bf16) = moved.in_bf16 {
        let data = in_bf16.try_into_data().map_err(|error| format!("cannot be read: {error:?}"))?;
        let rounded = data.try_into_vec::<bf16>().map_err(|error| format!("cannot be read: {error:?}"))?;
        let mut pairs = rounded.iter().zip(&values);
        let are_equal = pairs.all(|(rounded, value)| rounded.to_bits() == bf16::from_f32(*value).to_bits());
        if rounded.len() != values.len() || !are_equal {
            return Err("round weights otherwise".into());
        }
    }
    Ok(values)
}

/// Compares sums, clip factors and an update with those of the host, of units with and without an
/// average and with frozen segments, two of which share a clip group. Checks that a step that is
/// not finite is skipped. The units need two launches.
fn check(kernels: &UpdateKernels, device: &Device) -> Result<(), String> {
    const CLIP_NORM: f64 = 1.0;
    const CLIP_EPSILON: f64 = 1e-6;
    let mut lengths = vec![3 * BLOCK + 17];
    lengths.extend((0..40).map(|i| 300 + 7 * i));
    // The last two units are in one group.
    let n_groups = lengths.len() - 1;
    let mut gradients = Vec::with_capacity(lengths.len());
    let mut squares_of_groups = vec![0.0f64; n_groups];
    for (index, n) in lengths.iter().enumerate() {
        let grad = values(*n, 5 * index as u64, 0.1);
        let squares: f64 = grad.iter().map(|g| f64::from(*g) * f64::from(*g)).sum();
        squares_of_groups[index.min(n_groups - 1)] += squares;
        gradients.push(grad);
    }
    let mut expected_factors = Vec::with_capacity(n_groups + 1);
    for squares in squares_of_groups {
        expected_factors.push((CLIP_NORM / (squares.sqrt() + CLIP_EPSILON)).min(1.0) as f32);
    }
    let mut units = Vec::with_capacity(lengths.len());
    for (index, grad) in gradients.into_iter().enumerate() {
        let group = index.min(n_groups - 1);
        units.push(CheckedUnit::new(index, grad, group, expected_factors[group]));
    }
    // The factor of the losses.
    expected_factors.push(1.0);

    let grads: Vec<Tensor<1>> = units.iter().map(|unit| to_device(&unit.grad, device)).collect();
    let ranges: Vec<Vec<Range<usize>>> = lengths.iter().map(|n| std::iter::once(0..*n).collect()).collect();
    let (sums, range_of_block) = squares(kernels, &grads, &ranges);
    let mut groups = vec![Vec::new(); n_groups];
    for (block, range) in range_of_block.iter().enumerate() {
        groups[(*range).min(n_groups - 1)].push(block);
    }
    let loss = to_device(&[1.5], device);
    let finite = kernels.clip_factors(&sums, &groups, &loss, CLIP_NORM, CLIP_EPSILON);
    compare("clip by other factors", &read(finite.values())?, &expected_factors)?;
    let nan_loss = to_device(&[f32::NAN], device);
    let nan = kernels.clip_factors(&sums, &groups, &nan_loss, CLIP_NORM, CLIP_EPSILON);
    if !read(nan.values())?.iter().any(|factor| *factor < 0.0) {
        return Err("take NaN for a finite loss".into());
    }
    for factors in [None, Some(&finite)] {
        for (moved, unit) in update(kernels, &units, factors, device)?.into_iter().zip(&units) {
            compare("move weights elsewhere", &moved.weights, &unit.after.weights)?;
            compare("compute another first moment", &moved.exp_avg, &unit.after.exp_avg)?;
            compare("compute another second moment", &moved.exp_avg_sq, &unit.after.exp_avg_sq)?;
            match (&moved.average, &unit.after.average) {
                (Some(average), Some(expected)) => compare("average otherwise", average, expected)?,
                (None, None) => {}
                _ => return Err("lose an average".into()),
            }
        }
    }
    let infinite_loss = to_device(&[f32::INFINITY], device);
    let infinite = kernels.clip_factors(&sums, &groups, &infinite_loss, CLIP_NORM, CLIP_EPSILON);
    let skipped = update(kernels, &units, Some(&infinite), device)?;
    if !skipped.iter().zip(&units).all(|(moved, unit)| *moved == unit.before()) {
        return Err("make an update that is not finite".into());
    }
    Ok(())
}

/// Returns the units after an update, in their order.
fn update(
    kernels: &UpdateKernels,
    units: &[CheckedUnit],
    factors: Option<&ClipFactors>,
    device: &Device,
) -> Result<Vec<HostUnit>, String> {
    let lengths: Vec<usize> = units.iter().map(|unit| unit.weights.len()).collect();
    let mut moved = Vec::with_capacity(units.len());
    while moved.len() < units.len() {
        let remaining = &units[moved.len()..];
        let n_units = UpdateKernels::n_units_of_launch(&lengths[moved.len()..]);
        let launched = remaining[..n_units].iter().map(|unit| unit.on_device(device)).collect();
        for unit in kernels.adam_w(launched, constants(RULE), factors) {
            moved.push(HostUnit::read(unit)?);
        }
    }
    Ok(moved)
}

/// Returns `fault` as an error if `actual` and `expected` differ by more than rounding.
fn compare(fault: &str, actual: &[f32], expected: &[f32]) -> Result<(), String> {
    let mut pairs = actual.iter().zip(expected);
    let are_close = pairs.all(|(actual, expected)| (actual - expected).abs() <= 1e-6 + 1e-5 * expected.abs());
    if actual.len() == expected.len() && are_close { Ok(()) } else { Err(fault.into()) }
}

/// Returns `n` numbers between `-scale` and `scale`.
fn values(n: usize, seed: u64, scale: f32) -> Vec<f32> {
    (0..n)
        .map(|i: usize| {
            // The finalizer of SplitMix64.
            let mut x = (i as u64 ^ (seed + 1) << 32).wrapping_add(0x9e37_79b9_7f4a_7c15);
            x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            scale * ((x ^ x >> 31) as f64 / u64::MAX as f64 * 2.0 - 1.0) as f32
        })
        .collect()
}
