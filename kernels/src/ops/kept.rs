//! A residual branch that is computed for some of the sequences.
//!
//! ```text
//! y[kept[i]] = f(h[kept])[i], and 0 for all others          h, y [B, N, D]
//! ```
//!
//! Selection of sequences, and its reverse:
//!
//! ```text
//! selected:  y[i] = x[kept[i]]                                x [B, N, D], y [K, N, D]
//! spread:    y[kept[i]] = x[i], and 0 for all others          x [K, N, D], y [B, N, D]
//! ```
//!
//! Each is the other's gradient.

use std::marker::PhantomData;
use std::sync::Arc;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData};
use half::bf16;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, dims, elements, flex_dtype, tensor};
use super::math::over_rows;
use super::number::Number;

/// Smallest share of dropped sequences that is left out of a branch: for fewer, copying the others
/// takes as long as is saved.
pub const SMALLEST_SHARE_LEFT_OUT: f64 = 0.1;

/// Computes `f` of the sequences of `h` of `[B, N, D]` whose factor is not zero, and returns zeros
/// for the others; it computes `f` of all if few are dropped, and of the first if all are.
pub fn on_kept(h: Tensor<3>, factors: Option<&[f32]>, f: impl FnOnce(Tensor<3>) -> Tensor<3>) -> Tensor<3> {
    match factors.and_then(kept) {
        Some(kept) => {
            let [n_sequences, _, _] = h.dims();
            spread_sequences(f(select_sequences(h, &kept)), &kept, n_sequences)
        }
        None => f(h),
    }
}

/// Returns the numbers of the sequences whose factor is not zero; `None` if all are to be computed.
fn kept(factors: &[f32]) -> Option<Vec<usize>> {
    let mut kept: Vec<usize> = (0..factors.len()).filter(|number| factors[*number] != 0.0).collect();
    let n_dropped = (factors.len() - kept.len()) as f64;
    let is_worth_it = n_dropped > 0.0 && n_dropped >= SMALLEST_SHARE_LEFT_OUT * factors.len() as f64;
    if kept.is_empty() {
        // Operations expect a sequence at least; its factor is zero.
        kept.push(0);
    }
    is_worth_it.then_some(kept)
}

/// Returns the sequences of `x` of `[B, N, D]` with these increasing numbers, `[K, N, D]`.
fn select_sequences(x: Tensor<3>, kept: &[usize]) -> Tensor<3> {
    let [n_sequences, _, _] = x.dims();
    match flex_dtype(&x) {
        Some(DType::F32) => run(Select::<f32>::new(kept, n_sequences), [x.into()]),
        Some(DType::BF16) => run(Select::<bf16>::new(kept, n_sequences), [x.into()]),
        _ => selected_plainly(x, kept),
    }
}

/// Returns `n_sequences` sequences, `[B, N, D]`: the one of `x` of `[K, N, D]` at each of these
/// increasing numbers, and zeros elsewhere.
fn spread_sequences(x: Tensor<3>, kept: &[usize], n_sequences: usize) -> Tensor<3> {
    match flex_dtype(&x) {
        Some(DType::F32) => run(Spread(Select::<f32>::new(kept, n_sequences)), [x.into()]),
        Some(DType::BF16) => run(Spread(Select::<bf16>::new(kept, n_sequences)), [x.into()]),
        _ => spread_plainly(x, kept, n_sequences),
    }
}

fn selected_plainly(x: Tensor<3>, kept: &[usize]) -> Tensor<3> {
    let indices = indices(&x, kept);
    x.select(0, indices)
}

fn spread_plainly(x: Tensor<3>, kept: &[usize], n_sequences: usize) -> Tensor<3> {
    let [_, n, d] = x.dims();
    let indices = indices(&x, kept);
    let zeros = Tensor::<3>::zeros([n_sequences, n, d], &x.device().inner()).cast(x.dtype());
    let zeros = if x.is_autodiff() { zeros.autodiff() } else { zeros };
    zeros.select_assign(0, indices, x, IndexingUpdateOp::Add)
}

fn indices(x: &Tensor<3>, kept: &[usize]) -> Tensor<1, Int> {
    let numbers: Vec<i64> = kept.iter().map(|number| *number as i64).collect();
    Tensor::from_data(TensorData::new(numbers, [kept.len()]), &x.device())
}

/// Kernel for elements of type `T`.
#[derive(Debug, Clone)]
struct Select<T> {
    /// Number of each kept sequence.
    kept: Arc<[usize]>,
    /// Number of all sequences.
    n_sequences: usize,
    element: PhantomData<T>,
}

impl<T: Number> Select<T> {
    fn new(kept: &[usize], n_sequences: usize) -> Self {
        Self { kept: kept.into(), n_sequences, element: PhantomData }
    }

    fn selected(&self, x: &FlexTensor) -> FlexTensor {
        let [_, n, d] = dims(x);
        let x = contiguous(x);
        let mut y = vec![T::default(); self.kept.len() * n * d];
        let x = elements::<T>(&x);
        over_rows(&mut y, n * d, |first, rows| {
            for (y, number) in rows.chunks_exact_mut(n * d).zip(&self.kept[first..]) {
                y.copy_from_slice(&x[number * n * d..][..n * d]);
            }
        });
        tensor(y, [self.kept.len(), n, d])
    }

    fn spread(&self, x: &FlexTensor) -> FlexTensor {
        let [_, n, d] = dims(x);
        let x = contiguous(x);
        let mut y = vec![T::default(); self.n_sequences * n * d];
        let x = elements::<T>(&x);
        over_rows(&mut y, n * d, |first, rows| {
            let start = self.kept.partition_point(|number| *number < first);
            let end = self.kept.partition_point(|number| *number < first + rows.len() / (n * d));
            for (i, number) in self.kept[start..end].iter().enumerate() {
                let row = &mut rows[(number - first) * n * d..][..n * d];
                row.copy_from_slice(&x[(start + i) * n * d..][..n * d]);
            }
        });
        tensor(y, [self.n_sequences, n, d])
    }
}

impl<T: Number> Kernel<Flex, 1> for Select<T> {
    type Saved = ();

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, ()) {
        (self.selected(&x), ())
    }

    fn backward(&self, (): (), grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        [Some(self.spread(&grad))]
    }
}

/// Kernel of the reverse.
#[derive(Debug, Clone)]
struct Spread<T>(Select<T>);

impl<T: Number> Kernel<Flex, 1> for Spread<T> {
    type Saved = ();

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, ()) {
        (self.0.spread(&x), ())
    }

    fn backward(&self, (): (), grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        [Some(self.0.selected(&grad))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cast;
    use crate::ops::twin::{assert_close, devices, leaves, types};

    #[test]
    fn both_equal_their_twins_forwards_and_backwards() {
        for device in devices() {
            for (dtype, _) in types(&device, 0.0) {
                for kept in [vec![0, 3, 4], vec![6], (0..7).collect()] {
                    let inputs = leaves(&device, &[[7, 3, 5], [kept.len(), 3, 5]], 1);
                    let check = |what: &str, input: &Tensor<3>, fs: [&dyn Fn(Tensor<3>) -> Tensor<3>; 2]| {
                        let [y, twin] = fs.map(|f| f(cast(input.clone(), dtype)));
                        assert_close(what, y.clone().inner(), twin.clone().inner(), 0.0);
                        let gradient = |y: Tensor<3>| {
                            let grads = (y.clone() * y.inner().autodiff()).sum().backward();
                            input.grad(&grads).expect("a leaf")
                        };
                        assert_close(what, gradient(y), gradient(twin), 0.0);
                    };
                    check(
                        "selected",
                        &inputs[0],
                        [&|x| select_sequences(x, &kept), &|x| selected_plainly(x, &kept)],
                    );
                    check(
                        "spread",
                        &inputs[1],
                        [&|x| spread_sequences(x, &kept, 7), &|x| spread_plainly(x, &kept, 7)],
                    );
                }
            }
        }
    }
}
