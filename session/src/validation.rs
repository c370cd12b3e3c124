//! Images that are held out of training, to validate on.
//!
//! ```text
//! order        images by the name of their class, then by the hash of their key
//! held out     image i of that order, from 0, where ⌊(i + 1) s + ½⌋ > ⌊i s + ½⌋        s the share
//! ```
//!
//! So a share s of the images of each class is held out, rounded up or down, and of all images,
//! rounded to the nearest. They follow from the keys, the names of the classes, and which images
//! are shown: all ranks, a resumed run, and runs with other seeds or classes in another order hold
//! out the same images. The last image of a class that is left to train on is not held out, whether
//! it has other classes or not. Images with masks, whose pixels are of several classes, count as of
//! one.

use std::collections::HashMap;
use std::sync::Arc;

use augment::{DecodeRules, Transform};
use eval::{ImageSet, Source};
use pipeline::words::{counted, thousands};
use pipeline::{Dataset, SampleId};
use trainer::run::Labels;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::error::SessionError;

/// Seed of the hashes, different from those by which `ocelli shards split` divides images.
const SEED: u64 = u64::from_le_bytes(*b"held out");

/// An image with its classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LabeledImage {
    /// Index of the image in its data set.
    pub(crate) index: u64,
    /// Numbers of its classes.
    pub(crate) classes: Vec<u32>,
}

/// Images among which a share is held out, in the order in which they are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    /// Images of a class, by the position of its name among those of all classes: the first of
    /// several.
    Class(u32),
    /// Images of no class, and those with masks.
    NoClass,
}

/// An image that may be held out.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    group: Group,
    /// Hash of the key.
    hash: u64,
    index: u64,
    /// Numbers of its classes.
    classes: Vec<u32>,
}

/// Returns the images of `dataset` that are held out, a share `share` of those that would be shown
/// and whose classes are known, in the order of the data set. `names` are those of the classes, by
/// number. Of several classes, the first by name counts; images of no class are a class of their
/// own.
pub(crate) fn held_out(
    dataset: &Dataset,
    labels: &Labels,
    names: &[String],
    share: f64,
) -> Vec<LabeledImage> {
    if share == 0.0 {
        return Vec::new();
    }
    let positions = positions_by_name(names);
    let mut candidates = Vec::new();
    for image in labeled(labels, weights(dataset)) {
        candidates.push(Candidate::new(dataset, image, &positions));
    }
    choose(candidates, share)
}

/// Returns the images of `dataset` that are held out, a share `share` of those that would be shown
/// and have a mask, as `has_mask` says, in the order of the data set. None of them has a class.
pub(crate) fn held_out_masked(dataset: &Dataset, has_mask: &[bool], share: f64) -> Vec<LabeledImage> {
    if share == 0.0 {
        return Vec::new();
    }
    let mut candidates = Vec::new();
    for image in shown(dataset) {
        if has_mask[image.index as usize] {
            candidates.push(Candidate::new(dataset, image, &[]));
        }
    }
    choose(candidates, share)
}

/// Checks that images are held out of the set `set`, the share `share` of its `n_images` images, if
/// it is above 0, and reports how many on rank 0.
///
/// # Errors
/// [`SessionError::NothingHeldOut`].
pub(crate) fn check_held_out(
    held_out: &[LabeledImage],
    set: &str,
    share: f64,
    n_images: u64,
    rank: usize,
) -> Result<(), SessionError> {
    if share == 0.0 {
        return Ok(());
    }
    if held_out.is_empty() {
        return Err(SessionError::NothingHeldOut { set: set.to_string(), share, n_images });
    }
    if rank == 0 {
        tracing::info!(
            "{} of {} of {set} are held out of training, to validate on (data.validation={share})",
            thousands(held_out.len() as u64),
            counted(n_images, "image")
        );
    }
    Ok(())
}

/// Returns `dataset` with a weight of 0 for the images whose `is_shown` is not set.
///
/// # Errors
/// [`SessionError::Data`] if none is left.
pub(crate) fn with_only(dataset: Dataset, is_shown: &[bool]) -> Result<Dataset, SessionError> {
    let mut sampling = dataset.sampling().clone();
    let mut weights = sampling.weights.take().unwrap_or_else(|| vec![1.0; is_shown.len()]);
    for (weight, is_shown) in weights.iter_mut().zip(is_shown) {
        if !is_shown {
            *weight = 0.0;
        }
    }
    sampling.weights = Some(weights);
    Ok(dataset.sampled(sampling)?)
}

/// Returns the weights of the images of `dataset`, if they have any.
pub(crate) fn weights(dataset: &Dataset) -> Option<&[f64]> {
    dataset.sampling().weights.as_deref()
}

/// Returns whether the image `index` has a weight above 0.
fn is_shown(weights: Option<&[f64]>, index: usize) -> bool {
    weights.is_none_or(|weights| weights[index] > 0.0)
}

/// Returns the position of each class, by number, among all in the order of their names.
fn positions_by_name(names: &[String]) -> Vec<u32> {
    let mut numbers: Vec<usize> = (0..names.len()).collect();
    numbers.sort_by_key(|number| &names[*number]);
    let mut positions = vec![0; names.len()];
    for (position, number) in numbers.into_iter().enumerate() {
        positions[number] = position as u32;
    }
    positions
}

impl Candidate {
    /// Creates that of `image` of `dataset`; `positions` are those of the classes, by number.
    fn new(dataset: &Dataset, image: LabeledImage, positions: &[u32]) -> Self {
        let (_, key, _) = dataset.describe(SampleId(image.index));
        Self::with_key(&key, image, positions)
    }

    /// Creates that of `image`, whose key is `key`; `positions` are those of the classes, by
    /// number.
    fn with_key(key: &str, image: LabeledImage, positions: &[u32]) -> Self {
        let LabeledImage { index, classes } = image;
        let first_position = classes.iter().map(|class| positions[*class as usize]).min();
        let group = first_position.map_or(Group::NoClass, Group::Class);
        Self { group, hash: xxh3_64_with_seed(key.as_bytes(), SEED), index, classes }
    }
}

/// Returns a share `share` of `candidates`, by ascending index.
fn choose(mut candidates: Vec<Candidate>, share: f64) -> Vec<LabeledImage> {
    candidates.sort_unstable();
    // Images of each class that are left to train on: without any, a class could not be learned.
    let mut n_left: HashMap<u32, usize> = HashMap::new();
    for candidate in &candidates {
        for class in &candidate.classes {
            *n_left.entry(*class).or_default() += 1;
        }
    }
    let mut chosen = Vec::new();
    let mut position = 0.0;
    for group in candidates.chunk_by(|a, b| a.group == b.group) {
        if group.len() < 2 {
            continue;
        }
        for candidate in group {
            let is_next = (share * (position + 1.0) + 0.5).floor() > (share * position + 0.5).floor();
            position += 1.0;
            if !is_next || candidate.classes.iter().any(|class| n_left[class] < 2) {
                continue;
            }
            for class in &candidate.classes {
                *n_left.entry(*class).or_default() -= 1;
            }
            chosen.push(LabeledImage { index: candidate.index, classes: candidate.classes.clone() });
        }
    }
    chosen.sort_unstable_by_key(|image| image.index);
    chosen
}

/// Returns the images of `labels` whose classes are known and whose weight among `weights` is above
/// 0, in the order of the data set.
pub(crate) fn labeled(labels: &Labels, weights: Option<&[f64]>) -> Vec<LabeledImage> {
    let mut images = Vec::new();
    for index in 0..labels.len() {
        if labels.is_labeled(index) && is_shown(weights, index) {
            images.push(LabeledImage { index: index as u64, classes: labels.classes(index).to_vec() });
        }
    }
    images
}

/// Returns the images of `dataset` whose weight is above 0, without classes, in the order of the
/// data set.
pub(crate) fn shown(dataset: &Dataset) -> Vec<LabeledImage> {
    let mut images = Vec::new();
    for index in 0..dataset.n_samples() {
        if is_shown(weights(dataset), index as usize) {
            images.push(LabeledImage { index, classes: Vec::new() });
        }
    }
    images
}

/// Reports how many of `n_images` images are not among `images`, those that are scored, and `why`.
pub(crate) fn report_left_out(images: &ImageSet, n_images: usize, why: &str) {
    if images.len() < n_images {
        tracing::info!(
            "{} of {} of {} {why}, and are left out",
            thousands((n_images - images.len()) as u64),
            counted(n_images as u64, "image"),
            images.name
        );
    }
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

    /// Returns candidates with these numbers of classes, whose names are `names` by number and
    /// whose keys are the numbers of the images.
    fn named_candidates(by_image: &[Vec<u32>], names: &[String]) -> Vec<Candidate> {
        let positions = positions_by_name(names);
        let mut candidates = Vec::new();
        for (index, classes) in by_image.iter().enumerate() {
            let image = LabeledImage { index: index as u64, classes: classes.clone() };
            candidates.push(Candidate::with_key(&index.to_string(), image, &positions));
        }
        candidates
    }

    /// Returns candidates of one class each.
    fn candidates(classes: &[u32]) -> Vec<Candidate> {
        let by_image: Vec<Vec<u32>> = classes.iter().map(|class| vec![*class]).collect();
        named_candidates(&by_image, &["a", "b", "c", "d", "e"].map(String::from))
    }

    /// Returns the indices of a share `share` of `candidates`.
    fn chosen_indices(candidates: Vec<Candidate>, share: f64) -> Vec<u64> {
        choose(candidates, share).into_iter().map(|image| image.index).collect()
    }

    #[test]
    fn a_share_of_every_class_is_held_out() {
        for n in [10, 37, 100, 1000] {
            for share in [0.05, 0.1, 0.25, 1.0 / 3.0, 0.5] {
                // Classes of different sizes.
                let classes: Vec<u32> = (0..n).map(|index| if index % 5 == 0 { 1 } else { 0 }).collect();
                let chosen = chosen_indices(candidates(&classes), share);
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
        let chosen = chosen_indices(candidates(&classes), 0.5);
        for class in 0..5 {
            let mut left = (0..classes.len()).filter(|index| classes[*index] == class);
            assert!(left.any(|index| !chosen.contains(&(index as u64))), "{class}: {chosen:?}");
        }
        assert_eq!(chosen.len(), 4, "half of the seven images of classes with several, rounded");
    }

    /// Of images of several classes, which are drawn in the group of their first, the only one of
    /// another class stays, and one of two.
    #[test]
    fn an_image_of_every_class_of_several_is_trained_on() {
        const N_CLASSES: u32 = 40;
        let mut names = Vec::new();
        let mut alone = Vec::new();
        let mut by_image = Vec::new();
        for class in 0..N_CLASSES {
            names.push(format!("class {class:02}"));
            alone.push(vec![0, class + 1]);
            by_image.extend([vec![0, class + 1], vec![0, class + 1]]);
        }
        names.push("class 99".into());
        let chosen = chosen_indices(named_candidates(&by_image, &names), 0.5);
        for class in 1..=N_CLASSES {
            let mut images = (0..by_image.len()).filter(|index| by_image[*index].contains(&class));
            assert!(images.any(|index| !chosen.contains(&(index as u64))), "{class}: {chosen:?}");
        }
        // Without the rule, half of the images are held out, among them both of a few classes.
        let n_chosen = chosen.len();
        assert!((20..40).contains(&n_chosen), "{n_chosen}");
        assert!(chosen_indices(named_candidates(&alone, &names), 0.5).is_empty());
    }

    /// The same names in another order, as `method.classes` may list them, choose the same images.
    #[test]
    fn the_order_of_classes_does_not_choose() {
        let mut by_image = Vec::new();
        let mut permuted = Vec::new();
        for index in 0..101_u32 {
            let mut classes = vec![index % 3];
            if index % 7 == 0 {
                classes.push((classes[0] + 1) % 3);
            }
            permuted.push(classes.iter().map(|class| (class + 1) % 3).collect());
            by_image.push(classes);
        }
        for share in [0.1, 0.3] {
            let chosen =
                chosen_indices(named_candidates(&by_image, &["cat", "dog", "owl"].map(String::from)), share);
            let other =
                chosen_indices(named_candidates(&permuted, &["owl", "cat", "dog"].map(String::from)), share);
            assert_eq!(chosen, other);
            assert!(!chosen.is_empty());
        }
    }

    /// The choice is a random one, which the order of the images does not change.
    #[test]
    fn keys_alone_choose() {
        let ordered = candidates(&[0; 200]);
        let mut reversed = ordered.clone();
        reversed.reverse();
        let chosen = chosen_indices(ordered.clone(), 0.1);
        assert_eq!(chosen_indices(reversed, 0.1), chosen);
        assert_eq!(chosen.len(), 20);
        let n_first_half = chosen.iter().filter(|index| **index < 100).count();
        assert!((2..=18).contains(&n_first_half), "{chosen:?}");
        assert!(chosen.is_sorted() && chosen_indices(ordered, 1e-3).is_empty());
    }

    #[test]
    fn images_that_are_held_out_have_no_label_to_train_on() {
        let labels = Labels::new([Some(vec![2]), None, Some(vec![0, 3]), Some(vec![1]), Some(vec![])]);
        let left = labels.without(&[2]);
        assert_eq!((left.len(), left.n_labeled()), (5, 3));
        let indices: Vec<u64> = labeled(&left, None).into_iter().map(|image| image.index).collect();
        assert_eq!(indices, [0, 3, 4], "an image of no class has a label");
        let weights = [1.0, 1.0, 1.0, 0.0, 0.5];
        let indices: Vec<u64> = labeled(&left, Some(&weights)).into_iter().map(|image| image.index).collect();
        assert_eq!(indices, [0, 4], "an image of weight 0 is not shown");
    }
}
