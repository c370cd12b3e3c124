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
        out.decode_again(files, rules, &mut Decoder::default())?;
        Ok(out)
    }

    /// Decodes the files of a sample in the format that they have: a picture of 8 bits as RGB,
    /// anything else with the channels and the depth that the headers state.
    ///
    /// # Errors
    /// As [`bands::decode`].
    pub fn decode_any(files: &[&[u8]], rules: &DecodeRules) -> Result<Self, AugmentError> {
        if let [bytes] = files
            && !bands::is_more_than_a_picture(bytes)
        {
            return decode::decode(bytes, rules).map(Self::Rgb);
        }
        let found = bands::found(files, rules)?;
        let format = PixelFormat { n_channels: found.n_channels, depth: found.depth };
        bands::decode(files, &DecodeRules { format, ..*rules }).map(Self::Bands)
    }

    /// Decodes as [`Image::decode`], with the memory of this image and of `decoder`.
    pub(crate) fn decode_again(
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
                let decoded = decoder.decode_into(bytes, rules, image);
                decoded.map_err(|error| other_format(bytes, rules).unwrap_or(error))
            }
            // Arrays, and a file for each color.
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

    /// Returns a picture for people: the image itself if it is RGB, else [`bands::preview`].
    pub fn picture(self) -> Rgb8 {
        match self {
            Self::Rgb(image) => image,
            Self::Bands(image) => bands::preview(&image),
        }
    }
}

/// Returns the error for an image that cannot be decoded as 8-bit RGB because its header states
/// another format; `None` if it does not.
fn other_format(bytes: &[u8], rules: &DecodeRules) -> Option<AugmentError> {
    let found = bands::found(&[bytes], rules).ok()?;
    let format = PixelFormat { n_channels: found.n_channels, depth: found.depth };
    let is_other = !format.is_rgb8() && bands::format_of(bytes).is_some();
    is_other.then(|| AugmentError::Format { found: format.to_string(), expected: rules.format })
}

/// Returns the planes of a picture, `[3, S, S]`, of the bytes of a square view of `size_px`, `[C,
/// S, S]` in `format`.
pub fn picture_of_view(bytes: &[u8], format: PixelFormat, size_px: u32) -> Cow<'_, [u8]> {
    if format.is_rgb8() {
        bytes.into()
    } else {
        Planes::from(&bands::preview(&Bands::of_bytes(bytes, format, size_px))).data.into()
    }
}
