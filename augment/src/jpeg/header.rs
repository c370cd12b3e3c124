//! Header of a JPEG: the properties that are stated before the pixels.

use image::metadata::Orientation;

use super::error::JpegError;
use super::segments::{ColorSpace, Scan, Segments};
use crate::AugmentError;

/// Contents of the header.
pub(crate) struct Header {
    pub(crate) width_px: u32,
    pub(crate) height_px: u32,
    pub(crate) is_gray: bool,
    pub(crate) is_cmyk: bool,
    /// `true` for a progressive JPEG, whose pixels are coded in several scans.
    pub(crate) progressive: bool,
    /// `true` if EXIF states an orientation other than the pixels' own.
    pub(crate) turned: bool,
}

/// Reads the header.
pub(crate) fn header(bytes: &[u8]) -> Result<Header, AugmentError> {
    let mut segments = Segments::new(bytes)?;
    first_scan(&mut segments)?;
    let frame = segments.frame()?;
    let color_space = segments.color_space()?;
    Ok(Header {
        width_px: frame.width_px,
        height_px: frame.height_px,
        is_gray: color_space == ColorSpace::Gray,
        is_cmyk: matches!(color_space, ColorSpace::Cmyk | ColorSpace::Ycck),
        progressive: frame.progressive,
        turned: orientation(&segments) != Orientation::NoTransforms,
    })
}

/// Reads the header up to the first scan.
pub(super) fn first_scan(segments: &mut Segments<'_>) -> Result<Scan, JpegError> {
    segments.next_scan()?.ok_or(JpegError::Damaged("no pixels"))
}

/// Returns the orientation that EXIF states.
pub(super) fn orientation(segments: &Segments<'_>) -> Orientation {
    segments.exif().and_then(Orientation::from_exif_chunk).unwrap_or(Orientation::NoTransforms)
}
