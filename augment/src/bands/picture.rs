//! PNG, JPEG and the other formats of photographs as channels: one for gray, three for RGB, and an
//! additional one for alpha.

use std::io::Cursor;

use image::metadata::Orientation;
use image::{ColorType, DynamicImage, ImageDecoder, ImageReader};

use super::layer::{Header, Kind, Layer, Shape, check_shape, to_channels_first};
use crate::{AugmentError, DecodeRules};

/// Decodes an image with its own channels and depth.
pub(super) fn decode(bytes: &[u8], rules: &DecodeRules) -> Result<Layer, AugmentError> {
    let mut decoder = open(bytes)?;
    let (shape, _) = shape_and_kind(&decoder);
    check_shape(rules, shape)?;
    let orientation = if rules.apply_exif {
        decoder.orientation().unwrap_or(Orientation::NoTransforms)
    } else {
        Orientation::NoTransforms
    };
    let mut image = DynamicImage::from_decoder(decoder).map_err(broken)?;
    image.apply_orientation(orientation);
    let width_px = image.width();
    let height_px = image.height();
    let pixels: Vec<f32> = match image {
        DynamicImage::ImageLuma16(image) => to_f32(image.as_raw()),
        DynamicImage::ImageLumaA16(image) => to_f32(image.as_raw()),
        DynamicImage::ImageRgb16(image) => to_f32(image.as_raw()),
        DynamicImage::ImageRgba16(image) => to_f32(image.as_raw()),
        DynamicImage::ImageRgb32F(image) => image.into_raw(),
        DynamicImage::ImageRgba32F(image) => image.into_raw(),
        image => image.as_bytes().iter().map(|byte| f32::from(*byte)).collect(),
    };
    let values = to_channels_first(&pixels, shape.n_channels);
    Ok(Layer { shape: Shape { width_px, height_px, ..shape }, values })
}

/// Returns the shape and the type of an image, from its header.
pub(super) fn header(bytes: &[u8]) -> Result<Header, AugmentError> {
    let (shape, kind) = shape_and_kind(&open(bytes)?);
    Ok(Header { shape, kind, n_pages: 1 })
}

fn open(bytes: &[u8]) -> Result<impl ImageDecoder, AugmentError> {
    let reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format();
    reader.map_err(|error| AugmentError::Decode(error.to_string()))?.into_decoder().map_err(broken)
}

fn shape_and_kind(decoder: &impl ImageDecoder) -> (Shape, Kind) {
    let (width_px, height_px) = decoder.dimensions();
    let color = decoder.color_type();
    let kind = match color {
        ColorType::L16 | ColorType::La16 | ColorType::Rgb16 | ColorType::Rgba16 => Kind::Sixteen,
        ColorType::Rgb32F | ColorType::Rgba32F => Kind::Other,
        _ => Kind::Eight,
    };
    (Shape { width_px, height_px, n_channels: usize::from(color.channel_count()) }, kind)
}

fn broken(error: image::ImageError) -> AugmentError {
    AugmentError::Decode(error.to_string())
}

fn to_f32(values: &[u16]) -> Vec<f32> {
    values.iter().map(|value| f32::from(*value)).collect()
}
