//! Gaussian blur of each channel, in 32-bit floating point, with borders as in torchvision.

use super::filter::{Taps, transpose};
use crate::blur::gaussian::{reflect, taps};

/// Blurs channels, with scratch memory that is reused.
#[derive(Debug, Default)]
pub(super) struct BandBlur {
    taps: Taps,
    padded: Vec<f32>,
    transposed: Vec<f32>,
    blurred: Vec<f32>,
}

impl BandBlur {
    /// Blurs the square channels of `side_px` in `view` with `n_taps` taps, or, if `n_taps` is 0,
    /// with those within four standard deviations.
    pub(super) fn apply(&mut self, view: &mut [f32], side_px: usize, n_taps: usize, sigma: f32) {
        let n_taps = if n_taps > 0 { n_taps } else { 2 * (4.0 * sigma).ceil() as usize + 1 };
        let weights = taps(n_taps, sigma);
        self.taps.clear();
        for y in 0..side_px {
            self.taps.push(y, weights.iter().copied());
        }
        for channel in view.chunks_exact_mut(side_px * side_px) {
            self.blur_columns(channel, side_px, n_taps / 2);
            transpose(&self.blurred, side_px, &mut self.transposed);
            let transposed = std::mem::take(&mut self.transposed);
            self.blur_columns(&transposed, side_px, n_taps / 2);
            self.transposed = transposed;
            transpose(&self.blurred, side_px, &mut self.transposed);
            channel.copy_from_slice(&self.transposed);
        }
    }

    /// Blurs the columns of `channel`, with reflected rows above and below, into `self.blurred`.
    fn blur_columns(&mut self, channel: &[f32], side_px: usize, radius: usize) {
        self.padded.clear();
        for y in 0..side_px + 2 * radius {
            let row = reflect(y as isize - radius as isize, side_px) * side_px;
            self.padded.extend_from_slice(&channel[row..row + side_px]);
        }
        self.taps.apply(&self.padded, side_px, &mut self.blurred);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Planes;
    use crate::blur::Blur;

    /// Eight-bit RGB is blurred by another implementation.
    #[test]
    fn blur_equals_torchvisions_up_to_rounding() {
        let data: Vec<u8> =
            (0..3 * 17 * 17u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut ours: Vec<f32> = data.iter().map(|byte| f32::from(*byte)).collect();
        BandBlur::default().apply(&mut ours, 17, 9, 1.3);
        let mut planes = Planes { width_px: 17, height_px: 17, data };
        Blur::default().torchvision(&mut planes, 9, 1.3);
        assert!(ours.iter().zip(&planes.data).all(|(a, b)| (a - f32::from(*b)).abs() < 0.51));
    }

    /// A side that is shorter than the radius of the kernel is reflected repeatedly.
    #[test]
    fn a_flat_view_stays_flat() {
        for (side, n_taps) in [(1, 0), (2, 9), (30, 0)] {
            let mut view = vec![40_000.0; 2 * side * side];
            BandBlur::default().apply(&mut view, side, n_taps, 2.0);
            assert!(view.iter().all(|value| (value - 40_000.0).abs() < 0.05), "{side}");
        }
    }
}
