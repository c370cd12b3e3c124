//! Images that are held out of training, to validate on.
//!
//! ```text
//! order        images by class, then by the hash of their key
//! held out     image i of that order, from 0, where ⌊(i + 1) s + ½⌋ > ⌊i s + ½⌋        s the share
//! ```
//!
//! So a share s of the images of each class is held out, rounded up or down, and of all images,
//! rounded to the nearest. They follow from the keys alone: all ranks, a resumed run, and runs with
//! other seeds or settings hold out the same images. The only image of a class is not held out.
//! Images with masks, whose pixels are of several classes, count as of one.

use std::sync::Arc;

use augment::{DecodeRules, Transform};
use eval::{ImageSet, Source};
use pipeline::{Dataset, SampleId};
use trainer::run::Labels;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Seed of the hashes, different from those by which `ocelli shards split` divides images.
const SEED: u64 = u64::from_le_bytes(*b"held out");

/// Class of images of no class, and of those with masks, among those of [`Candidate`].
const NO_CLASS: u32 = u32::MAX;

/// An image with its classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LabeledImage {
    /// Index of the image in its data set.
    pub(crate) index: u64,
    /// Numbers of its classes.
    pub(crate) classes: Vec<u32>,
}

/// An image that may be held out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    class: u32,
    /// Hash of the key.
    hash: u64,
    index: u64,
}

/// Returns the images of `dataset` that are held out, a share `share` of those that would be shown
/// and whose classes are known, in the order of the data set. Of several classes, the first counts;
/// images of no class are a class of their own.
pub(crate) fn held_out(dataset: &Dataset, labels: &Labels, share: f64) -> Vec<LabeledImage> {
    if share == 0.0 {
        return Vec::new();
    }
    let mut candidates = Vec::new();
    for index in 0..labels.len() {
        if labels.is_labeled(index) && is_shown(dataset, index) {
            let class = labels.classes(index).first().copied().unwrap_or(NO_CLASS);
            candidates.push(Candidate::new(dataset, index, class));
        }
    }
    let mut images = Vec::new();
    for index in choose(candidates, share) {
        images.push(LabeledImage { index, classes: labels.classes(index as usize).to_vec() });
    }
    images
}

/// Returns the images of `dataset` that are held out, a share `share` of those that would be shown
/// and have a mask, as `has_mask` says, in the order of the data set. None of them has a class.
pub(crate) fn held_out_masked(dataset: &Dataset, has_mask: &[bool], share: f64) -> Vec<LabeledImage> {
    if share == 0.0 {
        return Vec::new();
    }
    let mut candidates = Vec::new();
    for (index, has_mask) in has_mask.iter().enumerate() {
        if *has_mask && is_shown(dataset, index) {
            candidates.push(Candidate::new(dataset, index, NO_CLASS));
        }
    }
    let mut images = Vec::new();
    for index in choose(candidates, share) {
        images.push(LabeledImage { index, classes: Vec::new() });
    }
    images
}

/// Returns whether the image `index` of `dataset` has a weight above 0.
fn is_shown(dataset: &Dataset, index: usize) -> bool {
    dataset.sampling().weights.as_ref().is_none_or(|weights| weights[index] > 0.0)
}

impl Candidate {
    /// Creates that of the image `index` of `dataset`, which is of the class `class`.
    fn new(dataset: &Dataset, index: usize, class: u32) -> Self {
        let index = index as u64;
        let (_, key, _) = dataset.describe(SampleId(index));
        Self { class, hash: xxh3_64_with_seed(key.as_bytes(), SEED), index }
    }
}

/// Returns the indices of a share `share` of `candidates`, in ascending order.
fn choose(mut candidates: Vec<Candidate>, share: f64) -> Vec<u64> {
    candidates.sort_unstable();
    let mut chosen = Vec::new();
    let mut position = 0.0;
    for class in candidates.chunk_by(|a, b| a.class == b.class) {
        // Without its only image, a class could not be learned.
        if class.len() < 2 {
            continue;
        }
        for candidate in class {
            if (share * (position + 1.0) + 0.5).floor() > (share * position + 0.5).floor() {
                chosen.push(candidate.index);
            }
            position += 1.0;
        }
    }
    chosen.sort_unstable();
    chosen
}

/// Returns the images of `labels` whose classes are known, in the order of the data set.
pub(crate) fn labeled(labels: &Labels) -> Vec<LabeledImage> {
    let mut images = Vec::new();
    for index in 0..labels.len() {
        if labels.is_labeled(index) {
            images.push(LabeledImage { index: index as u64, classes: labels.classes(index).to_vec() });
        }
    }
    images
}

/// How images of a run are read to be scored.
#[derive(Debug, Clone)]
pub(crate) struct Reading<'a> {
    /// Images of the run.
    pub(crate) dataset: &'a Arc<Dataset>,
    pub(crate) transform: Transform,
    pub(crate) rules: DecodeRules,
    /// Names of the classes, by number.
    pub(crate) classes: &'a [String],
}

impl Reading<'_> {
    /// Returns the set `name` of `images`.
    pub(crate) fn set(&self, name: String, images: &[LabeledImage]) -> ImageSet {
        let images = images.iter().map(|image| (image.index, image.classes.clone())).collect();
        let source = Source::Shards(Arc::clone(self.dataset));
        ImageSet::from_labels(source, self.transform, self.rules, name, self.classes, images)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns candidates of these classes, whose keys are their numbers.
    fn candidates(classes: &[u32]) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        for (index, class) in classes.iter().enumerate() {
            let hash = xxh3_64_with_seed(index.to_string().as_bytes(), SEED);
            candidates.push(Candidate { class: *class, hash, index: index as u64 });
        }
        candidates
    }

    #[test]
    fn a_share_of_every_class_is_held_out() {
        for n in [10, 37, 100, 1000] {
            for share in [0.05, 0.1, 0.25, 1.0 / 3.0, 0.5] {
                // Classes of different sizes.
                let classes: Vec<u32> = (0..n).map(|index| if index % 5 == 0 { 1 } else { 0 }).collect();
                let chosen = choose(candidates(&classes), share);
                assert!((chosen.len() as f64 - share * f64::from(n)).abs() <= 0.5 + 1e-9, "{n}, {share}");
                for class in [0, 1] {
                    let n_class = classes.iter().filter(|other| **other == class).count() as f64;
                    let n_chosen = chosen.iter().filter(|index| classes[**index as usize] == class).count();
                    let difference = (n_chosen as f64 - share * n_class).abs();
                    assert!(difference < 1.0 + 1e-9, "{n}, {share}: {n_chosen} of {n_class}");
                }
            }
        }
    }

    /// At the largest share, an image of every class is left, and the only one of a class.
    #[test]
    fn an_image_of_every_class_is_trained_on() {
        let classes = [0, 0, 1, 2, 2, 2, 3, 4, 4];
        let chosen = choose(candidates(&classes), 0.5);
        for class in 0..5 {
            let mut left = (0..classes.len()).filter(|index| classes[*index] == class);
            assert!(left.any(|index| !chosen.contains(&(index as u64))), "{class}: {chosen:?}");
        }
        assert_eq!(chosen.len(), 4, "half of the seven images of classes with several, rounded");
    }

    /// The choice is a random one, which the order of the images does not change.
    #[test]
    fn keys_alone_choose() {
        let ordered = candidates(&[0; 200]);
        let mut reversed = ordered.clone();
        reversed.reverse();
        let chosen = choose(ordered.clone(), 0.1);
        assert_eq!(choose(reversed, 0.1), chosen);
        assert_eq!(chosen.len(), 20);
        let n_first_half = chosen.iter().filter(|index| **index < 100).count();
        assert!((2..=18).contains(&n_first_half), "{chosen:?}");
        assert!(chosen.is_sorted() && choose(ordered, 1e-3).is_empty());
    }

    #[test]
    fn images_that_are_held_out_have_no_label_to_train_on() {
        let labels = Labels::new([Some(vec![2]), None, Some(vec![0, 3]), Some(vec![1]), Some(vec![])]);
        let left = labels.without(&[2]);
        assert_eq!((left.len(), left.n_labeled()), (5, 3));
        let indices: Vec<u64> = labeled(&left).into_iter().map(|image| image.index).collect();
        assert_eq!(indices, [0, 3, 4], "an image of no class has a label");
    }
}
