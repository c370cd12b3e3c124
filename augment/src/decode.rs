//! Decoding of encoded images to 8-bit RGB.
//!
//! Rules for formats other than 8-bit RGB: gray is copied into three channels; alpha is dropped, as
//! Pillow's `convert("RGB")` does, unless there is a background color; 16-bit channels keep their
//! high byte; CMYK and YCCK JPEGs are converted as Pillow does; color profiles are ignored. EXIF
//! orientation is not applied, as in the reference recipes, unless it is enabled.

use std::io::Cursor;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, RgbImage};

use crate::bands::ColorPage;
use crate::pixels::{DecodeRules, Rgb8};
use crate::values::too_many_bits;
use crate::{AugmentError, bands, gif, jpeg};

/// Decodes JPEG, PNG, WebP, BMP, GIF (its first image), TIFF (its first page) or PNM. The format is
/// detected from the content, not from a file name.
///
/// # Errors
/// [`AugmentError::TooManyPixels`] by the header alone; [`AugmentError::Decode`] for bytes that
/// are damaged, cut off or of another format; [`AugmentError::Empty`] for an image without pixels.
pub fn decode(bytes: &[u8], rules: &DecodeRules) -> Result<Rgb8, AugmentError> {
    let mut out = Rgb8::default();
    Decoder::default().decode_into(bytes, rules, &mut out)?;
    Ok(out)
}

/// A decoder that reuses its memory from one image to the next.
#[derive(Debug, Default)]
pub struct Decoder {
    jpeg: jpeg::Decoder,
}

impl Decoder {
    /// Decodes as [`decode`] does, into existing memory.
    ///
    /// # Errors
    /// As [`decode`]; the contents of `out` are then unspecified.
    pub fn decode_into(
        &mut self,
        bytes: &[u8],
        rules: &DecodeRules,
        out: &mut Rgb8,
    ) -> Result<(), AugmentError> {
        let orientation = if bytes.starts_with(&jpeg::MAGIC) {
            self.jpeg.decode_into(bytes, rules, out)?
        } else {
            self.decode_other(bytes, rules, out)?
        };
        if orientation != Orientation::NoTransforms {
            let mut image = to_dynamic_image(std::mem::take(out))?;
            image.apply_orientation(orientation);
            *out = to_rgb8(image, &DecodeRules::default())?;
        }
        Ok(())
    }

    /// Decodes all formats but JPEG, and returns the orientation to apply.
    fn decode_other(
        &mut self,
        bytes: &[u8],
        rules: &DecodeRules,
        out: &mut Rgb8,
    ) -> Result<Orientation, AugmentError> {
        if bytes.starts_with(&gif::MAGIC) {
            *out = gif::Canvas::decode(bytes, rules)?.to_rgb(rules.background);
            return Ok(Orientation::NoTransforms);
        }
        if let Some(mut page) = ColorPage::open(bytes) {
            *out = page.decode(rules, &mut self.jpeg)?;
            return Ok(if rules.apply_exif { page.orientation } else { Orientation::NoTransforms });
        }
        let mut decoder = reader(bytes)?.into_decoder().map_err(broken)?;
        let (width_px, height_px) = decoder.dimensions();
        rules.check(width_px, height_px)?;
        let mut orientation = Orientation::NoTransforms;
        if rules.apply_exif {
            orientation = decoder.orientation().unwrap_or(orientation);
        }
        *out = to_rgb8(DynamicImage::from_decoder(decoder).map_err(broken)?, rules)?;
        Ok(orientation)
    }
}

/// Returns a reader of `bytes`, whose format is detected from the first bytes.
pub(crate) fn reader(bytes: &[u8]) -> Result<ImageReader<Cursor<&[u8]>>, AugmentError> {
    let mut reader = ImageReader::new(Cursor::new(bytes));
    if bands::format_of(bytes) == Some("tiff") {
        // The library reads BigTIFF but does not detect it.
        reader.set_format(ImageFormat::Tiff);
        return Ok(reader);
    }
    reader.with_guessed_format().map_err(|error| AugmentError::Decode(error.to_string()))
}

fn broken(error: image::ImageError) -> AugmentError {
    AugmentError::Decode(error.to_string())
}

/// Wraps an image in the type of the `image` crate.
fn to_dynamic_image(image: Rgb8) -> Result<DynamicImage, AugmentError> {
    let buffer = RgbImage::from_raw(image.width_px, image.height_px, image.data);
    buffer.map(DynamicImage::ImageRgb8).ok_or(AugmentError::Empty)
}

/// Converts a decoded image to 8-bit RGB.
fn to_rgb8(image: DynamicImage, rules: &DecodeRules) -> Result<Rgb8, AugmentError> {
    let width_px = image.width();
    let height_px = image.height();
    let image = match rules.bits_used {
        Some(bits) => to_full_scale(image, bits)?,
        None => image,
    };
    if let Some(background) = rules.background
        && image.color().has_alpha()
    {
        let pixels = image.to_rgba8().into_raw();
        let mut data = Vec::with_capacity(3 * (pixels.len() / 4));
        for [r, g, b, alpha] in pixels.as_chunks::<4>().0 {
            data.extend(blend([*r, *g, *b], *alpha, background));
        }
        return Ok(Rgb8 { width_px, height_px, data });
    }
    let data = match image {
        DynamicImage::ImageRgb8(rgb) => rgb.into_raw(),
        DynamicImage::ImageLuma8(gray) => gray.into_raw().iter().flat_map(|v| [*v; 3]).collect(),
        DynamicImage::ImageLumaA8(gray) => gray.as_raw().chunks_exact(2).flat_map(|p| [p[0]; 3]).collect(),
        DynamicImage::ImageRgba8(rgba) => {
            rgba.as_raw().chunks_exact(4).flat_map(|p| [p[0], p[1], p[2]]).collect()
        }
        DynamicImage::ImageLuma16(gray) => gray.as_raw().iter().flat_map(|v| [high_byte(*v); 3]).collect(),
        DynamicImage::ImageLumaA16(gray) => {
            gray.as_raw().chunks_exact(2).flat_map(|p| [high_byte(p[0]); 3]).collect()
        }
        DynamicImage::ImageRgb16(rgb) => rgb.as_raw().iter().map(|v| high_byte(*v)).collect(),
        DynamicImage::ImageRgba16(rgba) => {
            rgba.as_raw().chunks_exact(4).flat_map(|p| [p[0], p[1], p[2]].map(high_byte)).collect()
        }
        other => other.to_rgb8().into_raw(),
    };
    Ok(Rgb8 { width_px, height_px, data })
}

/// Scales the values of 16-bit images that use only `bits` bits to all 16 bits.
///
/// # Errors
/// [`AugmentError::Decode`] for a value of more than `bits` bits.
fn to_full_scale(mut image: DynamicImage, bits: u8) -> Result<DynamicImage, AugmentError> {
    // The alpha channel always uses all bits.
    let n_channels = usize::from(image.color().channel_count());
    let n_colors = n_channels - usize::from(image.color().has_alpha());
    let values: &mut [u16] = match &mut image {
        DynamicImage::ImageLuma16(image) => image,
        DynamicImage::ImageLumaA16(image) => image,
        DynamicImage::ImageRgb16(image) => image,
        DynamicImage::ImageRgba16(image) => image,
        _ => return Ok(image),
    };
    let largest = u32::from(u16::MAX >> (16 - bits));
    for pixel in values.chunks_exact_mut(n_channels) {
        for value in &mut pixel[..n_colors] {
            if u32::from(*value) > largest {
                return Err(too_many_bits(f32::from(*value), bits));
            }
            let scaled = (u32::from(*value) * u32::from(u16::MAX) + largest / 2) / largest;
            // At most 65535.
            *value = scaled as u16;
        }
    }
    Ok(image)
}

/// Decodes a picture with its own channels and bits, for a copy in another format.
///
/// # Errors
/// As [`decode`].
pub fn decode_native(bytes: &[u8]) -> Result<DynamicImage, AugmentError> {
    let rules = DecodeRules::default();
    if bytes.starts_with(&gif::MAGIC) {
        let canvas = gif::Canvas::decode(bytes, &rules)?;
        return match canvas.to_rgba() {
            Some(image) => Ok(DynamicImage::ImageRgba8(image)),
            None => to_dynamic_image(canvas.to_rgb(None)),
        };
    }
    if let Some(mut page) = ColorPage::open(bytes) {
        return to_dynamic_image(page.decode(&rules, &mut jpeg::Decoder::default())?);
    }
    let decoder = reader(bytes)?.into_decoder().map_err(broken)?;
    let (width_px, height_px) = decoder.dimensions();
    rules.check(width_px, height_px)?;
    DynamicImage::from_decoder(decoder).map_err(broken)
}

/// Blends a color with the background, with a weight of `alpha` / 255 for the color, rounded.
fn blend(color: [u8; 3], alpha: u8, background: [u8; 3]) -> [u8; 3] {
    let alpha = u32::from(alpha);
    std::array::from_fn(|i| {
        let sum = alpha * u32::from(color[i]) + (255 - alpha) * u32::from(background[i]);
        ((sum + 127) / 255) as u8
    })
}

fn high_byte(value: u16) -> u8 {
    (value >> 8) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::{ImageBuffer, Luma, LumaA, Rgb, Rgba};
    use proptest::prelude::*;

    fn encode(image: DynamicImage, format: ImageFormat) -> Vec<u8> {
        let mut bytes = Cursor::new(Vec::new());
        image.write_to(&mut bytes, format).expect("in memory");
        bytes.into_inner()
    }

    fn first_pixel(image: DynamicImage, background: Option<[u8; 3]>) -> [u8; 3] {
        let rules = DecodeRules { background, ..DecodeRules::default() };
        let rgb = decode(&encode(image, ImageFormat::Png), &rules).expect("decoded");
        [rgb.data[0], rgb.data[1], rgb.data[2]]
    }

    #[test]
    fn every_pixel_format_is_converted_to_rgb_by_the_stated_rule() {
        assert_eq!(first_pixel(ImageBuffer::from_pixel(2, 2, Luma([7u8])).into(), None), [7, 7, 7]);
        assert_eq!(first_pixel(ImageBuffer::from_pixel(2, 2, LumaA([9u8, 0])).into(), None), [9, 9, 9]);
        assert_eq!(first_pixel(ImageBuffer::from_pixel(2, 2, Rgba([1u8, 2, 3, 0])).into(), None), [1, 2, 3]);
        assert_eq!(first_pixel(ImageBuffer::from_pixel(2, 2, Luma([0x12ffu16])).into(), None), [0x12; 3]);
        assert_eq!(
            first_pixel(ImageBuffer::from_pixel(2, 2, Rgb([0x0180u16, 0x02ff, 0x0300])).into(), None),
            [1, 2, 3]
        );
    }

    #[test]
    fn transparent_pixels_are_blended_with_the_background() {
        let pink = Some([255, 0, 100]);
        assert_eq!(
            first_pixel(ImageBuffer::from_pixel(2, 2, Rgba([1u8, 2, 3, 0])).into(), pink),
            [255, 0, 100]
        );
        assert_eq!(
            first_pixel(ImageBuffer::from_pixel(2, 2, Rgba([1u8, 2, 3, 255])).into(), pink),
            [1, 2, 3]
        );
        assert_eq!(
            first_pixel(ImageBuffer::from_pixel(2, 2, LumaA([100u8, 51])).into(), pink),
            [224, 20, 100]
        );
        assert_eq!(first_pixel(ImageBuffer::from_pixel(2, 2, Rgb([1u8, 2, 3])).into(), pink), [1, 2, 3]);
    }

    #[test]
    fn other_formats_are_decoded() {
        let image = DynamicImage::from(ImageBuffer::from_pixel(16, 8, Rgb([200u8, 100, 50])));
        for format in [
            ImageFormat::Jpeg,
            ImageFormat::WebP,
            ImageFormat::Bmp,
            ImageFormat::Gif,
            ImageFormat::Tiff,
            ImageFormat::Pnm,
        ] {
            let bytes = encode(image.clone(), format);
            let rgb = decode(&bytes, &DecodeRules::default()).expect("decoded");
            assert_eq!((rgb.width_px, rgb.height_px), (16, 8));
            assert!(rgb.data[0].abs_diff(200) < 6 && rgb.data[2].abs_diff(50) < 6, "{:?}", &rgb.data[..3]);
        }
    }

    /// Some decoders fill the missing part with gray and report success.
    #[test]
    fn a_truncated_jpeg_is_an_error() {
        let image = ImageBuffer::from_fn(64, 64, |x, y| Rgb([(x * y) as u8, x as u8 * 4, y as u8 * 4]));
        let jpeg = encode(image.into(), ImageFormat::Jpeg);
        assert!(decode(&jpeg, &DecodeRules::default()).is_ok());
        for share in [0.4, 0.7, 0.95] {
            let cut = &jpeg[..(jpeg.len() as f64 * share) as usize];
            assert!(decode(cut, &DecodeRules::default()).is_err(), "{share}");
        }
    }

    #[test]
    fn a_reused_decoder_yields_the_same_pixels() {
        let small = encode(
            ImageBuffer::from_fn(9, 5, |x, y| Rgb([x as u8 * 20, y as u8 * 40, 3])).into(),
            ImageFormat::Jpeg,
        );
        let large = encode(ImageBuffer::from_pixel(40, 40, Luma([90u8])).into(), ImageFormat::Jpeg);
        let mut decoder = Decoder::default();
        let mut out = Rgb8::default();
        for bytes in [&large, &small, &large] {
            decoder.decode_into(bytes, &DecodeRules::default(), &mut out).expect("decoded");
            assert_eq!(out, decode(bytes, &DecodeRules::default()).expect("decoded"));
        }
    }

    /// A PNG whose header states 60,000 x 60,000 pixels is refused from the header alone.
    #[test]
    fn an_image_with_too_many_pixels_is_refused_by_its_header() {
        let mut png = encode(ImageBuffer::from_pixel(2, 2, Luma([7u8])).into(), ImageFormat::Png);
        png[16..20].copy_from_slice(&60_000u32.to_be_bytes());
        png[20..24].copy_from_slice(&60_000u32.to_be_bytes());
        let crc = crc32(&png[12..29]);
        png[29..33].copy_from_slice(&crc.to_be_bytes());
        let error = decode(&png, &DecodeRules::default()).expect_err("too large");
        assert!(
            matches!(error, AugmentError::TooManyPixels { width_px: 60_000, height_px: 60_000, .. }),
            "{error}"
        );
    }

    fn crc32(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0u32, |mut crc, byte| {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
            }
            crc
        })
    }

    proptest! {
        #[test]
        fn damaged_images_never_panic(at in 0usize..600, value: u8, len in 0usize..700) {
            let pixels = ImageBuffer::from_fn(20, 20, |x, y| Rgb([x as u8 * 9, y as u8 * 7, 3u8]));
            let image = DynamicImage::from(pixels);
            let formats = [
                ImageFormat::Jpeg,
                ImageFormat::Png,
                ImageFormat::WebP,
                ImageFormat::Bmp,
                ImageFormat::Gif,
                ImageFormat::Tiff,
                ImageFormat::Pnm,
            ];
            let rules = DecodeRules {
                max_pixels: 1 << 20,
                apply_exif: true,
                background: Some([9; 3]),
                ..DecodeRules::default()
            };
            for format in formats {
                let mut bytes = encode(image.clone(), format);
                if at < bytes.len() { bytes[at] = value; }
                bytes.truncate(len);
                let _ = decode(&bytes, &rules);
            }
        }
    }
}
