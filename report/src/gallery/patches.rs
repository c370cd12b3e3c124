//! Patch features as colors: the first three principal components of all patches of all images
//! (Oquab et al. 2023, figure 1, without its foreground mask). The patches of a convolutional
//! network are the cells of its last feature map.

use eval::{FeatureKind, ImageSet, extract};
use networks::Network;
use pipeline::NoProgress;

use super::principal;
use super::sheet::{Sheet, caption};
use super::tile::Tile;
use crate::ReportError;

/// Shows each image beside its patches; a color has the same meaning in all rows.
pub(super) fn sheet(network: &Network, images: &ImageSet) -> Result<Sheet, ReportError> {
    let size_px = images.transform.size_px as usize;
    let d = network.model.width();
    let side = size_px / network.model.stride_px();
    let mut shown = Vec::new();
    let mut rows = Vec::new();
    extract(network, images, FeatureKind::Patches, &NoProgress, |image_numbers, values| {
        shown.extend_from_slice(image_numbers);
        rows.extend_from_slice(values);
        Ok(())
    })?;
    let colors: Vec<[u8; 3]> =
        principal::coordinates(&rows, d).iter().map(|row| row.map(|v| (255.0 * v).round() as u8)).collect();
    let mut sheet = Sheet { headings: vec!["image".into(), "patches".into()], rows: Vec::new() };
    for (image, grid) in shown.iter().zip(colors.chunks_exact(side * side)) {
        let Some(planes) = images.picture(*image as usize)? else { continue };
        let caption = caption(images, *image as usize);
        let patches = format!("{caption}: {side} x {side} patches");
        sheet.rows.push(vec![
            Tile::from_planes(&planes, size_px, caption)?,
            Tile::from_grid(grid, [side, side], patches)?,
        ]);
    }
    Ok(sheet)
}
