//! Masks of a set of images: which images have one, and which classes their pixels have.

use augment::Mask;
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
    /// The lowest class of a pixel that counts; `None` if none does, or masks were not decoded.
    pub lowest: Option<PixelClass>,
    /// The highest class of a pixel that counts.
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
    /// The lowest and the highest class of pixels that count, or the reason why it cannot be
    /// decoded; `None` if no pixel counts, or it was not decoded.
    classes: Result<Option<[u8; 2]>, String>,
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
    let mut classes = Ok(None);
    if decodes {
        classes = Mask::decode(&bytes, images.max_image_pixels()).map(|mask| mask.class_range());
    }
    Ok(Some(SeenMask { hash: xxh3_64(&bytes), classes }))
}

impl MaskSurvey {
    /// Summarizes the masks of all images.
    fn new(seen: Vec<Option<SeenMask>>) -> Self {
        let mut survey = Self {
            has_mask: Vec::with_capacity(seen.len()),
            fingerprint: 0,
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
                Ok(Some([lowest, highest])) => {
                    if survey.lowest.is_none_or(|known| lowest < known.class) {
                        survey.lowest = Some(PixelClass { class: lowest, image });
                    }
                    if survey.highest.is_none_or(|known| highest > known.class) {
                        survey.highest = Some(PixelClass { class: highest, image });
                    }
                }
                Ok(None) => {}
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
    let n_samples = images.len();
    let masked = images.with_only(&has_mask);
    if masked.is_empty() {
        return Err(EvalError::NoMasks { split: masked.name, n_samples });
    }
    Ok(masked)
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

    fn seen(hash: u64, classes: Result<Option<[u8; 2]>, String>) -> Option<SeenMask> {
        Some(SeenMask { hash, classes })
    }

    #[test]
    fn a_survey_names_the_first_image_of_its_extremes() {
        let survey = MaskSurvey::new(vec![
            None,
            seen(1, Ok(Some([2, 3]))),
            seen(2, Ok(None)),
            seen(3, Err("no PNG".into())),
            seen(4, Ok(Some([1, 7]))),
            seen(5, Ok(Some([1, 7]))),
            seen(6, Err("too large".into())),
        ]);
        assert_eq!(survey.n_masked(), 6);
        assert!(!survey.has_mask[0] && survey.has_mask[1]);
        assert_eq!(survey.lowest, Some(PixelClass { class: 1, image: 4 }));
        assert_eq!(survey.highest, Some(PixelClass { class: 7, image: 4 }));
        assert_eq!(survey.flaw, Some(MaskFlaw { image: 3, reason: "no PNG".into() }));
    }

    fn fingerprint(masks: Vec<Option<SeenMask>>) -> u64 {
        MaskSurvey::new(masks).fingerprint
    }

    /// Equal masks of other images are other labels.
    #[test]
    fn fingerprints_depend_on_masks_and_their_images() {
        let first = fingerprint(vec![seen(1, Ok(None)), None]);
        assert_eq!(first, fingerprint(vec![seen(1, Ok(Some([0, 1]))), None]));
        assert_ne!(first, fingerprint(vec![None, seen(1, Ok(None))]));
        assert_ne!(first, fingerprint(vec![seen(2, Ok(None)), None]));
    }
}
