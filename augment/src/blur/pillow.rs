//! Gaussian blur of Pillow: three box blurs along rows, then three along columns, each rounded to
//! bytes.
//!
//! ```text
//! box length of a Gaussian of deviation r in n = 3 passes (Gwosdek et al. 2011, equations 7, 11 and 14):
//!     σ² = r² / n,  l = ⌊(√(12 σ² + 1) - 1) / 2⌋,  a = (2l + 1)(l (l + 1) - 3 σ²) / (6 (σ² - (l + 1)²)),  box radius R = l + a
//! one pass, in 24-bit fixed point:  out[x] = (w Σ_{|i| ≤ l} in[x+i] + f (in[x-l-1] + in[x+l+1]) + 2^23) >> 24
//!     w = 2^24 / (2R + 1),  f = (2^24 - (2l + 1) w) / 2
//! ```
//!
//! Pixels outside the image are copies of its edge.

use super::box_kernel::{BoxKernel, N_PASSES};
use super::box_pass::{BLOCK, box_pass};
use crate::Planes;

/// Scratch memory of [`BoxBlur::apply`]: the input and the output of a pass. Each is a plane with a
/// border as wide as the reach of the kernel, so that one pass over all of its bytes covers all
/// rows.
#[derive(Debug, Default)]
pub(super) struct BoxBlur([Vec<u8>; 2]);

impl BoxBlur {
    /// Blurs `image` in place.
    pub(super) fn apply(&mut self, image: &mut Planes, radius: f32) {
        let kernel = BoxKernel::from_gaussian(radius);
        let width = image.width_px as usize;
        for plane in image.channels_mut() {
            self.blur_plane(plane, width, kernel);
        }
    }

    fn blur_plane(&mut self, plane: &mut [u8], width: usize, kernel: BoxKernel) {
        let height = plane.len() / width;
        let reach = kernel.reach();
        let stride = width + 2 * reach;
        // Position of the first pixel inside the border.
        let start = reach * stride + reach;
        let Self([from, to]) = self;
        // Complete blocks are written, which may extend past the end of the last row.
        let len = (height + 2 * reach) * stride + BLOCK;
        from.resize(len, 0);
        to.resize(len, 0);
        for (y, row) in plane.chunks_exact(width).enumerate() {
            from[start + y * stride..][..width].copy_from_slice(row);
        }
        let n_bytes = (height * stride - 2 * reach).next_multiple_of(BLOCK);
        for _ in 0..N_PASSES {
            for y in 0..height {
                let row = &mut from[(reach + y) * stride..][..stride];
                let left = row[reach];
                let right = row[reach + width - 1];
                row[..reach].fill(left);
                row[reach + width..].fill(right);
            }
            box_pass(&from[reach * stride..], 1, kernel, &mut to[start..][..n_bytes]);
            std::mem::swap(from, to);
        }
        for _ in 0..N_PASSES {
            let first_row = reach * stride;
            let last_row = (reach + height - 1) * stride;
            for i in 0..reach {
                from.copy_within(first_row..first_row + stride, i * stride);
                from.copy_within(last_row..last_row + stride, (reach + height + i) * stride);
            }
            box_pass(&from[reach..], stride, kernel, &mut to[start..][..n_bytes]);
            std::mem::swap(from, to);
        }
        for (y, row) in plane.chunks_exact_mut(width).enumerate() {
            row.copy_from_slice(&from[start + y * stride..][..width]);
        }
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
}
