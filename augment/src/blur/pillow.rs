//! Pillow's Gaussian blur: three box blurs along rows, then three along columns, each rounded to bytes.
//!
//! ```text
//! box length of a Gaussian of deviation r in n = 3 passes (Gwosdek et al. 2011, equations 7, 11 and 14):
//!     σ² = r² / n,  l = ⌊(√(12 σ² + 1) - 1) / 2⌋,  a = (2l + 1)(l (l + 1) - 3 σ²) / (6 (σ² - (l + 1)²)),  box radius R = l + a
//! one pass, in 24-bit fixed point:  out[x] = (w Σ_{|i| ≤ l} in[x+i] + f (in[x-l-1] + in[x+l+1]) + 2^23) >> 24
//!     w = 2^24 / (2R + 1),  f = (2^24 - (2l + 1) w) / 2
//! ```
//!
//! Outside the image lie copies of its edge.

use multiversion::multiversion;

use crate::Planes;

/// Box blurs of a direction.
const N_PASSES: usize = 3;

/// Pixels whose sums are kept in registers. It divides 96 and 224.
const BLOCK: usize = 32;

/// Scratch memory of [`BoxBlur::apply`].
#[derive(Debug, Default)]
pub(super) struct BoxBlur {
    /// A row between copies of its ends, padded to whole blocks: what a pass reads, and what it writes.
    rows: [Vec<u8>; 2],
    /// A plane, likewise between copies of its first and last row.
    planes: [Vec<u8>; 2],
}

/// A box of fractional length.
#[derive(Debug, Clone, Copy)]
struct BoxKernel {
    /// l: whole pixels to either side of the center.
    whole: usize,
    /// w, of the 2l + 1 pixels in the middle.
    weight: u32,
    /// f, of the two pixels at the ends.
    end_weight: u32,
}

impl BoxKernel {
    /// The box whose three passes are a Gaussian of deviation `radius`. Types are those of Pillow's C, so that it rounds alike.
    fn of_gaussian(radius: f32) -> Self {
        let variance = radius * radius / N_PASSES as f32;
        let length = (12.0 * f64::from(variance) + 1.0).sqrt() as f32;
        let whole = ((f64::from(length) - 1.0) / 2.0).floor() as f32;
        let fraction = (2.0 * whole + 1.0) * (whole * (whole + 1.0) - 3.0 * variance);
        let fraction = fraction / (6.0 * (variance - (whole + 1.0) * (whole + 1.0)));
        let box_radius = whole + fraction;
        let whole = box_radius as usize;
        let weight = ((1 << 24) as f32 / (box_radius * 2.0 + 1.0)) as u32;
        Self { whole, weight, end_weight: ((1 << 24) - (2 * whole as u32 + 1) * weight) / 2 }
    }

    /// Pixels to either side that a pass reads.
    fn reach(self) -> usize {
        self.whole + 1
    }
}

impl BoxBlur {
    /// Blurs `image` in place.
    pub(super) fn apply(&mut self, image: &mut Planes, radius: f32) {
        let kernel = BoxKernel::of_gaussian(radius);
        let width = image.width_px as usize;
        image.channels_mut().into_iter().for_each(|plane| self.plane(plane, width, kernel));
    }

    fn plane(&mut self, plane: &mut [u8], width: usize, kernel: BoxKernel) {
        let (height, reach) = (plane.len() / width, kernel.reach());
        let stride = width.next_multiple_of(BLOCK);
        self.rows.iter_mut().for_each(|row| row.resize(stride + 2 * reach, 0));
        self.planes.iter_mut().for_each(|plane| plane.resize((height + 2 * reach) * stride, 0));
        let [from, to] = &mut self.rows;
        let [first, second] = &mut self.planes;
        for (y, row) in plane.chunks_exact(width).enumerate() {
            from[reach..][..width].copy_from_slice(row);
            for _ in 0..N_PASSES {
                repeat_ends(from, 1, width, reach);
                box_pass(from, 1, kernel, &mut to[reach..][..stride]);
                std::mem::swap(from, to);
            }
            first[(reach + y) * stride..][..width].copy_from_slice(&from[reach..][..width]);
        }
        for _ in 0..N_PASSES {
            repeat_ends(first, stride, height, reach);
            for y in 0..height {
                let rows = &first[y * stride..][..(2 * reach + 1) * stride];
                box_pass(rows, stride, kernel, &mut second[(reach + y) * stride..][..stride]);
            }
            std::mem::swap(first, second);
        }
        for (y, row) in plane.chunks_exact_mut(width).enumerate() {
            row.copy_from_slice(&first[(reach + y) * stride..][..width]);
        }
    }
}

/// Copies the first and the last of `n` items of `item_len` bytes into the `reach` places before and behind them.
fn repeat_ends(items: &mut [u8], item_len: usize, n: usize, reach: usize) {
    for i in 0..reach {
        let item = |index: usize| index * item_len..(index + 1) * item_len;
        items.copy_within(item(reach), i * item_len);
        items.copy_within(item(reach + n - 1), (reach + n + i) * item_len);
    }
}

/// One pass for `out`: its first pixel is in the middle of the 2·reach + 1 that begin `items`, `step` bytes from one another.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn box_pass(items: &[u8], step: usize, kernel: BoxKernel, out: &mut [u8]) {
    let last = 2 * kernel.whole + 2;
    for (number, out) in out.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
        let block =
            |tap: usize| items.get(number * BLOCK + tap * step..).and_then(<[u8]>::first_chunk::<BLOCK>);
        let (mut middle, mut ends) = ([0u16; BLOCK], [0u16; BLOCK]);
        for tap in 1..last {
            add(&mut middle, block(tap));
        }
        add(&mut ends, block(0));
        add(&mut ends, block(last));
        for ((out, middle), ends) in out.iter_mut().zip(&middle).zip(&ends) {
            let sum = u32::from(*middle) * kernel.weight + u32::from(*ends) * kernel.end_weight;
            *out = ((sum + (1 << 23)) >> 24) as u8;
        }
    }
}

#[inline(always)]
fn add(sums: &mut [u16; BLOCK], block: Option<&[u8; BLOCK]>) {
    let Some(block) = block else { return };
    for (sum, value) in sums.iter_mut().zip(block) {
        *sum += u16::from(*value);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_flat_image_stays_flat(value: u8, w in 1u32..70, h in 1u32..20, radius in 0.05f32..30.0) {
            let mut image = Planes { width_px: w, height_px: h, data: vec![value; (3 * w * h) as usize] };
            BoxBlur::default().apply(&mut image, radius);
            prop_assert!(image.data.iter().all(|v| *v == value));
        }
    }

    #[test]
    fn boxes_of_known_gaussians() {
        let kernel = |radius: f32| {
            let kernel = BoxKernel::of_gaussian(radius);
            let length = f64::from(1 << 24) / f64::from(kernel.weight);
            (kernel.whole, (length * 100.0).round() / 100.0)
        };
        // Three boxes of length d have the variance (d² - 1) / 4: of 2 that of 0.75.
        assert_eq!(kernel(2f32.sqrt()), (1, 3.0));
        assert_eq!(kernel(0.1).0, 0);
        assert_eq!(kernel(2.0).0, 1);
        assert_eq!(kernel(6f32.sqrt()), (2, 5.0));
    }
}
