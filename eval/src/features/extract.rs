//! Extraction of features from images. The next batch is decoded while the network computes.

use std::sync::mpsc::sync_channel;

use augment::PixelFormat;
use augment::bands::Bands;
use kernels::device::host::to_host;
use networks::backbone::ModelConfig;
use networks::{Network, inference_bytes};
use pipeline::{NoProgress, Progress};
use prep::unusable::{Flaw, Unusable};
use rayon::prelude::*;

use super::columns::{Columns, FeatureKind};
use super::table::Table;
use crate::EvalError;
use crate::images::ImageSet;
use crate::parallel::try_collect;

/// Maximum number of images per batch: enough to keep a GPU busy.
const BATCH: usize = 64;

/// Number of images that are inspected if none can be decoded.
const N_INSPECTED: usize = 16;

/// Memory that a batch may take, in bytes: small enough for a laptop.
const BATCH_BYTES: f64 = 2e9;

/// Number of batches whose images are in memory: one is computed, one waits, one is decoded.
const DECODED_BATCHES: usize = 3;

/// Returns the batch size for images of `size_px`.
pub(crate) fn batch_size(network: &Network, size_px: usize) -> usize {
    images_per_batch(network.image_bytes(size_px))
}

/// Returns the batch size for images of which each needs `image_bytes` in the network.
fn images_per_batch(image_bytes: f64) -> usize {
    ((BATCH_BYTES / image_bytes) as usize).clamp(1, BATCH)
}

/// Returns the bytes that the extraction of features of images of `size_px` needs, beside the
/// weights and the features.
pub fn extraction_bytes(model: &ModelConfig, format: PixelFormat, size_px: usize) -> f64 {
    let image_bytes = inference_bytes(model, size_px);
    let decoded_bytes = DECODED_BATCHES * format.bytes_per_pixel() * size_px * size_px;
    images_per_batch(image_bytes) as f64 * (image_bytes + decoded_bytes as f64)
}

/// Checks that a network with a stride of `stride_px` supports images of `image_px`.
///
/// # Errors
/// [`EvalError::ImageSize`].
pub fn check_image_size(image_px: usize, stride_px: usize) -> Result<(), EvalError> {
    if image_px == 0 || !image_px.is_multiple_of(stride_px) {
        return Err(EvalError::ImageSize { image_px, stride_px });
    }
    Ok(())
}

/// Extracts the rows of `images` and passes them to `sink` in order, batch by batch: the indices of
/// the images, `[b]`, and their rows, `[b, width]`.
///
/// # Errors
/// [`EvalError::ImageSize`] if the network does not support images of this size,
/// [`EvalError::NoImages`] if none can be decoded, [`EvalError::NotFinite`], [`EvalError::Data`] if
/// a shard cannot be read, and errors of `sink`.
pub fn extract(
    network: &Network,
    images: &ImageSet,
    wanted: FeatureKind,
    progress: &dyn Progress,
    mut sink: impl FnMut(&[u32], &[f32]) -> Result<(), EvalError>,
) -> Result<Columns, EvalError> {
    let image_px = images.transform.size_px as usize;
    check_image_size(image_px, network.model.stride_px())?;
    let mut columns = None;
    progress.begin("features", images.len() as u64);
    each_batch(images, batch_size(network, image_px), progress, |indices, views| {
        let views: Vec<&[u8]> = views.iter().map(Vec::as_slice).collect();
        let (batch_columns, rows) = compute_rows(network, &views, image_px, wanted);
        check_finite(images, indices, &rows)?;
        columns = Some(batch_columns);
        sink(indices, &rows)
    })?;
    columns.ok_or_else(|| no_images(images))
}

/// Extracts the rows of `images` into memory.
///
/// # Errors
/// Errors of [`extract`].
pub(crate) fn table(
    network: &Network,
    images: &ImageSet,
    wanted: FeatureKind,
    progress: &dyn Progress,
) -> Result<Table, EvalError> {
    let mut indices = Vec::new();
    let mut rows = Vec::new();
    let columns = extract(network, images, wanted, progress, |batch, values| {
        indices.extend_from_slice(batch);
        rows.extend_from_slice(values);
        Ok(())
    })?;
    Ok(Table::new(columns, indices, rows))
}

/// Returns the pixels, averaged down to at most 32 per side, as features: a baseline.
///
/// # Errors
/// [`EvalError::NoImages`] if no image can be decoded, [`EvalError::Data`] if a shard cannot be
/// read.
pub fn pixels(images: &ImageSet) -> Result<Table, EvalError> {
    let size_px = images.transform.size_px as usize;
    let step = size_px.div_ceil(32);
    let format = images.format();
    let width = format.n_channels * (size_px / step).pow(2);
    let mut indices = Vec::new();
    let mut rows = Vec::new();
    each_batch(images, BATCH, &NoProgress, |batch, views| {
        indices.extend_from_slice(batch);
        for view in views {
            rows.extend(average_pool(view, format, size_px, step));
        }
        Ok(())
    })?;
    if indices.is_empty() {
        Err(no_images(images))
    } else {
        Ok(Table::new(Columns { levels: vec![width], average: 0 }, indices, rows))
    }
}

/// Returns the error for `images`, none of which can be decoded, with what a few of them have in
/// common.
pub(crate) fn no_images(images: &ImageSet) -> EvalError {
    let inspected = images.spread(N_INSPECTED);
    let mut flaws = Vec::new();
    for i in 0..inspected.len() {
        // An image that is missing has no bytes to inspect.
        if let Ok(Some(encoded)) = inspected.encoded(i) {
            flaws.extend(Flaw::find(&encoded.files(), inspected.rules()));
        }
    }
    let reason = match Unusable::from_flaws(&flaws) {
        Some(Unusable { format: Some(_), reason, .. }) => {
            format!("{reason}, but the network takes {}", images.format())
        }
        Some(Unusable { reason, .. }) => reason,
        None => "they cannot be read; for shards, `ocelli shards verify` says why".into(),
    };
    EvalError::NoImages { split: images.name.clone(), n_samples: images.len(), reason }
}

/// Attention of class tokens to the patches.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    /// Weights of each head of each image, in row-major order of the grid, `[B · H][N]`.
    pub heads: Vec<Vec<f32>>,
    /// Rows and columns of the grid.
    pub grid: [usize; 2],
}

/// Returns the attention of the class tokens of `views`, `[C, size, size]` as stored values; `None`
/// if the backbone has no attention or no class token.
pub fn class_attention(network: &Network, views: &[&[u8]], size_px: usize) -> Option<Attention> {
    let (weights, grid) = network.class_attention(views, size_px)?;
    let [b, h, n] = weights.dims();
    let heads = to_host(weights.reshape([b * h * n])).chunks_exact(n).map(<[f32]>::to_vec).collect();
    Some(Attention { heads, grid })
}

/// Calls `f` for each batch with the indices and the bytes of the images that can be decoded.
fn each_batch(
    images: &ImageSet,
    batch: usize,
    progress: &dyn Progress,
    mut f: impl FnMut(&[u32], &[Vec<u8>]) -> Result<(), EvalError>,
) -> Result<(), EvalError> {
    let (sender, batches) = sync_channel(1);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for start in (0..images.len()).step_by(batch) {
                let range = start..images.len().min(start + batch);
                let decoded = try_collect(range.clone().into_par_iter().map(|i| images.image(i)));
                if sender.send((range, decoded)).is_err() {
                    return;
                }
            }
        });
        for (range, decoded) in batches {
            let n_seen = range.len();
            let mut indices = Vec::with_capacity(n_seen);
            let mut views = Vec::with_capacity(n_seen);
            for (i, image) in range.zip(decoded?) {
                if let Some(image) = image {
                    indices.push(i as u32);
                    views.push(image);
                }
            }
            if !indices.is_empty() {
                f(&indices, &views)?;
            }
            progress.advance(n_seen as u64);
        }
        Ok(())
    })
}

/// Fails if a value of `rows`, the concatenated rows of the images `indices`, is not finite.
pub(crate) fn check_finite(images: &ImageSet, indices: &[u32], rows: &[f32]) -> Result<(), EvalError> {
    let Some(position) = rows.iter().position(|value| !value.is_finite()) else { return Ok(()) };
    let image = indices.get(position * indices.len() / rows.len()).copied().unwrap_or_default() as usize;
    Err(EvalError::NotFinite { split: images.name.clone(), image: images.describe(image).1 })
}

/// Computes the rows of `views`, `[C, size, size]` as stored values, and their columns.
pub(crate) fn compute_rows(
    network: &Network,
    views: &[&[u8]],
    size_px: usize,
    wanted: FeatureKind,
) -> (Columns, Vec<f32>) {
    match wanted {
        FeatureKind::Vectors { n_levels, average } => vectors(network, views, size_px, n_levels, average),
        FeatureKind::Patches => patches(network, views, size_px),
    }
}

/// Computes the rows of [`FeatureKind::Vectors`], `[B, width]`.
fn vectors(
    network: &Network,
    views: &[&[u8]],
    size_px: usize,
    n_levels: usize,
    average: bool,
) -> (Columns, Vec<f32>) {
    let levels = network.levels(views, size_px, n_levels);
    let mut parts: Vec<(usize, Vec<f32>)> = Vec::with_capacity(levels.len() + 1);
    for level in &levels {
        let x = level.pooled().x;
        let [b, d] = x.dims();
        parts.push((d, to_host(x.reshape([b * d]))));
    }
    let mut columns = Columns { levels: parts.iter().map(|(d, _)| *d).collect(), average: 0 };
    if let Some(last) = levels.last().filter(|last| average && last.only_group().n_prefix > 0) {
        let x = last.patches().pooled().x;
        let [b, d] = x.dims();
        columns.average = d;
        parts.push((d, to_host(x.reshape([b * d]))));
    }
    let mut rows = Vec::with_capacity(views.len() * columns.width());
    for i in 0..views.len() {
        for (d, values) in &parts {
            rows.extend_from_slice(&values[i * d..(i + 1) * d]);
        }
    }
    (columns, rows)
}

/// Computes the rows of [`FeatureKind::Patches`], `[B, N · D]`.
fn patches(network: &Network, views: &[&[u8]], size_px: usize) -> (Columns, Vec<f32>) {
    let x = network.tokens(views, size_px).patches().by_sequence();
    let [b, n, d] = x.dims();
    (Columns { levels: vec![n * d], average: 0 }, to_host(x.reshape([b * n * d])))
}

/// Averages squares of `step` x `step` pixels and scales the means to -1..=1.
fn average_pool(view: &[u8], format: PixelFormat, size_px: usize, step: usize) -> Vec<f32> {
    let n = size_px / step;
    let half = format.depth.unit() / 2.0;
    let mut out = Vec::with_capacity(format.n_channels * n * n);
    for plane in Bands::from_bytes(view, format, size_px as u32).channels() {
        for y in 0..n {
            for x in 0..n {
                let sum: f32 = (0..step)
                    .flat_map(|dy| {
                        let start = (y * step + dy) * size_px + x * step;
                        &plane[start..start + step]
                    })
                    .sum();
                out.push(sum / (step * step) as f32 / half - 1.0);
            }
        }
    }
    out
}
