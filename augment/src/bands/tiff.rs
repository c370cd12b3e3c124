//! TIFF as channels: the bands of all pages, in strips or tiles, stored channel by channel or pixel
//! by pixel.

use std::io::Cursor;

use tiff::ColorType;
use tiff::decoder::{Decoder, DecodingResult, Limits};
use tiff::tags::{PlanarConfiguration, SampleFormat, Tag};

use super::layer::{Header, Kind, Layer, Shape, check_equal, check_shape, max_values};
use super::tags::as_bands;
use crate::format::MAX_CHANNELS;
use crate::{AugmentError, DecodeRules};

/// Bits of the tag NewSubfileType of a page that is a smaller copy or a mask.
pub(super) const COPY_OR_MASK: u32 = 1 | 4;

/// Largest size of a value, in bytes.
const MAX_VALUE_BYTES: usize = 8;

/// Largest side of a tile, in pixels: the largest side of an image.
const MAX_TILE_PX: usize = 65_536;

/// Decoder of the pages of a TIFF.
pub(super) type Pages<'a> = Decoder<Cursor<&'a [u8]>>;

/// Returns whether `bytes` begin like a TIFF or BigTIFF.
pub(super) fn is_tiff(bytes: &[u8]) -> bool {
    [b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"].iter().any(|magic| bytes.starts_with(*magic))
}

/// Decodes the bands of all pages. Smaller copies and masks, which geographic software adds, are
/// skipped.
pub(super) fn decode(bytes: &[u8], rules: &DecodeRules) -> Result<Layer, AugmentError> {
    let mut limits = Limits::default();
    limits.decoding_buffer_size =
        usize::try_from(max_values(rules)).unwrap_or(usize::MAX).saturating_mul(MAX_VALUE_BYTES);
    limits.intermediate_buffer_size = limits.decoding_buffer_size;
    let bytes = as_bands(bytes);
    let mut pages = open(&bytes)?.with_limits(limits);
    let mut all: Option<Layer> = None;
    while let Some(Header { shape, .. }) = next_page(&mut pages)? {
        let n_before = all.as_ref().map_or(0, |all| all.shape.n_channels);
        check_shape(rules, Shape { n_channels: n_before + shape.n_channels, ..shape })?;
        let values = values(&mut pages, shape, rules)?;
        match &mut all {
            None => all = Some(Layer { shape, values }),
            Some(all) => {
                all.shape.n_channels += shape.n_channels;
                all.values.extend(values);
            }
        }
        if !pages.more_images() {
            break;
        }
        pages.next_image().map_err(broken)?;
    }
    all.ok_or(AugmentError::Empty)
}

/// Returns the shape of all pages together, the type of the values, and the number of pages.
pub(super) fn header(bytes: &[u8]) -> Result<Header, AugmentError> {
    let bytes = as_bands(bytes);
    let mut pages = open(&bytes)?;
    let mut all: Option<Header> = None;
    while let Some(page) = next_page(&mut pages)? {
        match &mut all {
            None => all = Some(page),
            Some(all) => {
                check_equal("its first page", *all, "a page of the TIFF", page)?;
                all.shape.n_channels += page.shape.n_channels;
                all.n_pages += 1;
            }
        }
        if !pages.more_images() || all.is_some_and(|all| all.shape.n_channels > MAX_CHANNELS) {
            break;
        }
        pages.next_image().map_err(broken)?;
    }
    all.ok_or(AugmentError::Empty)
}

/// Opens the pages of `bytes`.
pub(super) fn open(bytes: &[u8]) -> Result<Pages<'_>, AugmentError> {
    Decoder::new(Cursor::new(bytes)).map_err(broken)
}

/// Moves to the first page, from the current one on, that is neither a smaller copy nor a mask, and
/// returns its header.
fn next_page(pages: &mut Pages<'_>) -> Result<Option<Header>, AugmentError> {
    loop {
        let kind = pages.find_tag_unsigned::<u32>(Tag::NewSubfileType).map_err(broken)?.unwrap_or(0);
        if kind & COPY_OR_MASK == 0 {
            return page(pages).map(Some);
        }
        if !pages.more_images() {
            return Ok(None);
        }
        pages.next_image().map_err(broken)?;
    }
}

/// Returns the shape and the type of the current page.
fn page(pages: &mut Pages<'_>) -> Result<Header, AugmentError> {
    let (width_px, height_px) = pages.dimensions().map_err(broken)?;
    let color = pages.colortype().map_err(broken)?;
    if let ColorType::Palette(_) | ColorType::YCbCr(_) | ColorType::Lab(_) = color {
        return Err(AugmentError::Decode(format!("TIFF: pixels are {color:?}, not bands")));
    }
    let formats = pages.find_tag_unsigned_vec::<u16>(Tag::SampleFormat).map_err(broken)?.unwrap_or_default();
    let is_unsigned = formats.iter().all(|format| *format == SampleFormat::Uint.to_u16());
    let kind = match color.bit_depth() {
        8 if is_unsigned => Kind::Eight,
        16 if is_unsigned => Kind::Sixteen,
        8.. => Kind::Other,
        bits => return Err(AugmentError::Decode(format!("TIFF: {bits} bits per channel are not supported"))),
    };
    let n_channels = usize::from(color.num_samples());
    let n_stated = pages.find_tag_unsigned::<u16>(Tag::SamplesPerPixel).map_err(broken)?;
    if let Some(n_stated) = n_stated
        && usize::from(n_stated) != n_channels
    {
        return Err(AugmentError::Decode(format!(
            "TIFF: only {n_channels} of {n_stated} channels can be read as {color:?}"
        )));
    }
    Ok(Header { shape: Shape { width_px, height_px, n_channels }, kind, n_pages: 1 })
}

/// Decodes the current page, strip by strip or tile by tile: `[C, H, W]`.
pub(super) fn values(
    pages: &mut Pages<'_>,
    shape: Shape,
    rules: &DecodeRules,
) -> Result<Vec<f32>, AugmentError> {
    let planar = pages.find_tag_unsigned::<u16>(Tag::PlanarConfiguration).map_err(broken)?;
    let is_planar = planar == Some(PlanarConfiguration::Planar.to_u16());
    let [width, height] = [shape.width_px, shape.height_px].map(|side| side as usize);
    let tile_px = <[u32; 2]>::from(pages.chunk_dimensions());
    let [tile_width, tile_height] = tile_px.map(|side| side.max(1) as usize);
    // The library allocates complete rows of a tile, whatever the width of the image.
    if tile_width > MAX_TILE_PX || tile_width.saturating_mul(shape.n_channels) as u64 > max_values(rules) {
        return Err(AugmentError::Decode(format!("TIFF: tiles of width {tile_width} are too large")));
    }
    let n_columns = width.div_ceil(tile_width);
    let per_plane = n_columns * height.div_ceil(tile_height);
    let (n_planes, n_interleaved) = if is_planar { (shape.n_channels, 1) } else { (1, shape.n_channels) };
    let mut out = vec![0.0; shape.n_values()];
    for number in 0..n_planes * per_plane {
        let plane = number / per_plane;
        let index = number % per_plane;
        let left = index % n_columns * tile_width;
        let top = index / n_columns * tile_height;
        let columns = tile_width.min(width - left);
        let rows = tile_height.min(height - top);
        let number =
            u32::try_from(number).map_err(|_| AugmentError::Decode("TIFF: too many tiles".into()))?;
        let chunk = to_f32(pages.read_chunk(number).map_err(broken)?);
        // The library crops tiles at the edge of the image in the first plane only.
        let [stored_columns, stored_rows] =
            <[u32; 2]>::from(pages.chunk_data_dimensions(number)).map(|side| side as usize);
        let fits = stored_columns >= columns && stored_rows >= rows;
        if !fits || chunk.len() != stored_columns * stored_rows * n_interleaved {
            return Err(AugmentError::Decode("TIFF: a tile or strip has the wrong size".into()));
        }
        for (y, row) in chunk.chunks_exact(stored_columns * n_interleaved).take(rows).enumerate() {
            for channel in 0..n_interleaved {
                let start = ((plane + channel) * height + top + y) * width + left;
                let values = row.iter().skip(channel).step_by(n_interleaved);
                for (out, value) in out[start..start + columns].iter_mut().zip(values) {
                    *out = *value;
                }
            }
        }
    }
    Ok(out)
}

/// Converts decoded values of any type.
fn to_f32(decoded: DecodingResult) -> Vec<f32> {
    macro_rules! cast {
        ($values:expr) => {
            $values.into_iter().map(|value| value as f32).collect()
        };
    }
    match decoded {
        DecodingResult::U8(values) => cast!(values),
        DecodingResult::U16(values) => cast!(values),
        DecodingResult::U32(values) => cast!(values),
        DecodingResult::U64(values) => cast!(values),
        DecodingResult::F16(values) => values.into_iter().map(f32::from).collect(),
        DecodingResult::F32(values) => values,
        DecodingResult::F64(values) => cast!(values),
        DecodingResult::I8(values) => cast!(values),
        DecodingResult::I16(values) => cast!(values),
        DecodingResult::I32(values) => cast!(values),
        DecodingResult::I64(values) => cast!(values),
    }
}

pub(super) fn broken(error: tiff::TiffError) -> AugmentError {
    AugmentError::Decode(format!("TIFF: {error}"))
}
