//! Canvas of charts, and pictures as files.

use std::path::Path;
use std::sync::Once;

use image::codecs::png::PngEncoder;
use image::{ExtendedColorType, ImageEncoder};
use plotters::prelude::*;
use plotters::style::register_font;

use crate::ReportError;

/// Factor from the sizes of a chart to pixels: glyphs are placed on whole pixels, and are spaced evenly only if pixels
/// are small.
pub(crate) const SCALE: u32 = 2;

/// Returns white pixels for `n_rows` rows of charts, and their size; registers the font.
pub(crate) fn canvas(n_rows: usize) -> (Vec<u8>, (u32, u32)) {
    register_default_font();
    let (width, height) = (1000 * SCALE, 260 * SCALE * n_rows as u32);
    (vec![255; 3 * width as usize * height as usize], (width, height))
}

/// Writes a chart as a PNG.
pub(crate) fn save(path: &Path, pixels: &[u8], size: (u32, u32)) -> Result<(), ReportError> {
    write_png(path, pixels, size).map_err(|reason| ReportError::Picture { path: path.to_path_buf(), reason })
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
