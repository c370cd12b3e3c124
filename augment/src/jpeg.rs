//! JPEG through zune-jpeg, without the copy of the input and the second reading of the header that
//! the `image` crate's wrapper makes.

use image::metadata::Orientation;
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use crate::{AugmentError, DecodeRules, Rgb8};

/// How every JPEG starts.
pub(crate) const MAGIC: [u8; 2] = [0xff, 0xd8];

type Decoder<'a> = JpegDecoder<ZCursor<&'a [u8]>>;

/// Marker that opens the pixels.
const START_OF_SCAN: u8 = 0xda;

/// Markers of frames that come in several scans, by Huffman or by arithmetic coding.
const PROGRESSIVE_FRAMES: [u8; 2] = [0xc2, 0xca];

/// Marker that ends an image.
const END_OF_IMAGE: [u8; 2] = [0xff, 0xd9];

/// What the header says.
pub(crate) struct Header {
    pub(crate) width_px: u32,
    pub(crate) height_px: u32,
    pub(crate) is_gray: bool,
    pub(crate) is_cmyk: bool,
    /// Whether the pixels come in several scans.
    pub(crate) progressive: bool,
    /// Whether EXIF says that the picture stands otherwise than its pixels.
    pub(crate) turned: bool,
}

/// Decodes to RGB, whatever the color space, and returns the orientation that `rules` ask to apply.
pub(crate) fn decode_into(
    bytes: &[u8],
    rules: &DecodeRules,
    out: &mut Rgb8,
) -> Result<Orientation, AugmentError> {
    let (mut decoder, width_px, height_px) = open(bytes)?;
    rules.check(width_px, height_px)?;
    if !ends(bytes) {
        return Err(broken(&"the JPEG is cut off"));
    }
    out.width_px = width_px;
    out.height_px = height_px;
    out.data.resize(3 * width_px as usize * height_px as usize, 0);
    decoder.decode_into(&mut out.data).map_err(|error| broken(&error))?;
    Ok(if rules.apply_exif { orientation(&decoder) } else { Orientation::NoTransforms })
}

/// Reads the header.
pub(crate) fn header(bytes: &[u8]) -> Result<Header, AugmentError> {
    let (decoder, width_px, height_px) = open(bytes)?;
    Ok(Header {
        width_px,
        height_px,
        is_gray: decoder.input_colorspace() == Some(ColorSpace::Luma),
        is_cmyk: matches!(decoder.input_colorspace(), Some(ColorSpace::CMYK | ColorSpace::YCCK)),
        progressive: segments(bytes).any(|(marker, _)| PROGRESSIVE_FRAMES.contains(&marker)),
        turned: orientation(&decoder) != Orientation::NoTransforms,
    })
}

/// A decoder that has read the header, and the size that it found there.
fn open(bytes: &[u8]) -> Result<(Decoder<'_>, u32, u32), AugmentError> {
    let options = DecoderOptions::default()
        .jpeg_set_out_colorspace(ColorSpace::RGB)
        .set_strict_mode(false)
        .set_max_width(usize::from(u16::MAX))
        .set_max_height(usize::from(u16::MAX));
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(|error| broken(&error))?;
    let (width, height) = decoder.dimensions().ok_or(AugmentError::Empty)?;
    Ok((decoder, width as u32, height as u32))
}

fn orientation(decoder: &Decoder<'_>) -> Orientation {
    let exif = decoder.exif().and_then(|exif| Orientation::from_exif_chunk(exif));
    exif.unwrap_or(Orientation::NoTransforms)
}

fn broken(error: &dyn std::fmt::Display) -> AugmentError {
    // Some of zune-jpeg's messages end in a line break.
    AugmentError::Decode(error.to_string().trim().to_string())
}

/// Whether an end marker follows the start of the pixels. The headers may hold one of a thumbnail.
fn ends(bytes: &[u8]) -> bool {
    if bytes.ends_with(&END_OF_IMAGE) {
        return true;
    }
    let start = segments(bytes).find(|(marker, _)| *marker == START_OF_SCAN).map(|(_, start)| start);
    let pixels = start.and_then(|start| bytes.get(start..)).unwrap_or_default();
    pixels.windows(2).any(|pair| pair == END_OF_IMAGE)
}

/// The segments up to the first scan: each marker, and where its contents start.
fn segments(bytes: &[u8]) -> impl Iterator<Item = (u8, usize)> {
    let mut at = MAGIC.len();
    let mut in_scan = false;
    std::iter::from_fn(move || {
        loop {
            let [0xff, marker, high, low] = bytes.get(at..at + 4)? else { return None };
            // Any number of fill bytes may stand before a marker.
            if *marker == 0xff {
                at += 1;
                continue;
            }
            if std::mem::replace(&mut in_scan, *marker == START_OF_SCAN) {
                return None;
            }
            let start = at + 4;
            at += 2 + usize::from(u16::from_be_bytes([*high, *low]));
            return Some((*marker, start));
        }
    })
}
