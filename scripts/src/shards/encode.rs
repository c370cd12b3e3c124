//! Encoding of images as JPEG.

use std::io::Cursor;

use augment::Rgb8;
use image::codecs::jpeg::JpegEncoder;
use image::{ExtendedColorType, ImageEncoder};

/// Encodes a baseline JPEG.
pub(crate) fn jpeg(image: &Rgb8, quality: u8) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Cursor::new(Vec::new());
    let encoder = JpegEncoder::new_with_quality(&mut bytes, quality);
    encoder.write_image(&image.data, image.width_px, image.height_px, ExtendedColorType::Rgb8)?;
    Ok(bytes.into_inner())
}
