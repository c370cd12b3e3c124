//! Files of a sample as one image of many channels.

use super::image::Bands;
use super::layer::{Kind, Layer, Shape, wrong};
use super::{npy, picture, tiff};
use crate::format::{Depth, PixelFormat};
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
}

/// Decodes `files`, whose channels follow one another, as one image of the format of `rules`. PNG, TIFF, `.npy` and what
/// [`crate::decode::decode`] reads are recognized by their content. If the format is floating point, numbers of any type are taken as
/// they are.
///
/// # Errors
/// [`AugmentError::TooManyPixels`] by the headers alone; [`AugmentError::Bands`] for files of different sizes or types;
/// [`AugmentError::Format`] for another number of channels or another type; [`AugmentError::Decode`] for damaged files and for values
/// that are not finite.
pub fn decode(files: &[&[u8]], rules: &DecodeRules) -> Result<Bands, AugmentError> {
    let mut layers = Vec::with_capacity(files.len());
    for bytes in files {
        layers.push(match format_of(bytes) {
            Some("npy") => npy::decode(bytes, rules)?,
            Some(_) => tiff::decode(bytes, rules)?,
            None => picture::decode(bytes, rules)?,
        });
        let described = |layer: &Layer| (layer.shape, layer.kind);
        check_alike([described(&layers[0]), described(&layers[layers.len() - 1])], layers.len())?;
        let n_channels = layers.iter().map(|layer| layer.shape.n_channels).sum();
        if n_channels > rules.format.n_channels {
            return Err(wrong(rules, n_channels, ""));
        }
    }
    let Some(first) = layers.first() else { return Err(AugmentError::Empty) };
    let PixelFormat { n_channels, depth } = rules.format;
    let Shape { width_px, height_px, .. } = first.shape;
    let found: usize = layers.iter().map(|layer| layer.shape.n_channels).sum();
    let kind = first.kind;
    if found != n_channels || depth != Depth::Float && kind.depth() != depth {
        let bits = match kind {
            Kind::Eight => " of 8 bits",
            Kind::Sixteen => " of 16 bits",
            Kind::Other => " of other numbers than 8 or 16 bits without sign",
        };
        return Err(wrong(rules, found, bits));
    }
    let mut values = Vec::with_capacity(found * layers[0].values.len());
    layers.into_iter().for_each(|layer| values.extend(layer.values));
    if depth == Depth::Float && !values.iter().all(|value| value.is_finite()) {
        return Err(AugmentError::Decode("a pixel is not a finite number".into()));
    }
    Ok(Bands { width_px, height_px, depth, values })
}

/// Returns what the headers of `files` state. The number of channels that `rules` expect tells the axes of arrays apart.
///
/// # Errors
/// As [`decode`], for what headers show.
pub fn found(files: &[&[u8]], rules: &DecodeRules) -> Result<Found, AugmentError> {
    let mut all: Vec<(Shape, Kind)> = Vec::with_capacity(files.len());
    for bytes in files {
        all.push(match format_of(bytes) {
            Some("npy") => npy::header(bytes, rules)?,
            Some(_) => tiff::header(bytes)?,
            None => picture::header(bytes)?,
        });
        check_alike([all[0], all[all.len() - 1]], all.len())?;
    }
    let Some((Shape { width_px, height_px, .. }, kind)) = all.first() else {
        return Err(AugmentError::Empty);
    };
    let n_channels = all.iter().map(|(shape, _)| shape.n_channels).sum();
    Ok(Found { width_px: *width_px, height_px: *height_px, n_channels, depth: kind.depth() })
}

/// Returns the name of the format of `bytes`, if it is one that holds any number of channels.
pub fn format_of(bytes: &[u8]) -> Option<&'static str> {
    match () {
        () if bytes.starts_with(npy::MAGIC) => Some("npy"),
        () if tiff::is_tiff(bytes) => Some("tiff"),
        () => None,
    }
}

/// Checks that file `number` has the size and the type of the first one.
fn check_alike(
    [(first, kind), (shape, other)]: [(Shape, Kind); 2],
    number: usize,
) -> Result<(), AugmentError> {
    let bits = |kind: Kind| match kind {
        Kind::Eight => "8 bits",
        Kind::Sixteen => "16 bits",
        Kind::Other => "other numbers",
    };
    let size = |shape: Shape| [shape.width_px, shape.height_px];
    let ([w, h], [width, height]) = (size(first), size(shape));
    if [w, h] != [width, height] {
        return Err(AugmentError::Bands(format!(
            "file {number} has {width} x {height} pixels, file 1 {w} x {h}"
        )));
    }
    match kind == other {
        true => Ok(()),
        false => {
            Err(AugmentError::Bands(format!("file {number} has {}, file 1 {}", bits(other), bits(kind))))
        }
    }
}
