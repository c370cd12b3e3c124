//! Encoding of images as JPEG, and of masks as PNG.

use std::io::Cursor;

use augment::Rgb8;
use image::codecs::jpeg::JpegEncoder;
use image::codecs::png::PngEncoder;
use image::{ExtendedColorType, ImageEncoder};

use crate::error::PrepError;

/// Encodes a baseline JPEG, of one channel, the first, if `is_gray`.
///
/// # Errors
/// [`PrepError::Jpeg`].
pub(crate) fn jpeg(image: &Rgb8, quality: u8, is_gray: bool) -> Result<Vec<u8>, PrepError> {
    let mut bytes = Cursor::new(Vec::new());
    let encoder = JpegEncoder::new_with_quality(&mut bytes, quality);
    let width_px = image.width_px;
    let height_px = image.height_px;
    let written = if is_gray {
        let gray: Vec<u8> = image.data.iter().step_by(3).copied().collect();
        encoder.write_image(&gray, width_px, height_px, ExtendedColorType::L8)
    } else {
        encoder.write_image(&image.data, width_px, height_px, ExtendedColorType::Rgb8)
    };
    written.map_err(PrepError::Jpeg)?;
    Ok(bytes.into_inner())
}

/// Encodes a PNG of one channel, `[h, w]`, such as a mask.
///
/// # Errors
/// [`PrepError::Png`].
pub(crate) fn png_of_one_channel(
    values: &[u8],
    [width_px, height_px]: [u32; 2],
) -> Result<Vec<u8>, PrepError> {
    let mut bytes = Cursor::new(Vec::new());
    let encoder = PngEncoder::new(&mut bytes);
    encoder.write_image(values, width_px, height_px, ExtendedColorType::L8).map_err(PrepError::Png)?;
    Ok(bytes.into_inner())
}
