//! Rotary position embedding of queries and keys (Su et al. 2021; on two axes as in DINOv3, Siméoni
//! et al. 2025).
//!
//! ```text
//! y  = [x₁ cos θ - x₂ sin θ; x₂ cos θ + x₁ sin θ]
//! gx = the rotation of g by -θ
//! ```
//!
//! x = [x₁; x₂] are the channels of a head, in halves of D_h / 2; θ `[N, D_h / 2]`, of which each
//! token has a row. Queries and keys are rotated; values, and tokens without a row, such as a class
//! token, are unchanged. Rotations are computed in f32 for any type.

use std::marker::PhantomData;
use std::sync::Arc;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, Int, Tensor, TensorData};
use half::bf16;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{dims, elements_mut, flex_dtype, owned};
#[cfg(feature = "cube")]
use super::cube;
use super::in_f32;
use super::math::over_rows;
use super::number::Number;

/// Cosines and sines of angles, in rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotations {
    /// Cosines, row-major `[N, D_h / 2]`.
    pub cos: Vec<f32>,
    /// Sines, row-major `[N, D_h / 2]`.
    pub sin: Vec<f32>,
}

/// Row of the rotations of a token that is not rotated.
pub const UNROTATED: u32 = u32::MAX;

/// Rotates queries and keys in `qkv` of `[T, 3·H·D_h]`, whose order is (q, k, v), head, channel.
/// `rows` has the row of the rotations of each token, or [`UNROTATED`].
pub fn rotate(qkv: Tensor<2>, n_heads: usize, rotations: &Arc<Rotations>, rows: &Arc<[u32]>) -> Tensor<2> {
    let kernel = Rotate { n_heads, rotations: Arc::clone(rotations), rows: Arc::clone(rows) };
    #[cfg(feature = "cube")]
    if cube::is_cube(&qkv) {
        let [cos, sin] = kernel.tables(&qkv);
        return run(cube::Rotate { n_heads }, [qkv.into(), cos.into(), sin.into()]);
    }
    match flex_dtype(&qkv) {
        Some(DType::F32) => run(FlexRotate::<f32>(kernel, PhantomData), [qkv.into()]),
        Some(DType::BF16) => run(FlexRotate::<bf16>(kernel, PhantomData), [qkv.into()]),
        _ => kernel.plain(qkv),
    }
}

/// A rotation of tokens.
#[derive(Debug, Clone)]
struct Rotate {
    n_heads: usize,
    rotations: Arc<Rotations>,
    /// Row of the rotations of each token, or [`UNROTATED`].
    rows: Arc<[u32]>,
}

/// Kernel for elements of type `T`.
#[derive(Debug, Clone)]
struct FlexRotate<T>(Rotate, PhantomData<T>);

impl Rotate {
    /// Returns cosines and sines by token, `[T, D_h / 2]` each, on the device of `qkv` of
    /// `[T, 3·H·D_h]`: 1 and 0 for a token that is not rotated.
    fn tables(&self, qkv: &Tensor<2>) -> [Tensor<2>; 2] {
        let [_, d3] = qkv.dims();
        let half = d3 / 3 / self.n_heads / 2;
        let device = qkv.device().inner();
        // The first row rotates nothing.
        let mut index = Vec::with_capacity(self.rows.len());
        for row in self.rows.iter() {
            index.push(if *row == UNROTATED { 0 } else { *row as i32 + 1 });
        }
        let index = Tensor::<1, Int>::from_data(&index[..], &device);
        [(1.0, &self.rotations.cos), (0.0, &self.rotations.sin)].map(|(first, values)| {
            let mut rows = vec![first; half];
            rows.extend_from_slice(values);
            let n_rows = rows.len() / half;
            let table = Tensor::<2>::from_data(TensorData::new(rows, [n_rows, half]), &device);
            let by_token = table.select(0, index.clone());
            if qkv.is_autodiff() { by_token.autodiff() } else { by_token }
        })
    }

    fn plain(&self, qkv: Tensor<2>) -> Tensor<2> {
        let [t, d3] = qkv.dims();
        let dtype = qkv.dtype();
        let heads = 2 * self.n_heads;
        let half = d3 / 3 / self.n_heads / 2;
        let n_rotated = d3 / 3 * 2;
        let rotated = in_f32(qkv.clone().narrow(1, 0, n_rotated));
        let [cos, sin] = self.tables(&qkv).map(|table| table.reshape([t, 1, half]).cast(rotated.dtype()));
        let parts = rotated.reshape([t, heads, 2 * half]);
        let first = parts.clone().narrow(2, 0, half);
        let second = parts.narrow(2, half, half);
        let rotated = Tensor::cat(
            vec![first.clone() * cos.clone() - second.clone() * sin.clone(), second * cos + first * sin],
            2,
        );
        let rotated = rotated.reshape([t, n_rotated]).cast(dtype);
        qkv.slice_assign([0..t, 0..n_rotated], rotated)
    }

    /// Rotates tokens in place, by the angles times `sign`.
    fn rotate_in_place<T: Number>(&self, mut qkv: FlexTensor, sign: f32) -> FlexTensor {
        let [_, d3]: [usize; 2] = dims(&qkv);
        let half = d3 / 3 / self.n_heads / 2;
        over_rows(elements_mut::<T>(&mut qkv), d3, |first, tokens| {
            for (token, row) in tokens.chunks_exact_mut(d3).zip(&self.rows[first..]) {
                if *row == UNROTATED {
                    continue;
                }
                let range = *row as usize * half..(*row as usize + 1) * half;
                let cos = &self.rotations.cos[range.clone()];
                let sin = &self.rotations.sin[range];
                for head in token[..d3 / 3 * 2].chunks_exact_mut(2 * half) {
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

    fn rotations(n_rows: usize, half: usize) -> Arc<Rotations> {
        let angles = (0..n_rows * half).map(|i| (i as f32 * 0.37).sin() * 3.0);
        let (sin, cos) = angles.map(f32::sin_cos).unzip();
        Arc::new(Rotations { cos, sin })
    }

    /// Tokens use rows of the table in any order, or none.
    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            for (dtype, tolerance) in types(&device, 1e-6) {
                for rows in [vec![0, 1, 2, 3], vec![UNROTATED, UNROTATED, 8, 0, 3, 3, UNROTATED, 5]] {
                    let n_heads = 2;
                    let half = 6;
                    let angles = rotations(9, half);
                    let rows: Arc<[u32]> = rows.into();
                    let qkv = leaves(&device, &[[rows.len(), 3 * n_heads * 2 * half]], 1).remove(0);
                    let kernel = Rotate { n_heads, rotations: Arc::clone(&angles), rows: Arc::clone(&rows) };
                    let y = rotate(cast(qkv.clone(), dtype), n_heads, &angles, &rows);
                    let expected = kernel.plain(cast(qkv.clone(), dtype));
                    assert_eq!(y.dtype(), dtype);
                    assert_close("forward", y.clone().inner(), expected.clone().inner(), tolerance);
                    assert_gradients_close("backward", &qkv, &backward(y), &backward(expected), tolerance);
                }
            }
        }
    }

    #[test]
    fn unrotated_tokens_and_values_are_unchanged_and_lengths_are_preserved() {
        let rows: Arc<[u32]> = [UNROTATED, 0, 1, 2, 3].into();
        let qkv = leaves(&burn_tensor::Device::flex(), &[[5, 12]], 3).remove(0).inner();
        let y = rotate(qkv.clone(), 1, &rotations(4, 2), &rows);
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
