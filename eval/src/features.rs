//! Samples of a data set into rows of features. The only file that sees a network.
//!
//! Images are resized so that their short side is `image_px · 256 / 224`, rounded, and cropped to
//! the central square of `image_px`; images that are that size already are taken as they are.

use std::collections::BTreeSet;
use std::sync::Arc;

use augment::Interpolation;
use augment::crop::{CropBox, center_square};
use augment::decode::decode;
use augment::resize::BoxResizer;
use augment::{DecodeRules, Planes, Rgb8};
use pipeline::{Dataset, SampleId};
use rayon::prelude::*;
use trainer::Network;

use crate::EvalError;

/// Images that go through the network together.
const BATCH: usize = 128;

/// Rows of features with their labels.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FeatureSet {
    /// Channels of a row.
    pub width: usize,
    /// `[n, width]`, one row after another.
    pub rows: Vec<f32>,
    /// Class of each row.
    pub labels: Vec<u32>,
    /// The sample of each row.
    pub ids: Vec<SampleId>,
    /// Labelled samples that have no row because their image cannot be decoded.
    pub n_bad: usize,
}

/// Labelled samples of a data set. Images are decoded block by block when they are needed, so that a
/// set may be larger than memory.
#[derive(Debug, Clone)]
pub struct ImageSet {
    /// Side at which images are seen.
    pub size_px: usize,
    dataset: Arc<Dataset>,
    rules: DecodeRules,
    split: &'static str,
    /// Labelled samples with their classes.
    samples: Vec<(SampleId, u32)>,
}

impl ImageSet {
    /// The labelled samples of `dataset`; `split` names it in messages.
    ///
    /// # Errors
    /// [`EvalError::NoLabels`] when none has a label, [`EvalError::Data`] when a shard fails.
    pub fn open(
        dataset: Arc<Dataset>,
        size_px: usize,
        rules: DecodeRules,
        split: &'static str,
    ) -> Result<Self, EvalError> {
        let label = |id: u64| -> Result<_, EvalError> {
            let id = SampleId(id);
            Ok(dataset.label(id)?.map(|label| (id, label)))
        };
        let labels: Result<Vec<_>, _> = (0..dataset.n_samples()).into_par_iter().map(label).collect();
        let samples: Vec<_> = labels?.into_iter().flatten().collect();
        if samples.is_empty() {
            return Err(EvalError::NoLabels { split, n_samples: dataset.n_samples() as usize });
        }
        Ok(Self { size_px, dataset, rules, split, samples })
    }

    /// The classes that occur.
    pub fn classes(&self) -> BTreeSet<u32> {
        self.samples.iter().map(|(_, label)| *label).collect()
    }

    /// Numbers the classes by their place in `classes`, which holds all that occur.
    pub fn renumber(&mut self, classes: &[u32]) {
        for (_, label) in &mut self.samples {
            *label = classes.partition_point(|class| *class < *label) as u32;
        }
    }

    /// One image as `[3, size, size]` bytes; `None` if the sample is bad.
    ///
    /// # Errors
    /// [`EvalError::Data`] when its shard cannot be read: scores of what happens to be there are none.
    pub fn image(&self, id: SampleId) -> Result<Option<Vec<u8>>, EvalError> {
        let sample = match self.dataset.read(id) {
            Err(error) if error.is_of_a_sample() => return Ok(None),
            sample => sample?,
        };
        let image = decode(&sample.image, &self.rules);
        Ok(image.and_then(|image| square(&image, self.size_px as u32)).ok())
    }

    /// Features of the network: one vector an image.
    ///
    /// # Errors
    /// [`EvalError::NoImages`] when no image can be decoded, [`EvalError::Data`] when a shard cannot be
    /// read.
    pub fn features(&self, network: &Network) -> Result<FeatureSet, EvalError> {
        let width = network.model.width();
        self.rows_of(width, |images| {
            let views: Vec<&[u8]> = images.iter().map(Vec::as_slice).collect();
            let rows = network.embed(&views, self.size_px);
            let [b, d] = rows.dims();
            trainer::device::host::to_host(rows.reshape([b * d]))
        })
    }

    /// The pixels themselves, at most 32 a side, as features.
    ///
    /// # Errors
    /// As [`ImageSet::features`].
    pub fn pixels(&self) -> Result<FeatureSet, EvalError> {
        let step = self.size_px.div_ceil(32);
        let width = 3 * (self.size_px / step).pow(2);
        self.rows_of(width, |images| {
            images.par_iter().flat_map_iter(|image| pooled(image, self.size_px, step)).collect()
        })
    }

    fn rows_of(&self, width: usize, rows: impl Fn(&[Vec<u8>]) -> Vec<f32>) -> Result<FeatureSet, EvalError> {
        let mut set = FeatureSet { width, ..FeatureSet::default() };
        for block in self.samples.chunks(BATCH) {
            let decoded: Result<Vec<_>, EvalError> =
                block.par_iter().map(|(id, _)| self.image(*id)).collect();
            let mut images = Vec::with_capacity(block.len());
            for ((id, label), image) in block.iter().zip(decoded?) {
                match image {
                    Some(image) => {
                        images.push(image);
                        set.ids.push(*id);
                        set.labels.push(*label);
                    }
                    None => set.n_bad += 1,
                }
            }
            if !images.is_empty() {
                set.rows.extend(rows(&images));
            }
        }
        if set.is_empty() {
            return Err(EvalError::NoImages { split: self.split, n_samples: self.samples.len() });
        }
        Ok(set)
    }
}

/// The central square of an image at `size_px`, as planes.
pub(crate) fn square(image: &Rgb8, size_px: u32) -> Result<Vec<u8>, augment::AugmentError> {
    let whole = CropBox { left_px: 0, top_px: 0, width_px: image.width_px, height_px: image.height_px };
    let side = if image.width_px == size_px && image.height_px == size_px {
        whole
    } else {
        let square = center_square(image.width_px, image.height_px);
        // Cropping 224 of 256 is cropping 7/8 of the short side.
        let kept = (f64::from(square.width_px) * 0.875).round().max(1.0) as u32;
        let margin = (square.width_px - kept) / 2;
        CropBox {
            left_px: square.left_px + margin,
            top_px: square.top_px + margin,
            width_px: kept,
            height_px: kept,
        }
    };
    let mut out = Planes::default();
    BoxResizer::default().resize(image, side, [size_px; 2], Interpolation::Bicubic, &mut out)?;
    Ok(out.data)
}

/// Means over squares of `step` pixels, centered around zero.
fn pooled(planes: &[u8], size_px: usize, step: usize) -> Vec<f32> {
    let n = size_px / step;
    let mut out = Vec::with_capacity(3 * n * n);
    for plane in planes.chunks_exact(size_px * size_px) {
        for y in 0..n {
            for x in 0..n {
                let sum: u32 = (0..step)
                    .flat_map(|dy| {
                        let start = (y * step + dy) * size_px + x * step;
                        plane[start..start + step].iter().map(|v| u32::from(*v))
                    })
                    .sum();
                out.push(sum as f32 / (step * step) as f32 / 127.5 - 1.0);
            }
        }
    }
    out
}

impl FeatureSet {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Row `i`.
    pub fn row(&self, i: usize) -> &[f32] {
        &self.rows[i * self.width..(i + 1) * self.width]
    }

    /// The rows at unit length.
    pub fn normalized(&self) -> Self {
        let mut out = self.clone();
        for row in out.rows.chunks_exact_mut(self.width) {
            let norm = row.iter().map(|v| v * v).sum::<f32>().sqrt().max(1e-12);
            row.iter_mut().for_each(|v| *v /= norm);
        }
        out
    }

    /// The rows whose number `keep` accepts.
    pub fn select(&self, keep: impl Fn(usize) -> bool) -> Self {
        let mut out = Self { width: self.width, ..Self::default() };
        for i in (0..self.len()).filter(|i| keep(*i)) {
            out.rows.extend_from_slice(self.row(i));
            out.labels.push(self.labels[i]);
            out.ids.push(self.ids[i]);
        }
        out
    }

    /// One more than the largest class.
    pub fn n_classes(&self) -> usize {
        self.labels.iter().max().map_or(0, |label| *label as usize + 1)
    }
}
