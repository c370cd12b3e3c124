//! Selection of rows of a tensor, and its transpose.
//!
//! ```text
//! select:   y[i] = x[rows[i]]                         x [M, D], y [K, D]
//! scatter:  y[r] = Σ_{i: rows[i] = r} x[i]            x [K, D], y [M, D]
//! ```
//!
//! Each computes the gradient of the other. Sums are in the order of `rows`.

use std::marker::PhantomData;
use std::sync::Arc;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData};
use half::bf16;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, dims, elements, flex_dtype, tensor};
use super::math::over_rows;
use super::number::Number;

/// Returns the rows `rows` of `x` of `[M, D]`, in any order and any number of times: `[K, D]`.
pub fn select_rows(x: Tensor<2>, rows: &Arc<[u32]>) -> Tensor<2> {
    let [n_rows, _] = x.dims();
    match flex_dtype(&x) {
        Some(DType::F32) => run(Select::<f32>::new(rows, n_rows), [x.into()]),
        Some(DType::BF16) => run(Select::<bf16>::new(rows, n_rows), [x.into()]),
        _ => select_plain(x, rows),
    }
}

/// Adds the rows of `x` of `[K, D]` to the rows `rows` of `n_rows` zero rows: `[M, D]`.
pub fn scatter_rows(x: Tensor<2>, rows: &Arc<[u32]>, n_rows: usize) -> Tensor<2> {
    match flex_dtype(&x) {
        Some(DType::F32) => run(Scatter(Select::<f32>::new(rows, n_rows)), [x.into()]),
        Some(DType::BF16) => run(Scatter(Select::<bf16>::new(rows, n_rows)), [x.into()]),
        _ => scatter_plain(x, rows, n_rows),
    }
}

fn select_plain(x: Tensor<2>, rows: &[u32]) -> Tensor<2> {
    let indices = indices(&x, rows);
    x.select(0, indices)
}

fn scatter_plain(x: Tensor<2>, rows: &[u32], n_rows: usize) -> Tensor<2> {
    let [_, d] = x.dims();
    let indices = indices(&x, rows);
    let zeros = Tensor::<2>::zeros([n_rows, d], &x.device().inner()).cast(x.dtype());
    let zeros = if x.is_autodiff() { zeros.autodiff() } else { zeros };
    zeros.select_assign(0, indices, x, IndexingUpdateOp::Add)
}

fn indices(x: &Tensor<2>, rows: &[u32]) -> Tensor<1, Int> {
    let indices: Vec<i64> = rows.iter().map(|row| i64::from(*row)).collect();
    Tensor::from_data(TensorData::new(indices, [rows.len()]), &x.device())
}

/// Kernel of the selection, for elements of type `T`.
#[derive(Debug, Clone)]
struct Select<T> {
    /// Selected rows.
    rows: Arc<[u32]>,
    /// Number of rows from which they are selected.
    n_rows: usize,
    element: PhantomData<T>,
}

/// Positions in a list of rows at which each row is listed.
struct Occurrences {
    /// Start of the positions of each row, and their end.
    starts: Vec<u32>,
    /// Positions in ascending order, row after row.
    positions: Vec<u32>,
}

impl Occurrences {
    fn new(rows: &[u32], n_rows: usize) -> Self {
        let mut starts = vec![0u32; n_rows + 1];
        for row in rows {
            starts[*row as usize + 1] += 1;
        }
        for row in 0..n_rows {
            starts[row + 1] += starts[row];
        }
        let mut next = starts.clone();
        let mut positions = vec![0u32; rows.len()];
        for (position, row) in rows.iter().enumerate() {
            let slot = &mut next[*row as usize];
            positions[*slot as usize] = position as u32;
            *slot += 1;
        }
        Self { starts, positions }
    }

    /// Returns the positions at which `row` is listed.
    fn positions(&self, row: usize) -> &[u32] {
        &self.positions[self.starts[row] as usize..self.starts[row + 1] as usize]
    }
}

impl<T: Number> Select<T> {
    fn new(rows: &Arc<[u32]>, n_rows: usize) -> Self {
        Self { rows: Arc::clone(rows), n_rows, element: PhantomData }
    }

    fn select(&self, x: &FlexTensor) -> FlexTensor {
        let [_, d] = dims(x);
        let x = contiguous(x);
        let mut y = vec![T::default(); self.rows.len() * d];
        let x = elements::<T>(&x);
        over_rows(&mut y, d, |first, rows| {
            for (y, row) in rows.chunks_exact_mut(d).zip(&self.rows[first..]) {
                y.copy_from_slice(&x[*row as usize * d..][..d]);
            }
        });
        tensor(y, [self.rows.len(), d])
    }

    fn scatter(&self, x: &FlexTensor) -> FlexTensor {
        let [_, d] = dims(x);
        let x = contiguous(x);
        let mut y = vec![T::default(); self.n_rows * d];
        let x = elements::<T>(&x);
        let occurrences = Occurrences::new(&self.rows, self.n_rows);
        over_rows(&mut y, d, |first, rows| {
            for (i, y) in rows.chunks_exact_mut(d).enumerate() {
                for (number, position) in occurrences.positions(first + i).iter().enumerate() {
                    let x = &x[*position as usize * d..][..d];
                    if number == 0 {
                        y.copy_from_slice(x);
                    } else {
                        add_rounded(y, x);
                    }
                }
            }
        });
        tensor(y, [self.n_rows, d])
    }
}

/// Computes `y += x`, rounding each sum to the type of the elements.
fn add_rounded<T: Number>(y: &mut [T], x: &[T]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = T::nearest(y.wide() + x.wide());
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

/// Kernel of the transpose of the selection.
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

    /// Rows are missing, in order, repeated, and out of order.
    #[test]
    fn both_directions_match_plain_forward_and_backward() {
        for device in devices() {
            for (dtype, tolerance) in types(&device, 1e-6) {
                for rows in [vec![0, 3, 4], vec![6], (0..7).collect(), vec![5, 0, 5, 2, 0, 5]] {
                    let rows: Arc<[u32]> = rows.into();
                    let inputs = leaves(&device, &[[7, 5], [rows.len(), 5]], 1);
                    let y = select_rows(cast(inputs[0].clone(), dtype), &rows);
                    let expected = select_plain(cast(inputs[0].clone(), dtype), &rows);
                    check("selected", &inputs[0], y, expected, tolerance);
                    let y = scatter_rows(cast(inputs[1].clone(), dtype), &rows, 7);
                    let expected = scatter_plain(cast(inputs[1].clone(), dtype), &rows, 7);
                    check("scattered", &inputs[1], y, expected, tolerance);
                }
            }
        }
    }

    fn check(name: &str, input: &Tensor<2>, y: Tensor<2>, expected: Tensor<2>, tolerance: f32) {
        assert_close(name, y.clone().inner(), expected.clone().inner(), tolerance);
        assert_gradients_close(name, input, &backward(y), &backward(expected), tolerance);
    }
}
