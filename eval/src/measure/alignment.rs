//! Alignment (Wang and Isola 2020): mean squared distance between views of an image.
//!
//! ```text
//! mean over pairs of views of an image of ‖u - v‖²,  u, v rows of unit length
//! ```

use kernels::rows::scale_to_unit_length;

/// Computes the alignment of rows, `[n, n_views, D]`.
pub(crate) fn alignment(rows: &[f32], n_views: usize, d: usize) -> f64 {
    let unit = unit_rows(rows, d);
    let mut sum = 0.0;
    let mut n_pairs = 0usize;
    for views in unit.chunks_exact((n_views * d).max(1)) {
        for a in 0..n_views {
            for b in 0..a {
                let squares = (0..d).map(|c| f64::from(views[a * d + c] - views[b * d + c]).powi(2));
                sum += squares.sum::<f64>();
                n_pairs += 1;
            }
        }
    }
    sum / n_pairs.max(1) as f64
}

/// Scales rows of `d` numbers to unit length.
pub(crate) fn unit_rows(rows: &[f32], d: usize) -> Vec<f32> {
    let mut out = rows.to_vec();
    out.chunks_exact_mut(d).for_each(scale_to_unit_length);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_views_have_no_distance() {
        assert_eq!(alignment(&[3.0, 0.0, 1.0, 0.0], 2, 2), 0.0);
        // One pair opposite, one at a right angle.
        let rows = [1.0, 0.0, -1.0, 0.0, 0.0, 2.0, 2.0, 0.0];
        assert!((alignment(&rows, 2, 2) - 3.0).abs() < 1e-6);
    }
}
