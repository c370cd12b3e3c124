//! Channels and header of one file.

use crate::format::Depth;
use crate::{AugmentError, DecodeRules};

/// Size of an image in pixels, and the number of its channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub width_px: u32,
    pub height_px: u32,
    pub n_channels: usize,
}

/// Type of the values of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Whole numbers in 0..=255.
    Eight,
    /// Whole numbers in 0..=65535.
    Sixteen,
    /// Any other numbers.
    Other,
}

/// Header of a file: shape, type and pages of its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub shape: Shape,
    pub kind: Kind,
    /// Number of pages, whose channels are counted together.
    pub n_pages: usize,
}

/// Channels of one file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Layer {
    pub shape: Shape,
    /// Values, `[C, H, W]`.
    pub values: Vec<f32>,
}

impl Shape {
    /// Returns the number of values, or the largest number if there are more.
    pub(super) fn n_values(&self) -> usize {
        let pixels = (self.width_px as usize).saturating_mul(self.height_px as usize);
        pixels.saturating_mul(self.n_channels)
    }
}

impl Kind {
    /// Returns the name of the type for messages.
    pub(super) fn description(self) -> &'static str {
        match self {
            Self::Eight => "8 bits",
            Self::Sixteen => "16 bits",
            Self::Other => "a type other than unsigned 8 or 16 bits",
        }
    }

    /// Returns the smallest depth that holds values of this type.
    pub(super) fn depth(self) -> Depth {
        match self {
            Self::Eight => Depth::Eight,
            Self::Sixteen => Depth::Sixteen,
            Self::Other => Depth::Float,
        }
    }
}

/// Checks the size and the number of channels of a header against `rules`, before anything is
/// allocated.
///
/// # Errors
/// [`AugmentError::TooManyPixels`], [`AugmentError::Format`] or [`AugmentError::Empty`].
pub(super) fn check_shape(rules: &DecodeRules, shape: Shape) -> Result<(), AugmentError> {
    let Shape { width_px, height_px, n_channels } = shape;
    rules.check(width_px, height_px)?;
    match n_channels {
        0 => Err(AugmentError::Empty),
        n if n > rules.format.n_channels => Err(format_error(rules, n, "")),
        n if shape.n_values() as u64 > max_values(rules) => {
            let max_pixels = max_values(rules) / n as u64;
            Err(AugmentError::TooManyPixels { width_px, height_px, max_pixels })
        }
        _ => Ok(()),
    }
}

/// Returns the largest number of values in all channels: that of a photograph with the largest
/// number of pixels.
pub(super) fn max_values(rules: &DecodeRules) -> u64 {
    rules.max_pixels.saturating_mul(3)
}

/// Returns the error for `n_channels` channels whose format is not that of `rules`; `kind`
/// describes their type.
pub(super) fn format_error(rules: &DecodeRules, n_channels: usize, kind: &str) -> AugmentError {
    let channels = if n_channels == 1 { "channel" } else { "channels" };
    AugmentError::Format { found: format!("{n_channels} {channels}{kind}"), expected: rules.format }
}

/// Checks that two files or pages, each with its name in messages, have the same size and type.
///
/// # Errors
/// [`AugmentError::Bands`] with both.
pub(super) fn check_equal(
    name: &str,
    header: Header,
    other_name: &str,
    other: Header,
) -> Result<(), AugmentError> {
    let Shape { width_px: w, height_px: h, .. } = header.shape;
    let Shape { width_px: width, height_px: height, .. } = other.shape;
    if w != width || h != height {
        return Err(AugmentError::Bands(format!(
            "{other_name} has {width} x {height} pixels, but {name} has {w} x {h}"
        )));
    }
    if header.kind != other.kind {
        let bits = header.kind.description();
        let other_bits = other.kind.description();
        return Err(AugmentError::Bands(format!("{other_name} has {other_bits}, but {name} has {bits}")));
    }
    Ok(())
}

/// Converts pixels of `n_channels` values, `[H, W, C]`, to channels, `[C, H, W]`.
pub(super) fn to_channels_first(pixels: &[f32], n_channels: usize) -> Vec<f32> {
    let mut channels = Vec::with_capacity(pixels.len());
    for channel in 0..n_channels {
        channels.extend(pixels.iter().skip(channel).step_by(n_channels));
    }
    channels
}
