//! Files of a sample as one image of many channels.

use super::image::Bands;
use super::layer::{Header, Kind, Shape, check_alike, check_shape, wrong};
use super::tiff_color::ColorPage;
use super::{npy, picture, tiff};
use crate::format::{Depth, PixelFormat};
use crate::values::{check_numbers, scale_to_all_bits};
use crate::{AugmentError, DecodeRules};

/// Pixels that the headers of a sample's files state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Number of pixels per row.
    pub width_px: u32,
    /// Number of rows.
    pub height_px: u32,
    /// Number of channels of all files.
    pub n_channels: usize,
    /// Smallest depth that holds the values.
    pub depth: Depth,
    /// Number of files, and of pages of their own in each.
    pub n_layers: usize,
}

/// Decodes `files`, whose channels follow one another, as one image of the format of `rules`. PNG,
/// TIFF, `.npy` and what [`crate::decode::decode`] reads are recognized by their content. If the
/// format is floating point, numbers of any type are taken as they are.
///
/// # Errors
/// [`AugmentError::TooManyPixels`] by the headers alone; [`AugmentError::Bands`] for files of
/// different sizes or types; [`AugmentError::Format`] for another number of channels or another
/// type; [`AugmentError::Decode`] for damaged files and for values that are not finite.
pub fn decode(files: &[&[u8]], rules: &DecodeRules) -> Result<Bands, AugmentError> {
    let stated = headers(files, rules)?;
    let PixelFormat { n_channels, depth } = rules.format;
    let n_found = stated.iter().map(|header| header.shape.n_channels).sum();
    // Of all files together, before any of them is decoded.
    check_shape(rules, Shape { n_channels: n_found, ..stated[0].shape })?;
    let Shape { width_px, height_px, .. } = stated[0].shape;
    let kind = stated[0].kind;
    if n_found != n_channels || depth != Depth::Float && kind.depth() != depth {
        return Err(wrong(rules, n_found, &format!(" of {}", kind.in_words())));
    }
    let mut values = Vec::new();
    for (number, bytes) in files.iter().enumerate() {
        let layer = match format_of(bytes) {
            Some("npy") => npy::decode(bytes, n_channels_of_each(files, rules))?,
            Some(_) => tiff::decode(bytes, rules)?,
            None => picture::decode(bytes, rules)?,
        };
        match number {
            0 if files.len() == 1 => values = layer.values,
            0 => {
                values.reserve_exact(n_found * (layer.values.len() / layer.shape.n_channels));
                values.extend(layer.values);
            }
            _ => values.extend(layer.values),
        }
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

/// Returns what the headers of `files` state. The number of channels that `rules` expect tells the
/// axes of arrays apart.
///
/// # Errors
/// As [`decode`], for what headers show.
pub fn found(files: &[&[u8]], rules: &DecodeRules) -> Result<Found, AugmentError> {
    let all = headers(files, rules)?;
    let Header { shape: Shape { width_px, height_px, .. }, kind, .. } = all[0];
    let n_channels = all.iter().map(|header| header.shape.n_channels).sum();
    let n_layers = all.iter().map(|header| header.n_pages).sum();
    Ok(Found { width_px, height_px, n_channels, depth: kind.depth(), n_layers })
}

/// Returns what the header of each file states: of one file at least, all of the same size and
/// type.
fn headers(files: &[&[u8]], rules: &DecodeRules) -> Result<Vec<Header>, AugmentError> {
    let mut all: Vec<Header> = Vec::with_capacity(files.len());
    for bytes in files {
        all.push(match format_of(bytes) {
            Some("npy") => npy::header(bytes, n_channels_of_each(files, rules))?,
            Some(_) => tiff::header(bytes)?,
            None => picture::header(bytes)?,
        });
        let name = format!("file {}", all.len());
        check_alike([("file 1", all[0]), (&name, all[all.len() - 1])])?;
    }
    let is_color_picture =
        |(bytes, header): (&&[u8], &Header)| format_of(bytes).is_none() && header.shape.n_channels > 2;
    let n_color = files.iter().zip(&all).filter(|pair| is_color_picture((pair.0, pair.1))).count();
    if n_color > 1 {
        return Err(AugmentError::ColorImages { n_files: n_color });
    }
    if all.is_empty() { Err(AugmentError::Empty) } else { Ok(all) }
}

/// Returns the number of channels by which the axes of an array are told apart: one in each of
/// several files.
fn n_channels_of_each(files: &[&[u8]], rules: &DecodeRules) -> usize {
    if files.len() > 1 { 1 } else { rules.format.n_channels }
}

/// Returns whether `bytes` hold what 8-bit gray or RGB cannot: a TIFF of several pages or other
/// channels, an array, or other values.
pub fn is_more_than_a_picture(bytes: &[u8]) -> bool {
    if let Some(mut page) = ColorPage::open(bytes)
        && page.is_alone()
    {
        return false;
    }
    let found = found(&[bytes], &DecodeRules::default());
    match format_of(bytes) {
        Some("npy") => true,
        Some(_) => found.is_ok_and(|found| {
            found.depth != Depth::Eight || found.n_layers > 1 || ![1, 3].contains(&found.n_channels)
        }),
        None => found.is_ok_and(|found| found.depth != Depth::Eight),
    }
}

/// Returns the largest value of files of 16 bits; `None` for those of other values, and for files
/// that cannot be decoded.
pub fn largest_of_16_bits(files: &[&[u8]], rules: &DecodeRules) -> Option<u16> {
    let stated = headers(files, rules).ok()?;
    if stated[0].kind != Kind::Sixteen {
        return None;
    }
    let n_channels = stated.iter().map(|header| header.shape.n_channels).sum();
    let format = PixelFormat { n_channels, depth: Depth::Sixteen };
    let image = decode(files, &DecodeRules { format, bits_used: None, no_data: None, ..*rules }).ok()?;
    // Opacity has all bits in any case.
    let is_picture = files.len() == 1 && format_of(files[0]).is_none();
    let n_colors = if is_picture && n_channels % 2 == 0 { n_channels - 1 } else { n_channels };
    Some(image.channels().take(n_colors).flatten().fold(0.0, |largest, value| value.max(largest)) as u16)
}

/// Returns the name of the format of `bytes`, if it is one that holds any number of channels.
pub fn format_of(bytes: &[u8]) -> Option<&'static str> {
    match () {
        () if bytes.starts_with(npy::MAGIC) => Some("npy"),
        () if tiff::is_tiff(bytes) => Some("tiff"),
        () => None,
    }
}
