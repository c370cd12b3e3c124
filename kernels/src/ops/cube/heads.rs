//! Conversion between rows of tokens, `[B, N, P·H·D_h]`, and heads, `[B, H, M, D_h]`. The P parts
//! are queries, keys and values.
//!
//! A head has M ≥ N tokens, padded with zeros: matrix products require M to be a multiple of eight,
//! which 197 is not.

use burn_backend::Slice;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{Rows, elem, empty, one_unit_each, vector_size};

/// Sizes of the tokens of a batch and of their heads.
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
    /// Number of vectors of one token in a head.
    n_vectors: usize,
}

impl Grid {
    fn new(sizes: Sizes, vector_size: usize) -> Self {
        Self {
            n_tokens: sizes.n_tokens,
            padded: sizes.padded(),
            n_heads: sizes.n_heads,
            n_vectors: sizes.d_head / vector_size,
        }
    }
}

/// Returns the heads, `[P, B, H, M, D_h]`, of `tokens` of `[B, N, P·H·D_h]`.
pub(super) fn split(tokens: &Rows, n_parts: usize, sizes: Sizes) -> CubeTensor {
    let shape = [n_parts, sizes.n_images, sizes.n_heads, sizes.padded(), sizes.d_head];
    let heads = Rows::new(&empty(&tokens.tensor, shape, tokens.tensor.dtype));
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
        heads.n_rows * heads.d / n,
        sizes.n_images,
        Grid::new(sizes, n),
        elem(&tokens.tensor),
    );
    heads.tensor
}

/// Returns part `index`, `[B, H, M, D_h]`, of `heads` of `[P, B, H, M, D_h]`.
pub(super) fn head_part(heads: &CubeTensor, index: usize) -> CubeTensor {
    let shape: Vec<usize> = heads.meta.shape().iter().copied().collect();
    let mut ranges: Vec<Slice> = shape.iter().map(|length| (0..*length).into()).collect();
    ranges[0] = (index..index + 1).into();
    let part = CubeBackend::float_slice(heads.clone(), &ranges);
    CubeBackend::float_reshape(part, shape[1..].to_vec().into())
}

/// Returns the tokens, `[B, N, H·D_h]`, of `heads` of `[B, H, M, D_h]`.
pub(super) fn merge(heads: &CubeTensor, sizes: Sizes) -> CubeTensor {
    merge_parts(&[heads, heads, heads], 1, sizes)
}

/// Returns the tokens, `[B, N, 3·H·D_h]`, of queries, keys and values of `[B, H, M, D_h]`.
pub(super) fn merge_three(heads: &[CubeTensor; 3], sizes: Sizes) -> CubeTensor {
    merge_parts(&[&heads[0], &heads[1], &heads[2]], 3, sizes)
}

/// Returns the tokens of the first `n_parts` of three parts.
fn merge_parts(parts: &[&CubeTensor; 3], n_parts: usize, sizes: Sizes) -> CubeTensor {
    let parts = parts.map(Rows::new);
    let shape = [sizes.n_images, sizes.n_tokens, n_parts * sizes.d()];
    let tokens = Rows::new(&empty(&parts[0].tensor, shape, parts[0].tensor.dtype));
    let n = vector_size(&[&parts[0], &parts[1], &parts[2], &tokens]);
    let client = &tokens.tensor.client;
    let n_units = tokens.n_rows * tokens.d / n;
    let (count, dim) = one_unit_each(client, n_units);
    merge_heads::launch(
        client,
        count,
        dim,
        n,
        parts[0].arg(),
        parts[1].arg(),
        parts[2].arg(),
        tokens.arg(),
        // Products have the same row stride in all parts.
        parts[0].stride / n,
        tokens.stride / n,
        n_units,
        n_parts,
        Grid::new(sizes, n),
        elem(&tokens.tensor),
    );
    tokens.tensor
}

#[cube(launch)]
fn split_heads<F: Float, N: Size>(
    tokens: &[Vector<F, N>],
    heads: &mut [Vector<F, N>],
    stride: usize,
    n_units: usize,
    n_images: usize,
    #[comptime] grid: Grid,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n_units {
        let column = ABSOLUTE_POS % grid.n_vectors;
        let token = (ABSOLUTE_POS / grid.n_vectors) % grid.padded;
        let head_index = ABSOLUTE_POS / comptime!(grid.n_vectors * grid.padded);
        let head = head_index % grid.n_heads;
        let image_index = head_index / grid.n_heads;
        let image = image_index % n_images;
        let part = image_index / n_images;
        if token < grid.n_tokens {
            let first = (part * grid.n_heads + head) * grid.n_vectors + column;
            heads[ABSOLUTE_POS] = tokens[(image * grid.n_tokens + token) * stride + first];
        } else {
            heads[ABSOLUTE_POS] = Vector::new(F::from_int(0));
        }
    }
}

#[cube(launch)]
fn merge_heads<F: Float, N: Size>(
    first: &[Vector<F, N>],
    second: &[Vector<F, N>],
    third: &[Vector<F, N>],
    tokens: &mut [Vector<F, N>],
    heads_stride: usize,
    stride: usize,
    n_units: usize,
    #[comptime] n_parts: usize,
    #[comptime] grid: Grid,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n_units {
        let width = comptime!(n_parts * grid.n_heads * grid.n_vectors);
        let row = ABSOLUTE_POS / width;
        let position = ABSOLUTE_POS % width;
        let column = position % grid.n_vectors;
        let head = (position / grid.n_vectors) % grid.n_heads;
        let part = position / comptime!(grid.n_vectors * grid.n_heads);
        let token = row % grid.n_tokens;
        let image = row / grid.n_tokens;
        let heads_index = ((image * grid.n_heads + head) * grid.padded + token) * heads_stride + column;
        let tokens_index = row * stride + position;
        if part == 0 {
            tokens[tokens_index] = first[heads_index];
        } else if part == 1 {
            tokens[tokens_index] = second[heads_index];
        } else {
            tokens[tokens_index] = third[heads_index];
        }
    }
}
