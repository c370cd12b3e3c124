//! Gaussian blur of torchvision: a fixed number of taps, reflected borders, rounded to 8 bits.
//!
//! torchvision convolves with the outer product of the taps in f32. A pass along rows and one
//! across them yield the same up to f32 rounding.

use multiversion::multiversion;

use crate::Planes;

/// Number of pixels whose sums are kept in registers; a divisor of 96 and 224.
const BLOCK: usize = 32;

/// Scratch memory of [`GaussianBlur::apply`].
#[derive(Debug, Default)]
pub(super) struct GaussianBlur {
    /// Plane after the pass along rows, with its reflected rows above and below; each row is padded
    /// to complete blocks.
    rows: Vec<f32>,
    /// Row with its reflections on both sides, padded to complete blocks.
    padded: Vec<f32>,
}

/// Returns `exp(-x² / 2σ²)` over the `n_taps` integers around 0, normalized.
pub(crate) fn taps(n_taps: usize, sigma: f32) -> Vec<f32> {
    let half = (n_taps / 2) as f32;
    let mut taps = Vec::with_capacity(n_taps);
    for i in 0..n_taps {
        let x = (i as f32 - half) / sigma;
        taps.push((-0.5 * x * x).exp());
    }
    let sum: f32 = taps.iter().sum();
    for tap in &mut taps {
        *tap /= sum;
    }
    taps
}

impl GaussianBlur {
    /// Blurs `image` in place. A side that is shorter than the reach of the kernel is reflected
    /// repeatedly.
    pub(super) fn apply(&mut self, image: &mut Planes, n_taps: usize, sigma: f32) {
        assert!(n_taps % 2 == 1, "a kernel has a center");
        let taps = taps(n_taps, sigma);
        let width = image.width_px as usize;
        for plane in image.channels_mut() {
            self.blur_plane(plane, width, &taps);
        }
    }

    fn blur_plane(&mut self, plane: &mut [u8], width: usize, taps: &[f32]) {
        let radius = taps.len() / 2;
        let height = plane.len() / width;
        let stride = width.next_multiple_of(BLOCK);
        self.rows.resize((height + 2 * radius) * stride, 0.0);
        self.padded.resize(stride + 2 * radius, 0.0);
        for (row, out) in plane.chunks_exact(width).zip(self.rows.chunks_exact_mut(stride).skip(radius)) {
            pad(row, radius, &mut self.padded);
            along_row(taps, &self.padded, out);
        }
        for y in (0..radius).chain(radius + height..height + 2 * radius) {
            let from = (radius + reflect(y as isize - radius as isize, height)) * stride;
            self.rows.copy_within(from..from + stride, y * stride);
        }
        for (y, out) in plane.chunks_exact_mut(width).enumerate() {
            across_rows(taps, &self.rows[y * stride..(y + taps.len()) * stride], stride, out);
        }
    }
}

/// Convolves a padded row with the taps.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn along_row(taps: &[f32], padded: &[f32], out: &mut [f32]) {
    for (index, out) in out.chunks_exact_mut(BLOCK).enumerate() {
        let mut sums = [0.0f32; BLOCK];
        for (tap, weight) in taps.iter().enumerate() {
            add_weighted(&mut sums, *weight, &padded[index * BLOCK + tap..]);
        }
        out.copy_from_slice(&sums);
    }
}

/// Convolves columns with the taps, over as many rows as there are taps, and rounds to bytes.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn across_rows(taps: &[f32], rows: &[f32], stride: usize, out: &mut [u8]) {
    // Adding 2^23 rounds half to even, as torch's `round` does, and leaves the integer in the low
    // bits. The taps sum to one, so that all results fit into a byte.
    const MAGIC: f32 = 8_388_608.0;
    for (index, out) in out.chunks_mut(BLOCK).enumerate() {
        let mut sums = [0.0f32; BLOCK];
        for (row, weight) in rows.chunks_exact(stride).zip(taps) {
            add_weighted(&mut sums, *weight, &row[index * BLOCK..]);
        }
        // Plain loops, because `map` of an array is not inlined into code for wider vectors.
        let mut bytes = [0; BLOCK];
        for (byte, sum) in bytes.iter_mut().zip(&sums) {
            *byte = (*sum + MAGIC).to_bits() as u8;
        }
        out.copy_from_slice(&bytes[..out.len()]);
    }
}

/// Adds `weight` times the first block of `row`. Rows are padded to complete blocks.
#[inline(always)]
fn add_weighted(sums: &mut [f32; BLOCK], weight: f32, row: &[f32]) {
    let Some(row) = row.first_chunk::<BLOCK>() else { return };
    for (sum, value) in sums.iter_mut().zip(row) {
        *sum += weight * value;
    }
}

/// Copies a row into `padded`, with its reflections on both sides.
fn pad(row: &[u8], radius: usize, padded: &mut [f32]) {
    let width = row.len();
    for (out, value) in padded[radius..].iter_mut().zip(row) {
        *out = f32::from(*value);
    }
    for x in 0..radius {
        padded[x] = f32::from(row[reflect(x as isize - radius as isize, width)]);
        padded[radius + width + x] = f32::from(row[reflect((width + x) as isize, width)]);
    }
}

/// Maps `index` into `0..len` by reflection that does not repeat the edge.
pub(crate) fn reflect(index: isize, len: usize) -> usize {
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
            let mut image = Planes { width_px: w, height_px: h, data: vec![value; (3 * w * h) as usize] };
            GaussianBlur::default().apply(&mut image, 9, sigma);
            prop_assert!(image.data.iter().all(|v| *v == value));
        }
    }

    #[test]
    fn an_impulse_becomes_the_kernel() {
        let mut image = Planes { width_px: 21, height_px: 21, data: vec![0; 3 * 21 * 21] };
        let center = 10 * 21 + 10;
        image.data[center] = 255;
        GaussianBlur::default().apply(&mut image, 9, 1.0);
        let taps = taps(9, 1.0);
        for dx in 0..5 {
            let expected = (255.0 * taps[4] * taps[4 + dx]).round() as u8;
            assert_eq!(image.data[center + dx], expected, "dx {dx}");
        }
        assert_eq!(image.data[center + 21 * 21], 0, "channels do not mix");
    }

    #[test]
    fn reflection_does_not_repeat_the_edge() {
        let folded: Vec<usize> = (-4..8).map(|i| reflect(i, 4)).collect();
        assert_eq!(folded, [2, 3, 2, 1, 0, 1, 2, 3, 2, 1, 0, 1]);
    }
}
