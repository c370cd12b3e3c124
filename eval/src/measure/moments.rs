//! Second moments of rows and their spectrum.

use kernels::ops::gemm::{Mat, gemm};
use nalgebra::DMatrix;

/// Number of rows converted to f64 at a time.
const BLOCK: usize = 1024;

/// Computes `Σ (x - mean)(x - mean)ᵀ` over rows x of `d` numbers: `[d, d]`.
pub(crate) fn second_moment(rows: &[f32], mean: &[f64]) -> DMatrix<f64> {
    let d = mean.len();
    let mut sum = vec![0.0; d * d];
    let mut block = Vec::with_capacity(BLOCK * d);
    for rows in rows.chunks(BLOCK * d) {
        block.clear();
        block.extend(rows.iter().enumerate().map(|(i, v)| f64::from(*v) - mean[i % d]));
        let x = Mat::rows(&block, d);
        gemm([d, rows.len() / d, d], 1.0, x.t(), x, 1.0, &mut sum, d);
    }
    DMatrix::from_vec(d, d, sum)
}

/// Computes the mean of rows of `d` numbers.
pub(crate) fn mean_of(rows: &[f32], d: usize) -> Vec<f64> {
    let mut mean = vec![0.0; d];
    let n = (rows.len() / d).max(1) as f64;
    for row in rows.chunks_exact(d) {
        mean.iter_mut().zip(row).for_each(|(sum, v)| *sum += f64::from(*v) / n);
    }
    mean
}

/// Computes the eigenvalues of a positive semidefinite matrix in descending order. Values that are
/// negative by rounding become 0.
pub(crate) fn spectrum(matrix: DMatrix<f64>) -> Vec<f64> {
    let mut values: Vec<f64> = matrix.symmetric_eigenvalues().iter().map(|v| v.max(0.0)).collect();
    values.sort_unstable_by(|a, b| b.total_cmp(a));
    values
}

/// Computes the effective number of `values`, the exponential of their entropy: exp(-Σ p ln p), p =
/// v / Σ v + ε.
pub(crate) fn effective_number(values: &[f64], epsilon: f64) -> f64 {
    let sum: f64 = values.iter().sum();
    if sum <= 0.0 {
        return 0.0;
    }
    let entropy: f64 = values.iter().map(|v| v / sum + epsilon).map(|p| -p * p.ln()).sum();
    entropy.exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eigenvalues_are_in_descending_order() {
        let rows = [3.0, 0.0, -3.0, 0.0, 0.0, 1.0, 0.0, -1.0];
        assert_eq!(mean_of(&rows, 2), [0.0, 0.0]);
        let values = spectrum(second_moment(&rows, &[0.0, 0.0]));
        assert!((values[0] - 18.0).abs() < 1e-12 && (values[1] - 2.0).abs() < 1e-12, "{values:?}");
    }

    #[test]
    fn effective_number_counts_equal_values() {
        assert!((effective_number(&[2.0; 5], 0.0) - 5.0).abs() < 1e-12);
        assert!((effective_number(&[1.0, 0.0, 0.0], 1e-12) - 1.0).abs() < 1e-9);
        assert_eq!(effective_number(&[0.0; 3], 1e-7), 0.0);
    }
}
