//! Label-free measures of features, one file each.

pub(crate) mod alignment;
pub(crate) mod alpha_req;
pub(crate) mod lidar;
pub(crate) mod moments;
pub(crate) mod rankme;
pub(crate) mod retrieval;
pub(crate) mod uniformity;

use augment::MultiCrop;
use networks::Network;
use rayon::prelude::*;
use serde::Serialize;

use crate::EvalError;
use crate::features::columns::FeatureKind;
use crate::features::extract::{check_finite, compute_rows, table};
use crate::images::ImageSet;
use crate::parallel::try_collect;
use pipeline::Progress;

/// Number of images and views to measure on.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct SampleSizes {
    /// Images without augmentation, evenly spread over the set.
    pub n_images: usize,
    /// Images with augmented views, evenly spread over the set.
    pub n_viewed: usize,
    /// Views per image.
    pub n_views: usize,
    /// Images of which two views each are searched, evenly spread over the set.
    pub n_retrieved: usize,
}

impl Default for SampleSizes {
    /// Returns numbers small enough for a laptop; RankMe's paper uses 25,600 images.
    fn default() -> Self {
        Self { n_images: 10_000, n_viewed: 1000, n_views: 10, n_retrieved: 2000 }
    }
}

/// Number of images per batch of views.
const IMAGES_PER_BATCH: usize = 8;

/// Name and value of each measure, and a text on which values are better.
pub type Measures = Vec<(&'static str, f64, &'static str)>;

/// Computes the measures of `network` on `images`. Views are drawn like the first kind of crop in
/// `multicrop`, the views of the pretraining.
///
/// # Errors
/// Errors of [`crate::extract`].
pub fn label_free(
    network: &Network,
    images: &ImageSet,
    multicrop: &MultiCrop,
    effort: SampleSizes,
    progress: &dyn Progress,
) -> Result<Measures, EvalError> {
    let wanted = FeatureKind::LAST_LEVEL;
    let table = table(network, &images.spread(effort.n_images), wanted, progress)?;
    let rows = table.rows();
    let d = table.columns.width();
    let views = view_rows(network, &images.spread(effort.n_viewed), multicrop, effort.n_views, progress)?;
    Ok(vec![
        ("rankme", rankme::rankme(rows, d), "higher: directions that the features use"),
        ("alpha_req", alpha_req::alpha_req(rows, d), "near 1: how fast their spectrum falls"),
        (
            "lidar",
            lidar::lidar(&views, effort.n_views, d),
            "higher: directions that tell images apart, not views",
        ),
        (
            "alignment",
            alignment::alignment(&views, effort.n_views, d),
            "lower: distance between views of an image",
        ),
        ("uniformity", uniformity::uniformity(rows, d), "lower: how evenly they cover the sphere"),
        (
            retrieval::RETRIEVAL,
            retrieval::retrieval(network, &images.spread(effort.n_retrieved), progress)?.percent,
            "higher: percent of views that find the other view of their image",
        ),
    ])
}

/// Computes features of `n_views` views of each image that can be decoded, `[n, n_views, D]`.
fn view_rows(
    network: &Network,
    images: &ImageSet,
    multicrop: &MultiCrop,
    n_views: usize,
    progress: &dyn Progress,
) -> Result<Vec<f32>, EvalError> {
    let wanted = FeatureKind::LAST_LEVEL;
    let Some(first) = multicrop.crops.first() else { return Ok(Vec::new()) };
    let mut crop = first.clone();
    crop.count = n_views;
    let size_px = crop.size_px as usize;
    let multicrop = MultiCrop { crops: vec![crop] };
    let mut rows = Vec::new();
    progress.begin("views", images.len() as u64);
    let indices: Vec<usize> = (0..images.len()).collect();
    for indices in indices.chunks(IMAGES_PER_BATCH) {
        let decoded = try_collect(indices.par_iter().map(|i| images.views(*i, &multicrop, 0, 0)))?;
        progress.advance(indices.len() as u64);
        // Images that can be decoded, and the views of each, `[V, C, size, size]`.
        let mut usable = Vec::new();
        let mut views_by_image = Vec::new();
        for (i, groups) in indices.iter().zip(decoded) {
            if let Some(mut groups) = groups {
                usable.push(*i as u32);
                views_by_image.push(groups.remove(0));
            }
        }
        let view_bytes = images.format().bytes_per_pixel() * size_px * size_px;
        let views: Vec<&[u8]> =
            views_by_image.iter().flat_map(|views| views.chunks_exact(view_bytes)).collect();
        if !views.is_empty() {
            let (_, batch) = compute_rows(network, &views, size_px, wanted);
            check_finite(images, &usable, &batch)?;
            rows.extend(batch);
        }
    }
    Ok(rows)
}
