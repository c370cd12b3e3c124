//! A picture that is embedded in the page.

use std::io::Cursor;

use image::codecs::jpeg::JpegEncoder;
use image::imageops::{FilterType, resize};
use image::{ImageFormat, RgbImage};
use serde::Serialize;

use crate::ReportError;
use crate::data_url::data_url;

/// Largest side in pixels; larger pictures are shrunk.
const MAX_PX: u32 = 160;

/// Largest side in pixels of pictures that are encoded without loss, because their single pixels
/// can be seen.
const LOSSLESS_PX: u32 = 64;

const JPEG_QUALITY: u8 = 88;

/// Whether a neighbor has the class of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mark {
    Same,
    Other,
}

/// A picture with its caption.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Tile {
    /// The file as a `data:` URL.
    pub(crate) src: String,
    pub(crate) caption: String,
    /// Mark of a neighbor, if both classes are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mark: Option<Mark>,
    /// The pixels of the file, before they were encoded.
    #[serde(skip)]
    pub(crate) pixels: RgbImage,
}

impl Tile {
    /// Creates a tile of `planes` of `[3, size, size]` bytes.
    pub(crate) fn from_planes(planes: &[u8], size_px: usize, caption: String) -> Result<Self, ReportError> {
        let area = size_px * size_px;
        let picture = RgbImage::from_fn(size_px as u32, size_px as u32, |x, y| {
            let i = y as usize * size_px + x as usize;
            image::Rgb([planes[i], planes[area + i], planes[2 * area + i]])
        });
        Self::from_image(&picture, caption)
    }

    /// Creates a tile of the `pixels` of a grid, row by row.
    pub(crate) fn from_grid(
        pixels: &[[u8; 3]],
        [rows, columns]: [usize; 2],
        caption: String,
    ) -> Result<Self, ReportError> {
        let picture = RgbImage::from_fn(columns as u32, rows as u32, |x, y| {
            image::Rgb(pixels[y as usize * columns + x as usize])
        });
        Self::from_image(&picture, caption)
    }

    /// Creates a tile of an image, shrunk if it is large.
    pub(crate) fn from_image(image: &RgbImage, caption: String) -> Result<Self, ReportError> {
        let (width, height) = image.dimensions();
        let longest = width.max(height);
        let pixels = if longest > MAX_PX {
            let width = (width * MAX_PX / longest).max(1);
            let height = (height * MAX_PX / longest).max(1);
            resize(image, width, height, FilterType::Triangle)
        } else {
            image.clone()
        };
        let mut bytes = Cursor::new(Vec::new());
        let (kind, encoded) = if longest > LOSSLESS_PX {
            let encoder = JpegEncoder::new_with_quality(&mut bytes, JPEG_QUALITY);
            ("jpeg", pixels.write_with_encoder(encoder))
        } else {
            ("png", pixels.write_to(&mut bytes, ImageFormat::Png))
        };
        encoded.map_err(|error| ReportError::Encode(error.to_string()))?;
        let src = data_url(kind, bytes.get_ref());
        Ok(Self { src, caption, mark: None, pixels })
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    fn decoded(tile: &Tile) -> RgbImage {
        let (_, data) = tile.src.split_once(";base64,").unwrap();
        image::load_from_memory(&STANDARD.decode(data).unwrap()).unwrap().to_rgb8()
    }

    #[test]
    fn small_pictures_keep_every_pixel_and_large_ones_shrink() {
        let planes: Vec<u8> = (0..12).map(|v| v * 20).collect();
        let small = decoded(&Tile::from_planes(&planes, 2, String::new()).unwrap());
        assert_eq!(small.get_pixel(1, 0).0, [20, 100, 180]);
        let large = decoded(&Tile::from_image(&RgbImage::new(400, 100), String::new()).unwrap());
        assert_eq!(large.dimensions(), (160, 40));
        let grid = decoded(&Tile::from_grid(&[[1, 2, 3], [4, 5, 6]], [1, 2], String::new()).unwrap());
        assert_eq!((grid.dimensions(), grid.get_pixel(1, 0).0), ((2, 1), [4, 5, 6]));
    }
}
