//! α-ReQ (Agrawal et al. 2022): the power-law decay of the covariance's spectrum.
//!
//! ```text
//! λ_i ∝ i^-α for i in 4..=100: a least-squares line through (ln i, ln λ_i) with weights 1 / i
//! ```

use super::moments::{mean_of, second_moment, spectrum};

/// Numbers of the eigenvalues that the line is fitted to, from the authors' code; the largest is 1.
const RANGE: std::ops::RangeInclusive<usize> = 4..=100;

/// Computes α of rows of `d` numbers; 0 if there are too few nonzero eigenvalues for a line.
pub(crate) fn alpha_req(rows: &[f32], d: usize) -> f64 {
    let mut eigenvalues = spectrum(second_moment(rows, &mean_of(rows, d)));
    let n = rows.len() / d.max(1);
    // n centered rows span at most n - 1 directions, and eigenvalues below the rounding error of
    // the largest are noise.
    let floor = eigenvalues.first().map_or(0.0, |largest| largest * n.max(d) as f64 * f64::EPSILON);
    eigenvalues.truncate(n.saturating_sub(1));
    eigenvalues.retain(|value| *value > floor);
    slope(&eigenvalues)
}

/// Fits α to eigenvalues in descending order.
fn slope(eigenvalues: &[f64]) -> f64 {
    // Abscissa, ordinate and weight of each point.
    let mut points: Vec<(f64, f64, f64)> = Vec::new();
    for number in RANGE {
        if let Some(value) = eigenvalues.get(number - 1) {
            let i = number as f64;
            points.push((-i.ln(), value.ln(), 1.0 / i));
        }
    }
    let sum_w: f64 = points.iter().map(|(_, _, w)| w).sum();
    let sum_x: f64 = points.iter().map(|(x, _, w)| w * x).sum();
    let sum_y: f64 = points.iter().map(|(_, y, w)| w * y).sum();
    let sum_xx: f64 = points.iter().map(|(x, _, w)| w * x * x).sum();
    let sum_xy: f64 = points.iter().map(|(x, y, w)| w * x * y).sum();
    let spread = sum_w * sum_xx - sum_x * sum_x;
    if points.len() < 2 || spread <= 0.0 { 0.0 } else { (sum_w * sum_xy - sum_x * sum_y) / spread }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponent_of_a_power_law_is_fitted() {
        let law: Vec<f64> = (1..=128).map(|i| 7.0 * f64::from(i).powf(-1.3)).collect();
        assert!((slope(&law) - 1.3).abs() < 1e-9);
        assert_eq!(slope(&[1.0, 0.5]), 0.0);
    }

    /// Eigenvalues that are rounding noise, because there are few rows, do not affect the fit.
    #[test]
    fn rounding_errors_do_not_affect_the_fit() {
        let d = 64;
        let rows: Vec<f32> = (0..20 * d).map(|i| (i * 7919 % 1009) as f32 / 500.0 - 1.0).collect();
        let twice: Vec<f32> = [&rows[..], &rows[..]].concat();
        let once = alpha_req(&rows, d);
        let twice = alpha_req(&twice, d);
        assert!((once - twice).abs() < 1e-6 && once.abs() < 3.0, "{once} {twice}");
    }
}
