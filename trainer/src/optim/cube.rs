//! Update and norms on a device, each in one pass over a shard. [`super::adamw::on_tensors`]
//! computes the same update with two dozen operations of Burn, one pass each.
//!
//! ```text
//! θ, m, v, θ_F, g  [n] f32      ends[s] one past segment s
//!                               shrink[s], clip[s], rate[s], root[s]: factors of segment s
//! m ← β₁ m + (1 - β₁) c g       v ← β₂ v + (1 - β₂) c² g²       c = clip[s]
//! θ ← shrink[s] · θ - rate[s] · m / (root[s] · √v + ε)      θ_F ← d θ_F + (1 - d) θ
//! ```
//!
//! Results go to new memory: CubeCL orders threads by when memory was allocated, so threads that
//! send shards or write checkpoints would not wait for results that are written in place.

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Tensor, TensorData};
use cubecl::prelude::*;
use kernels::ops::cube::{cube_count, empty, one_unit_each};

use super::adamw::{Constants, EPSILON, Update};
use super::follow::{Follower, follow_all};
use super::state::UnitShard;

/// Elements whose squares are added up by one cube.
const BLOCK: usize = 8192;

/// Units of a cube that sums squares.
const UNITS: usize = 128;

/// Returns whether the kernels here support `tensor`.
pub(super) fn is_cube(tensor: &Tensor<1>) -> bool {
    tensor.clone().try_into_primitive::<CubeBackend>().is_ok()
}

/// Applies AdamW to `shard`, given this rank's shard of the mean gradient, and then updates its
/// followers, the first of them in the same pass.
pub(super) fn update(
    shard: &mut UnitShard,
    grad: Tensor<1>,
    mut update: Update,
    mut followers: Vec<Follower<'_>>,
) {
    // AdamW::MOMENTS are two.
    let [m, v] = shard.moments.as_slice() else { return };
    // A unit with parameters has a segment; all have the same decay rates.
    let Some(&(_, constants)) = update.first() else { return };
    let Constants { beta1, beta2, .. } = constants;
    let n = shard.len();
    let device = grad.device();
    let end = update.last().map_or(0, |(range, _)| range.end);
    // The padding after the last parameter stays zero.
    update.push((end..n, Constants { shrink: 1.0, clip: 1.0, ..constants }));
    let ends: Vec<i32> = update.iter().map(|(range, _)| range.end as i32).collect();
    let factors: Vec<f32> = update.iter().flat_map(|(_, c)| [c.shrink, c.clip, c.rate, c.root]).collect();
    let ends = Tensor::<1, burn_tensor::Int>::from_data(TensorData::from(&ends[..]), (&device, DType::I32));
    let factors = Tensor::<1>::from_data(TensorData::from(&factors[..]), &device);

    // Without a follower the kernel averages the weights with themselves.
    let (followed, decay): (&Tensor<1>, f64) = match followers.first() {
        Some(follower) => (follower.weights.values(), follower.decay),
        None => (shard.weights.values(), 0.0),
    };
    let before: [&Tensor<1>; 4] = [shard.weights.values(), &m.values, &v.values, followed];
    let before = before.map(|tensor| primitive(tensor.clone()));
    let client = before[0].client.clone();
    let after = [(); 4].map(|()| empty(&before[0], [n], DType::F32));
    let (count, dim) = one_unit_each(&client, n);
    let [theta, m, v, followed] = before.map(CubeTensor::into_buffer_arg);
    let [to_theta, to_m, to_v, to_followed] = after.clone().map(CubeTensor::into_buffer_arg);
    adam_w::launch(
        &client,
        count,
        dim,
        primitive(grad).into_buffer_arg(),
        int_primitive(ends).into_buffer_arg(),
        primitive(factors).into_buffer_arg(),
        theta,
        m,
        v,
        followed,
        to_theta,
        to_m,
        to_v,
        to_followed,
        n,
        beta1,
        beta2,
        decay as f32,
        (1.0 - decay) as f32,
    );
    let [weights, m, v, followed] = after.map(Tensor::from_primitive::<CubeBackend>);
    shard.weights = weights.into();
    shard.moments[0].values = m;
    shard.moments[1].values = v;
    if !followers.is_empty() {
        *followers.remove(0).weights = followed.into();
    }
    follow_all(followers, &shard.weights);
}

/// Returns sums of squares of blocks of the ranges of each unit, on the device, and for each block
/// the index of its range.
pub(super) fn squares(
    grads: &[Tensor<1>],
    ranges: &[Vec<std::ops::Range<usize>>],
) -> (Tensor<1>, Vec<usize>) {
    // Bounds of each block, by unit.
    let mut bounds: Vec<Vec<i32>> = Vec::new();
    let mut range_of_block = Vec::new();
    let mut index = 0;
    for ranges in ranges {
        let mut unit_bounds = Vec::new();
        for range in ranges {
            for start in range.clone().step_by(BLOCK) {
                unit_bounds.extend([start as i32, (start + BLOCK).min(range.end) as i32]);
                range_of_block.push(index);
            }
            index += 1;
        }
        bounds.push(unit_bounds);
    }
    let device = grads[0].device();
    let sums = empty(&primitive(grads[0].clone()), [range_of_block.len()], DType::F32);
    let client = sums.client.clone();
    // One transfer for the bounds of all units, one buffer for their sums.
    let all_bounds = TensorData::from(&bounds.concat()[..]);
    let all_bounds = Tensor::<1, burn_tensor::Int>::from_data(all_bounds, (&device, DType::I32));
    let all_bounds = int_primitive(all_bounds);
    let mut first = 0;
    for (grad, bounds) in grads.iter().zip(&bounds) {
        let n_blocks = bounds.len() / 2;
        if n_blocks == 0 {
            continue;
        }
        sum_squares::launch(
            &client,
            cube_count(&client, n_blocks),
            CubeDim::new_1d(UNITS as u32),
            primitive(grad.clone()).into_buffer_arg(),
            all_bounds.clone().into_buffer_arg(),
            sums.clone().into_buffer_arg(),
            first,
            n_blocks,
        );
        first += n_blocks;
    }
    (Tensor::from_primitive::<CubeBackend>(sums), range_of_block)
}

fn primitive(tensor: Tensor<1>) -> CubeTensor {
    tensor.try_into_primitive::<CubeBackend>().expect("callers ask is_cube before")
}

fn int_primitive(tensor: Tensor<1, burn_tensor::Int>) -> CubeTensor {
    tensor.try_into_primitive::<CubeBackend>().expect("it was made on the device of a tensor that is_cube")
}

#[cube(launch)]
#[allow(clippy::too_many_arguments)]
fn adam_w(
    grad: &[f32],
    ends: &[i32],
    factors: &[f32],
    weights: &[f32],
    exp_avg: &[f32],
    exp_avg_sq: &[f32],
    follower: &[f32],
    to_weights: &mut [f32],
    to_exp_avg: &mut [f32],
    to_exp_avg_sq: &mut [f32],
    to_follower: &mut [f32],
    n: usize,
    beta1: f32,
    beta2: f32,
    decay: f32,
    rest: f32,
) {
    let i = ABSOLUTE_POS;
    if i < n {
        let mut segment = 0usize;
        while ends[segment] <= i as i32 {
            segment += 1;
        }
        let g = grad[i] * factors[4 * segment + 1];
        let m = beta1 * exp_avg[i] + (1.0f32 - beta1) * g;
        let v = beta2 * exp_avg_sq[i] + (1.0f32 - beta2) * g * g;
        let theta = weights[i] * factors[4 * segment]
            - factors[4 * segment + 2] * m / (v.sqrt() * factors[4 * segment + 3] + EPSILON);
        to_exp_avg[i] = m;
        to_exp_avg_sq[i] = v;
        to_weights[i] = theta;
        to_follower[i] = decay * follower[i] + rest * theta;
    }
}

/// Sums the squares of one of `n` blocks per cube, always in the same order. The first block of the
/// unit is block `first` of all.
#[cube(launch)]
fn sum_squares(grad: &[f32], bounds: &[i32], sums: &mut [f32], first: usize, n: usize) {
    if CUBE_POS >= n {
        terminate!();
    }
    let block = first + CUBE_POS;
    let mut shared = Shared::<[f32]>::new_slice(UNITS);
    let mut total = 0.0f32;
    for i in
        range_stepped(bounds[2 * block] as usize + UNIT_POS as usize, bounds[2 * block + 1] as usize, UNITS)
    {
        total += grad[i] * grad[i];
    }
    shared[UNIT_POS as usize] = total;
    sync_cube();
    if UNIT_POS == 0 {
        let mut sum = 0.0f32;
        for unit in 0..UNITS {
            sum += shared[unit];
        }
        sums[block] = sum;
    }
}
