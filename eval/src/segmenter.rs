//! Scores of a network with the decoder of pixels that was trained with it.
//!
//! ```text
//! s[n] = decoder(f(x))[n]             x a whole image, resized to a square of S pixels; n a cell of the grid
//! s[i, j] = Σ_n m[i, j, n] s[n]       interpolated bilinearly to the size of the mask, not of the square
//! a pixel's predicted class is that with the largest score
//! ```
//!
//! Each pixel of a mask that counts is predicted once. mIoU is the mean over classes of the
//! intersection over union of the pixels of all images, pixel accuracy the share of the pixels of
//! all images that are right.

use augment::crop::CropBox;
use augment::{IGNORED_CLASS, Image, Mask, squashed};
use kernels::device::host::to_host;
use kernels::ops::{Taps, bilinear_taps};
use networks::{Network, PixelHead, PixelScorer};
use pipeline::Progress;
use rayon::prelude::*;

use crate::EvalError;
use crate::features::extract::{batch_size, check_finite, check_image_size, no_images};
use crate::images::ImageSet;
use crate::parallel::try_collect;
use crate::statistics::argmax;
use crate::statistics::segmented::PixelCounts;

/// Name of the mean intersection over union.
pub const MEAN_IOU: &str = "miou";

/// Name of the share of pixels whose class has the largest score.
pub const PIXEL_ACCURACY: &str = "pixel_accuracy";

/// Number of images that are kept as those with the largest shares of wrong pixels.
const N_WORST: usize = 24;

/// Result of a network with a decoder on a set of images with masks.
#[derive(Debug, Clone, PartialEq)]
pub struct Segmented {
    /// Pixels by true and predicted class.
    pub counts: PixelCounts,
    /// Number of images that were scored.
    pub n_images: usize,
    /// Number of images that could not be decoded and were left out.
    pub n_bad: usize,
    /// Images with the smallest shares of right pixels, the smallest first; at most 24.
    pub worst: Vec<SegmentedImage>,
}

/// An image with the share of its pixels that are predicted correctly.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SegmentedImage {
    /// Index of the image in its set.
    pub image: usize,
    /// Share of the pixels that count whose predicted class is right, in percent.
    pub accuracy: f64,
}

/// An image with its true and predicted classes, as squares.
#[derive(Debug, Clone, PartialEq)]
pub struct MaskPicture {
    /// Index of the image in its set.
    pub image: usize,
    /// Key of the image in its shard, or its name.
    pub key: String,
    /// Share of the pixels that count whose predicted class is right, in percent.
    pub accuracy: f64,
    /// The whole image for people, `[3, S, S]`.
    pub picture: Vec<u8>,
    /// True classes, `[S, S]`.
    pub truth: Vec<u8>,
    /// Predicted classes, `[S, S]`.
    pub predicted: Vec<u8>,
}

/// A decoded image of a set, with its mask.
struct MaskedImage {
    index: usize,
    image: Image,
    mask: Mask,
    /// The whole image as a square, `[C, S, S]` as stored values.
    square: Vec<u8>,
}

/// Scores of the classes of one image's cells.
struct CellScores {
    /// Scores, `[N, C]`.
    values: Vec<f32>,
    /// Rows and columns of the cells.
    grid: [usize; 2],
    n_classes: usize,
}

/// Scores `network` with `head` on `images`, all of which have a mask, as
/// [`masked_images`](crate::masked_images) selects them. Images are resized to squares of the size
/// of their transform.
///
/// # Errors
/// [`EvalError::ImageSize`] if the network does not support images of this size,
/// [`EvalError::NoImages`] if none can be decoded, [`EvalError::Mask`] if a mask cannot be used,
/// [`EvalError::NotFinite`], [`EvalError::Network`] if the decoder does not fit the network, and
/// [`EvalError::Data`] if a shard cannot be read.
pub fn segment(
    network: &Network,
    head: &PixelHead,
    images: &ImageSet,
    progress: &dyn Progress,
) -> Result<Segmented, EvalError> {
    let n_classes = head.classes.len();
    let scorer = scorer(network, head, images)?;
    let mut counts = PixelCounts::new(n_classes);
    let mut scored = Vec::new();
    let all: Vec<usize> = (0..images.len()).collect();
    progress.begin("masks", all.len() as u64);
    for batch in all.chunks(batch_size(network, images.transform.size_px as usize)) {
        let masked = masked_batch(images, batch, n_classes)?;
        let scores = cell_scores(network, &scorer, images, &masked)?;
        let pairs = scores.par_iter().zip(&masked);
        let confusions: Vec<Vec<u64>> = pairs.map(|(scores, image)| scores.confusion(&image.mask)).collect();
        for (confusion, image) in confusions.iter().zip(&masked) {
            counts.add(confusion);
            scored.push(SegmentedImage { image: image.index, accuracy: share_right(confusion, n_classes) });
        }
        progress.advance(batch.len() as u64);
    }
    if scored.is_empty() {
        return Err(no_images(images));
    }
    Ok(Segmented::new(counts, scored, images.len()))
}

/// Returns pictures of the images `chosen` of `images`, whose masks have the classes of `head`,
/// with their true and predicted classes. Those that cannot be decoded are left out.
///
/// # Errors
/// Errors of [`segment`].
pub fn mask_pictures(
    network: &Network,
    head: &PixelHead,
    images: &ImageSet,
    chosen: &[usize],
) -> Result<Vec<MaskPicture>, EvalError> {
    let scorer = scorer(network, head, images)?;
    let size_px = images.transform.size_px;
    let mut pictures = Vec::with_capacity(chosen.len());
    for batch in chosen.chunks(batch_size(network, size_px as usize)) {
        let masked = masked_batch(images, batch, head.classes.len())?;
        let scores = cell_scores(network, &scorer, images, &masked)?;
        for (image, scores) in masked.into_iter().zip(scores) {
            let truth = image.mask.resized(CropBox::from_size(image.mask.size_px()), [size_px; 2]);
            let predicted = scores.predicted([size_px; 2]);
            let accuracy = share_right(&scores.confusion(&image.mask), scores.n_classes);
            let (_, key) = images.describe(image.index);
            let Ok(picture) = squashed(&image.image.picture().into(), size_px) else { continue };
            pictures.push(MaskPicture { image: image.index, key, accuracy, picture, truth, predicted });
        }
    }
    Ok(pictures)
}

/// Returns the decoder of `head` on the device of `network`, which scores images of the size of
/// `images`.
fn scorer(network: &Network, head: &PixelHead, images: &ImageSet) -> Result<PixelScorer, EvalError> {
    check_image_size(images.transform.size_px as usize, network.model.stride_px())?;
    Ok(head.scorer(network.model.width(), network.device())?)
}

/// Decodes those of the images `batch` that have a mask, of the first `n_classes` classes.
fn masked_batch(images: &ImageSet, batch: &[usize], n_classes: usize) -> Result<Vec<MaskedImage>, EvalError> {
    let decoded = try_collect(batch.par_iter().map(|index| masked_image(images, *index, n_classes)))?;
    Ok(decoded.into_iter().flatten().collect())
}

/// Decodes the image `index` with its mask; `None` if it has no mask, or cannot be decoded.
fn masked_image(images: &ImageSet, index: usize, n_classes: usize) -> Result<Option<MaskedImage>, EvalError> {
    let Some(mask) = images.checked_mask(index, n_classes)? else { return Ok(None) };
    let Some(image) = images.decoded(index)? else { return Ok(None) };
    images.check_mask_size(index, &mask, &image)?;
    let Ok(square) = squashed(&image, images.transform.size_px) else { return Ok(None) };
    Ok(Some(MaskedImage { index, image, mask, square }))
}

/// Computes the scores of the cells of each of `masked`.
fn cell_scores(
    network: &Network,
    scorer: &PixelScorer,
    images: &ImageSet,
    masked: &[MaskedImage],
) -> Result<Vec<CellScores>, EvalError> {
    if masked.is_empty() {
        return Ok(Vec::new());
    }
    let squares: Vec<&[u8]> = masked.iter().map(|image| image.square.as_slice()).collect();
    let tokens = network.tokens(&squares, images.transform.size_px as usize);
    let grid = tokens.grid();
    let scores = scorer.scores(&tokens);
    let [b, n, n_classes] = scores.dims();
    let values = to_host(scores.reshape([b * n * n_classes]));
    let indices: Vec<u32> = masked.iter().map(|image| image.index as u32).collect();
    check_finite(images, &indices, &values)?;
    let mut scores = Vec::with_capacity(b);
    for values in values.chunks_exact(n * n_classes) {
        scores.push(CellScores { values: values.to_vec(), grid, n_classes });
    }
    Ok(scores)
}

impl CellScores {
    /// Predicts the classes of the pixels of the image, which has this width and height: rows from
    /// the top.
    fn predicted(&self, [width_px, height_px]: [u32; 2]) -> Vec<u8> {
        let [n_rows, n_columns] = self.grid;
        let c = self.n_classes;
        let row_len = n_columns * c;
        let columns = bilinear_taps(n_columns, width_px as usize);
        let mut row = vec![0.0; row_len];
        let mut pixel = vec![0.0; c];
        let mut predicted = Vec::with_capacity(width_px as usize * height_px as usize);
        for taps in bilinear_taps(n_rows, height_px as usize) {
            interpolate(&self.values, row_len, taps, &mut row);
            for taps in &columns {
                interpolate(&row, c, *taps, &mut pixel);
                predicted.push(argmax(&pixel) as u8);
            }
        }
        predicted
    }

    /// Counts the pixels of the image, whose mask is `mask`, by true and predicted class, `[C, C]`.
    fn confusion(&self, mask: &Mask) -> Vec<u64> {
        let mut counts = vec![0; self.n_classes * self.n_classes];
        for (truth, predicted) in mask.classes().iter().zip(self.predicted(mask.size_px())) {
            if *truth != IGNORED_CLASS {
                counts[usize::from(*truth) * self.n_classes + usize::from(predicted)] += 1;
            }
        }
        counts
    }
}

/// Interpolates between two of the groups of `len` values in `values`.
fn interpolate(values: &[f32], len: usize, taps: Taps, out: &mut [f32]) {
    let first = &values[taps.first * len..][..len];
    let second = &values[taps.second * len..][..len];
    for ((out, a), b) in out.iter_mut().zip(first).zip(second) {
        *out = a + taps.share * (b - a);
    }
}

/// Returns the share of the pixels of `confusion`, `[C, C]`, that are right, in percent; that of no
/// pixels is 100.
fn share_right(confusion: &[u64], n_classes: usize) -> f64 {
    let n_right: u64 = confusion.iter().step_by(n_classes + 1).sum();
    match confusion.iter().sum::<u64>() {
        0 => 100.0,
        n_pixels => 100.0 * n_right as f64 / n_pixels as f64,
    }
}

impl Segmented {
    /// Summarizes the images `scored` of a set of `n_all`, whose pixels are counted in `counts`.
    fn new(counts: PixelCounts, mut scored: Vec<SegmentedImage>, n_all: usize) -> Self {
        let n_images = scored.len();
        // The order is stable: images of equal shares keep theirs.
        scored.sort_by(|a, b| a.accuracy.total_cmp(&b.accuracy));
        scored.truncate(N_WORST);
        Self { counts, n_images, n_bad: n_all - n_images, worst: scored }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two cells side by side: the middle of the image divides the classes.
    fn halves() -> CellScores {
        CellScores { values: vec![1.0, 0.0, 0.0, 1.0], grid: [1, 2], n_classes: 2 }
    }

    #[test]
    fn pixels_have_the_class_with_the_largest_interpolated_score() {
        assert_eq!(halves().predicted([4, 2]), [0, 0, 1, 1, 0, 0, 1, 1]);
        // Of equal scores, in the middle, the first class is predicted.
        assert_eq!(halves().predicted([5, 1]), [0, 0, 0, 1, 1]);
        let corners = CellScores { values: vec![0.0, 2.0, 0.0, 0.0, 1.0, 1.0], grid: [2, 1], n_classes: 3 };
        assert_eq!(corners.predicted([1, 4]), [1, 1, 1, 1]);
        assert_eq!(corners.predicted([1, 40])[32..], [1; 8], "class 1 has as large a score as class 2");
    }

    #[test]
    fn shares_of_right_pixels_order_images() {
        assert_eq!(share_right(&[3, 0, 1, 0], 2), 75.0);
        assert_eq!(share_right(&[0; 4], 2), 100.0, "no pixel counts");
        let mut scored = Vec::new();
        for image in 0..30 {
            scored.push(SegmentedImage { image, accuracy: f64::from(image as u32 / 2) });
        }
        scored.reverse();
        let segmented = Segmented::new(PixelCounts::new(2), scored, 32);
        assert_eq!((segmented.n_images, segmented.n_bad, segmented.worst.len()), (30, 2, N_WORST));
        assert_eq!([segmented.worst[0].image, segmented.worst[1].image], [1, 0], "the order is kept");
    }
}
