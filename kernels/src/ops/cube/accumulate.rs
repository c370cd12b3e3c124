//! Addition into a part of a buffer.
//!
//! ```text
//! buffer[start + i]   += x[i]                     buffer [n] f32, x [m] of any type
//! buffer[start_j + i] += Σ_b partial[b, j, i]     partial [blocks, parts, D] f32, summed in the
//!                                                 order of blocks
//! ```

use std::ops::Range;

use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{elem, one_unit_each};
use crate::ops::places::{Claimed, GradientPlace};

/// Adds the elements of `x`, of any shape, to the elements `range` of `buffer`, in place.
pub(super) fn add_into(buffer: &CubeTensor, range: Range<usize>, x: &CubeTensor) {
    let x = into_contiguous(x.clone());
    let dtype = elem(&x);
    let client = &buffer.client;
    let (count, dim) = one_unit_each(client, range.len());
    add_kernel::launch(
        client,
        count,
        dim,
        x.into_buffer_arg(),
        buffer.clone().into_buffer_arg(),
        range.start,
        range.len(),
        dtype,
    );
}

/// Adds `grad`, of any shape with the same number of elements, to its place.
pub(in crate::ops) fn add_to_place(place: &GradientPlace, grad: &CubeTensor) {
    let Claimed { buffer, range, .. } = place.claim();
    add_into(&buffer, range, grad);
}

/// Sums `partial` of `[blocks, parts, D]` over its blocks, and adds each part to its place. All
/// places are in the same buffer.
pub(super) fn add_block_sums(partial: &CubeTensor, places: &[&GradientPlace]) {
    let n_blocks = partial.meta.shape()[0];
    let d = partial.meta.shape()[2];
    let mut starts = SequenceArg::<usize>::new();
    let claimed: Vec<Claimed> = places.iter().map(|place| place.claim()).collect();
    for place in &claimed {
        starts.push(place.range.start);
    }
    let client = &partial.client;
    let (count, dim) = one_unit_each(client, places.len() * d);
    add_sums::launch(
        client,
        count,
        dim,
        partial.clone().into_buffer_arg(),
        claimed[0].buffer.clone().into_buffer_arg(),
        starts,
        n_blocks,
        d,
    );
}

#[cube(launch)]
fn add_sums(partial: &[f32], buffer: &mut [f32], starts: Sequence<usize>, n_blocks: usize, d: usize) {
    let n_parts = comptime!(starts.len());
    let part = ABSOLUTE_POS / d;
    let column = ABSOLUTE_POS % d;
    if part < n_parts {
        let mut total = 0.0f32;
        for block in 0..n_blocks {
            total += partial[block * n_parts * d + ABSOLUTE_POS];
        }
        let mut start = 0usize;
        #[unroll]
        for i in 0..n_parts {
            if part == i {
                start = starts[i];
            }
        }
        buffer[start + column] += total;
    }
}

#[cube(launch)]
fn add_kernel<F: Float>(x: &[F], buffer: &mut [f32], start: usize, n: usize, #[define(F)] _dtype: ElemType) {
    if ABSOLUTE_POS < n {
        buffer[start + ABSOLUTE_POS] += f32::cast_from(x[ABSOLUTE_POS]);
    }
}
