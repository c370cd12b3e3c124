//! RankMe (Garrido et al. 2023): the effective rank of features.
//!
//! ```text
//! exp(-Σ p_k ln p_k),  p_k = σ_k / Σ σ + 10⁻⁷,  σ the singular values of Z, [n, D], not centered
//! ```

use super::moments::{effective_number, second_moment, spectrum};

/// The paper's ε.
const EPSILON: f64 = 1e-7;

/// Computes RankMe of rows of `d` numbers.
pub(crate) fn rankme(rows: &[f32], d: usize) -> f64 {
    let eigenvalues = spectrum(second_moment(rows, &vec![0.0; d]));
    // A matrix of n rows has at most n singular values.
    let n = (rows.len() / d).min(d);
    let singular: Vec<f64> = eigenvalues.iter().take(n).map(|v| v.sqrt()).collect();
    effective_number(&singular, EPSILON)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_directions_are_counted() {
        // Four directions of equal length, then one that dominates the others.
        let axes: Vec<f32> = (0..16).map(|i| if i / 4 == i % 4 { 1.0 } else { 0.0 }).collect();
        assert!((rankme(&axes, 4) - 4.0).abs() < 1e-4);
        let one: Vec<f32> =
            axes.iter().enumerate().map(|(i, v)| if i == 0 { 1e6 } else { v * 1e-3 }).collect();
        assert!(rankme(&one, 4) < 1.01);
    }
}
