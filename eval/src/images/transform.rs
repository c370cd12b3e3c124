//! How evaluation sees an image: torchvision's `Resize` and `CenterCrop`, on bytes.
//!
//! ```text
//! [h, w] → the short side becomes r, the long one ⌊r · long / short⌋: bicubic, antialiased, rounded to 8 bits
//!        → the square of side s whose corner is at round((side - s) / 2), halves to even
//! ```

use augment::crop::CropBox;
use augment::resize::BoxResizer;
use augment::{AugmentError, Interpolation, Planes, Rgb8};
use serde::{Deserialize, Serialize};

/// A resize and a central crop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transform {
    /// Length of the short side after the resize.
    pub resize_px: u32,
    /// Side of the square that is cut out.
    pub size_px: u32,
    /// Whether images of `size_px` x `size_px` are taken as they are: thumbnails such as CIFAR's.
    pub keeps_exact: bool,
}

impl Transform {
    /// DINO's for images of `size_px`: 256 for 224 and in proportion, and nothing for images that are that size already.
    pub fn new(size_px: u32) -> Self {
        Self { resize_px: (f64::from(size_px) * 256.0 / 224.0).round() as u32, size_px, keeps_exact: true }
    }

    /// The short side goes to `resize_px`, whatever the image.
    ///
    /// # Errors
    /// In words, when the square is larger.
    pub fn resizing(resize_px: u32, size_px: u32) -> Result<Self, String> {
        if resize_px < size_px {
            return Err(format!("the crop ({size_px} px) is larger than the resized image ({resize_px} px)"));
        }
        Ok(Self { resize_px, size_px, keeps_exact: false })
    }

    /// `[3, s, s]` bytes of `image`.
    ///
    /// # Errors
    /// [`AugmentError::Resize`] for an image without pixels.
    pub fn apply(&self, image: &Rgb8) -> Result<Vec<u8>, AugmentError> {
        let source_px = [image.width_px, image.height_px];
        let side_px = self.size_px;
        let (resized_px, corner_px) = self.place(source_px);
        let [left_px, top_px] = corner_px.map(|corner| corner as u32);
        let part = CropBox { left_px, top_px, width_px: side_px, height_px: side_px };
        let mut out = Planes::default();
        let whole = CropBox::whole(source_px);
        BoxResizer::default().resize_part(
            image,
            whole,
            resized_px,
            part,
            Interpolation::Bicubic,
            &mut out,
        )?;
        Ok(out.data)
    }

    /// Width and height after the resize of an image of `source_px`, and the left upper corner of the square within.
    pub(super) fn place(&self, source_px: [u32; 2]) -> ([u32; 2], [i64; 2]) {
        let resized_px = match self.keeps_exact && source_px == [self.size_px; 2] {
            true => source_px,
            false => self.resized(source_px),
        };
        let corner = |side: u32| ((f64::from(side) - f64::from(self.size_px)) / 2.0).round_ties_even() as i64;
        (resized_px, resized_px.map(corner))
    }

    /// Width and height after the resize.
    fn resized(&self, [width_px, height_px]: [u32; 2]) -> [u32; 2] {
        // As Python's `int(size * long / short)`, whose product is exact and whose quotient is rounded once.
        let long = |long: u32, short: u32| {
            ((u64::from(self.resize_px) * u64::from(long)) as f64 / f64::from(short.max(1))) as u32
        };
        match width_px <= height_px {
            true => [self.resize_px, long(height_px, width_px)],
            false => [long(width_px, height_px), self.resize_px],
        }
    }
}

/// As torchvision writes it: `Resize(256), CenterCrop(224)`.
impl std::fmt::Display for Transform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Resize({}, bicubic), CenterCrop({})", self.resize_px, self.size_px)?;
        if self.keeps_exact {
            write!(f, "; images of {0} x {0} px as they are", self.size_px)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_images_are_taken_as_they_are() {
        let image = Rgb8::new(8, 8, (0..192).collect());
        let planes = Transform::new(8).apply(&image).expect("a square");
        assert_eq!(planes[..3], [0, 3, 6]);
        assert_ne!(Transform::resizing(9, 8).expect("smaller").apply(&image).expect("a square"), planes);
    }

    /// A needle becomes millions of pixels long, of which the square alone is made.
    #[test]
    fn long_images_are_cut_before_they_are_made() {
        let image = Rgb8::new(60_000, 1, vec![7; 180_000]);
        let planes = Transform::new(224).apply(&image).expect("a square");
        assert_eq!(planes, vec![7; 3 * 224 * 224]);
    }

    #[test]
    fn a_square_larger_than_the_side_is_refused() {
        assert!(Transform::resizing(200, 224).is_err());
    }
}
