//! LiDAR (Thilak et al. 2024): the effective rank of linear discriminant analysis with images as
//! classes and views as their members.
//!
//! ```text
//! Σ_b = mean over images of (μ_x - μ)(μ_x - μ)ᵀ,   Σ_w = mean over views of (z - μ_x)(z - μ_x)ᵀ + δ I
//! exp(-Σ p_k ln p_k),  p_k = λ_k / Σ λ + ε,  λ the eigenvalues of Σ_w^-½ Σ_b Σ_w^-½
//! ```

use nalgebra::{DMatrix, SymmetricEigen};

use super::moments::{effective_number, mean_of, second_moment, spectrum};

/// The paper's δ.
const DELTA: f64 = 1e-4;

/// The paper's ε.
const EPSILON: f64 = 1e-7;

/// Computes LiDAR of rows, `[n, n_views, D]`; 0 for fewer than two images.
pub(crate) fn lidar(rows: &[f32], n_views: usize, d: usize) -> f64 {
    let n = rows.len() / (n_views * d).max(1);
    if n < 2 {
        return 0.0;
    }
    let mut means = Vec::with_capacity(n * d);
    let mut within_rows = Vec::with_capacity(rows.len());
    for views in rows.chunks_exact(n_views * d) {
        let mean = mean_of(views, d);
        within_rows.extend(views.iter().enumerate().map(|(i, v)| (f64::from(*v) - mean[i % d]) as f32));
        means.extend(mean.into_iter().map(|v| v as f32));
    }
    let between = second_moment(&means, &mean_of(&means, d)) / n as f64;
    let within = second_moment(&within_rows, &vec![0.0; d]) / (n * n_views) as f64;
    let within = within + DMatrix::identity(d, d) * DELTA;
    let SymmetricEigen { eigenvalues, eigenvectors } = within.symmetric_eigen();
    let roots = eigenvalues.map(|v| 1.0 / v.max(DELTA * 1e-3).sqrt());
    let whitening = &eigenvectors * DMatrix::from_diagonal(&roots) * eigenvectors.transpose();
    effective_number(&spectrum(&whitening * between * &whitening), EPSILON)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Images lie along two axes, and views differ along a third: two directions distinguish
    /// images, however large the variation along the third.
    #[test]
    fn variation_between_views_does_not_count() {
        let mut rows = Vec::new();
        for (a, b) in [(1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0)] {
            for noise in [-50.0, 50.0] {
                rows.extend([a, b, noise]);
            }
        }
        assert!((lidar(&rows, 2, 3) - 2.0).abs() < 1e-3, "{}", lidar(&rows, 2, 3));
    }
}
