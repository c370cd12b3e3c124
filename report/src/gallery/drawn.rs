//! The sheets of a gallery as PNG files.

use std::path::{Path, PathBuf};

use image::RgbImage;

use super::Gallery;
use super::sheet::Sheet;
use super::tile::{Mark, Tile};
use crate::ReportError;
use crate::picture::tiles::{self, GREEN, RED, sheet};

/// Side of a tile in pixels.
const TILE_PX: u32 = 112;

/// Number of columns of tiles. Shorter rows stand beside one another.
const N_COLUMNS: usize = 8;

/// Name of the picture of patch features.
const PATCHES: &str = "patches.png";

/// Name of the picture of attention.
const ATTENTION: &str = "attention.png";

/// Name of the picture of neighbors.
const NEIGHBORS: &str = "neighbors.png";

impl Gallery {
    /// Names of the files that [`Gallery::draw`] writes.
    pub const FILES: [&'static str; 3] = [PATCHES, ATTENTION, NEIGHBORS];

    /// Draws patch features, attention and neighbors into files in `folder`; returns the files. A
    /// picture that this network does not have is removed, which an earlier network may have had.
    ///
    /// # Errors
    /// [`ReportError::Picture`], [`ReportError::Write`].
    pub fn draw(&self, folder: &Path) -> Result<Vec<PathBuf>, ReportError> {
        let mut files = Vec::new();
        let patches = "image, and the first three principal components of its patches as red, green and blue";
        files.extend(draw_sheet(&folder.join(PATCHES), &self.patches, patches)?);
        let attention = "attention of the class token in the last block, from black to white";
        files.extend(draw_sheet(&folder.join(ATTENTION), &self.attention, attention)?);
        let has_classes = self.neighbors.rows.iter().flatten().any(|tile| tile.mark.is_some());
        let neighbors = if has_classes {
            "left: image; right: its nearest neighbors; green frame: same class, red: another"
        } else {
            "left: image; right: its nearest neighbors"
        };
        files.extend(draw_sheet(&folder.join(NEIGHBORS), &self.neighbors, neighbors)?);
        Ok(files)
    }
}

/// Draws a sheet into the file `path`, with `legend` below it; returns the file, or `None` if the
/// sheet is empty.
fn draw_sheet(path: &Path, shown: &Sheet, legend: &str) -> Result<Option<PathBuf>, ReportError> {
    let longest = shown.rows.iter().map(Vec::len).max().unwrap_or(0);
    if longest == 0 {
        if path.exists() {
            std::fs::remove_file(path)
                .map_err(|source| ReportError::Write { path: path.to_path_buf(), source })?;
        }
        return Ok(None);
    }
    let mut lines: Vec<Vec<tiles::Tile>> = Vec::new();
    for rows in shown.rows.chunks((N_COLUMNS / longest).max(1)) {
        let mut line = Vec::new();
        for row in rows {
            for (column, tile) in row.iter().enumerate() {
                line.push(drawn_tile(tile, heading(shown, column)));
            }
        }
        lines.push(line);
    }
    sheet(path, &lines, TILE_PX, legend)?;
    Ok(Some(path.to_path_buf()))
}

/// Returns the heading of a column, if all columns after the first have headings of their own.
fn heading(shown: &Sheet, column: usize) -> Option<&String> {
    if column > 0 && shown.headings.len() > 2 { shown.headings.get(column) } else { None }
}

/// Returns a tile, whose picture is square, as it is drawn, with `heading` as its caption if there
/// is one.
fn drawn_tile(tile: &Tile, heading: Option<&String>) -> tiles::Tile {
    let frame = match tile.mark {
        Some(Mark::Same) => Some(GREEN),
        Some(Mark::Other) => Some(RED),
        None => None,
    };
    tiles::Tile {
        planes: planes(&tile.pixels),
        size_px: tile.pixels.width() as usize,
        frame,
        caption: vec![heading.unwrap_or(&tile.caption).clone()],
    }
}

/// Returns the R, G and B planes of a picture, one after another.
fn planes(pixels: &RgbImage) -> Vec<u8> {
    let mut planes = Vec::with_capacity(pixels.len());
    for channel in 0..3 {
        planes.extend(pixels.pixels().map(|pixel| pixel.0[channel]));
    }
    planes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gray(value: u8) -> Tile {
        let pixels = RgbImage::from_pixel(4, 4, image::Rgb([value; 3]));
        Tile::from_image(&pixels, format!("gray {value}")).unwrap()
    }

    #[test]
    fn short_rows_stand_beside_one_another_and_empty_sheets_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sheet.png");
        let rows: Vec<Vec<Tile>> = (0..5).map(|row| vec![gray(10 * row), gray(200 + row)]).collect();
        let shown = Sheet { headings: vec!["image".into(), "patches".into()], rows };
        assert_eq!(draw_sheet(&path, &shown, "").unwrap(), Some(path.clone()));
        let drawn = image::open(&path).unwrap().to_rgb8();
        // Four rows of two tiles in the first line, one in the second.
        assert_eq!(drawn.width(), 8 * (TILE_PX + 4) + 4);
        let centers: Vec<u8> = (0..8)
            .map(|x| drawn.get_pixel(4 + x * (TILE_PX + 4) + TILE_PX / 2, 4 + TILE_PX / 2).0[0])
            .collect();
        assert_eq!(centers, [0, 200, 10, 201, 20, 202, 30, 203]);
        assert_eq!(draw_sheet(&path, &Sheet::default(), "").unwrap(), None);
        assert!(!path.exists(), "the picture of an earlier network");
    }

    #[test]
    fn planes_are_separate() {
        let pixels = RgbImage::from_fn(2, 1, |x, _| image::Rgb([x as u8, 10 + x as u8, 20 + x as u8]));
        assert_eq!(planes(&pixels), [0, 1, 10, 11, 20, 21]);
    }
}
