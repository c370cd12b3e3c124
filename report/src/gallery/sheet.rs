//! Rows of pictures.

use eval::ImageSet;
use serde::Serialize;

use super::tile::Tile;

/// Rows of tiles.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Sheet {
    /// Headings of the columns; only two if all columns after the first have the same heading.
    pub(crate) headings: Vec<String>,
    pub(crate) rows: Vec<Vec<Tile>>,
}

/// Returns the name of image `i`, and its class.
pub(super) fn caption(images: &ImageSet, i: usize) -> String {
    let (_, key) = images.describe(i);
    match images.label(i).map(|label| &images.classes()[label as usize]) {
        Some(class) => format!("{key}, class {class:?}"),
        None => key,
    }
}
