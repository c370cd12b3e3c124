//! Crop, then resize with Pillow's bicubic (Catmull-Rom, a = -0.5, always antialiased).
//!
//! The filter clamps at the edges of the crop, as it does when torchvision crops first.
//! `fast_image_resize` rounds its coefficients to 16 bits and runs the vertical pass first, so that
//! most bytes equal Pillow's and the rest differ by a few levels.

use fast_image_resize::images::{CroppedImage, Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};
use serde::{Deserialize, Serialize};

use crate::crop::CropBox;
use crate::{AugmentError, Rgb8};

/// Interpolation of a resize.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Interpolation {
    /// Catmull-Rom: the DINO family.
    #[default]
    Bicubic,
    /// Triangle filter: SwAV, SimCLR, MoCo.
    Bilinear,
}

/// Resizes boxes of images and keeps its scratch memory between calls.
#[derive(Default)]
pub struct BoxResizer(Resizer);

impl BoxResizer {
    /// Resizes `crop` of `image` into `out`, which becomes `width_px` x `height_px`.
    ///
    /// # Errors
    /// [`AugmentError::Resize`] when the box does not lie inside the image.
    pub fn resize(
        &mut self,
        image: &Rgb8,
        crop: CropBox,
        [width_px, height_px]: [u32; 2],
        interpolation: Interpolation,
        out: &mut Rgb8,
    ) -> Result<(), AugmentError> {
        let failed = |error: String| AugmentError::Resize(error);
        out.width_px = width_px;
        out.height_px = height_px;
        out.data.resize(3 * width_px as usize * height_px as usize, 0);
        let whole = ImageRef::new(image.width_px, image.height_px, &image.data, PixelType::U8x3)
            .map_err(|error| failed(error.to_string()))?;
        let source = CroppedImage::new(&whole, crop.left_px, crop.top_px, crop.width_px, crop.height_px)
            .map_err(|error| failed(error.to_string()))?;
        let mut target = Image::from_slice_u8(width_px, height_px, &mut out.data, PixelType::U8x3)
            .map_err(|error| failed(error.to_string()))?;
        let filter = match interpolation {
            Interpolation::Bicubic => FilterType::CatmullRom,
            Interpolation::Bilinear => FilterType::Bilinear,
        };
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(filter));
        self.0.resize(&source, &mut target, &options).map_err(|error| failed(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gradient(width_px: u32, height_px: u32) -> Rgb8 {
        let data = (0..height_px)
            .flat_map(|y| (0..width_px).flat_map(move |x| [x as u8 * 3, y as u8 * 3, 77]))
            .collect();
        Rgb8::new(width_px, height_px, data)
    }

    #[test]
    fn the_same_size_is_a_copy_of_the_box() {
        let image = gradient(20, 10);
        let crop = CropBox { left_px: 3, top_px: 2, width_px: 5, height_px: 4 };
        let mut out = Rgb8::default();
        BoxResizer::default().resize(&image, crop, [5, 4], Interpolation::Bicubic, &mut out).expect("inside");
        assert_eq!(&out.data[..3], [9, 6, 77]);
        assert_eq!(&out.data[3 * 19..], [21, 15, 77]);
    }

    /// What lies outside the box must not leak in: the filter clamps at the crop's edge.
    #[test]
    fn pixels_outside_the_box_do_not_count() {
        let mut image = gradient(40, 40);
        let crop = CropBox { left_px: 10, top_px: 10, width_px: 12, height_px: 9 };
        let (mut a, mut b) = (Rgb8::default(), Rgb8::default());
        let mut resizer = BoxResizer::default();
        resizer.resize(&image, crop, [7, 7], Interpolation::Bicubic, &mut a).expect("inside");
        for y in 0..40 {
            for x in 0..40 {
                if !(10..22).contains(&x) || !(10..19).contains(&y) {
                    image.data[3 * (y * 40 + x)] = 255;
                }
            }
        }
        resizer.resize(&image, crop, [7, 7], Interpolation::Bicubic, &mut b).expect("inside");
        assert_eq!(a, b);
    }

    #[test]
    fn a_box_outside_the_image_is_an_error() {
        let crop = CropBox { left_px: 15, top_px: 0, width_px: 10, height_px: 4 };
        let result = BoxResizer::default().resize(
            &gradient(20, 10),
            crop,
            [5, 5],
            Interpolation::Bicubic,
            &mut Rgb8::default(),
        );
        assert!(result.is_err());
    }
}
