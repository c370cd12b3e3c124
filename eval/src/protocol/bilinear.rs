//! Bilinear interpolation from a grid to pixels, and its transpose.
//!
//! ```text
//! pixel i samples the grid at max((i + 0.5) · g / s - 0.5, 0): PyTorch's `interpolate` with `align_corners=False`
//! ```

/// Interpolation from a grid of g x g cells to s x s pixels, with any number of channels.
pub(super) struct Bilinear {
    side: usize,
    /// For each pixel along a side, the two cells that it is interpolated from, and the weight of
    /// the second.
    taps: Vec<(usize, usize, f32)>,
}

impl Bilinear {
    /// Returns the interpolation from `side` x `side` cells to `size_px` x `size_px` pixels.
    pub(super) fn new(side: usize, size_px: usize) -> Self {
        Self {
            side,
            taps: (0..size_px)
                .map(|pixel: usize| {
                    let at = ((pixel as f32 + 0.5) * side as f32 / size_px as f32 - 0.5).max(0.0);
                    let first = (at as usize).min(side - 1);
                    (first, (first + 1).min(side - 1), at - first as f32)
                })
                .collect(),
        }
    }

    /// Interpolates cells, `[g·g, C]`, to pixels, `[s·s, C]`.
    pub(super) fn up(&self, cells: &[f32], n_channels: usize) -> Vec<f32> {
        let size_px = self.taps.len();
        let c = n_channels;
        let mut out = vec![0.0; size_px * size_px * c];
        let row_len = self.side * c;
        let mut row = vec![0.0; row_len];
        for (y, (top, bottom, share)) in self.taps.iter().enumerate() {
            let top = &cells[top * row_len..(top + 1) * row_len];
            let bottom = &cells[bottom * row_len..(bottom + 1) * row_len];
            for ((out, a), b) in row.iter_mut().zip(top).zip(bottom) {
                *out = a + share * (b - a);
            }
            for (x, (left, right, share)) in self.taps.iter().enumerate() {
                let pixel = &mut out[(y * size_px + x) * c..(y * size_px + x + 1) * c];
                let a = &row[left * c..(left + 1) * c];
                let b = &row[right * c..(right + 1) * c];
                for ((out, a), b) in pixel.iter_mut().zip(a).zip(b) {
                    *out = a + share * (b - a);
                }
            }
        }
        out
    }

    /// Propagates gradients of pixels, `[s·s, C]`, back to gradients of cells, `[g·g, C]`.
    pub(super) fn down(&self, pixels: &[f32], n_channels: usize) -> Vec<f32> {
        let size_px = self.taps.len();
        let c = n_channels;
        let mut out = vec![0.0; self.side * self.side * c];
        let mut row = vec![0.0; self.side * c];
        for (y, (top, bottom, share)) in self.taps.iter().enumerate() {
            row.fill(0.0);
            for (x, (left, right, share)) in self.taps.iter().enumerate() {
                let pixel = &pixels[(y * size_px + x) * c..(y * size_px + x + 1) * c];
                for (channel, value) in pixel.iter().enumerate() {
                    row[left * c + channel] += (1.0 - share) * value;
                    row[right * c + channel] += share * value;
                }
            }
            for (i, value) in row.iter().enumerate() {
                out[top * self.side * c + i] += (1.0 - share) * value;
                out[bottom * self.side * c + i] += share * value;
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values are those of `torch.nn.functional.interpolate(x, 4, mode="bilinear")`
    /// for x = [[0, 1], [2, 3]].
    #[test]
    fn upsampling_equals_pytorch() {
        let up = Bilinear::new(2, 4).up(&[0.0, 1.0, 2.0, 3.0], 1);
        let first = [0.0, 0.25, 0.75, 1.0];
        for (y, add) in [0.0, 0.5, 1.5, 2.0].into_iter().enumerate() {
            let expected: Vec<f32> = first.iter().map(|v| v + add).collect();
            assert_eq!(up[y * 4..(y + 1) * 4], expected, "row {y}");
        }
    }

    fn value(i: usize) -> f32 {
        ((i * 31 % 17) as f32 - 8.0) / 4.0
    }

    fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum()
    }

    #[test]
    fn down_is_the_transpose_of_up() {
        let bilinear = Bilinear::new(3, 7);
        let cells: Vec<f32> = (0..18).map(value).collect();
        let pixels: Vec<f32> = (0..98).map(|i| value(i + 5)).collect();
        let up = dot(&bilinear.up(&cells, 2), &pixels);
        let down = dot(&cells, &bilinear.down(&pixels, 2));
        assert!((up - down).abs() < 1e-4 * up.abs().max(1.0), "{up} {down}");
    }
}
