//! Masks of a set of images: which images have one, and which classes their pixels have.

use std::collections::BTreeSet;

use augment::{IGNORED_CLASS, Mask};
use rayon::prelude::*;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::EvalError;
use crate::images::ImageSet;
use crate::parallel::try_collect;

/// Masks of a set of images.
#[derive(Debug, Clone, PartialEq)]
pub struct MaskSurvey {
    /// Whether each image has a mask.
    pub has_mask: Vec<bool>,
    /// Hash of the bytes of all masks, and of which images have them.
    pub fingerprint: u64,
    /// Classes of the pixels that count; empty if none does, or masks were not decoded.
    pub classes: BTreeSet<u8>,
    /// The lowest of these classes.
    pub lowest: Option<PixelClass>,
    /// The highest of these classes.
    pub highest: Option<PixelClass>,
    /// The first mask that cannot be decoded.
    pub flaw: Option<MaskFlaw>,
}

/// A class of pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PixelClass {
    /// The class.
    pub class: u8,
    /// The first image with pixels of the class.
    pub image: usize,
}

/// A mask that cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskFlaw {
    /// Its image.
    pub image: usize,
    /// Reason.
    pub reason: String,
}

/// One mask as a survey sees it.
struct SeenMask {
    hash: u64,
    /// The classes of the pixels that count, in ascending order, or the reason why it cannot be
    /// decoded; none if no pixel counts, or it was not decoded.
    classes: Result<Vec<u8>, String>,
}

/// Reads the masks of `images`, and decodes them if `decodes`.
///
/// # Errors
/// [`EvalError::Data`] if a shard cannot be read.
pub fn survey_masks(images: &ImageSet, decodes: bool) -> Result<MaskSurvey, EvalError> {
    let all = (0..images.len()).into_par_iter();
    let seen = try_collect(all.map(|image| see_mask(images, image, decodes)))?;
    Ok(MaskSurvey::new(seen))
}

/// Reads the mask of `image`, if it has one.
fn see_mask(images: &ImageSet, image: usize, decodes: bool) -> Result<Option<SeenMask>, EvalError> {
    let Some(bytes) = images.encoded_mask(image)? else { return Ok(None) };
    let mut classes = Ok(Vec::new());
    if decodes {
        classes = Mask::decode(&bytes, images.max_image_pixels()).map(|mask| counted_classes(&mask));
    }
    Ok(Some(SeenMask { hash: xxh3_64(&bytes), classes }))
}

/// Returns the classes of the pixels of `mask` that count, in ascending order.
fn counted_classes(mask: &Mask) -> Vec<u8> {
    let mut is_present = [false; 256];
    for class in mask.classes() {
        is_present[usize::from(*class)] = true;
    }
    is_present[usize::from(IGNORED_CLASS)] = false;
    (0..=u8::MAX).filter(|class| is_present[usize::from(*class)]).collect()
}

impl MaskSurvey {
    /// Summarizes the masks of all images.
    fn new(seen: Vec<Option<SeenMask>>) -> Self {
        let mut survey = Self {
            has_mask: Vec::with_capacity(seen.len()),
            fingerprint: 0,
            classes: BTreeSet::new(),
            lowest: None,
            highest: None,
            flaw: None,
        };
        let mut hash = Xxh3::new();
        for (image, mask) in seen.into_iter().enumerate() {
            survey.has_mask.push(mask.is_some());
            let Some(mask) = mask else { continue };
            hash.update(&(image as u64).to_le_bytes());
            hash.update(&mask.hash.to_le_bytes());
            match mask.classes {
                Ok(classes) => {
                    for class in classes {
                        if survey.lowest.is_none_or(|known| class < known.class) {
                            survey.lowest = Some(PixelClass { class, image });
                        }
                        if survey.highest.is_none_or(|known| class > known.class) {
                            survey.highest = Some(PixelClass { class, image });
                        }
                        survey.classes.insert(class);
                    }
                }
                Err(reason) => survey.flaw = survey.flaw.or(Some(MaskFlaw { image, reason })),
            }
        }
        survey.fingerprint = hash.digest();
        survey
    }

    /// Returns the number of images that have a mask.
    pub fn n_masked(&self) -> usize {
        self.has_mask.iter().filter(|has_mask| **has_mask).count()
    }
}

/// Returns the images of `images` that have a mask, of pixels of the first `n_classes` classes.
///
/// # Errors
/// [`EvalError::NoMasks`] if no image has one, [`EvalError::Mask`] if a mask cannot be decoded,
/// differs in size from its image, or has another class, and [`EvalError::Data`] if a shard cannot
/// be read.
pub fn masked_images(images: ImageSet, n_classes: usize) -> Result<ImageSet, EvalError> {
    let all = (0..images.len()).into_par_iter();
    let has_mask = try_collect(all.map(|image| has_checked_mask(&images, image, n_classes)))?;
    with_masks(images, &has_mask)
}

/// Returns the images of `images` that have a mask as [`masked_images`] requires it: those with
/// another mask are left out, too.
///
/// # Errors
/// [`EvalError::NoMasks`] if no image has one, and [`EvalError::Data`] if a shard cannot be read.
pub fn usable_masked_images(images: ImageSet, n_classes: usize) -> Result<ImageSet, EvalError> {
    let all = (0..images.len()).into_par_iter();
    let has_mask = try_collect(all.map(|image| has_usable_mask(&images, image, n_classes)))?;
    with_masks(images, &has_mask)
}

/// Returns those of `images` whose `has_mask` is set.
fn with_masks(images: ImageSet, has_mask: &[bool]) -> Result<ImageSet, EvalError> {
    let n_samples = images.len();
    let masked = images.with_only(has_mask);
    if masked.is_empty() {
        return Err(EvalError::NoMasks { split: masked.name, n_samples });
    }
    Ok(masked)
}

/// Returns whether image `index` has a mask that can be used.
fn has_usable_mask(images: &ImageSet, index: usize, n_classes: usize) -> Result<bool, EvalError> {
    match has_checked_mask(images, index, n_classes) {
        Err(EvalError::Mask { .. }) => Ok(false),
        checked => checked,
    }
}

/// Returns whether image `index` has a mask, and checks it.
fn has_checked_mask(images: &ImageSet, index: usize, n_classes: usize) -> Result<bool, EvalError> {
    let Some(mask) = images.checked_mask(index, n_classes)? else { return Ok(false) };
    if let Some(image) = images.decoded(index)? {
        images.check_mask_size(index, &mask, &image)?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(hash: u64, classes: Result<&[u8], &str>) -> Option<SeenMask> {
        Some(SeenMask { hash, classes: classes.map(<[u8]>::to_vec).map_err(String::from) })
    }

    #[test]
    fn a_survey_names_the_first_image_of_its_extremes() {
        let survey = MaskSurvey::new(vec![
            None,
            seen(1, Ok(&[2, 3])),
            seen(2, Ok(&[])),
            seen(3, Err("no PNG")),
            seen(4, Ok(&[1, 7])),
            seen(5, Ok(&[1, 7])),
            seen(6, Err("too large")),
        ]);
        assert_eq!(survey.n_masked(), 6);
        assert!(!survey.has_mask[0] && survey.has_mask[1]);
        assert_eq!(survey.lowest, Some(PixelClass { class: 1, image: 4 }));
        assert_eq!(survey.highest, Some(PixelClass { class: 7, image: 4 }));
        assert_eq!(survey.flaw, Some(MaskFlaw { image: 3, reason: "no PNG".into() }));
        assert_eq!(survey.classes, BTreeSet::from([1, 2, 3, 7]), "there are no pixels of 0 and of 4 to 6");
    }

    fn fingerprint(masks: Vec<Option<SeenMask>>) -> u64 {
        MaskSurvey::new(masks).fingerprint
    }

    /// Equal masks of other images are other labels.
    #[test]
    fn fingerprints_depend_on_masks_and_their_images() {
        let first = fingerprint(vec![seen(1, Ok(&[])), None]);
        assert_eq!(first, fingerprint(vec![seen(1, Ok(&[0, 1])), None]));
        assert_ne!(first, fingerprint(vec![None, seen(1, Ok(&[]))]));
        assert_ne!(first, fingerprint(vec![seen(2, Ok(&[])), None]));
    }
}
