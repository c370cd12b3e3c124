//! torchvision's Gaussian blur: nine taps a side, reflected borders, rounded to 8 bits.
//!
//! torchvision convolves with the 9 x 9 outer product; two passes of nine taps give the same up to
//! the rounding of f32 before the last `round`, so that a byte may differ by one level.

use crate::Rgb8;

/// Taps to either side of the center.
const RADIUS: usize = 4;
const N_TAPS: usize = 2 * RADIUS + 1;

/// Scratch memory of [`GaussianBlur::apply`].
#[derive(Debug, Default)]
pub struct GaussianBlur {
    rows: Vec<f32>,
    padded: Vec<f32>,
}

/// `exp(-x² / 2σ²)` over `x` in -4..=4, normalised.
pub fn taps(sigma: f32) -> [f32; N_TAPS] {
    let weights: [f32; N_TAPS] = std::array::from_fn(|i| {
        let x = (i as f32 - RADIUS as f32) / sigma;
        (-0.5 * x * x).exp()
    });
    let sum: f32 = weights.iter().sum();
    weights.map(|w| w / sum)
}

impl GaussianBlur {
    /// Blurs `image` in place. Sides shorter than five pixels cannot be reflected by four; there
    /// the border is reflected again.
    pub fn apply(&mut self, image: &mut Rgb8, sigma: f32) {
        let taps = taps(sigma);
        let (width, height) = (image.width_px as usize, image.height_px as usize);
        let stride = 3 * width;
        self.rows.clear();
        self.rows.resize(height * stride, 0.0);
        self.padded.clear();
        self.padded.resize(stride + 6 * RADIUS, 0.0);
        for (row, out) in image.data.chunks_exact(stride).zip(self.rows.chunks_exact_mut(stride)) {
            pad_row(row, width, &mut self.padded);
            convolve(&taps, out, |tap| &self.padded[3 * tap..3 * tap + stride]);
        }
        // The padded row has done its work and serves as the sum of the second pass.
        let sums = &mut self.padded[..stride];
        for (y, out) in image.data.chunks_exact_mut(stride).enumerate() {
            convolve(&taps, sums, |tap| {
                let row = reflect(y as isize + tap as isize - RADIUS as isize, height);
                &self.rows[row * stride..(row + 1) * stride]
            });
            for (byte, sum) in out.iter_mut().zip(sums.iter()) {
                *byte = sum.round_ties_even() as u8;
            }
        }
    }
}

/// `out = Σ taps[k] · row(k)`, with the taps as the outer loop so that the inner one is a plain
/// multiply-add over a row.
fn convolve<'a>(taps: &[f32; N_TAPS], out: &mut [f32], row: impl Fn(usize) -> &'a [f32]) {
    out.fill(0.0);
    for (k, weight) in taps.iter().enumerate() {
        for (sum, value) in out.iter_mut().zip(row(k)) {
            *sum += weight * value;
        }
    }
}

fn pad_row(row: &[u8], width: usize, padded: &mut [f32]) {
    for (x, out) in padded.chunks_exact_mut(3).enumerate() {
        let from = 3 * reflect(x as isize - RADIUS as isize, width);
        for (out, value) in out.iter_mut().zip(&row[from..from + 3]) {
            *out = f32::from(*value);
        }
    }
}

/// The index that reflection without repeating the edge maps `index` to.
fn reflect(index: isize, len: usize) -> usize {
    if len == 1 {
        return 0;
    }
    let period = 2 * (len as isize - 1);
    let folded = index.rem_euclid(period);
    folded.min(period - folded) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_flat_image_stays_flat(value: u8, w in 1u32..20, h in 1u32..20, sigma in 0.1f32..2.0) {
            let mut image = Rgb8::new(w, h, vec![value; (3 * w * h) as usize]);
            GaussianBlur::default().apply(&mut image, sigma);
            prop_assert!(image.data.iter().all(|v| *v == value));
        }
    }

    #[test]
    fn an_impulse_becomes_the_kernel() {
        let mut image = Rgb8::new(21, 21, vec![0; 3 * 21 * 21]);
        let center = 3 * (10 * 21 + 10);
        image.data[center] = 255;
        GaussianBlur::default().apply(&mut image, 1.0);
        let taps = taps(1.0);
        for dx in 0..5 {
            let expected = (255.0 * taps[4] * taps[4 + dx]).round() as u8;
            assert_eq!(image.data[center + 3 * dx], expected, "dx {dx}");
        }
        assert_eq!(image.data[center + 1], 0, "channels do not mix");
    }

    #[test]
    fn reflection_does_not_repeat_the_edge() {
        let folded: Vec<usize> = (-4..8).map(|i| reflect(i, 4)).collect();
        assert_eq!(folded, [2, 3, 2, 1, 0, 1, 2, 3, 2, 1, 0, 1]);
    }
}
