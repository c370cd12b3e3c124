//! Pairs of images around a threshold, by which a user chooses it.

use std::collections::HashSet;

use augment::Rgb8;

use super::input::Input;
use crate::selection::Retrieved;

/// Number of pairs in a row.
const PAIRS_PER_ROW: usize = 4;

/// Distances of the rows from a similarity of 1, relative to the threshold's distance.
const STEPS: [f32; 8] = [0.2, 0.5, 0.8, 0.97, 1.03, 1.3, 1.8, 3.0];

/// Two similar images.
pub struct ImagePair {
    /// The images, each with its caption: the other image with its key, and the image with its
    /// similarity.
    pub images: [(String, Rgb8); 2],
    /// Whether their similarity is at or above the threshold.
    pub is_above: bool,
}

/// Returns pairs of an image of `input` and the one of `others` that it matches, in rows from
/// similarities above `threshold` down to those below it; none without images. Images that cannot
/// be read are left out.
pub(super) fn pairs_around(
    threshold: f32,
    matches: &[Retrieved],
    input: &Input,
    others: &Input,
) -> Vec<Vec<ImagePair>> {
    if !input.has_images() || !others.has_images() {
        return Vec::new();
    }
    let mut sorted = matches.to_vec();
    sorted.sort_by(|a, b| b.similarity.total_cmp(&a.similarity).then(a.row.cmp(&b.row)));
    let n_above = sorted.partition_point(|pair| pair.similarity >= threshold);
    let (above, below) = sorted.split_at(n_above);
    let mut rows = Vec::new();
    let mut shown = HashSet::new();
    for step in STEPS {
        let side = if step < 1.0 { above } else { below };
        let target = 1.0 - step * (1.0 - threshold);
        let mut near: Vec<Retrieved> =
            side.iter().filter(|pair| !shown.contains(&pair.row)).copied().collect();
        near.sort_by(|a, b| {
            let distances = [a, b].map(|pair| (pair.similarity - target).abs());
            distances[0].total_cmp(&distances[1]).then(a.row.cmp(&b.row))
        });
        near.truncate(PAIRS_PER_ROW);
        near.sort_by(|a, b| b.similarity.total_cmp(&a.similarity).then(a.row.cmp(&b.row)));
        shown.extend(near.iter().map(|pair| pair.row));
        let mut row = Vec::new();
        for pair in near {
            let Some(other) = others.picture(pair.query as usize) else { continue };
            let Some(image) = input.picture(pair.row as usize) else { continue };
            let first = (others.names[pair.query as usize].key.clone(), other);
            let second = (format!("{:.4}", pair.similarity), image);
            row.push(ImagePair { images: [first, second], is_above: pair.similarity >= threshold });
        }
        if !row.is_empty() {
            rows.push(row);
        }
    }
    rows
}
