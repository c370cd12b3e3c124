//! Linear segmentation: one linear layer on frozen patch features (like DINOv3's linear head).
//!
//! ```text
//! x̂ = (x - mean) / std over the patches of train            [N, D]: batch norm with fixed statistics
//! logits = up(x̂ Wᵀ + b)                                     [s·s, C]: bilinear from the grid to the pixels
//! loss = mean over pixels of -log softmax(logits)[class];    AdamW, cosine to zero
//! ```
//!
//! Published numbers on ADE20k come from 512 px crops with flips, 40,000 steps, and sliding windows
//! over whole images; here, images and masks go through the one transform of evaluation, without
//! augmentation. Pixels of class 255 are ignored.

use augment::{IGNORED_CLASS, ViewRng};
use kernels::ops::gemm::{Mat, gemm};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::batches::cosine;
use super::bilinear::Bilinear;
use super::heads::softmax;
use super::task::{Counts, Scored, Sets, Task};
use super::{Classes, Needs, Rules};
use crate::EvalError;
use crate::features::cache::features;
use crate::features::columns::FeatureKind;
use crate::features::table::Table;
use crate::images::ImageSet;
use crate::parallel::try_collect;
use crate::statistics::outcome::Outcome;
use crate::statistics::segmented::PixelCounts;

/// Name of the protocol and of its number.
const NAME: &str = "segmentation";

/// RNG domain of the shuffles, distinct from all other streams.
const ORDER_DOMAIN: u64 = 0x7365_676d_0000_0000;

/// Usual betas of AdamW.
const BETAS: [f32; 2] = [0.9, 0.999];

/// The protocol's settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Segmentation {
    /// Learning rate.
    pub rate: f64,
    /// Weight decay, applied to the weights but not to the biases.
    pub weight_decay: f64,
    /// Number of passes over train.
    pub epochs: usize,
    /// Images per mini-batch.
    pub batch: usize,
}

impl Default for Segmentation {
    /// Returns DINOv3's rate, decay and batch.
    fn default() -> Self {
        Self { rate: 1e-3, weight_decay: 1e-3, epochs: 20, batch: 16 }
    }
}

impl Rules for Segmentation {
    fn needs(&self) -> Needs {
        Needs { classes: Classes::Unused, ..Needs::VECTORS }
    }

    fn in_words(&self, _: &[Scored], _: bool) -> String {
        format!(
            "like DINOv3's linear head, on one square of each image, {} passes, without augmentation or \
             sliding windows: not to be compared with published numbers",
            self.epochs
        )
    }

    fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError> {
        Ok(vec![self.number(task)?])
    }
}

impl Segmentation {
    /// Computes the score on the masks of test.
    ///
    /// # Errors
    /// [`EvalError::ImagesRequired`] if the task has features only, [`EvalError::Mask`] if a mask
    /// cannot be decoded or differs in size from its image, [`EvalError::NoMasks`],
    /// [`EvalError::OneClass`], and errors of [`features`].
    fn number(&self, task: &Task<'_>) -> Result<Scored, EvalError> {
        let sets = task.sets.ok_or(EvalError::ImagesRequired { protocol: NAME })?;
        let train = Patches::new(sets, sets.train, task)?;
        let test = Patches::new(sets, sets.test, task)?;
        if train.n_classes < 2 {
            return Err(EvalError::OneClass { split: sets.train.name.clone() });
        }
        let n_classes = train.n_classes.max(test.n_classes);
        let mut head = Head::new(&train, n_classes);
        let steps_per_epoch = train.masked.len().div_ceil(self.batch);
        let n_steps = self.epochs * steps_per_epoch;
        task.progress.begin(NAME, (self.epochs * train.masked.len()) as u64);
        for epoch in 0..self.epochs {
            let mut order = train.masked.clone();
            ViewRng::from_words([task.seed, ORDER_DOMAIN, epoch as u64, 0]).shuffle(&mut order);
            for (index, rows) in order.chunks(self.batch).enumerate() {
                let done = (epoch * steps_per_epoch + index) as f32 / n_steps as f32;
                head.step(self, &train, rows, cosine(done))?;
                task.progress.advance(rows.len() as u64);
            }
        }
        let mut confusions = PixelCounts::new(n_classes);
        for rows in test.masked.chunks(64) {
            let batch: Result<Vec<_>, EvalError> =
                rows.par_iter().map(|row| head.confusion(&test, *row)).collect();
            for confusion in batch? {
                confusions.add(&confusion);
            }
        }
        let n_train = train.masked.len();
        let n_test = test.masked.len();
        let counts = Counts { n_train, n_test, n_bad: train.n_bad() + test.n_bad() };
        Ok(Scored {
            metric: NAME.into(),
            outcome: Outcome::PixelCounts(confusions),
            details: Value::Null,
            counts: Some(counts),
        })
    }
}

/// Patch features of a set and its masks.
struct Patches<'a> {
    images: &'a ImageSet,
    table: std::sync::Arc<Table>,
    /// Rows of the images whose mask has a pixel that counts.
    masked: Vec<usize>,
    /// Cells along a side of the grid.
    side: usize,
    n_classes: usize,
}

impl<'a> Patches<'a> {
    /// Computes the features of `images` and checks their masks.
    fn new(sets: &Sets<'a>, images: &'a ImageSet, task: &Task<'_>) -> Result<Self, EvalError> {
        let table = features(sets.cache, sets.network, images, FeatureKind::Patches, task.progress)?;
        let side = images.transform.size_px as usize / sets.network.model.stride_px();
        let highest_classes =
            try_collect(table.images.par_iter().map(|image| highest_class(images, *image as usize)))?;
        let mut masked = Vec::new();
        let mut n_classes = 0;
        for (row, highest) in highest_classes.into_iter().enumerate() {
            if let Some(class) = highest {
                masked.push(row);
                n_classes = n_classes.max(usize::from(class) + 1);
            }
        }
        if masked.is_empty() {
            return Err(EvalError::NoMasks { split: images.name.clone(), n_samples: images.len() });
        }
        Ok(Self { images, table, masked, side, n_classes })
    }

    /// Returns the number of images that could not be decoded.
    fn n_bad(&self) -> usize {
        self.images.len() - self.table.len()
    }

    /// Returns the number of channels of a patch.
    fn width(&self) -> usize {
        self.table.columns.width() / (self.side * self.side)
    }

    /// Returns the classes of the pixels of row `row`, `[s·s]`.
    fn mask(&self, row: usize) -> Result<Vec<u8>, EvalError> {
        // `masked` holds only rows with a mask, so that the default is never used.
        Ok(self.images.mask(self.table.images[row] as usize)?.unwrap_or_default())
    }
}

/// Returns the highest class in the mask of image `image`; `None` if it has no mask, or no pixel
/// that counts.
fn highest_class(images: &ImageSet, image: usize) -> Result<Option<u8>, EvalError> {
    images.check_mask(image)?;
    let Some(mask) = images.mask(image)? else { return Ok(None) };
    Ok(mask.into_iter().filter(|class| *class != IGNORED_CLASS).max())
}

/// The linear layer and the state of AdamW.
struct Head {
    n_classes: usize,
    mean: Vec<f32>,
    inverse: Vec<f32>,
    /// `[C, D]`, then the biases, `[C]`.
    params: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    n_steps: i32,
    up: Bilinear,
}

impl Head {
    /// Returns a layer of zeros that standardizes by the patches of `train`.
    fn new(train: &Patches<'_>, n_classes: usize) -> Self {
        let d = train.width();
        let mut sums = vec![0.0f64; d];
        let mut squares = vec![0.0f64; d];
        let mut n = 0.0f64;
        for patch in train.masked.iter().flat_map(|row| train.table.row(*row).chunks_exact(d)) {
            n += 1.0;
            for ((sum, square), value) in sums.iter_mut().zip(&mut squares).zip(patch) {
                *sum += f64::from(*value);
                *square += f64::from(*value) * f64::from(*value);
            }
        }
        let inverse = sums.iter().zip(&squares).map(|(sum, square)| {
            let variance = (square / n - (sum / n).powi(2)).max(0.0);
            (1.0 / (variance + 1e-5).sqrt()) as f32
        });
        let len = n_classes * (d + 1);
        Self {
            n_classes,
            inverse: inverse.collect(),
            mean: sums.iter().map(|sum| (sum / n) as f32).collect(),
            params: vec![0.0; len],
            first: vec![0.0; len],
            second: vec![0.0; len],
            n_steps: 0,
            up: Bilinear::new(train.side, train.images.transform.size_px as usize),
        }
    }

    /// Standardizes the patches of a row, `[N, D]`.
    fn standardized(&self, row: &[f32]) -> Vec<f32> {
        let d = self.mean.len();
        row.iter().enumerate().map(|(i, value)| (value - self.mean[i % d]) * self.inverse[i % d]).collect()
    }

    /// Computes the logits of standardized patches, `[N, C]`.
    fn logits(&self, x: &[f32]) -> Vec<f32> {
        let c = self.n_classes;
        let d = self.mean.len();
        let (weight, bias) = self.params.split_at(c * d);
        let n = x.len() / d;
        let mut out = bias.repeat(n);
        gemm([n, d, c], 1.0, Mat::rows(x, d), Mat::rows(weight, d).t(), 1.0, &mut out, c);
        out
    }

    /// Takes one step of AdamW on the images of `rows`; the learning rate is multiplied by `scale`.
    fn step(
        &mut self,
        settings: &Segmentation,
        patches: &Patches<'_>,
        rows: &[usize],
        scale: f32,
    ) -> Result<(), EvalError> {
        let parts: Vec<(Vec<f32>, usize)> = try_collect(
            rows.par_iter().map(|row| self.gradient(patches.table.row(*row), &patches.mask(*row)?)),
        )?;
        let n_pixels: usize = parts.iter().map(|(_, n)| n).sum();
        let mut gradient = vec![0.0f32; self.params.len()];
        for (part, _) in &parts {
            gradient.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        self.n_steps += 1;
        let rate = settings.rate as f32 * scale;
        let corrections = BETAS.map(|beta| 1.0 - beta.powi(self.n_steps));
        let n_weights = self.n_classes * self.mean.len();
        for (i, gradient) in gradient.into_iter().enumerate() {
            let gradient = gradient / n_pixels.max(1) as f32;
            self.first[i] += (1.0 - BETAS[0]) * (gradient - self.first[i]);
            self.second[i] += (1.0 - BETAS[1]) * (gradient * gradient - self.second[i]);
            let decay = if i < n_weights { settings.weight_decay as f32 } else { 0.0 };
            let step = (self.first[i] / corrections[0]) / ((self.second[i] / corrections[1]).sqrt() + 1e-8);
            self.params[i] -= rate * (step + decay * self.params[i]);
        }
        Ok(())
    }

    /// Computes the gradient of the summed loss of one image, and the number of pixels that count.
    fn gradient(&self, row: &[f32], mask: &[u8]) -> Result<(Vec<f32>, usize), EvalError> {
        let c = self.n_classes;
        let d = self.mean.len();
        let x = self.standardized(row);
        let mut pixels = self.up.up(&self.logits(&x), c);
        let mut n_pixels = 0;
        for (logits, class) in pixels.chunks_exact_mut(c).zip(mask) {
            if *class == IGNORED_CLASS {
                logits.fill(0.0);
                continue;
            }
            n_pixels += 1;
            softmax(logits);
            logits[usize::from(*class)] -= 1.0;
        }
        let errors = self.up.down(&pixels, c);
        let mut gradient = vec![0.0; c * (d + 1)];
        let n = x.len() / d;
        gemm([c, n, d], 1.0, Mat::rows(&errors, c).t(), Mat::rows(&x, d), 0.0, &mut gradient[..c * d], d);
        for error in errors.chunks_exact(c) {
            gradient[c * d..].iter_mut().zip(error).for_each(|(sum, error)| *sum += error);
        }
        Ok((gradient, n_pixels))
    }

    /// Counts the pixels of an image by true and predicted class, `[C, C]`.
    fn confusion(&self, patches: &Patches<'_>, row: usize) -> Result<Vec<u64>, EvalError> {
        let c = self.n_classes;
        let pixels = self.up.up(&self.logits(&self.standardized(patches.table.row(row))), c);
        let mut counts = vec![0; c * c];
        for (logits, class) in pixels.chunks_exact(c).zip(patches.mask(row)?) {
            if class != IGNORED_CLASS {
                counts[usize::from(class) * c + crate::statistics::argmax(logits) as usize] += 1;
            }
        }
        Ok(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(c: usize, d: usize, side: usize, size_px: usize) -> Head {
        let len = c * (d + 1);
        Head {
            n_classes: c,
            mean: vec![0.1; d],
            inverse: vec![1.5; d],
            params: (0..len).map(|i| ((i * 37 % 19) as f32 - 9.0) / 20.0).collect(),
            first: vec![0.0; len],
            second: vec![0.0; len],
            n_steps: 0,
            up: Bilinear::new(side, size_px),
        }
    }

    /// Computes the summed cross-entropy of the pixels that count.
    fn loss(head: &Head, row: &[f32], mask: &[u8]) -> f64 {
        let pixels = head.up.up(&head.logits(&head.standardized(row)), head.n_classes);
        pixels
            .chunks_exact(head.n_classes)
            .zip(mask)
            .map(|(logits, class)| {
                let sum: f64 = logits.iter().map(|v| f64::from(*v).exp()).sum();
                if *class == IGNORED_CLASS { 0.0 } else { sum.ln() - f64::from(logits[usize::from(*class)]) }
            })
            .sum()
    }

    /// Computes the loss with parameter `i` changed by `delta`.
    fn shifted_loss(head: &mut Head, i: usize, delta: f32, row: &[f32], mask: &[u8]) -> f64 {
        let before = head.params[i];
        head.params[i] += delta;
        let loss = loss(head, row, mask);
        head.params[i] = before;
        loss
    }

    #[test]
    fn gradients_equal_finite_differences() {
        let c = 3;
        let d = 4;
        let side = 2;
        let size_px = 6;
        let mut head = head(c, d, side, size_px);
        let row: Vec<f32> = (0..side * side * d).map(|i| ((i * 29 % 23) as f32 - 11.0) / 8.0).collect();
        let mask: Vec<u8> =
            (0..size_px * size_px).map(|i| if i % 7 == 0 { IGNORED_CLASS } else { (i % c) as u8 }).collect();
        let (gradient, n_pixels) = head.gradient(&row, &mask).unwrap();
        assert_eq!(n_pixels, 30);
        for (i, gradient) in gradient.into_iter().enumerate() {
            let above = shifted_loss(&mut head, i, 1e-2, &row, &mask);
            let below = shifted_loss(&mut head, i, -1e-2, &row, &mask);
            let slope = (above - below) / 2e-2;
            assert!((slope - f64::from(gradient)).abs() < 2e-3, "{i}: {slope} {gradient}");
        }
    }
}
