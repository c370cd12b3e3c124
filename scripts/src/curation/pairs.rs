//! Sheets of images for choosing a threshold.

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
    duplicates: &Duplicates,
) -> anyhow::Result<bool> {
    let mut matches = Vec::new();
    for (row, nearest) in duplicates.nearest.iter().enumerate() {
        if let Some(nearest) = nearest {
            matches.push(Match { row, other: nearest.row as usize, similarity: nearest.similarity });
        }
    }
    draw_matches(path, images, &matches, images, names, duplicates.threshold)
}

/// Draws pairs, in rows from similarities above `threshold` down to those below it: the other image
/// with its key, and the image with the similarity. `names` are those of `others`. Returns whether
/// there are any pairs.
pub(crate) fn draw_matches(
    path: &Path,
    images: &Images,
    matches: &[Match],
    others: &Images,
    names: &[ImageName],
    threshold: f32,
) -> anyhow::Result<bool> {
    let mut sorted = matches.to_vec();
    sorted.sort_by(|a, b| b.similarity.total_cmp(&a.similarity).then(a.row.cmp(&b.row)));
    let n_above = sorted.partition_point(|pair| pair.similarity >= threshold);
    let (above, below) = sorted.split_at(n_above);
    let mut rows = Vec::new();
    let mut shown = HashSet::new();
    for step in STEPS {
        let side = if step < 1.0 { above } else { below };
        let target = 1.0 - step * (1.0 - threshold);
        let mut near: Vec<Match> = side.iter().filter(|pair| !shown.contains(&pair.row)).copied().collect();
        near.sort_by(|a, b| {
            let distances = [a, b].map(|pair| (pair.similarity - target).abs());
            distances[0].total_cmp(&distances[1]).then(a.row.cmp(&b.row))
        });
        near.truncate(PAIRS_PER_ROW);
        near.sort_by(|a, b| b.similarity.total_cmp(&a.similarity).then(a.row.cmp(&b.row)));
        shown.extend(near.iter().map(|pair| pair.row));
        let mut row = Vec::new();
        for pair in near {
            let Some(other) = image(others, pair.other) else { continue };
            let Some(image) = image(images, pair.row) else { continue };
            let first = (names[pair.other].key.clone(), other);
            let second = (format!("{:.4}", pair.similarity), image);
            row.push(Pair { images: [first, second], is_marked: pair.similarity >= threshold });
        }
        if !row.is_empty() {
            rows.push(row);
        }
    }
    if rows.is_empty() {
        return Ok(false);
    }
    image_pairs(path, &rows, &format!("pairs by similarity; red: dropped at {threshold}"))?;
    Ok(true)
}

/// Draws images: the row of each, its caption, and whether it is marked. Returns whether there are
/// any.
pub(crate) fn draw_images(
    path: &Path,
    images: &Images,
    shown: &[(usize, String, bool)],
    legend: &str,
) -> anyhow::Result<bool> {
    let mut captioned = Vec::new();
    for (row, caption, is_marked) in shown {
        if let Some(image) = image(images, *row) {
            captioned.push(Captioned { image, caption: caption.clone(), is_marked: *is_marked });
        }
    }
    if captioned.is_empty() {
        return Ok(false);
    }
    image_sheet(path, &captioned, legend)?;
    Ok(true)
}

/// Returns the image of row `row`; `None` for one that cannot be read.
pub(crate) fn image(images: &Images, row: usize) -> Option<Rgb8> {
    let encoded = images.encoded(row).ok()?;
    Image::decode_any(&encoded.files(), &DecodeRules::default()).ok().map(Image::picture)
}
