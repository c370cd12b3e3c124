//! A decoded image: 8-bit RGB, or bands of another format.

use std::borrow::Cow;

use crate::bands::{self, Bands};
use crate::decode::Decoder;
use crate::format::PixelFormat;
use crate::pixels::{DecodeRules, Rgb8};
use crate::planes::Planes;
use crate::{AugmentError, decode};

/// A decoded image.
#[derive(Debug, Clone, PartialEq)]
pub enum Image {
    /// 8-bit RGB.
    Rgb(Rgb8),
    /// Any other format.
    Bands(Bands),
}

impl Default for Image {
    fn default() -> Self {
        Self::Rgb(Rgb8::default())
    }
}

impl From<Rgb8> for Image {
    fn from(image: Rgb8) -> Self {
        Self::Rgb(image)
    }
}

impl From<Bands> for Image {
    fn from(image: Bands) -> Self {
        Self::Bands(image)
    }
}

impl Image {
    /// Decodes the files of a sample in the format of `rules`.
    ///
    /// # Errors
    /// As [`decode::decode`] for 8-bit RGB, which is one file, and as [`bands::decode`] for other
    /// formats.
    pub fn decode(files: &[&[u8]], rules: &DecodeRules) -> Result<Self, AugmentError> {
        let mut out = Self::default();
        out.decode_into(files, rules, &mut Decoder::default())?;
        Ok(out)
    }

    /// Decodes the files of a sample in their own format: a picture of 8 bits as RGB, anything else
    /// with the channels and the depth that the headers state.
    ///
    /// # Errors
    /// As [`bands::decode`].
    pub fn decode_any(files: &[&[u8]], rules: &DecodeRules) -> Result<Self, AugmentError> {
        if let [bytes] = files
            && !bands::exceeds_rgb8(bytes)
        {
            return decode::decode(bytes, rules).map(Self::Rgb);
        }
        let header = bands::sample_header(files, rules)?;
        let format = PixelFormat { n_channels: header.n_channels, depth: header.depth };
        bands::decode(files, &DecodeRules { format, ..*rules }).map(Self::Bands)
    }

    /// Decodes as [`Image::decode`] does, into the memory of this image, with that of `decoder`.
    pub(crate) fn decode_into(
        &mut self,
        files: &[&[u8]],
        rules: &DecodeRules,
        decoder: &mut Decoder,
    ) -> Result<(), AugmentError> {
        if !rules.format.is_rgb8() {
            *self = Self::Bands(bands::decode(files, rules)?);
            return Ok(());
        }
        if let Self::Bands(_) = self {
            *self = Self::default();
        }
        let Self::Rgb(image) = self else { return Err(AugmentError::Empty) };
        match files {
            [bytes] if bands::format_of(bytes) != Some("npy") => {
                let result = decoder.decode_into(bytes, rules, image);
                result.map_err(|error| format_error(bytes, rules).unwrap_or(error))
            }
            // Arrays, and samples with one file per color.
            _ => {
                let Bands { width_px, height_px, values, .. } = bands::decode(files, rules)?;
                let data = values.into_iter().map(|value| value as u8).collect();
                *image = Rgb8::from(&Planes { width_px, height_px, data });
                Ok(())
            }
        }
    }

    /// Returns the number of pixels per row and the number of rows.
    pub fn size_px(&self) -> [u32; 2] {
        match self {
            Self::Rgb(image) => [image.width_px, image.height_px],
            Self::Bands(image) => [image.width_px, image.height_px],
        }
    }

    /// Returns the format of the pixels.
    pub fn format(&self) -> PixelFormat {
        match self {
            Self::Rgb(_) => PixelFormat::RGB8,
            Self::Bands(image) => image.format(),
        }
    }

    /// Returns a picture for display: the image itself if it is RGB, else [`bands::preview`].
    pub fn picture(self) -> Rgb8 {
        match self {
            Self::Rgb(image) => image,
            Self::Bands(image) => bands::preview(&image),
        }
    }
}

/// Returns the error for an image that cannot be decoded as 8-bit RGB because its header states
/// another format; `None` if it does not.
fn format_error(bytes: &[u8], rules: &DecodeRules) -> Option<AugmentError> {
    let header = bands::sample_header(&[bytes], rules).ok()?;
    let format = PixelFormat { n_channels: header.n_channels, depth: header.depth };
    if format.is_rgb8() || bands::format_of(bytes).is_none() {
        return None;
    }
    Some(AugmentError::Format { found: format.to_string(), expected: rules.format })
}

/// Returns the planes of a picture, `[3, S, S]`, for the bytes of a square view of `size_px`,
/// `[C, S, S]` in `format`.
pub fn picture_of_view(bytes: &[u8], format: PixelFormat, size_px: u32) -> Cow<'_, [u8]> {
    if format.is_rgb8() {
        bytes.into()
    } else {
        Planes::from(&bands::preview(&Bands::from_bytes(bytes, format, size_px))).data.into()
    }
}
