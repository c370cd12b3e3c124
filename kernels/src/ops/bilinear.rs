//! Bilinear interpolation from cells to pixels, along one axis.
//!
//! ```text
//! pixel i of n reads cells at max((i + 0.5) · g / n - 0.5, 0) of g
//! ```
//!
//! This is PyTorch's `interpolate(mode="bilinear", align_corners=False)`.

/// The two cells that a pixel is interpolated from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Taps {
    /// The first cell.
    pub first: usize,
    /// The second cell, which is the first one at the edges.
    pub second: usize,
    /// Weight of the second cell; that of the first is the rest to 1.
    pub share: f32,
}

/// Returns the cells among `n_cells`, at least one, that each of `n_pixels` is interpolated from.
pub fn bilinear_taps(n_cells: usize, n_pixels: usize) -> Vec<Taps> {
    let scale = n_cells as f64 / n_pixels as f64;
    let mut taps = Vec::with_capacity(n_pixels);
    for pixel in 0..n_pixels {
        let position = ((pixel as f64 + 0.5) * scale - 0.5).max(0.0);
        let first = (position as usize).min(n_cells - 1);
        let second = (first + 1).min(n_cells - 1);
        taps.push(Taps { first, second, share: (position - first as f64) as f32 });
    }
    taps
}

/// Writes the values between `first` and `second` to `out`, of equal lengths.
#[inline(always)]
pub(super) fn interpolate(first: &[f32], second: &[f32], share: f32, out: &mut [f32]) {
    for ((out, a), b) in out.iter_mut().zip(first).zip(second) {
        *out = a + share * (b - a);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `interpolate(torch.tensor([[[0., 1., 4.]]]), size=n, mode="linear")`.
    #[test]
    fn positions_are_those_of_pytorch() {
        let cells = [0.0, 1.0, 4.0];
        let cases: [(usize, &[f32]); 3] =
            [(2, &[0.25, 3.25]), (4, &[0.0, 0.625, 2.125, 4.0]), (5, &[0.0, 0.4, 1.0, 2.8, 4.0])];
        for (n_pixels, expected) in cases {
            for (taps, expected) in bilinear_taps(3, n_pixels).iter().zip(expected) {
                let mut value = [0.0];
                interpolate(&[cells[taps.first]], &[cells[taps.second]], taps.share, &mut value);
                assert!((value[0] - expected).abs() < 1e-6, "{n_pixels}: {} {expected}", value[0]);
            }
        }
        for taps in bilinear_taps(1, 2) {
            assert_eq!((taps.first, taps.second), (0, 0));
        }
    }
}
