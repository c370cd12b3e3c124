//! Sheets of images beside the classes of their pixels.

use std::path::Path;

use eval::MaskPicture;

use super::tiles::{Tile, sheet};
use crate::ReportError;

/// Number of images in a row, each with its true and its predicted classes.
const IMAGES_PER_ROW: usize = 2;

/// Side of a tile in pixels.
const TILE_PX: u32 = 128;

/// Draws `pictures`, images of the set called `set`, each with its key, its true classes and its
/// predicted ones, in the colors of PASCAL VOC.
///
/// # Errors
/// [`ReportError::Picture`].
pub(super) fn mask_sheet(path: &Path, set: &str, pictures: &[MaskPicture]) -> Result<(), ReportError> {
    let mut rows: Vec<Vec<Tile>> = Vec::new();
    for row in pictures.chunks(IMAGES_PER_ROW) {
        let mut tiles = Vec::with_capacity(3 * row.len());
        for picture in row {
            tiles.push(square(picture.picture.clone(), picture.key.clone()));
            tiles.push(square(colored(&picture.truth), "true classes".into()));
            let predicted = format!("predicted, {:.0} % right", picture.accuracy);
            tiles.push(square(colored(&picture.predicted), predicted));
        }
        rows.push(tiles);
    }
    let legend =
        format!("{set}, smallest share of right pixels first; a color is a class, beige does not count");
    sheet(path, &rows, TILE_PX, &legend)
}

/// Returns the tile of the square `planes`, `[3, S, S]`, with `caption`.
fn square(planes: Vec<u8>, caption: String) -> Tile {
    let size_px = (planes.len() / 3).isqrt();
    Tile { planes, size_px, frame: None, caption: vec![caption] }
}

/// Returns the planes of a picture of `classes`, `[3, S, S]` for `[S, S]`.
fn colored(classes: &[u8]) -> Vec<u8> {
    let mut planes = Vec::with_capacity(3 * classes.len());
    for channel in 0..3 {
        for class in classes {
            planes.push(color(*class)[channel]);
        }
    }
    planes
}

/// Returns the color of `class` in PASCAL VOC, whose bits are spread over the channels from the
/// highest down: 0 is black, 255 beige.
fn color(class: u8) -> [u8; 3] {
    let mut color = [0; 3];
    let mut bits = class;
    for shift in (0..8).rev() {
        for (channel, value) in color.iter_mut().enumerate() {
            *value |= ((bits >> channel) & 1) << shift;
        }
        bits >>= 3;
    }
    color
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first colors of the data set's development kit, and that of its borders.
    #[test]
    fn colors_are_those_of_pascal_voc() {
        let known =
            [(0, [0, 0, 0]), (1, [128, 0, 0]), (2, [0, 128, 0]), (3, [128, 128, 0]), (4, [0, 0, 128])];
        for (class, expected) in known {
            assert_eq!(color(class), expected, "{class}");
        }
        assert_eq!([color(8), color(20), color(255)], [[64, 0, 0], [0, 64, 128], [224, 224, 192]]);
        assert_eq!(colored(&[1, 2]), [128, 0, 0, 128, 0, 0]);
    }

    #[test]
    fn an_image_and_its_classes_are_side_by_side() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("masks.png");
        let mut pictures = Vec::new();
        for image in 0..3 {
            pictures.push(MaskPicture {
                image,
                key: image.to_string(),
                accuracy: 50.0,
                picture: vec![200; 3 * 4],
                truth: vec![1; 4],
                predicted: vec![0; 4],
            });
        }
        mask_sheet(&path, "val", &pictures).unwrap();
        let drawn = image::open(&path).unwrap().to_rgb8();
        let middle = TILE_PX / 2;
        let pitch = TILE_PX + 4;
        let left = [4 + middle, 4 + middle + pitch, 4 + middle + 2 * pitch];
        let colors = left.map(|x| drawn.get_pixel(x, 4 + middle).0);
        assert_eq!(colors, [[200; 3], [128, 0, 0], [0, 0, 0]]);
        assert!(drawn.width() >= 6 * pitch && drawn.height() >= 2 * pitch);
    }
}
