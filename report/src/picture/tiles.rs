//! Rows of tiles, each an image with its frame and caption.

use std::path::Path;

use image::{Rgb, RgbImage};
use plotters::prelude::*;

use super::canvas::{register_default_font, write_png};
use crate::ReportError;

/// Pixels between tiles.
const GAP_PX: u32 = 4;

/// Height of the line of text below the tiles.
const LEGEND_PX: u32 = 26;

/// Size of the text below the tiles.
const LEGEND_TEXT_PX: u32 = 16;

/// Height of a line of text below a tile.
const LINE_PX: u32 = 16;

/// Size of the text below a tile.
const CAPTION_PX: u32 = 12;

/// Pixels between the frame of a tile and its caption, whose letters may reach above their line.
const BELOW_FRAME_PX: u32 = 3;

/// Largest number of lines of a text below a tile; the last one is shortened.
const MAX_CAPTION_LINES: usize = 3;

/// Color of a frame that says yes: the same class, a right prediction, the image that is kept.
pub(crate) const GREEN: [u8; 3] = [40, 160, 70];

/// Color of a frame that says no: another class, a wrong prediction, a marked image.
pub(crate) const RED: [u8; 3] = [200, 50, 50];

/// An image in a sheet, with its frame and caption.
pub(crate) struct Tile {
    /// R, G and B planes, `[3, size, size]`.
    pub(crate) planes: Vec<u8>,
    /// Side of the image.
    pub(crate) size_px: usize,
    /// Color of a frame around the tile, if it has one.
    pub(crate) frame: Option<[u8; 3]>,
    /// Lines of text below the tile, each shortened to the tile's width.
    pub(crate) caption: Vec<String>,
}

/// Writes rows of tiles as a PNG, with `legend` below them unless it is empty. Tiles are scaled to
/// `tile_px` by nearest neighbor.
///
/// # Errors
/// [`ReportError::Picture`].
pub(crate) fn sheet(path: &Path, rows: &[Vec<Tile>], tile_px: u32, legend: &str) -> Result<(), ReportError> {
    let n_columns = rows.iter().map(Vec::len).max().unwrap_or(0) as u32;
    let n_lines = rows.iter().flatten().map(|tile| tile.caption.len()).max().unwrap_or(0) as u32;
    // Letters reach below their line, where the frame of the next row begins.
    let below_captions_px = if n_lines > 0 { GAP_PX + BELOW_FRAME_PX } else { 0 };
    let pitch = [tile_px + GAP_PX, tile_px + GAP_PX + n_lines * LINE_PX + below_captions_px];
    let width = (n_columns * pitch[0] + GAP_PX).max(legend_width_px(legend));
    let tiles_px = rows.len() as u32 * pitch[1] + GAP_PX;
    let height = if legend.is_empty() { tiles_px } else { tiles_px + LEGEND_PX };
    let mut canvas = RgbImage::from_pixel(width.max(1), height.max(1), Rgb([255; 3]));
    for (y, row) in rows.iter().enumerate() {
        for (x, tile) in row.iter().enumerate() {
            let left = GAP_PX + x as u32 * pitch[0];
            let top = GAP_PX + y as u32 * pitch[1];
            draw(&mut canvas, tile, [left, top], tile_px);
            // A frame is around the tile.
            let gap_px = if tile.frame.is_some() { GAP_PX + BELOW_FRAME_PX } else { 2 };
            let below = (top + tile_px + gap_px..).step_by(LINE_PX as usize);
            for (line, y) in tile.caption.iter().zip(below) {
                write(&mut canvas, line, [left, y], CAPTION_PX, Some(tile_px))
                    .map_err(|reason| ReportError::picture(path, reason))?;
            }
        }
    }
    if !legend.is_empty() {
        write(&mut canvas, legend, [GAP_PX, tiles_px + GAP_PX], LEGEND_TEXT_PX, None)
            .map_err(|reason| ReportError::picture(path, reason))?;
    }
    write_png(path, canvas.as_raw(), canvas.dimensions()).map_err(|reason| ReportError::picture(path, reason))
}

/// Returns the width that the line below the tiles needs; zero without one.
fn legend_width_px(legend: &str) -> u32 {
    if legend.is_empty() {
        return 0;
    }
    register_default_font();
    text_width(legend, &("sans-serif", LEGEND_TEXT_PX).into_font()) + 2 * GAP_PX
}

/// Draws a line of text of `size_px` whose upper left corner is at `[x, y]`. If it is wider than
/// `max_width_px`, its beginning is cut off: the end of a path says more.
fn write(
    canvas: &mut RgbImage,
    text: &str,
    [x, y]: [u32; 2],
    size_px: u32,
    max_width_px: Option<u32>,
) -> Result<(), String> {
    register_default_font();
    let size = canvas.dimensions();
    let area = BitMapBackend::with_buffer(canvas, size).into_drawing_area();
    let font = ("sans-serif", size_px).into_font();
    let shown = match max_width_px {
        Some(max_width_px) => shorten(text, &font, max_width_px),
        None => text.to_string(),
    };
    let text = Text::new(shown, (x as i32, y as i32), font.clone());
    area.draw(&text).and_then(|()| area.present()).map_err(|error| error.to_string())
}

/// Breaks `text` into lines that fit below a tile of `tile_px`, after a slash where a line has one.
pub(crate) fn caption_lines(text: &str, tile_px: u32) -> Vec<String> {
    register_default_font();
    let font = ("sans-serif", CAPTION_PX).into_font();
    let mut lines = Vec::new();
    let mut rest = text;
    while text_width(rest, &font) > tile_px && lines.len() + 1 < MAX_CAPTION_LINES {
        let ends: Vec<usize> = rest.char_indices().map(|(i, c)| i + c.len_utf8()).collect();
        // A longer prefix is never narrower, so that bisection applies; one character always fits.
        let n_fitting = ends.partition_point(|end| text_width(&rest[..*end], &font) <= tile_px);
        let fitting = &rest[..ends[n_fitting.max(1) - 1]];
        let len = fitting.rfind('/').map_or(fitting.len(), |slash| slash + 1);
        lines.push(rest[..len].to_string());
        rest = &rest[len..];
    }
    lines.push(rest.to_string());
    lines
}

/// Returns `text` if it fits into `max_width_px`, or else its longest suffix that fits after an
/// ellipsis.
fn shorten(text: &str, font: &FontDesc<'_>, max_width_px: u32) -> String {
    if text_width(text, font) <= max_width_px {
        return text.to_string();
    }
    let starts: Vec<usize> = text.char_indices().map(|(i, _)| i).chain([text.len()]).collect();
    // A shorter suffix is never wider, so that bisection applies.
    let first =
        starts.partition_point(|start| text_width(&suffix_with_ellipsis(text, *start), font) > max_width_px);
    starts.get(first).map_or_else(String::new, |start| suffix_with_ellipsis(text, *start))
}

fn suffix_with_ellipsis(text: &str, start: usize) -> String {
    format!("…{}", &text[start..])
}

/// Returns the width of `text` in pixels; zero if the font cannot measure it.
fn text_width(text: &str, font: &FontDesc<'_>) -> u32 {
    font.box_size(text).map_or(0, |(width, _)| width)
}

fn draw(canvas: &mut RgbImage, tile: &Tile, [left, top]: [u32; 2], tile_px: u32) {
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
            let i =
                (y * tile.size_px / tile_px as usize) * tile.size_px + x * tile.size_px / tile_px as usize;
            let pixel = Rgb([tile.planes[i], tile.planes[plane + i], tile.planes[2 * plane + i]]);
            canvas.put_pixel(left + x as u32, top + y as u32, pixel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_captions_take_several_lines() {
        assert_eq!(caption_lines("2024/IMG_1", 128), ["2024/IMG_1"]);
        let key = "holidays/2024/a_photograph_of_the_sea";
        let lines = caption_lines(key, 128);
        assert_eq!(lines.concat(), key);
        assert!(lines.len() > 1 && lines[0].ends_with('/'), "{lines:?}");
        let font = ("sans-serif", CAPTION_PX).into_font();
        assert!(lines.iter().all(|line| text_width(line, &font) <= 128), "{lines:?}");
        // What does not fit into the last line is cut when it is drawn.
        assert_eq!(caption_lines(&"x".repeat(500), 128).len(), MAX_CAPTION_LINES);
    }
}
