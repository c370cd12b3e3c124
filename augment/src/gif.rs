//! The first image of a GIF, with the pixels of Pillow's `convert("RGB")`.
//!
//! An image may cover a part of the file's canvas. The rest shows the transparent color if the image
//! has one, else the first color of its palette, as in Pillow; browsers show nothing there.

use gif::{ColorOutput, DecodeOptions, DecodingError, Frame};

use crate::AugmentError;
use crate::pixels::{DecodeRules, Rgb8};

/// Bytes that begin every GIF, before its version.
pub(crate) const MAGIC: [u8; 4] = *b"GIF8";

/// Number of colors that an index of 8 bits can name.
const N_COLORS: usize = 256;

/// The first image, whose pixels are still to be read.
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
    /// [`AugmentError::Decode`] for damaged bytes, [`AugmentError::Empty`] for a GIF without an image.
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

    /// Whether a color of the palette stands for no color.
    pub(crate) fn is_transparent(&self) -> bool {
        self.frame.transparent.is_some()
    }
}

/// Decodes the first image onto the canvas; transparent pixels have their color of the palette, or the
/// background of `rules`.
///
/// # Errors
/// [`AugmentError::TooManyPixels`] by the headers alone; [`AugmentError::Decode`] for damaged bytes.
pub(crate) fn decode(bytes: &[u8], rules: &DecodeRules) -> Result<Rgb8, AugmentError> {
    let FirstImage { mut decoder, frame, width_px, height_px } = FirstImage::open(bytes)?;
    rules.check(width_px, height_px)?;
    let width = width_px as usize;
    let left = usize::from(frame.left);
    let top = usize::from(frame.top);
    let frame_width = usize::from(frame.width);
    let frame_height = usize::from(frame.height);

    let mut indices = vec![0; frame_width * frame_height];
    decoder.read_into_buffer(&mut indices).map_err(broken)?;
    let mut colors = [[0; 3]; N_COLORS];
    for (index, color) in colors.iter_mut().enumerate() {
        // Gray where the palette is shorter, as in Pillow.
        *color = [index as u8; 3];
    }
    for (color, entry) in colors.iter_mut().zip(decoder.palette().map_err(broken)?.as_chunks().0) {
        *color = *entry;
    }
    let mut around = 0;
    if let Some(transparent) = frame.transparent {
        around = transparent;
        if let Some(background) = rules.background {
            colors[usize::from(transparent)] = background;
        }
    }

    let around = colors[usize::from(around)];
    let mut data = around.repeat(width * height_px as usize);
    if frame_width > 0 {
        for (y, row) in indices.chunks_exact(frame_width).enumerate() {
            let start = 3 * ((top + y) * width + left);
            let pixels = data[start..start + 3 * frame_width].as_chunks_mut().0;
            for (pixel, index) in pixels.iter_mut().zip(row) {
                *pixel = colors[usize::from(*index)];
            }
        }
    }
    Ok(Rgb8::new(width_px, height_px, data))
}

fn broken(error: DecodingError) -> AugmentError {
    AugmentError::Decode(format!("GIF: {error}"))
}
