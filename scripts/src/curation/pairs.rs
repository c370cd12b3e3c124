//! Sheets of images by which a threshold can be chosen.

use std::collections::HashSet;
use std::path::Path;

use augment::{DecodeRules, Image, Rgb8};
use curate::selection::Duplicates;
use eval::features::file::ImageName;
use report::picture::sheets::{Captioned, Pair, image_pairs, image_sheet};

use super::input::Images;

/// Number of pairs in a row of the sheet.
const PAIRS_PER_ROW: usize = 4;

/// Distances of the rows from a similarity of 1, relative to that of the threshold.
const STEPS: [f32; 8] = [0.2, 0.5, 0.8, 0.97, 1.03, 1.3, 1.8, 3.0];

/// An image and the most similar one that it is compared with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Match {
    /// Row of the image.
    pub(crate) row: usize,
    /// Row of the other image, in its own set.
    pub(crate) other: usize,
    /// Cosine similarity.
    pub(crate) similarity: f32,
}

/// Draws pairs of an image and the most similar kept one. Returns whether there are any.
pub(crate) fn draw_pairs(
    path: &Path,
    images: &Images,
    names: &[ImageName],
    found: &Duplicates,
) -> anyhow::Result<bool> {
    let matched = found.nearest.iter().enumerate().filter_map(|(row, nearest)| {
        nearest.map(|nearest| Match { row, other: nearest.row as usize, similarity: nearest.similarity })
    });
    draw_matches(path, (images, &matched.collect::<Vec<_>>()), (images, names), found.threshold)
}

/// Draws pairs, in rows from more similar ones down to less similar ones than `threshold`: the
/// other image with its key, and the image with the similarity. Returns whether there are any.
pub(crate) fn draw_matches(
    path: &Path,
    (images, matches): (&Images, &[Match]),
    (others, names): (&Images, &[ImageName]),
    threshold: f32,
) -> anyhow::Result<bool> {
    let mut sorted = matches.to_vec();
    sorted.sort_by(|a, b| b.similarity.total_cmp(&a.similarity).then(a.row.cmp(&b.row)));
    let n_above = sorted.partition_point(|one| one.similarity >= threshold);
    let (above, below) = sorted.split_at(n_above);
    let mut rows = Vec::new();
    let mut shown = HashSet::new();
    for step in STEPS {
        let side = if step < 1.0 { above } else { below };
        let wanted = 1.0 - step * (1.0 - threshold);
        let away = |one: &Match| (one.similarity - wanted).abs();
        let mut near: Vec<Match> = side.iter().filter(|one| !shown.contains(&one.row)).copied().collect();
        near.sort_by(|a, b| away(a).total_cmp(&away(b)).then(a.row.cmp(&b.row)));
        near.truncate(PAIRS_PER_ROW);
        near.sort_by(|a, b| b.similarity.total_cmp(&a.similarity).then(a.row.cmp(&b.row)));
        shown.extend(near.iter().map(|one| one.row));
        let drawn: Vec<Pair> = near
            .iter()
            .filter_map(|one| {
                let first = (names[one.other].key.clone(), image(others, one.other)?);
                let second = (format!("{:.4}", one.similarity), image(images, one.row)?);
                Some(Pair { images: [first, second], is_marked: one.similarity >= threshold })
            })
            .collect();
        if !drawn.is_empty() {
            rows.push(drawn);
        }
    }
    if rows.is_empty() {
        return Ok(false);
    }
    image_pairs(path, &rows, &format!("pairs by similarity; red: left out at {threshold}"))?;
    Ok(true)
}

/// Draws images, each a row with its caption and whether it is marked. Returns whether there are
/// any.
pub(crate) fn draw_images(
    path: &Path,
    images: &Images,
    shown: &[(usize, String, bool)],
    legend: &str,
) -> anyhow::Result<bool> {
    let drawn: Vec<Captioned> = shown
        .iter()
        .filter_map(|(row, caption, is_marked)| {
            Some(Captioned { image: image(images, *row)?, caption: caption.clone(), is_marked: *is_marked })
        })
        .collect();
    if drawn.is_empty() {
        return Ok(false);
    }
    image_sheet(path, &drawn, legend)?;
    Ok(true)
}

/// Returns the image of row `row`; `None` for one that cannot be read.
pub(crate) fn image(images: &Images, row: usize) -> Option<Rgb8> {
    let encoded = images.encoded(row).ok()?;
    Image::decode_any(&encoded.files(), &DecodeRules::default()).ok().map(Image::picture)
}
