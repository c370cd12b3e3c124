//! Rotary position embedding of queries and keys (Su et al. 2021; on two axes as in DINOv3, Siméoni
//! et al. 2025).
//!
//! ```text
//! y  = [x₁ cos θ - x₂ sin θ; x₂ cos θ + x₁ sin θ]
//! gx = the rotation of g by -θ
//! ```
//!
//! x = [x₁; x₂] are the channels of a head, in halves of D_h / 2; θ `[N, D_h / 2]`. Queries and
//! keys of the cells are rotated; prefix tokens and values are unchanged. Rotations are computed in
//! f32 for any type.

use std::marker::PhantomData;
use std::sync::Arc;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Tensor, TensorData};
use half::bf16;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{dims, elements_mut, flex_dtype, owned};
#[cfg(feature = "cube")]
use super::cube;
use super::in_f32;
use super::math::over_rows;
use super::number::Number;

/// Cosines and sines of the angles of the cells of a grid, by cell.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotations {
    /// Cosines, row-major `[N, D_h / 2]`.
    pub cos: Vec<f32>,
    /// Sines, row-major `[N, D_h / 2]`.
    pub sin: Vec<f32>,
}

/// Rotates queries and keys of the cells in `qkv` of `[B, P + N, 3·H·D_h]`, whose order is (q, k,
/// v), head, channel.
pub fn rotate(qkv: Tensor<3>, n_heads: usize, rotations: &Arc<Rotations>) -> Tensor<3> {
    let [_, n_tokens, d3] = qkv.dims();
    let n_cells = 2 * n_heads * rotations.cos.len() * 3 / d3;
    let kernel = Rotate { n_heads, n_prefix: n_tokens - n_cells, rotations: Arc::clone(rotations) };
    #[cfg(feature = "cube")]
    if cube::is_cube(&qkv) {
        let [cos, sin] = kernel.tables(&qkv);
        let kernel = cube::Rotate { n_heads, n_prefix: kernel.n_prefix };
        return run(kernel, [qkv.into(), cos.into(), sin.into()]);
    }
    match flex_dtype(&qkv) {
        Some(DType::F32) => run(FlexRotate::<f32>(kernel, PhantomData), [qkv.into()]),
        Some(DType::BF16) => run(FlexRotate::<bf16>(kernel, PhantomData), [qkv.into()]),
        _ => kernel.plain(qkv),
    }
}

/// A rotation of sequences with `n_prefix` prefix tokens.
#[derive(Debug, Clone)]
struct Rotate {
    n_heads: usize,
    n_prefix: usize,
    rotations: Arc<Rotations>,
}

/// Kernel for elements of type `T`.
#[derive(Debug, Clone)]
struct FlexRotate<T>(Rotate, PhantomData<T>);

impl Rotate {
    /// Returns cosines and sines, `[N, D_h / 2]` each, on the device of `qkv` of
    /// `[B, P + N, 3·H·D_h]`.
    fn tables(&self, qkv: &Tensor<3>) -> [Tensor<2>; 2] {
        let [_, n, d3] = qkv.dims();
        let device = qkv.device().inner();
        [&self.rotations.cos, &self.rotations.sin].map(|values| {
            let data = TensorData::new(values.clone(), [n - self.n_prefix, d3 / 3 / self.n_heads / 2]);
            let table = Tensor::<2>::from_data(data, &device);
            if qkv.is_autodiff() { table.autodiff() } else { table }
        })
    }

    fn plain(&self, qkv: Tensor<3>) -> Tensor<3> {
        let [b, n, d3] = qkv.dims();
        let dtype = qkv.dtype();
        let heads = 2 * self.n_heads;
        let half = d3 / 3 / self.n_heads / 2;
        let n_cells = n - self.n_prefix;
        let rotated = in_f32(qkv.clone().slice([0..b, self.n_prefix..n, 0..d3 / 3 * 2]));
        let [cos, sin] =
            self.tables(&qkv).map(|table| table.reshape([1, n_cells, 1, half]).cast(rotated.dtype()));
        let parts = rotated.reshape([b, n_cells, heads, 2 * half]);
        let first = parts.clone().slice([0..b, 0..n_cells, 0..heads, 0..half]);
        let second = parts.slice([0..b, 0..n_cells, 0..heads, half..2 * half]);
        let rotated = Tensor::cat(
            vec![first.clone() * cos.clone() - second.clone() * sin.clone(), second * cos + first * sin],
            3,
        );
        let rotated = rotated.reshape([b, n_cells, d3 / 3 * 2]).cast(dtype);
        qkv.slice_assign([0..b, self.n_prefix..n, 0..d3 / 3 * 2], rotated)
    }

    /// Rotates sequences in place, by the angles times `sign`.
    fn rotate_in_place<T: Number>(&self, mut qkv: FlexTensor, sign: f32) -> FlexTensor {
        let [_, n, d3]: [usize; 3] = dims(&qkv);
        let half = d3 / 3 / self.n_heads / 2;
        over_rows(elements_mut::<T>(&mut qkv), d3, |first, rows| {
            for (i, row) in rows.chunks_exact_mut(d3).enumerate() {
                let Some(cell) = ((first + i) % n).checked_sub(self.n_prefix) else { continue };
                let range = cell * half..(cell + 1) * half;
                let cos = &self.rotations.cos[range.clone()];
                let sin = &self.rotations.sin[range];
                for head in row[..d3 / 3 * 2].chunks_exact_mut(2 * half) {
                    rotate_head(head, cos, sin, sign);
                }
            }
        });
        qkv
    }
}

impl<T: Number> Kernel<Flex, 1> for FlexRotate<T> {
    type Saved = ();

    fn forward(&self, [qkv]: [FlexTensor; 1]) -> (FlexTensor, ()) {
        (self.0.rotate_in_place::<T>(owned(qkv), 1.0), ())
    }

    fn backward(&self, (): (), grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        [Some(self.0.rotate_in_place::<T>(owned(grad), -1.0))]
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn rotate_head<T: Number>(head: &mut [T], cos: &[f32], sin: &[f32], sign: f32) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let x = a.wide();
        let y = b.wide();
        let sin = sin * sign;
        *a = T::nearest(x * cos - y * sin);
        *b = T::nearest(y * cos + x * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cast;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves, types};

    fn rotations(n_cells: usize, half: usize) -> Arc<Rotations> {
        let angles = (0..n_cells * half).map(|i| (i as f32 * 0.37).sin() * 3.0);
        let (sin, cos) = angles.map(f32::sin_cos).unzip();
        Arc::new(Rotations { cos, sin })
    }

    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            for (dtype, tolerance) in types(&device, 1e-6) {
                for [n_prefix, n_cells] in [[0, 4], [3, 9]] {
                    let n_heads = 2;
                    let half = 6;
                    let angles = rotations(n_cells, half);
                    let shape = [2, n_prefix + n_cells, 3 * n_heads * 2 * half];
                    let qkv = leaves(&device, &[shape], 1).remove(0);
                    let kernel = Rotate { n_heads, n_prefix, rotations: Arc::clone(&angles) };
                    let y = rotate(cast(qkv.clone(), dtype), n_heads, &angles);
                    let expected = kernel.plain(cast(qkv.clone(), dtype));
                    assert_eq!(y.dtype(), dtype);
                    assert_close("forward", y.clone().inner(), expected.clone().inner(), tolerance);
                    assert_gradients_close("backward", &qkv, &backward(y), &backward(expected), tolerance);
                }
            }
        }
    }

    #[test]
    fn prefix_and_values_are_unchanged_and_lengths_are_preserved() {
        let n_heads = 1;
        let half = 2;
        let n_prefix = 1;
        let n_cells = 4;
        let qkv = leaves(&burn_tensor::Device::flex(), &[[1, n_prefix + n_cells, 12]], 3).remove(0).inner();
        let y = rotate(qkv.clone(), n_heads, &rotations(n_cells, half));
        let before = qkv.into_data().try_to_vec::<f32>().expect("f32");
        let after = y.into_data().try_to_vec::<f32>().expect("f32");
        assert_eq!(before[..12], after[..12]);
        for (before, after) in before.chunks(12).zip(after.chunks(12)).skip(1) {
            assert_eq!(before[8..], after[8..]);
            for part in [0..4, 4..8] {
                let length = squared_length(&before[part.clone()]);
                assert!((length - squared_length(&after[part])).abs() < 1e-5);
            }
        }
    }

    fn squared_length(values: &[f32]) -> f32 {
        values.iter().map(|value| value * value).sum()
    }
}
