//! Pictures of images: contact sheets of views, and images with their nearest neighbors.

use std::path::Path;
use std::sync::Once;

use image::{Rgb, RgbImage};
use plotters::prelude::*;
use plotters::style::register_font;

use crate::EvalError;

/// Pixels between tiles.
const GAP_PX: u32 = 4;

/// Height of the line of text below the tiles.
const LEGEND_PX: u32 = 26;

/// One tile: planes `[3, size, size]` of bytes, and its frame.
pub(crate) struct Tile<'a> {
    /// R, G and B planes.
    pub planes: &'a [u8],
    /// Side of the image.
    pub size_px: usize,
    /// Color of a frame around the tile, if it has one.
    pub frame: Option<[u8; 3]>,
}

/// Writes rows of tiles as a PNG, with `legend` below them unless it is empty. Tiles are scaled up or down, by whole
/// pixels, to `tile_px`.
///
/// # Errors
/// [`EvalError::Picture`].
pub(crate) fn sheet(
    path: &Path,
    rows: &[Vec<Tile<'_>>],
    tile_px: u32,
    legend: &str,
) -> Result<(), EvalError> {
    let failed = |reason: String| EvalError::Picture { path: path.to_path_buf(), reason };
    let n_columns = rows.iter().map(Vec::len).max().unwrap_or(0) as u32;
    let pitch = tile_px + GAP_PX;
    let (width, tiles_px) = (n_columns * pitch + GAP_PX, rows.len() as u32 * pitch + GAP_PX);
    let height = if legend.is_empty() { tiles_px } else { tiles_px + LEGEND_PX };
    let mut canvas = RgbImage::from_pixel(width.max(1), height.max(1), Rgb([255; 3]));
    for (y, row) in rows.iter().enumerate() {
        for (x, tile) in row.iter().enumerate() {
            let corner = [GAP_PX + x as u32 * pitch, GAP_PX + y as u32 * pitch];
            draw(&mut canvas, tile, corner, tile_px);
        }
    }
    if !legend.is_empty() {
        write(&mut canvas, legend, [GAP_PX, tiles_px + GAP_PX]).map_err(failed)?;
    }
    canvas.save(path).map_err(|error| failed(error.to_string()))
}

/// Writes a line of text whose upper left corner is at `[x, y]`.
fn write(canvas: &mut RgbImage, text: &str, [x, y]: [u32; 2]) -> Result<(), String> {
    have_font();
    let size = canvas.dimensions();
    let area = BitMapBackend::with_buffer(canvas, size).into_drawing_area();
    let text = Text::new(text, (x as i32, y as i32), ("sans-serif", 16));
    area.draw(&text).and_then(|()| area.present()).map_err(|error| error.to_string())
}

/// Makes the font that ships with the program known.
pub(crate) fn have_font() {
    static FONT: Once = Once::new();
    FONT.call_once(|| {
        // A second registration would only repeat the first.
        let _ = register_font("sans-serif", FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
    });
}

fn draw(canvas: &mut RgbImage, tile: &Tile<'_>, [left, top]: [u32; 2], tile_px: u32) {
    if let Some(color) = tile.frame {
        for y in top - 3..top + tile_px + 3 {
            for x in left - 3..left + tile_px + 3 {
                canvas.put_pixel(x, y, Rgb(color));
            }
        }
    }
    let plane = tile.size_px * tile.size_px;
    for y in 0..tile_px as usize {
        for x in 0..tile_px as usize {
            let at =
                (y * tile.size_px / tile_px as usize) * tile.size_px + x * tile.size_px / tile_px as usize;
            let pixel = Rgb([tile.planes[at], tile.planes[plane + at], tile.planes[2 * plane + at]]);
            canvas.put_pixel(left + x as u32, top + y as u32, pixel);
        }
    }
}
