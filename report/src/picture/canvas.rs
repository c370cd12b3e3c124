//! Canvas of charts, and pictures as files.

use std::path::Path;
use std::sync::Once;

use image::codecs::png::PngEncoder;
use image::{ExtendedColorType, ImageEncoder};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::register_font;

use crate::ReportError;

/// Factor from the sizes of a chart to pixels: glyphs are placed on whole pixels, and are spaced
/// evenly only if pixels are small.
pub(crate) const SCALE: u32 = 2;

/// Area of one chart.
pub(crate) type Cell<'a> = DrawingArea<BitMapBackend<'a>, Shift>;

/// Draws a chart for each of `items`, two per row, and writes them as one PNG.
///
/// # Errors
/// [`ReportError::Picture`].
pub(crate) fn draw_charts<T>(
    path: &Path,
    items: &[T],
    draw: impl Fn(&Cell<'_>, &T) -> Result<(), String>,
) -> Result<(), ReportError> {
    register_default_font();
    let n_rows = items.len().div_ceil(2).max(1);
    let size = (1000 * SCALE, 260 * SCALE * n_rows as u32);
    let mut pixels = vec![255; 3 * size.0 as usize * size.1 as usize];
    {
        let area = BitMapBackend::with_buffer(&mut pixels, size).into_drawing_area();
        for (item, cell) in items.iter().zip(area.split_evenly((n_rows, 2))) {
            draw(&cell, item).map_err(|reason| ReportError::picture(path, reason))?;
        }
        area.present().map_err(|error| ReportError::picture(path, error.to_string()))?;
    }
    write_png(path, &pixels, size).map_err(|reason| ReportError::picture(path, reason))
}

/// Writes RGB pixels as a PNG, atomically.
pub(crate) fn write_png(path: &Path, pixels: &[u8], (width, height): (u32, u32)) -> Result<(), String> {
    let mut bytes = Vec::new();
    let encoder = PngEncoder::new(&mut bytes);
    encoder.write_image(pixels, width, height, ExtendedColorType::Rgb8).map_err(|error| error.to_string())?;
    pipeline::file::replace(path, &bytes).map_err(|error| error.to_string())
}

/// Registers the font that ships with the program.
pub(crate) fn register_default_font() {
    static FONT: Once = Once::new();
    FONT.call_once(|| {
        // A second registration would only repeat the first.
        let _ = register_font("sans-serif", FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
    });
}
