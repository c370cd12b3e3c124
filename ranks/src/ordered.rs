//! Sums over the micro-batches of a batch in an order that does not depend on their distribution
//! over ranks. The values of one micro-batch are a part of the sum.
//!
//! ```text
//! sum of N parts = sum of the parts of even number + sum of the parts of odd number     N even
//!                = part 0 + part 1 + … in sequence                                       N odd
//! ```
//!
//! Position `p` of a global batch belongs to micro-batch `p mod N`, and data rank `r` of `W` holds
//! micro-batches `r, r + W, …`. With N a power of two, the sum of a rank's own parts is therefore
//! one branch of this tree, and the sum over ranks is the tree above the branches: 1, 2, 4 … N
//! ranks give the same bits.
//!
//! This holds for everything that spans a batch: gradients, Sinkhorn's sums, centers. A
//! reduce-scatter in this order is an all-to-all followed by a local sum: the same traffic as a
//! ring, with sums in f32 even if bf16 is sent. Between nodes, however, it moves up to as many
//! times the bytes of a ring as a node has ranks, unless the ranks of a node are a shard group. On
//! a device, sums are additions of tensors in the same tree, with the same bits.

use burn_tensor::{DType, Tensor, TensorData};
use half::bf16;
use kernels::device::host::{is_host, with_bytes};
use kernels::ops::Number;

use crate::engine::Engine;
use crate::error::EngineError;

/// Elements that are summed together: few enough for the level 1 cache.
const BLOCK: usize = 1024;

/// Folds `part(0) … part(n - 1)` in this module's order, with at most log₂ n results at a time. `n`
/// is at least 1.
pub fn fold<T>(n: usize, part: &mut impl FnMut(usize) -> T, add: &impl Fn(T, T) -> T) -> T {
    branch(0, 1, n, part, add)
}

/// Folds the `n` parts `first, first + stride, …`.
fn branch<T>(
    first: usize,
    stride: usize,
    n: usize,
    part: &mut impl FnMut(usize) -> T,
    add: &impl Fn(T, T) -> T,
) -> T {
    if n > 1 && n.is_multiple_of(2) {
        let even = branch(first, 2 * stride, n / 2, part, add);
        let odd = branch(first + stride, 2 * stride, n / 2, part, add);
        return add(even, odd);
    }
    let start = part(first);
    (1..n).fold(start, |sum, i| {
        let next = part(first + i * stride);
        add(sum, next)
    })
}

/// Returns the number of partial sums that [`fold`] holds while the next of `n` parts is computed:
/// one for each halving, and one for the sequence.
pub fn n_partial_sums(n: usize) -> usize {
    let halvings = n.max(1).trailing_zeros();
    halvings as usize + usize::from(n >> halvings > 1)
}

/// Writes the sum of `n` parts of `out.len()` elements to `out`; `parts(i)` returns part `i`.
fn sum_into<'a, T: Number>(n: usize, parts: &(impl Fn(usize) -> &'a [T] + Sync), out: &mut [f32]) {
    for (index, out) in out.chunks_mut(BLOCK).enumerate() {
        let range = index * BLOCK..index * BLOCK + out.len();
        let sum = fold(n, &mut |i| to_block(&parts(i)[range.clone()]), &add_blocks);
        out.copy_from_slice(&sum[..out.len()]);
    }
}

/// Converts at most [`BLOCK`] values to f32, followed by zeros.
#[inline]
fn to_block<T: Number>(values: &[T]) -> [f32; BLOCK] {
    let mut block = [0.0f32; BLOCK];
    block.iter_mut().zip(values).for_each(|(sum, value)| *sum = value.wide());
    block
}

#[inline]
fn add_blocks(mut a: [f32; BLOCK], b: [f32; BLOCK]) -> [f32; BLOCK] {
    a.iter_mut().zip(&b).for_each(|(a, b)| *a += b);
    a
}

/// Returns the sum of the parts that ranks have sent, `received` of `[W·n]` in f32 or bf16: `[n]`
/// in f32. Part `i` of the order is that of rank `order[i]`.
pub fn sum_of_parts(received: Tensor<1>, order: &[usize]) -> Tensor<1> {
    let [len] = received.dims();
    let n = len / order.len();
    if is_host(&received) {
        let sum = with_bytes(&received, |bytes| match received.dtype() {
            DType::BF16 => sum_of_slices::<bf16>(bytemuck::cast_slice(bytes), order),
            _ => sum_of_slices::<f32>(bytemuck::cast_slice(bytes), order),
        });
        return Tensor::from_data(TensorData::new(sum, [n]), &received.device());
    }
    sum_of_tensors(&received, order)
}

/// Computes [`sum_of_parts`] with operations of the device.
fn sum_of_tensors(received: &Tensor<1>, order: &[usize]) -> Tensor<1> {
    let [len] = received.dims();
    let n = len / order.len();
    fold(order.len(), &mut |i| received.clone().narrow(0, order[i] * n, n).cast(DType::F32), &|a, b| a + b)
}

/// Returns the sum `[n]` of the parts in `parts`, `[W·n]`; part `i` of the order is that of rank
/// `order[i]`.
pub(crate) fn sum_of_slices<T: Number>(parts: &[T], order: &[usize]) -> Vec<f32> {
    let n = parts.len() / order.len();
    let mut sum = vec![0.0; n];
    sum_into(order.len(), &|i| &parts[order[i] * n..(order[i] + 1) * n], &mut sum);
    sum
}

/// Returns the sum over ranks of `values` of `[n]`, on all ranks. Part `i` of the order is that of
/// rank `order[i]`. Moves as many bytes as a ring.
///
/// # Errors
/// [`EngineError`].
pub fn all_sum(engine: &mut dyn Engine, values: &[f32], order: &[usize]) -> Result<Vec<f32>, EngineError> {
    let mut full = values.to_vec();
    full.resize(values.len().next_multiple_of(engine.world_size()), 0.0);
    let mut received = vec![0.0; full.len()];
    engine.all_to_all(bytemuck::cast_slice(&full), bytemuck::cast_slice_mut(&mut received))?;
    let mine = sum_of_slices(&received, order);
    engine.all_gather(bytemuck::cast_slice(&mine), bytemuck::cast_slice_mut(&mut full))?;
    full.truncate(values.len());
    Ok(full)
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use burn_tensor::Device;
    use proptest::prelude::*;

    use super::*;
    use kernels::device::host::to_host;

    fn part(seed: u64, i: usize) -> f32 {
        ((seed as usize * 31 + i * 7919) as f32).sin() * 10f32.powi(i as i32 % 7)
    }

    fn add(a: f32, b: f32) -> f32 {
        a + b
    }

    proptest! {
        /// Sums over each rank's own parts, and then over ranks, form the same tree.
        #[test]
        fn any_number_of_ranks_gives_the_same_bits(log_parts in 0u32..6, seed in 0u64..1000) {
            let n = 1usize << log_parts;
            let expected = fold(n, &mut |i| part(seed, i), &add);
            for log_ranks in 0..=log_parts {
                let world_size = 1usize << log_ranks;
                let mut rank_sums = Vec::new();
                for rank in 0..world_size {
                    rank_sums.push(fold(n / world_size, &mut |i| part(seed, i * world_size + rank), &add));
                }
                let sum = fold(world_size, &mut |rank| rank_sums[rank], &add);
                prop_assert_eq!(sum.to_bits(), expected.to_bits());
            }
        }

        #[test]
        fn every_part_is_visited_once(n in 1usize..100) {
            let mut seen = Vec::new();
            fold(n, &mut |part| seen.push(part), &|(), ()| ());
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..n).collect::<Vec<_>>());
        }
    }

    #[test]
    fn partial_sums_are_the_parts_that_are_alive_while_parts_are_summed() {
        for n in [1, 2, 3, 4, 6, 7, 8, 12, 64] {
            let alive = Rc::new(());
            let mut most = 0;
            let sum = fold(
                n,
                &mut |_| {
                    // `alive` itself is not a part.
                    most = most.max(Rc::strong_count(&alive) - 1);
                    Rc::clone(&alive)
                },
                &|a, _| a,
            );
            drop(sum);
            assert_eq!(n_partial_sums(n), most, "{n}");
        }
    }

    /// The device's operations and the loop over slices give the same bits, in any order.
    #[test]
    fn sums_of_tensors_equal_sums_of_slices() {
        for world_size in 1..9 {
            let parts: Vec<f32> =
                (0..world_size * 37).map(|i| (i as f32).sin() * 10f32.powi(i % 5)).collect();
            let parts = Tensor::<1>::from_floats(parts.as_slice(), &Device::flex());
            let order: Vec<usize> = (0..world_size as usize).map(|i| i * 5 % world_size as usize).collect();
            for dtype in [DType::F32, DType::BF16] {
                let sent = parts.clone().cast(dtype);
                let slices = sum_of_slices(&to_host(sent.clone().cast(DType::F32)), &order);
                assert_eq!(to_host(sum_of_tensors(&sent, &order)), slices, "{world_size} ranks, {dtype:?}");
            }
        }
    }

    #[test]
    fn sums_over_blocks_equal_sums_of_elements() {
        let parts: Vec<Vec<f32>> =
            (0..6).map(|p| (0..2500).map(|i| ((p * 2500 + i) as f32).sin()).collect()).collect();
        let mut out = vec![0.0; 2500];
        sum_into(6, &|i| parts[i].as_slice(), &mut out);
        for (i, sum) in out.iter().enumerate() {
            assert_eq!(*sum, fold(6, &mut |p| parts[p][i], &|a, b| a + b));
        }
    }
}
