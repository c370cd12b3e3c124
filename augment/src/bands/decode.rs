//! Decoding of the files of a sample as one image of many channels.

use super::image::Bands;
use super::layer::{Header, Kind, Shape, check_equal, check_shape, format_error};
use super::tiff_color::ColorPage;
use super::{npy, picture, tiff};
use crate::format::{Depth, PixelFormat};
use crate::values::{check_numbers, scale_to_all_bits};
use crate::{AugmentError, DecodeRules};

/// Properties of the image of a sample, from the headers of its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleHeader {
    /// Number of pixels per row.
    pub width_px: u32,
    /// Number of rows.
    pub height_px: u32,
    /// Number of channels of all files.
    pub n_channels: usize,
    /// Smallest depth that holds the values.
    pub depth: Depth,
    /// Number of files, in which each page that is a separate image counts as one.
    pub n_layers: usize,
}

/// Decodes `files` as one image in the format of `rules`, with their channels in the order of the
/// files. PNG, TIFF, `.npy` and the formats of [`crate::decode::decode`] are recognized by their
/// content. If the format is floating point, numbers of any type are converted without scaling.
///
/// # Errors
/// [`AugmentError::TooManyPixels`] by the headers alone; [`AugmentError::Bands`] for files of
/// different sizes or types; [`AugmentError::Format`] for another number of channels or another
/// type; [`AugmentError::Decode`] for damaged files and for values that are not finite.
pub fn decode(files: &[&[u8]], rules: &DecodeRules) -> Result<Bands, AugmentError> {
    let headers = read_headers(files, rules)?;
    let PixelFormat { n_channels, depth } = rules.format;
    let n_in_files = headers.iter().map(|header| header.shape.n_channels).sum();
    // The size of all files together is checked before any of them is decoded.
    check_shape(rules, Shape { n_channels: n_in_files, ..headers[0].shape })?;
    let Shape { width_px, height_px, .. } = headers[0].shape;
    let kind = headers[0].kind;
    if n_in_files != n_channels || depth != Depth::Float && kind.depth() != depth {
        return Err(format_error(rules, n_in_files, &format!(" of {}", kind.description())));
    }
    let mut values = Vec::new();
    for (index, bytes) in files.iter().enumerate() {
        let layer = match format_of(bytes) {
            Some("npy") => npy::decode(bytes, n_array_channels(files, rules))?,
            Some(_) => tiff::decode(bytes, rules)?,
            None => picture::decode(bytes, rules)?,
        };
        if files.len() == 1 {
            values = layer.values;
            break;
        }
        if index == 0 {
            values.reserve_exact(n_in_files * (layer.values.len() / layer.shape.n_channels));
        }
        values.extend(layer.values);
    }
    match rules.no_data {
        Some(no_data) => no_data.fill(&mut values, width_px as usize * height_px as usize)?,
        None if depth == Depth::Float => check_numbers(&values)?,
        None => {}
    }
    if let (Some(bits), Depth::Sixteen) = (rules.bits_used, depth) {
        scale_to_all_bits(&mut values, bits)?;
    }
    Ok(Bands { width_px, height_px, depth, values })
}

/// Reads the headers of `files`. The number of channels that `rules` expect distinguishes the axes
/// of arrays.
///
/// # Errors
/// As [`decode`], for errors that headers show.
pub fn sample_header(files: &[&[u8]], rules: &DecodeRules) -> Result<SampleHeader, AugmentError> {
    let headers = read_headers(files, rules)?;
    let Header { shape: Shape { width_px, height_px, .. }, kind, .. } = headers[0];
    let n_channels = headers.iter().map(|header| header.shape.n_channels).sum();
    let n_layers = headers.iter().map(|header| header.n_pages).sum();
    Ok(SampleHeader { width_px, height_px, n_channels, depth: kind.depth(), n_layers })
}

/// Reads the header of each file: at least one, and all with the same size and type.
fn read_headers(files: &[&[u8]], rules: &DecodeRules) -> Result<Vec<Header>, AugmentError> {
    let mut headers: Vec<Header> = Vec::with_capacity(files.len());
    let mut n_color_pictures = 0;
    for bytes in files {
        let format = format_of(bytes);
        let header = match format {
            Some("npy") => npy::header(bytes, n_array_channels(files, rules))?,
            Some(_) => tiff::header(bytes)?,
            None => picture::header(bytes)?,
        };
        headers.push(header);
        check_equal("file 1", headers[0], &format!("file {}", headers.len()), header)?;
        if format.is_none() && header.shape.n_channels > 2 {
            n_color_pictures += 1;
        }
    }
    if n_color_pictures > 1 {
        return Err(AugmentError::ColorImages { n_files: n_color_pictures });
    }
    if headers.is_empty() { Err(AugmentError::Empty) } else { Ok(headers) }
}

/// Returns the number of channels that identifies the axis of channels of an array: one if there
/// are several files.
fn n_array_channels(files: &[&[u8]], rules: &DecodeRules) -> usize {
    if files.len() > 1 { 1 } else { rules.format.n_channels }
}

/// Returns whether `bytes` are an image that 8-bit gray or RGB cannot represent: a TIFF of several
/// pages or other channels, an array, or other values.
pub fn exceeds_rgb8(bytes: &[u8]) -> bool {
    if let Some(mut page) = ColorPage::open(bytes)
        && page.is_only_image()
    {
        return false;
    }
    let format = format_of(bytes);
    if format == Some("npy") {
        return true;
    }
    let Ok(header) = sample_header(&[bytes], &DecodeRules::default()) else { return false };
    let has_other_channels = header.n_layers > 1 || ![1, 3].contains(&header.n_channels);
    header.depth != Depth::Eight || format.is_some() && has_other_channels
}

/// Returns the largest value of files of 16 bits; `None` for files of other types, and for files
/// that cannot be decoded.
pub fn largest_of_16_bits(files: &[&[u8]], rules: &DecodeRules) -> Option<u16> {
    let headers = read_headers(files, rules).ok()?;
    if headers[0].kind != Kind::Sixteen {
        return None;
    }
    let n_channels = headers.iter().map(|header| header.shape.n_channels).sum();
    let format = PixelFormat { n_channels, depth: Depth::Sixteen };
    let image = decode(files, &DecodeRules { format, bits_used: None, no_data: None, ..*rules }).ok()?;
    // The alpha channel always uses all bits.
    let is_picture = files.len() == 1 && format_of(files[0]).is_none();
    let n_colors = if is_picture && n_channels % 2 == 0 { n_channels - 1 } else { n_channels };
    Some(image.channels().take(n_colors).flatten().fold(0.0, |largest, value| value.max(largest)) as u16)
}

/// Returns the name of the format of `bytes`, if it is one that holds any number of channels.
pub fn format_of(bytes: &[u8]) -> Option<&'static str> {
    if bytes.starts_with(npy::MAGIC) {
        Some("npy")
    } else if tiff::is_tiff(bytes) {
        Some("tiff")
    } else {
        None
    }
}
