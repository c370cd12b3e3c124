//! Masks of images: those of a run whose method learns from them, and of the images on which its
//! decoder is scored.

use std::path::Path;
use std::sync::Arc;

use augment::Transform;
use eval::image_sets::set_name;
use eval::{EvalError, ImageSet, MaskSurvey, Source, masked_images, survey_masks, usable_masked_images};
use pipeline::Dataset;
use pipeline::words::{counted, thousands};
use trainer::Recipe;

use crate::error::SessionError;
use crate::initial::begun_plan;
use crate::validation::{LabeledImage, check_held_out, held_out_masked, report_left_out, with_only};

/// Images of a run.
pub(crate) struct RunMasks {
    /// The images; those without a mask, and those that are held out, are not shown if the run
    /// learns from masks.
    pub(crate) dataset: Dataset,
    /// Number of images that are shown, if the run learns from masks.
    pub(crate) n_masked: Option<u64>,
    /// Images that are held out of training, to validate on.
    pub(crate) held_out: Vec<LabeledImage>,
}

/// Classes and fingerprint of the masks of a run that has begun.
struct RecordedMasks {
    classes: Vec<String>,
    fingerprint: String,
}

/// Reads the masks of `dataset`, the images of `recipe`, if its method learns from masks, and
/// records in the recipe the names of the classes and the fingerprint of the masks. A run that has
/// begun in `workdir` is resumed only with the same masks, which then are not decoded. The share
/// `data.validation` of the images is held out. Rank 0 reports what is assumed.
///
/// # Errors
/// [`SessionError`] when no image has a mask that can be used, masks have classes that the recipe
/// does not list, or have changed, or a shard cannot be read.
pub(crate) fn open(
    recipe: &mut Recipe,
    dataset: Dataset,
    workdir: &Path,
    rank: usize,
) -> Result<RunMasks, SessionError> {
    let rules = recipe.data.rules();
    let transform = Transform::new(recipe.evaluated_px() as u32);
    let name = set_name(&recipe.data.shard_lists());
    let share = recipe.data.validation.unwrap_or_default();
    let Some(facts) = recipe.method.pixel_labels() else {
        return Ok(RunMasks { dataset, n_masked: None, held_out: Vec::new() });
    };
    if rank == 0 && !dataset.is_local() {
        tracing::info!("reading the masks of all images fetches all shards of {name}");
    }
    let recorded = recorded(workdir)?;
    let shared = Arc::new(dataset);
    let images = ImageSet::open(Source::Shards(Arc::clone(&shared)), transform, rules, name)?;
    let survey = survey_masks(&images, recorded.is_none())?;
    let n_images = images.len() as u64;
    let n_masked = survey.n_masked() as u64;
    if n_masked == 0 {
        return Err(no_masks(&images));
    }
    let fingerprint = format!("{:016x}", survey.fingerprint);
    let listed = std::mem::take(facts.classes);
    let classes = match recorded {
        Some(recorded) => {
            check_unchanged(workdir, &recorded, &listed, &fingerprint)?;
            recorded.classes
        }
        None => {
            let is_listed = !listed.is_empty();
            let classes = named_classes(listed, &images, &survey)?;
            if !is_listed && rank == 0 {
                warn_of_gaps(&survey, classes.len(), &images.name);
            }
            classes
        }
    };
    if n_masked < n_images && rank == 0 {
        tracing::info!(
            "{} of {} of {} have no mask, and are not shown",
            thousands(n_images - n_masked),
            counted(n_images, "image"),
            images.name
        );
    }
    *facts.classes = classes;
    *facts.fingerprint = fingerprint;
    let name = images.name.clone();
    drop(images);
    // The set of images had the only other reference.
    let mut dataset = Arc::into_inner(shared).expect("a data set that nothing else reads");
    let held_out = held_out_masked(&dataset, &survey.has_mask, share);
    check_held_out(&held_out, &name, share, n_masked, rank)?;
    let n_shown = n_masked - held_out.len() as u64;
    if n_shown < n_images {
        let mut is_shown = survey.has_mask;
        for image in &held_out {
            is_shown[image.index as usize] = false;
        }
        dataset = with_only(dataset, &is_shown)?;
    }
    Ok(RunMasks { dataset, n_masked: Some(n_shown), held_out })
}

/// Returns those of `images`, on which a decoder of `classes` is scored, that have a mask; the
/// number of the others is reported.
///
/// # Errors
/// [`SessionError::Eval`] when no image has a mask, or a mask cannot be used or has another class.
pub fn segmented_images(images: ImageSet, classes: &[String]) -> Result<ImageSet, SessionError> {
    let n_images = images.len();
    let images = masked_images(images, classes.len())?;
    report_left_out(&images, n_images, "have no mask");
    Ok(images)
}

/// Returns those of `images`, which were held out of training, that have a mask as
/// [`segmented_images`] requires it. Nobody has chosen these images: the number of those whose mask
/// cannot be used, which training replaces by others, is reported.
///
/// # Errors
/// [`SessionError::Eval`] when no image has such a mask, or a shard cannot be read.
pub fn held_out_segmented_images(images: ImageSet, classes: &[String]) -> Result<ImageSet, SessionError> {
    let n_images = images.len();
    let images = usable_masked_images(images, classes.len())?;
    report_left_out(&images, n_images, "have a mask that cannot be used");
    Ok(images)
}

/// Warns if the masks of the set `set` have pixels of fewer than the `n_classes` classes that
/// follow from their highest value.
fn warn_of_gaps(survey: &MaskSurvey, n_classes: usize, set: &str) {
    let n_present = survey.classes.len();
    if n_present < n_classes {
        tracing::warn!(
            "masks of {set} have pixels of {n_present} of {n_classes} classes, numbered from 0: renumber them, \
             or name the classes in method.classes"
        );
    }
}

/// Returns the names of the classes of `images`: `listed`, or the numbers of the classes that their
/// masks have.
fn named_classes(
    listed: Vec<String>,
    images: &ImageSet,
    survey: &MaskSurvey,
) -> Result<Vec<String>, SessionError> {
    let (Some(lowest), Some(highest)) = (survey.lowest, survey.highest) else {
        let Some(flaw) = &survey.flaw else { return Err(no_masks(images)) };
        let (shard, key) = images.describe(flaw.image);
        let shard = shard.unwrap_or_default();
        return Err(EvalError::Mask { shard, key, reason: flaw.reason.clone() }.into());
    };
    if !listed.is_empty() && usize::from(highest.class) >= listed.len() {
        let (shard, key) = images.describe(highest.image);
        return Err(SessionError::UnlistedPixelClass {
            shard: shard.unwrap_or_default(),
            key,
            class: highest.class,
            n_listed: listed.len(),
        });
    }
    if lowest.class == highest.class {
        return Err(EvalError::OneClass { split: images.name.clone() }.into());
    }
    if listed.is_empty() {
        Ok((0..=highest.class).map(|class| class.to_string()).collect())
    } else {
        Ok(listed)
    }
}

/// Returns the error for `images`, none of which has a mask.
fn no_masks(images: &ImageSet) -> SessionError {
    EvalError::NoMasks { split: images.name.clone(), n_samples: images.len() }.into()
}

/// Returns what the run in `workdir` has recorded about its masks; `None` if no run has begun
/// there, or one that does not learn from masks, which is refused elsewhere.
///
/// # Errors
/// [`SessionError::Train`] for a plan that cannot be read.
fn recorded(workdir: &Path) -> Result<Option<RecordedMasks>, SessionError> {
    let Some(mut plan) = begun_plan(workdir)? else { return Ok(None) };
    let Some(facts) = plan.recipe.method.pixel_labels() else { return Ok(None) };
    let classes = std::mem::take(facts.classes);
    let fingerprint = std::mem::take(facts.fingerprint);
    Ok(Some(RecordedMasks { classes, fingerprint }))
}

/// Checks that the masks of the run in `workdir`, which has begun with those of `recorded`, have
/// the same classes, unless none are `listed`, and the same fingerprint.
fn check_unchanged(
    workdir: &Path,
    recorded: &RecordedMasks,
    listed: &[String],
    fingerprint: &str,
) -> Result<(), SessionError> {
    let workdir = workdir.to_path_buf();
    if !listed.is_empty() && listed != recorded.classes {
        return Err(SessionError::MasksChanged { workdir, difference: "method.classes lists other classes" });
    }
    if fingerprint != recorded.fingerprint {
        return Err(SessionError::MasksChanged { workdir, difference: "other bytes, or of other images" });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use trainer::TrainError;

    use super::*;

    /// A run whose plan cannot be read is not taken for one that has not begun.
    #[test]
    fn masks_of_a_run_with_an_unreadable_plan_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(recorded(folder.path()).unwrap().is_none(), "no run has begun");
        std::fs::write(folder.path().join("plan.toml"), "masks = 'of another release'\n").unwrap();
        let result = recorded(folder.path());
        assert!(matches!(result, Err(SessionError::Train(TrainError::Recipe { .. }))));
    }
}
