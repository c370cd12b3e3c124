//! Uniformity (Wang and Isola 2020): the evenness of features on the unit sphere.
//!
//! ```text
//! ln mean over pairs of exp(-2 ‖u - v‖²),  u, v rows of unit length
//! ```

use kernels::ops::gemm::{Mat, gemm};

use super::alignment::unit_rows;

/// Maximum number of rows; all pairs of them are compared.
const ROWS: usize = 2000;

/// Computes the uniformity of rows of `d` numbers, on an evenly spread subset if there are many; 0
/// for fewer than two rows.
pub(crate) fn uniformity(rows: &[f32], d: usize) -> f64 {
    let n_all = rows.len() / d;
    let n = n_all.min(ROWS);
    if n < 2 {
        return 0.0;
    }
    let sampled: Vec<f32> = (0..n).flat_map(|i| &rows[i * n_all / n * d..][..d]).copied().collect();
    let unit = unit_rows(&sampled, d);
    let mut cosines = vec![0.0; n * n];
    gemm([n, d, n], 1.0, Mat::rows(&unit, d), Mat::rows(&unit, d).t(), 0.0, &mut cosines, n);
    let mut sum = 0.0;
    for i in 0..n {
        // ‖u - v‖² = 2 - 2 u·v
        sum += cosines[i * n..i * n + i]
            .iter()
            .map(|cosine| (4.0 * (f64::from(*cosine) - 1.0)).exp())
            .sum::<f64>();
    }
    (sum / (n * (n - 1) / 2) as f64).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_of_pairs_follow_the_formula() {
        assert!((uniformity(&[1.0, 0.0, 5.0, 0.0], 2) - 0.0).abs() < 1e-6);
        // Opposite: ‖u - v‖² = 4.
        assert!((uniformity(&[1.0, 0.0, -2.0, 0.0], 2) + 8.0).abs() < 1e-6);
    }
}
