//! The first image of a GIF, with the pixels of Pillow's `convert("RGB")`.
//!
//! An image may cover a part of the file's canvas. The rest has the transparent color if the image
//! has one, else the first color of its palette, as in Pillow; in browsers it is transparent.

use gif::{ColorOutput, DecodeOptions, DecodingError, Frame};
use image::RgbaImage;

use crate::AugmentError;
use crate::pixels::{DecodeRules, Rgb8};

/// Bytes that begin every GIF, before its version.
pub(crate) const MAGIC: [u8; 4] = *b"GIF8";

/// Number of colors that an index of 8 bits can address.
const N_COLORS: usize = 256;

/// The first image, before its pixels are read.
pub(crate) struct FirstImage<'a> {
    decoder: gif::Decoder<&'a [u8]>,
    frame: Frame<'static>,
    /// Number of pixels per row of the canvas.
    pub(crate) width_px: u32,
    /// Number of rows of the canvas.
    pub(crate) height_px: u32,
}

impl<'a> FirstImage<'a> {
    /// Reads the headers of `bytes`.
    ///
    /// # Errors
    /// [`AugmentError::Decode`] for damaged bytes, [`AugmentError::Empty`] for a GIF without an
    /// image.
    pub(crate) fn open(bytes: &'a [u8]) -> Result<Self, AugmentError> {
        let mut options = DecodeOptions::new();
        options.set_color_output(ColorOutput::Indexed);
        let mut decoder = options.read_info(bytes).map_err(broken)?;
        let frame = decoder.next_frame_info().map_err(broken)?.ok_or(AugmentError::Empty)?.clone();
        // Pillow enlarges a canvas that its first image exceeds.
        let right = u32::from(frame.left) + u32::from(frame.width);
        let bottom = u32::from(frame.top) + u32::from(frame.height);
        let width_px = right.max(decoder.width().into());
        let height_px = bottom.max(decoder.height().into());
        Ok(Self { decoder, frame, width_px, height_px })
    }

    /// Returns whether a color of the palette is transparent.
    pub(crate) fn is_transparent(&self) -> bool {
        self.frame.transparent.is_some()
    }
}

/// The canvas with its first image.
pub(crate) struct Canvas {
    width_px: u32,
    height_px: u32,
    /// Index of each pixel's color.
    indices: Vec<u8>,
    colors: [[u8; 3]; N_COLORS],
    /// Index of the transparent color.
    transparent: Option<u8>,
}

impl Canvas {
    /// Decodes the first image.
    ///
    /// # Errors
    /// [`AugmentError::TooManyPixels`] by the headers alone; [`AugmentError::Decode`] for damaged
    /// bytes.
    pub(crate) fn decode(bytes: &[u8], rules: &DecodeRules) -> Result<Self, AugmentError> {
        let FirstImage { mut decoder, frame, width_px, height_px } = FirstImage::open(bytes)?;
        rules.check(width_px, height_px)?;
        let mut colors = [[0; 3]; N_COLORS];
        // Colors beyond the end of the palette are black, as in Pillow 13.
        for (color, entry) in colors.iter_mut().zip(decoder.palette().map_err(broken)?.as_chunks().0) {
            *color = *entry;
        }
        let width = width_px as usize;
        let left = usize::from(frame.left);
        let top = usize::from(frame.top);
        let columns = usize::from(frame.width);
        let mut image = vec![0; columns * usize::from(frame.height)];
        decoder.read_into_buffer(&mut image).map_err(broken)?;
        let mut indices = vec![frame.transparent.unwrap_or(0); width * height_px as usize];
        if columns > 0 {
            for (y, row) in image.chunks_exact(columns).enumerate() {
                let start = (top + y) * width + left;
                indices[start..start + columns].copy_from_slice(row);
            }
        }
        Ok(Self { width_px, height_px, indices, colors, transparent: frame.transparent })
    }

    /// Returns the colors of the pixels: transparent ones have that of the palette, or
    /// `background`.
    pub(crate) fn to_rgb(&self, background: Option<[u8; 3]>) -> Rgb8 {
        let mut colors = self.colors;
        if let (Some(transparent), Some(background)) = (self.transparent, background) {
            colors[usize::from(transparent)] = background;
        }
        let mut data = Vec::with_capacity(3 * self.indices.len());
        for index in &self.indices {
            data.extend(colors[usize::from(*index)]);
        }
        Rgb8::new(self.width_px, self.height_px, data)
    }

    /// Returns colors and opacity of the pixels; `None` if all are opaque.
    pub(crate) fn to_rgba(&self) -> Option<RgbaImage> {
        let transparent = self.transparent?;
        let mut data = Vec::with_capacity(4 * self.indices.len());
        for index in &self.indices {
            data.extend(self.colors[usize::from(*index)]);
            data.push(if *index == transparent { 0 } else { u8::MAX });
        }
        RgbaImage::from_raw(self.width_px, self.height_px, data)
    }
}

fn broken(error: DecodingError) -> AugmentError {
    AugmentError::Decode(format!("GIF: {error}"))
}
