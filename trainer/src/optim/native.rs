//! AdamW by the kernels for NVIDIA GPUs, which take all units of a network at once and have been
//! checked beside the host's loop before they are used.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use burn_tensor::{Device, Tensor};
use kernels::device::host::to_host;
use kernels::native::update::{Betas, Block, ClipFactors, Segment, Unit, UpdateKernels};
use kernels::products;

use super::adamw::{self, AdamW, EPSILON};
use super::follow::{Follower, follow_all};
use super::state::UnitShard;

/// Elements whose squares are added up by one block.
const BLOCK: usize = 8192;

/// Returns the kernels for tensors like `tensor`, after a check of their results at the first use.
pub(super) fn kernels(tensor: &Tensor<1>) -> Option<UpdateKernels> {
    static CHECKED: Mutex<Vec<Device>> = Mutex::new(Vec::new());
    let kernels = UpdateKernels::on_device_of(tensor)?;
    let device = tensor.device();
    // A device is added whole, so that the list stays valid if a holder panics.
    let mut checked = CHECKED.lock().unwrap_or_else(PoisonError::into_inner);
    if checked.contains(&device) || products::is_trusted() {
        return Some(kernels);
    }
    if let Err(fault) = check(&kernels, &device) {
        UpdateKernels::discard(tensor, &fault);
        return None;
    }
    checked.push(device);
    Some(kernels)
}

/// Returns sums of squares of blocks of the ranges of each unit, on the device, and the number of
/// the range that each block is of.
pub(super) fn squares(
    kernels: &UpdateKernels,
    grads: &[Tensor<1>],
    ranges: &[Vec<Range<usize>>],
) -> (Tensor<1>, Vec<usize>) {
    let mut blocks = Vec::new();
    let mut range_of_block = Vec::new();
    let mut number = 0;
    for (tensor, ranges) in ranges.iter().enumerate() {
        for range in ranges {
            for start in range.clone().step_by(BLOCK) {
                blocks.push(Block { tensor, start, end: (start + BLOCK).min(range.end) });
                range_of_block.push(number);
            }
            number += 1;
        }
    }
    (kernels.sum_squares(grads, &blocks), range_of_block)
}

/// Updates every shard and its followers, with the clip factors of the `segments` of each shard, or
/// with those of the device.
pub(super) fn step(
    kernels: &UpdateKernels,
    rule: AdamW,
    shards: &mut [UnitShard],
    segments: Vec<Vec<Segment>>,
    grads: Vec<Tensor<1>>,
    factors: Option<&ClipFactors>,
    followers: Vec<Vec<Follower<'_>>>,
) {
    let mut units = Vec::with_capacity(shards.len());
    for (((shard, mut segments), grad), followers) in shards.iter().zip(segments).zip(grads).zip(&followers) {
        // The padding after the last parameter stays zero.
        if segments.last().map_or(0, |last| last.end) < shard.len() {
            let padding = Segment {
                end: shard.len(),
                shrink: 1.0,
                clip: 1.0,
                group: 0,
                rate: 0.0,
                root: 1.0,
                is_frozen: true,
            };
            segments.push(padding);
        }
        units.push(Unit {
            grad,
            weights: shard.weights.clone(),
            // AdamW::MOMENTS are two.
            exp_avg: shard.moments[0].values.clone(),
            exp_avg_sq: shard.moments[1].values.clone(),
            follower: followers.first().map(|follower| (follower.weights.clone(), follower.decay)),
            segments,
        });
    }
    let moved = kernels.adam_w(units, betas(rule), factors);
    for ((shard, moved), mut followers) in shards.iter_mut().zip(moved).zip(followers) {
        shard.weights = moved.weights;
        shard.moments[0].values = moved.exp_avg;
        shard.moments[1].values = moved.exp_avg_sq;
        if let Some(average) = moved.follower {
            *followers.remove(0).weights = average;
        }
        follow_all(followers, &shard.weights);
    }
}

fn betas(rule: AdamW) -> Betas {
    let [first, second] = rule.betas;
    Betas { first: first as f32, second: second as f32, epsilon: EPSILON }
}

/// Compares sums, clip factors and an update with the host's, of units with and without an average and
/// with frozen segments; and makes an update that must be left out.
fn check(kernels: &UpdateKernels, device: &Device) -> Result<(), String> {
    const CLIP_NORM: f64 = 1.0;
    const CLIP_EPSILON: f64 = 1e-6;
    let rule = AdamW { betas: [0.9, 0.99] };
    // More units than one launch takes.
    let mut lengths = vec![3 * BLOCK + 17];
    lengths.extend((0..40).map(|i| 300 + 7 * i));
    let on_device = |values: &[f32]| Tensor::<1>::from_floats(values, device);
    let mut units = Vec::new();
    let mut expected = Vec::new();
    let mut grads = Vec::new();
    for (number, n) in lengths.iter().copied().enumerate() {
        let grad = values(n, 5 * number as u64, 0.1);
        let weights = values(n, 5 * number as u64 + 1, 1.0);
        let exp_avg = values(n, 5 * number as u64 + 2, 0.01);
        let exp_avg_sq: Vec<f32> = values(n, 5 * number as u64 + 3, 0.1).iter().map(|x| x * x).collect();
        let average = values(n, 5 * number as u64 + 4, 1.0);
        let norm = grad.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt();
        let factor = (CLIP_NORM / (norm + CLIP_EPSILON)).min(1.0) as f32;
        let mut after = [weights.clone(), exp_avg.clone(), exp_avg_sq.clone()];
        let mut segments = Vec::new();
        for (range, is_frozen) in [(0..100, false), (100..n - 50, number % 5 == 1), (n - 50..n, false)] {
            let decay = if range.start == 0 { 0.0 } else { 0.04 };
            let constants = rule.constants(3, 1e-2, decay, factor);
            segments.push(Segment {
                end: range.end,
                shrink: constants.shrink,
                clip: constants.clip,
                group: number,
                rate: constants.rate,
                root: constants.root,
                is_frozen,
            });
            if !is_frozen {
                let [weights, m, v] = &mut after;
                let (weights, m, v) =
                    (&mut weights[range.clone()], &mut m[range.clone()], &mut v[range.clone()]);
                adamw::adam(constants, weights, m, v, &grad[range]);
            }
        }
        let mut averaged = average.clone();
        super::follow::average(&mut averaged, &after[0], 0.996, (1.0 - 0.996f64) as f32);
        units.push(Unit {
            grad: on_device(&grad),
            weights: on_device(&weights),
            exp_avg: on_device(&exp_avg),
            exp_avg_sq: on_device(&exp_avg_sq),
            follower: (number % 3 == 0).then(|| (on_device(&average), 0.996)),
            segments,
        });
        grads.push(on_device(&grad));
        expected.push((after, averaged, factor));
    }
    let ranges: Vec<Vec<Range<usize>>> = lengths.iter().map(|n| std::iter::once(0..*n).collect()).collect();
    let (sums, range_of_block) = squares(kernels, &grads, &ranges);
    let mut groups = vec![Vec::new(); lengths.len()];
    for (block, range) in range_of_block.iter().enumerate() {
        groups[*range].push(block);
    }
    let decide =
        |loss: f32| kernels.clip_factors(&sums, &groups, &on_device(&[loss]), CLIP_NORM, CLIP_EPSILON);
    let factors = to_host(decide(1.5).values());
    let right: Vec<f32> = expected.iter().map(|(_, _, factor)| *factor).chain([1.0]).collect();
    compare("clips by other factors", &factors, &right)?;
    if !to_host(decide(f32::NAN).values()).iter().any(|factor| *factor < 0.0) {
        return Err("take NaN for a finite loss".into());
    }
    for factors in [None, Some(decide(1.5))] {
        let moved = kernels.adam_w(units.clone(), betas(rule), factors.as_ref());
        for (moved, (after, averaged, _)) in moved.into_iter().zip(&expected) {
            compare("move weights elsewhere", &to_host(moved.weights), &after[0])?;
            compare("compute another first moment", &to_host(moved.exp_avg), &after[1])?;
            compare("compute another second moment", &to_host(moved.exp_avg_sq), &after[2])?;
            if let Some(average) = moved.follower {
                compare("average otherwise", &to_host(average), averaged)?;
            }
        }
    }
    let moved = kernels.adam_w(units.clone(), betas(rule), Some(&decide(f32::INFINITY)));
    for (moved, unit) in moved.into_iter().zip(units) {
        let still = to_host(moved.weights) == to_host(unit.weights)
            && to_host(moved.exp_avg) == to_host(unit.exp_avg)
            && to_host(moved.exp_avg_sq) == to_host(unit.exp_avg_sq);
        if !still {
            return Err("make an update that is not finite".into());
        }
    }
    Ok(())
}

/// Compares results, which differ by rounding at most.
fn compare(fault: &str, found: &[f32], right: &[f32]) -> Result<(), String> {
    let is_right = |(found, right): (&f32, &f32)| (found - right).abs() <= 1e-6 + 1e-5 * right.abs();
    match found.len() == right.len() && found.iter().zip(right).all(is_right) {
        true => Ok(()),
        false => Err(fault.into()),
    }
}

/// Returns `n` numbers between `-scale` and `scale`.
fn values(n: usize, seed: u64, scale: f32) -> Vec<f32> {
    let number = |i: usize| {
        // The finalizer of SplitMix64.
        let mut x = (i as u64 ^ (seed + 1) << 32).wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        scale * ((x ^ x >> 31) as f64 / u64::MAX as f64 * 2.0 - 1.0) as f32
    };
    (0..n).map(number).collect()
}
