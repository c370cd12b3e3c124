//! Resampling of feature maps to another grid: bilinear interpolation as a matrix.
//!
//! ```text
//! y = M x      x [B, N, D] on a grid of from, y [B, N', D] on a grid of to, rows of M [N', N] sum to one
//! ```
//!
//! The weights are PyTorch's `interpolate(mode="bilinear", align_corners=False)`.

use burn_tensor::{Tensor, TensorData};
use kernels::ops::matmul;

/// Resamples `x` `[B, N, D]` from the grid `from` to the grid `to`, `[B, N', D]`.
pub(crate) fn resample_bilinear(x: Tensor<3>, from: [usize; 2], to: [usize; 2]) -> Tensor<3> {
    if from == to {
        return x;
    }
    let [b, _, _] = x.dims();
    let device = x.device().inner();
    let n = from[0] * from[1];
    let m = to[0] * to[1];
    let matrix: Tensor<2> = Tensor::from_data(TensorData::new(matrix(from, to), [m, n]), &device);
    let matrix = if x.is_autodiff() { matrix.autodiff() } else { matrix };
    matmul(matrix.reshape([1, m, n]).expand([b, m, n]), x)
}

/// Returns the interpolation matrix, row-major `[to_h · to_w, from_h · from_w]`.
fn matrix(from: [usize; 2], to: [usize; 2]) -> Vec<f32> {
    let rows = weights(from[0], to[0]);
    let columns = weights(from[1], to[1]);
    let mut matrix = Vec::with_capacity(from[0] * from[1] * to[0] * to[1]);
    for row in rows.chunks_exact(from[0]) {
        for column in columns.chunks_exact(from[1]) {
            for row_weight in row {
                matrix.extend(column.iter().map(|column_weight| (row_weight * column_weight) as f32));
            }
        }
    }
    matrix
}

/// Returns the interpolation weights along one axis, row-major `[to, from]`.
fn weights(from: usize, to: usize) -> Vec<f64> {
    let mut weights = vec![0.0; to * from];
    let scale = from as f64 / to as f64;
    for (i, row) in weights.chunks_exact_mut(from).enumerate() {
        let source = ((i as f64 + 0.5) * scale - 0.5).max(0.0);
        let first = (source as usize).min(from - 1);
        let share = source - first as f64;
        row[first] += 1.0 - share;
        row[(first + 1).min(from - 1)] += share;
    }
    weights
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `interpolate(torch.tensor([0., 1., 4.])[None, None, :, None].expand(1, 1, 3,
    /// 3).contiguous(), size=(n, 3), mode="bilinear")[0, 0, :, 0]`.
    #[test]
    fn weights_equal_pytorch() {
        let cases: [(usize, &[f64]); 3] =
            [(2, &[0.25, 3.25]), (4, &[0.0, 0.625, 2.125, 4.0]), (5, &[0.0, 0.4, 1.0, 2.8, 4.0])];
        for (to, expected) in cases {
            for (row, expected) in weights(3, to).chunks_exact(3).zip(expected) {
                let value = row[1] + 4.0 * row[2];
                assert!((value - expected).abs() < 1e-6, "{to}: {value} instead of {expected}");
            }
        }
    }

    #[test]
    fn map_that_only_varies_along_rows_is_resampled_along_rows() {
        let rows = matrix([3, 2], [2, 4]);
        for (cell, weights) in rows.chunks_exact(6).enumerate() {
            let value: f32 = weights.iter().enumerate().map(|(i, w)| w * [0.0, 1.0, 4.0][i / 2]).sum();
            assert!((value - [0.25, 3.25][cell / 4]).abs() < 1e-6, "{cell}: {value}");
        }
    }
}
