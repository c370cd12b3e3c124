//! Pictures of images: contact sheets of views, and images with their nearest neighbors.

use std::path::Path;

use image::{Rgb, RgbImage};

use crate::EvalError;

/// Pixels between tiles.
const GAP_PX: u32 = 4;

/// One tile: planes `[3, size, size]` of bytes, and its frame.
pub(crate) struct Tile<'a> {
    /// R, G and B planes.
    pub planes: &'a [u8],
    /// Side of the image.
    pub size_px: usize,
    /// Color of a frame around the tile, if it has one.
    pub frame: Option<[u8; 3]>,
}

/// Writes rows of tiles as a PNG. Tiles are scaled up or down, by whole pixels, to `tile_px`.
///
/// # Errors
/// [`EvalError::Picture`].
pub(crate) fn sheet(path: &Path, rows: &[Vec<Tile<'_>>], tile_px: u32) -> Result<(), EvalError> {
    let n_columns = rows.iter().map(Vec::len).max().unwrap_or(0) as u32;
    let pitch = tile_px + GAP_PX;
    let (width, height) = (n_columns * pitch + GAP_PX, rows.len() as u32 * pitch + GAP_PX);
    let mut canvas = RgbImage::from_pixel(width.max(1), height.max(1), Rgb([255; 3]));
    for (y, row) in rows.iter().enumerate() {
        for (x, tile) in row.iter().enumerate() {
            let corner = [GAP_PX + x as u32 * pitch, GAP_PX + y as u32 * pitch];
            draw(&mut canvas, tile, corner, tile_px);
        }
    }
    canvas
        .save(path)
        .map_err(|error| EvalError::Picture { path: path.to_path_buf(), reason: error.to_string() })
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
