//! Residual branches that are computed for some of the sequences only (stochastic depth).
//!
//! ```text
//! y[kept[i]] = f(h[kept])[i], and 0 for all others          h, y [B, N, D]
//! ```
//!
//! Selection of sequences, and its reverse:
//!
//! ```text
//! select:   y[i] = x[kept[i]]                                x [B, N, D], y [K, N, D]
//! scatter:  y[kept[i]] = x[i], and 0 for all others          x [K, N, D], y [B, N, D]
//! ```
//!
//! Each computes the gradient of the other.

use std::marker::PhantomData;
use std::sync::Arc;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData};
use half::bf16;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, dims, elements, flex_dtype, tensor};
use super::math::over_rows;
use super::number::Number;

/// Smallest share of dropped sequences for which a branch skips them: for a smaller share, copying
/// the other sequences takes as long as computing the dropped ones.
pub const MIN_SKIPPED_SHARE: f64 = 0.1;

/// Computes `f` of the sequences of `h` of `[B, N, D]` whose factor is not zero, and returns zeros
/// for the others. If few sequences are dropped, `f` is computed for all of them; if all are
/// dropped, for the first.
pub fn apply_to_kept(
    h: Tensor<3>,
    factors: Option<&[f32]>,
    f: impl FnOnce(Tensor<3>) -> Tensor<3>,
) -> Tensor<3> {
    match factors.and_then(kept_sequences) {
        Some(kept) => {
            let [n_sequences, _, _] = h.dims();
            scatter_sequences(f(select_sequences(h, &kept)), &kept, n_sequences)
        }
        None => f(h),
    }
}

/// Returns the indices of the sequences whose factor is not zero; `None` if all are to be computed.
fn kept_sequences(factors: &[f32]) -> Option<Vec<usize>> {
    let mut kept: Vec<usize> = (0..factors.len()).filter(|index| factors[*index] != 0.0).collect();
    let n_dropped = (factors.len() - kept.len()) as f64;
    if n_dropped == 0.0 || n_dropped < MIN_SKIPPED_SHARE * factors.len() as f64 {
        return None;
    }
    if kept.is_empty() {
        // Operations expect at least one sequence; the factor of this one is zero.
        kept.push(0);
    }
    Some(kept)
}

/// Returns the sequences of `x` of `[B, N, D]` with the indices `kept`, which increase: `[K, N,
/// D]`.
fn select_sequences(x: Tensor<3>, kept: &[usize]) -> Tensor<3> {
    let [n_sequences, _, _] = x.dims();
    match flex_dtype(&x) {
        Some(DType::F32) => run(Select::<f32>::new(kept, n_sequences), [x.into()]),
        Some(DType::BF16) => run(Select::<bf16>::new(kept, n_sequences), [x.into()]),
        _ => select_plain(x, kept),
    }
}

/// Returns `n_sequences` sequences, `[B, N, D]`: those of `x` of `[K, N, D]` at the indices `kept`,
/// which increase, and zeros elsewhere.
fn scatter_sequences(x: Tensor<3>, kept: &[usize], n_sequences: usize) -> Tensor<3> {
    match flex_dtype(&x) {
        Some(DType::F32) => run(Scatter(Select::<f32>::new(kept, n_sequences)), [x.into()]),
        Some(DType::BF16) => run(Scatter(Select::<bf16>::new(kept, n_sequences)), [x.into()]),
        _ => scatter_plain(x, kept, n_sequences),
    }
}

fn select_plain(x: Tensor<3>, kept: &[usize]) -> Tensor<3> {
    let indices = indices(&x, kept);
    x.select(0, indices)
}

fn scatter_plain(x: Tensor<3>, kept: &[usize], n_sequences: usize) -> Tensor<3> {
    let [_, n, d] = x.dims();
    let indices = indices(&x, kept);
    let zeros = Tensor::<3>::zeros([n_sequences, n, d], &x.device().inner()).cast(x.dtype());
    let zeros = if x.is_autodiff() { zeros.autodiff() } else { zeros };
    zeros.select_assign(0, indices, x, IndexingUpdateOp::Add)
}

fn indices(x: &Tensor<3>, kept: &[usize]) -> Tensor<1, Int> {
    let indices: Vec<i64> = kept.iter().map(|index| *index as i64).collect();
    Tensor::from_data(TensorData::new(indices, [kept.len()]), &x.device())
}

/// Kernel of the selection, for elements of type `T`.
#[derive(Debug, Clone)]
struct Select<T> {
    /// Indices of the kept sequences.
    kept: Arc<[usize]>,
    /// Number of sequences, dropped ones included.
    n_sequences: usize,
    element: PhantomData<T>,
}

impl<T: Number> Select<T> {
    fn new(kept: &[usize], n_sequences: usize) -> Self {
        Self { kept: kept.into(), n_sequences, element: PhantomData }
    }

    fn select(&self, x: &FlexTensor) -> FlexTensor {
        let [_, n, d] = dims(x);
        let x = contiguous(x);
        let mut y = vec![T::default(); self.kept.len() * n * d];
        let x = elements::<T>(&x);
        over_rows(&mut y, n * d, |first, rows| {
            for (y, index) in rows.chunks_exact_mut(n * d).zip(&self.kept[first..]) {
                y.copy_from_slice(&x[index * n * d..][..n * d]);
            }
        });
        tensor(y, [self.kept.len(), n, d])
    }

    fn scatter(&self, x: &FlexTensor) -> FlexTensor {
        let [_, n, d] = dims(x);
        let x = contiguous(x);
        let mut y = vec![T::default(); self.n_sequences * n * d];
        let x = elements::<T>(&x);
        over_rows(&mut y, n * d, |first, rows| {
            let start = self.kept.partition_point(|index| *index < first);
            let end = self.kept.partition_point(|index| *index < first + rows.len() / (n * d));
            for (i, index) in self.kept[start..end].iter().enumerate() {
                let row = &mut rows[(index - first) * n * d..][..n * d];
                row.copy_from_slice(&x[(start + i) * n * d..][..n * d]);
            }
        });
        tensor(y, [self.n_sequences, n, d])
    }
}

impl<T: Number> Kernel<Flex, 1> for Select<T> {
    type Saved = ();

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, ()) {
        (self.select(&x), ())
    }

    fn backward(&self, (): (), grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        [Some(self.scatter(&grad))]
    }
}

/// Kernel of the reverse of the selection.
#[derive(Debug, Clone)]
struct Scatter<T>(Select<T>);

impl<T: Number> Kernel<Flex, 1> for Scatter<T> {
    type Saved = ();

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, ()) {
        (self.0.scatter(&x), ())
    }

    fn backward(&self, (): (), grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        [Some(self.0.select(&grad))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cast;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves, types};

    #[test]
    fn both_directions_match_plain_forward_and_backward() {
        for device in devices() {
            for (dtype, _) in types(&device, 0.0) {
                for kept in [vec![0, 3, 4], vec![6], (0..7).collect()] {
                    let inputs = leaves(&device, &[[7, 3, 5], [kept.len(), 3, 5]], 1);
                    let y = select_sequences(cast(inputs[0].clone(), dtype), &kept);
                    let expected = select_plain(cast(inputs[0].clone(), dtype), &kept);
                    check("selected", &inputs[0], y, expected);
                    let y = scatter_sequences(cast(inputs[1].clone(), dtype), &kept, 7);
                    let expected = scatter_plain(cast(inputs[1].clone(), dtype), &kept, 7);
                    check("scattered", &inputs[1], y, expected);
                }
            }
        }
    }

    fn check(name: &str, input: &Tensor<3>, y: Tensor<3>, expected: Tensor<3>) {
        assert_close(name, y.clone().inner(), expected.clone().inner(), 0.0);
        assert_gradients_close(name, input, &backward(y), &backward(expected), 0.0);
    }
}
