//! Images beside the images whose features are most similar.

use std::sync::Arc;

use eval::{FeatureSet, ImageSet, Table, neighbors};

use super::sheet::{Sheet, caption};
use super::tile::{Mark, Tile};
use crate::ReportError;

/// Number of neighbors of each image.
const N_NEIGHBORS: usize = 8;

/// Shows `n_rows` of `images`, whose features are `table`, with their neighbors among all of them.
/// If classes are known, a neighbor's mark says whether it has the same class.
pub(super) fn sheet(images: &ImageSet, table: Arc<Table>, n_rows: usize) -> Result<Sheet, ReportError> {
    let size_px = images.transform.size_px as usize;
    let all = FeatureSet::from_table(table, |_| Some(0));
    let n_rows = n_rows.min(all.len());
    let queries = all.select((0..n_rows).map(|i| i * all.len() / n_rows));
    // The nearest neighbor of each query is the query itself.
    let nearest = neighbors(&all, &queries, N_NEIGHBORS + 1, false);
    let mut sheet = Sheet { headings: vec!["image".into(), "nearest".into()], rows: Vec::new() };
    for (row, near) in nearest.iter().enumerate() {
        let query = queries.image(row);
        let Some(planes) = images.picture(query)? else { continue };
        let mut tiles = vec![Tile::from_planes(&planes, size_px, caption(images, query))?];
        let others = near.iter().map(|(i, cosine)| (all.image(*i as usize), cosine));
        for (image, cosine) in others.filter(|(image, _)| *image != query).take(N_NEIGHBORS) {
            let Some(planes) = images.picture(image)? else { continue };
            let caption = format!("{}, cosine {cosine:.3}", caption(images, image));
            let mark = match (images.label(query), images.label(image)) {
                (Some(a), Some(b)) => Some(if a == b { Mark::Same } else { Mark::Other }),
                _ => None,
            };
            tiles.push(Tile { mark, ..Tile::from_planes(&planes, size_px, caption)? });
        }
        sheet.rows.push(tiles);
    }
    Ok(sheet)
}
