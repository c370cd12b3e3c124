//! Properties of an image that its header states.

use image::metadata::Orientation;
use image::{ColorType, ImageDecoder, ImageFormat};

use crate::bands::ColorPage;
use crate::decode::reader;
use crate::{AugmentError, DecodeRules, bands, gif, jpeg};

/// Color format of the pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ColorKind {
    /// Three channels.
    Rgb,
    /// One channel, with alpha or without.
    Gray,
    /// Three channels and alpha.
    Rgba,
    /// Four inks.
    Cmyk,
    /// Any number of bands, or an array.
    Bands,
}

/// Properties of an image, from its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Name of the format: `jpeg`, `png`, `webp`, `bmp`, `gif`, `tiff`, `pnm` or `npy`.
    pub format: &'static str,
    /// Number of pixels per row.
    pub width_px: u32,
    /// Number of rows.
    pub height_px: u32,
    /// Color format of the pixels.
    pub color: ColorKind,
    /// `true` for a progressive JPEG, which decodes two to three times slower than a sequential
    /// one.
    pub progressive: bool,
    /// `true` if EXIF states an orientation other than the pixels' own.
    pub turned: bool,
}

/// Reads the properties of an image from its header.
///
/// # Errors
/// [`AugmentError::Decode`] for bytes of another format than
/// [`decode::decode`](crate::decode::decode) reads, or whose header is damaged.
pub fn facts(bytes: &[u8]) -> Result<Facts, AugmentError> {
    if bytes.starts_with(&jpeg::MAGIC) {
        return jpeg_facts(bytes);
    }
    if bytes.starts_with(&gif::MAGIC) {
        let image = gif::FirstImage::open(bytes)?;
        return Ok(Facts {
            format: "gif",
            width_px: image.width_px,
            height_px: image.height_px,
            color: if image.is_transparent() { ColorKind::Rgba } else { ColorKind::Rgb },
            progressive: false,
            turned: false,
        });
    }
    if let Some(page) = ColorPage::open(bytes) {
        let color = if page.is_cmyk() {
            ColorKind::Cmyk
        } else if page.is_gray() {
            ColorKind::Gray
        } else {
            ColorKind::Rgb
        };
        return Ok(Facts {
            format: "tiff",
            width_px: page.width_px,
            height_px: page.height_px,
            color,
            progressive: false,
            turned: page.orientation != Orientation::NoTransforms,
        });
    }
    if let Some(format) = bands::format_of(bytes) {
        return photograph_facts(bytes).or_else(|_| bands_facts(bytes, format));
    }
    photograph_facts(bytes)
}

/// Reads the properties of an image of any number of channels, in `format`.
fn bands_facts(bytes: &[u8], format: &'static str) -> Result<Facts, AugmentError> {
    let header = bands::sample_header(&[bytes], &DecodeRules::default())?;
    Ok(Facts {
        format,
        width_px: header.width_px,
        height_px: header.height_px,
        color: ColorKind::Bands,
        progressive: false,
        turned: false,
    })
}

/// Reads the properties of an image in a format of photographs other than JPEG and GIF.
fn photograph_facts(bytes: &[u8]) -> Result<Facts, AugmentError> {
    let reader = reader(bytes)?;
    let format = match reader.format() {
        Some(ImageFormat::Png) => "png",
        Some(ImageFormat::WebP) => "webp",
        Some(ImageFormat::Bmp) => "bmp",
        Some(ImageFormat::Tiff) => "tiff",
        Some(ImageFormat::Pnm) => "pnm",
        _ => return Err(AugmentError::Decode("not an image of a known format".into())),
    };
    let mut decoder = reader.into_decoder().map_err(|error| AugmentError::Decode(error.to_string()))?;
    let (width_px, height_px) = decoder.dimensions();
    let color = match decoder.color_type() {
        ColorType::L8 | ColorType::L16 | ColorType::La8 | ColorType::La16 => ColorKind::Gray,
        ColorType::Rgba8 | ColorType::Rgba16 | ColorType::Rgba32F => ColorKind::Rgba,
        _ => ColorKind::Rgb,
    };
    let turned = decoder.orientation().is_ok_and(|orientation| orientation != Orientation::NoTransforms);
    Ok(Facts { format, width_px, height_px, color, progressive: false, turned })
}

/// Reads the properties of a JPEG.
fn jpeg_facts(bytes: &[u8]) -> Result<Facts, AugmentError> {
    let header = jpeg::header(bytes)?;
    let color = if header.is_gray {
        ColorKind::Gray
    } else if header.is_cmyk {
        ColorKind::Cmyk
    } else {
        ColorKind::Rgb
    };
    Ok(Facts {
        format: "jpeg",
        width_px: header.width_px,
        height_px: header.height_px,
        color,
        progressive: header.progressive,
        turned: header.turned,
    })
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use image::{DynamicImage, ImageBuffer, Luma, Rgba};
    use proptest::prelude::*;

    fn encode(image: DynamicImage, format: ImageFormat) -> Vec<u8> {
        let mut bytes = Cursor::new(Vec::new());
        image.write_to(&mut bytes, format).expect("in memory");
        bytes.into_inner()
    }

    #[test]
    fn facts_have_format_size_and_color() {
        let gray: DynamicImage = ImageBuffer::from_pixel(12, 7, Luma([9u8])).into();
        let jpeg = facts(&encode(gray, ImageFormat::Jpeg)).expect("a header");
        assert_eq!((jpeg.format, jpeg.width_px, jpeg.height_px), ("jpeg", 12, 7));
        assert_eq!((jpeg.color, jpeg.progressive, jpeg.turned), (ColorKind::Gray, false, false));
        let transparent: DynamicImage = ImageBuffer::from_pixel(3, 4, Rgba([9u8, 9, 9, 0])).into();
        let png = facts(&encode(transparent, ImageFormat::Png)).expect("a header");
        assert_eq!((png.format, png.width_px, png.color), ("png", 3, ColorKind::Rgba));
        assert!(facts(b"GIF89a").is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200), jpeg: bool,
        ) {
            if jpeg && bytes.len() > 4 { bytes[..4].copy_from_slice(&[0xff, 0xd8, 0xff, 0xc2]); }
            let _ = facts(&bytes);
        }
    }
}
