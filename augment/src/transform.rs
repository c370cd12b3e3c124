//! Transform of images for evaluation and deployment: torchvision's `Resize` and `CenterCrop`, on
//! bytes.
//!
//! ```text
//! [h, w] → the short side becomes r, the long one ⌊r · long / short⌋: bicubic, antialiased, rounded to 8 bits
//!        → the square of side s whose corner is at round((side - s) / 2), halves to even
//! ```

use serde::{Deserialize, Serialize};

use crate::bands::{PlaneResizer, store};
use crate::coefficients::Interpolation;
use crate::crop::CropBox;
use crate::error::AugmentError;
use crate::image::Image;
use crate::pixels::Rgb8;
use crate::planes::Planes;
use crate::resize::BoxResizer;

/// Largest side of the square.
const MAX_PX: u32 = 4096;

/// A resize and a central crop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transform {
    /// Length of the short side after the resize.
    pub resize_px: u32,
    /// Side of the central square.
    pub size_px: u32,
}

impl Transform {
    /// Creates the transform of DINO's and DINOv2's evaluations for squares of `size_px`: the short
    /// side becomes 256 px for 224, and in proportion for other sizes.
    pub fn new(size_px: u32) -> Self {
        Self { resize_px: (f64::from(size_px) * 256.0 / 224.0).round() as u32, size_px }
    }

    /// Creates the transform with a short side of `resize_px` and a square of `size_px`.
    ///
    /// # Errors
    /// A message if the square is larger than the short side.
    pub fn with_resize(resize_px: u32, size_px: u32) -> Result<Self, String> {
        if resize_px < size_px {
            return Err(format!("the crop ({size_px} px) is larger than the resized image ({resize_px} px)"));
        }
        Ok(Self { resize_px, size_px })
    }

    /// Checks the sizes.
    ///
    /// # Errors
    /// A message that states the invalid sizes.
    pub fn validate(&self) -> Result<(), String> {
        let Self { resize_px, size_px } = *self;
        if (1..=MAX_PX).contains(&size_px) && (1..=2 * MAX_PX).contains(&resize_px) {
            Ok(())
        } else {
            Err(format!(
                "images are resized to {resize_px} px and cropped to {size_px} px, which must lie in 1..={} \
                 and 1..={MAX_PX}",
                2 * MAX_PX
            ))
        }
    }

    /// Applies the transform to `image`: `[3, s, s]` bytes.
    ///
    /// # Errors
    /// [`AugmentError::Resize`] if the image has no pixels.
    pub fn apply(&self, image: &Rgb8) -> Result<Vec<u8>, AugmentError> {
        let source_px = [image.width_px, image.height_px];
        let (resized_px, part) = self.part(source_px);
        let mut out = Planes::default();
        let full = CropBox::from_size(source_px);
        let bicubic = Interpolation::Bicubic;
        BoxResizer::default().resize_part(image, full, resized_px, part, bicubic, &mut out)?;
        Ok(out.data)
    }

    /// Applies the transform to `image` of any format: `[C, s, s]`, as bytes or as values of
    /// several bytes, the lowest first.
    ///
    /// # Errors
    /// [`AugmentError::Resize`] if the image has no pixels.
    pub fn apply_to(&self, image: &Image) -> Result<Vec<u8>, AugmentError> {
        let bands = match image {
            Image::Rgb(image) => return self.apply(image),
            Image::Bands(bands) => bands,
        };
        let (resized_px, part) = self.part(image.size_px());
        let full = CropBox::from_size(image.size_px());
        let bicubic = Interpolation::Bicubic;
        let values = PlaneResizer::default().resize_part(bands, full, resized_px, part, bicubic)?;
        let mut out = Vec::with_capacity(values.len() * bands.depth.bytes());
        store(&values, bands.depth, &mut out);
        Ok(out)
    }

    /// Returns the resized width and height of an image of `source_px`, and the square in it.
    fn part(&self, source_px: [u32; 2]) -> ([u32; 2], CropBox) {
        let (resized_px, corner_px) = self.placement(source_px);
        let [left_px, top_px] = corner_px.map(|corner| corner as u32);
        (resized_px, CropBox { left_px, top_px, width_px: self.size_px, height_px: self.size_px })
    }

    /// Returns the resized width and height of an image of `source_px`, and the upper left corner
    /// of the square in it.
    pub fn placement(&self, source_px: [u32; 2]) -> ([u32; 2], [i64; 2]) {
        let resized_px = self.resized(source_px);
        let corner_px = resized_px
            .map(|side| ((f64::from(side) - f64::from(self.size_px)) / 2.0).round_ties_even() as i64);
        (resized_px, corner_px)
    }

    /// Returns the width and height after the resize.
    fn resized(&self, [width_px, height_px]: [u32; 2]) -> [u32; 2] {
        if width_px <= height_px {
            [self.resize_px, self.long_side(height_px, width_px)]
        } else {
            [self.long_side(width_px, height_px), self.resize_px]
        }
    }

    /// Returns the length of the long side after the resize, given both sides before it.
    fn long_side(&self, long: u32, short: u32) -> u32 {
        // Python's `int(size * long / short)`: the product is exact, and the quotient is rounded
        // once.
        ((u64::from(self.resize_px) * u64::from(long)) as f64 / f64::from(short.max(1))) as u32
    }
}

/// Resizes the whole of `image` to a square of `size_px`, whatever its aspect ratio: bicubic,
/// antialiased, `[C, size, size]`, as bytes or as values of several bytes, the lowest first.
///
/// # Errors
/// [`AugmentError::Resize`] if the image has no pixels.
pub fn squashed(image: &Image, size_px: u32) -> Result<Vec<u8>, AugmentError> {
    let full = CropBox::from_size(image.size_px());
    let square_px = [size_px; 2];
    let bicubic = Interpolation::Bicubic;
    let bands = match image {
        Image::Rgb(image) => {
            let mut out = Planes::default();
            BoxResizer::default().resize(image, full, square_px, bicubic, &mut out)?;
            return Ok(out.data);
        }
        Image::Bands(bands) => bands,
    };
    let square = CropBox::from_size(square_px);
    let values = PlaneResizer::default().resize_part(bands, full, square_px, square, bicubic)?;
    let mut out = Vec::with_capacity(values.len() * bands.depth.bytes());
    store(&values, bands.depth, &mut out);
    Ok(out)
}

/// Formats the transform in torchvision's terms: `Resize(256, bicubic), CenterCrop(224)`.
impl std::fmt::Display for Transform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Resize({}, bicubic), CenterCrop({})", self.resize_px, self.size_px)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resize_to_the_same_size_is_the_identity() {
        let image = Rgb8::new(8, 8, (0..192).collect());
        let planes = Transform::with_resize(8, 8).expect("a square").apply(&image).expect("a square");
        assert_eq!(planes, Planes::from(&image).data);
        assert_ne!(Transform::new(8).apply(&image).expect("a square"), planes);
    }

    /// A very elongated image would become millions of pixels long; only the square is computed.
    #[test]
    fn long_images_are_cropped_before_they_are_resized() {
        let image = Rgb8::new(60_000, 1, vec![7; 180_000]);
        let planes = Transform::new(224).apply(&image).expect("a square");
        assert_eq!(planes, vec![7; 3 * 224 * 224]);
    }

    #[test]
    fn an_image_of_any_shape_becomes_a_square() {
        let image = Rgb8::new(8, 8, (0..192).collect());
        let planes = squashed(&image.clone().into(), 8).expect("a square");
        assert_eq!(planes, Planes::from(&image).data);
        // The left half is dark, the right half bright.
        let halves: Vec<u8> = (0..2 * 40).flat_map(|i| [if i % 40 < 20 { 10 } else { 200 }; 3]).collect();
        let planes = squashed(&Rgb8::new(40, 2, halves).into(), 4).expect("a square");
        for row in planes.chunks_exact(4) {
            assert!(row[0] < 40 && row[3] > 160, "{row:?}");
        }
    }

    #[test]
    fn a_square_larger_than_the_short_side_is_an_error() {
        assert!(Transform::with_resize(200, 224).is_err());
    }
}
