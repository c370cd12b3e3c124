//! Images beside the views that a run draws of them in its first epoch.

use augment::MultiCrop;
use augment::image::picture_of_view;
use eval::ImageSet;

use super::sheet::{Sheet, caption};
use super::tile::Tile;
use crate::ReportError;

/// Shows each image beside all of its views.
pub(super) fn sheet(images: &ImageSet, multicrop: &MultiCrop, seed: u64) -> Result<Sheet, ReportError> {
    let size_px = images.transform.size_px as usize;
    let groups = multicrop.groups();
    let format = images.format();
    let mut sheet = Sheet { headings: vec!["image".into(), "views".into()], rows: Vec::new() };
    for image in 0..images.len() {
        let (Some(planes), Some(views)) = (images.picture(image)?, images.views(image, multicrop, seed, 0)?)
        else {
            continue;
        };
        let mut row = vec![Tile::from_planes(&planes, size_px, caption(images, image))?];
        for (bytes, group) in views.iter().zip(&groups) {
            let side = group.size_px as usize;
            for view in bytes.chunks_exact(format.bytes_per_pixel() * side * side) {
                let planes = picture_of_view(view, format, group.size_px);
                row.push(Tile::from_planes(&planes, side, format!("{side} x {side} px"))?);
            }
        }
        sheet.rows.push(row);
    }
    Ok(sheet)
}
