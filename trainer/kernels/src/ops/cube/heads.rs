//! Conversion between rows of tokens, `[B, N, P·H·D_h]`, and heads, `[B, H, M, D_h]`: parts are queries, keys, values.
//!
//! A head has M ≥ N tokens, the last of them zero: matrix products want M to be a multiple of eight, which
//! 197 is not.

use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{Rows, elem, empty, one_unit_each, vector_size};

/// Sizes of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Sizes {
    pub(super) n_images: usize,
    pub(super) n_tokens: usize,
    pub(super) n_heads: usize,
    pub(super) d_head: usize,
}

impl Sizes {
    /// Returns M, the number of tokens of a head including the zero padding.
    pub(super) fn padded(&self) -> usize {
        self.n_tokens.next_multiple_of(8)
    }

    /// Returns the width of a part.
    pub(super) fn d(&self) -> usize {
        self.n_heads * self.d_head
    }
}

/// Sizes of the copy between tokens and heads, in vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Grid {
    n_tokens: usize,
    padded: usize,
    n_heads: usize,
    /// Vectors of one token in a head.
    n_vectors: usize,
}

impl Grid {
    fn of(sizes: Sizes, vector_size: usize) -> Self {
        Self {
            n_tokens: sizes.n_tokens,
            padded: sizes.padded(),
            n_heads: sizes.n_heads,
            n_vectors: sizes.d_head / vector_size,
        }
    }
}

/// Returns the heads of part `part`, `[B, H, M, D_h]`, of `tokens` of `[B, N, P·H·D_h]`.
pub(super) fn split(tokens: &Rows, part: usize, sizes: Sizes) -> CubeTensor {
    let shape = [sizes.n_images, sizes.n_heads, sizes.padded(), sizes.d_head];
    let heads = Rows::of(&empty(&tokens.tensor, shape, tokens.tensor.dtype));
    let n = vector_size(&[&heads, tokens]);
    let client = &tokens.tensor.client;
    let (count, dim) = one_unit_each(client, heads.n_rows * heads.d / n);
    split_heads::launch(
        client,
        count,
        dim,
        n,
        tokens.arg(),
        heads.arg(),
        tokens.stride / n,
        part * sizes.d() / n,
        heads.n_rows * heads.d / n,
        Grid::of(sizes, n),
        elem(&tokens.tensor),
    );
    heads.tensor
}

/// Writes `heads` of `[B, H, M, D_h]` to part `part` of `tokens` of `[B, N, P·H·D_h]`.
pub(super) fn merge(heads: &CubeTensor, tokens: &Rows, part: usize, sizes: Sizes) {
    let heads = Rows::of(heads);
    let n = vector_size(&[&heads, tokens]);
    let client = &tokens.tensor.client;
    let n_units = tokens.n_rows * sizes.d() / n;
    let (count, dim) = one_unit_each(client, n_units);
    merge_heads::launch(
        client,
        count,
        dim,
        n,
        heads.arg(),
        tokens.arg(),
        heads.stride / n,
        tokens.stride / n,
        part * sizes.d() / n,
        n_units,
        Grid::of(sizes, n),
        elem(&tokens.tensor),
    );
}

#[cube(launch)]
fn split_heads<F: Float, N: Size>(
    tokens: &[Vector<F, N>],
    heads: &mut [Vector<F, N>],
    stride: usize,
    offset: usize,
    n_units: usize,
    #[comptime] grid: Grid,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n_units {
        let column = ABSOLUTE_POS % grid.n_vectors;
        let token = (ABSOLUTE_POS / grid.n_vectors) % grid.padded;
        let of_head = ABSOLUTE_POS / comptime!(grid.n_vectors * grid.padded);
        let (head, image) = (of_head % grid.n_heads, of_head / grid.n_heads);
        if token < grid.n_tokens {
            let from = (image * grid.n_tokens + token) * stride + offset + head * grid.n_vectors + column;
            heads[ABSOLUTE_POS] = tokens[from];
        } else {
            heads[ABSOLUTE_POS] = Vector::new(F::from_int(0));
        }
    }
}

#[cube(launch)]
fn merge_heads<F: Float, N: Size>(
    heads: &[Vector<F, N>],
    tokens: &mut [Vector<F, N>],
    heads_stride: usize,
    stride: usize,
    offset: usize,
    n_units: usize,
    #[comptime] grid: Grid,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n_units {
        let column = ABSOLUTE_POS % grid.n_vectors;
        let head = (ABSOLUTE_POS / grid.n_vectors) % grid.n_heads;
        let row = ABSOLUTE_POS / comptime!(grid.n_vectors * grid.n_heads);
        let (token, image) = (row % grid.n_tokens, row / grid.n_tokens);
        let from = ((image * grid.n_heads + head) * grid.padded + token) * heads_stride + column;
        tokens[row * stride + offset + head * grid.n_vectors + column] = heads[from];
    }
}
