//! Crop, then resize, channel by channel, with the filters of Pillow in 32-bit floating point.

use std::ops::Range;

use super::filter::{Taps, transpose};
use super::image::Bands;
use crate::AugmentError;
use crate::coefficients::{Interpolation, Window};
use crate::crop::CropBox;

/// Resizes boxes of images, with scratch memory that is reused.
#[derive(Debug, Default)]
pub(crate) struct PlaneResizer {
    horizontal: Taps,
    vertical: Taps,
    window: Window,
    /// Crop of a channel, and then the resized channel.
    rows: Vec<f32>,
    /// Crop at its new height.
    shortened: Vec<f32>,
    /// Transpose of `shortened`.
    transposed: Vec<f32>,
    /// Transpose of the crop at its new height and width.
    narrowed: Vec<f32>,
}

impl PlaneResizer {
    /// Resizes `crop` of `image` to `size_px`, and computes the box `part` of the result: `[C,
    /// height, width]`.
    ///
    /// # Errors
    /// [`AugmentError::Resize`] when a box is not inside its image.
    pub(crate) fn resize_part(
        &mut self,
        image: &Bands,
        crop: CropBox,
        size_px: [u32; 2],
        part: CropBox,
        interpolation: Interpolation,
    ) -> Result<Vec<f32>, AugmentError> {
        let source_px = [image.width_px, image.height_px];
        if !crop.is_inside(source_px) || !part.is_inside(size_px) {
            return Err(AugmentError::outside(crop, source_px, size_px));
        }
        let window = &mut self.window;
        let columns = part.left_px..part.left_px + part.width_px;
        set_taps(&mut self.horizontal, window, crop.width_px, size_px[0], columns, interpolation);
        let rows = part.top_px..part.top_px + part.height_px;
        set_taps(&mut self.vertical, window, crop.height_px, size_px[1], rows, interpolation);
        let width = crop.width_px as usize;
        let height = crop.height_px as usize;
        let mut out =
            Vec::with_capacity(image.format().n_channels * (part.width_px * part.height_px) as usize);
        for channel in image.channels() {
            self.rows.clear();
            for row in channel.chunks_exact(image.width_px as usize).skip(crop.top_px as usize).take(height) {
                self.rows.extend_from_slice(&row[crop.left_px as usize..][..width]);
            }
            self.vertical.apply(&self.rows, width, &mut self.shortened);
            transpose(&self.shortened, width, &mut self.transposed);
            let height = part.height_px as usize;
            self.horizontal.apply(&self.transposed, height, &mut self.narrowed);
            transpose(&self.narrowed, height, &mut self.rows);
            out.extend_from_slice(&self.rows);
        }
        if let Some(largest) = image.depth.largest() {
            for value in &mut out {
                *value = value.clamp(0.0, largest);
            }
        }
        Ok(out)
    }
}

/// Sets `taps` to those of `outputs` of a resize from `n_in` to `n_out` pixels.
fn set_taps(
    taps: &mut Taps,
    window: &mut Window,
    n_in: u32,
    n_out: u32,
    outputs: Range<u32>,
    interpolation: Interpolation,
) {
    taps.clear();
    for x in outputs {
        let first = window.set(n_in as usize, n_out as usize, x as usize, interpolation);
        taps.push(first, window.normalized().map(|weight| weight as f32));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::{Depth, PixelFormat};
    use crate::resize::BoxResizer;
    use crate::{Planes, Rgb8};

    proptest! {
        /// Eight-bit RGB is resized by another implementation, in fixed point, which rounds and
        /// clamps after each pass: the values are so far from the ends that none is clamped.
        #[test]
        fn resized_values_equal_those_of_rgb_up_to_rounding(
            w in 1u32..60, h in 1u32..60, size in prop::array::uniform2(1u32..50), bilinear: bool, seed: u32,
        ) {
            let mut data = Vec::new();
            for i in 0..3 * w * h {
                data.push(64 + ((i ^ seed).wrapping_mul(2_654_435_761) >> 25) as u8);
            }
            let image = Rgb8::new(w, h, data);
            let planes = Planes::from(&image);
            let bands = Bands::from_bytes(&planes.data, PixelFormat::RGB8, w);
            let interpolation = if bilinear { Interpolation::Bilinear } else { Interpolation::Bicubic };
            let crop = CropBox { left_px: w / 3, top_px: h / 4, width_px: w - w / 3, height_px: h - h / 4 };
            let ours = PlaneResizer::default()
                .resize_part(&bands, crop, size, CropBox::from_size(size), interpolation)
                .expect("inside");
            let mut theirs = Planes::default();
            BoxResizer::default().resize(&image, crop, size, interpolation, &mut theirs).expect("inside");
            for (ours, theirs) in ours.iter().zip(&theirs.data) {
                prop_assert!((ours - f32::from(*theirs)).abs() < 1.3, "{} {}", ours, theirs);
            }
        }
    }

    /// Expected values: `numpy.asarray(Image.fromarray(x).crop((1, 0, 6, 4)).resize((3, 2),
    /// BICUBIC))` for `x[i, j] = (37 i + 11 j²) % 1000`, 4 × 7, in Pillow 13.
    #[test]
    fn values_equal_pillows_in_floating_point() {
        let values: Vec<f32> =
            (0..28).map(|i| ((37 * (i / 7) + 11 * (i % 7) * (i % 7)) % 1000) as f32).collect();
        let bands = Bands { width_px: 7, height_px: 4, depth: Depth::Float, values };
        let crop = CropBox { left_px: 1, top_px: 0, width_px: 5, height_px: 4 };
        let out = PlaneResizer::default()
            .resize_part(&bands, crop, [3, 2], CropBox::from_size([3, 2]), Interpolation::Bicubic)
            .expect("inside");
        assert!(out.iter().zip(PILLOW).all(|(a, b)| (a - b).abs() < 1e-3), "{out:?}");
    }

    const PILLOW: [f32; 6] = [42.3569, 122.8596, 259.6492, 109.9354, 190.4381, 327.2277];
}
