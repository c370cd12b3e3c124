//! Labels of images: those of a run whose method learns from labels, and of the images on which its
//! classifier is scored.

use std::path::Path;
use std::sync::Arc;

use augment::Transform;
use eval::image_sets::{set_name, with_names};
use eval::{ImageSet, Source};
use pipeline::words::{counted, thousands};
use pipeline::{Dataset, Storage};
use prep::classes::report_class_folders;
use trainer::Recipe;
use trainer::run::Labels;

use crate::error::SessionError;
use crate::initial::begun_plan;

/// Images of a run.
pub(crate) struct RunImages {
    /// The images; those without a class are not shown if the run learns from labels.
    pub(crate) dataset: Dataset,
    /// Labels of all images, if the run learns from them.
    pub(crate) labels: Option<Arc<Labels>>,
}

/// Reads the labels of `dataset`, the images of `recipe`, if its method learns from labels, and
/// records in the recipe the names of the classes and the fingerprint of the labels. A run that has
/// begun in `workdir` is resumed only with the same labels. Rank 0 reports what is assumed.
///
/// # Errors
/// [`SessionError`] when labels are missing, are not as the recipe lists them, or have changed, or
/// a shard cannot be read.
pub(crate) fn open(
    recipe: &mut Recipe,
    dataset: Dataset,
    workdir: &Path,
    rank: usize,
    storage: &Storage,
) -> Result<RunImages, SessionError> {
    let shards = recipe.data.shard_lists();
    let rules = recipe.data.rules();
    let transform = Transform::new(recipe.evaluated_px() as u32);
    let Some(facts) = recipe.method.labels() else { return Ok(RunImages { dataset, labels: None }) };
    let name = set_name(&shards);
    if rank == 0 {
        report_class_folders(&dataset, &name)?;
        if !dataset.is_local() {
            tracing::info!("reading the classes of all images fetches all shards of {name}");
        }
    }
    let shared = Arc::new(dataset);
    let images = ImageSet::open(Source::Shards(Arc::clone(&shared)), transform, rules, name)?;
    let images = with_names(images, &shards, storage)?;
    check_single(&images)?;
    let classes =
        if facts.classes.is_empty() { images.distinct_classes() } else { std::mem::take(facts.classes) };
    let images = images.numbered(&classes).map_err(|classes| SessionError::UnlistedClasses { classes })?;
    check_all_used(&images)?;
    let labels = Labels::new((0..images.len()).map(|image| images.labels(image)));
    let n_unlabeled = labels.len() as u64 - labels.n_labeled();
    if n_unlabeled > 0 && rank == 0 {
        tracing::info!(
            "{} of {} of {} have no class, and are not shown",
            thousands(n_unlabeled),
            counted(labels.len() as u64, "image"),
            images.name
        );
    }
    let fingerprint = format!("{:016x}", labels.fingerprint());
    check_unchanged(workdir, &classes, &fingerprint)?;
    *facts.classes = classes;
    *facts.fingerprint = fingerprint;
    drop(images);
    // The set of images had the only other reference.
    let mut dataset = Arc::into_inner(shared).expect("a data set that nothing else reads");
    if n_unlabeled > 0 {
        dataset = without_unlabeled(dataset, &labels)?;
    }
    Ok(RunImages { dataset, labels: Some(Arc::new(labels)) })
}

/// Returns `images`, on which a classifier of `classes` is scored, with the numbers of these
/// classes, and without the images that have no class, whose number is reported.
///
/// # Errors
/// [`SessionError`] when no image has a class, an image has several, or a class is not one of
/// `classes`.
pub fn classified_images(images: ImageSet, classes: &[String]) -> Result<ImageSet, SessionError> {
    check_single(&images)?;
    let n_images = images.len();
    let images = images.labeled()?;
    if images.len() < n_images {
        tracing::info!(
            "{} of {} of {} have no class, and are left out",
            thousands((n_images - images.len()) as u64),
            counted(n_images as u64, "image"),
            images.name
        );
    }
    let set = images.name.clone();
    images.numbered(classes).map_err(|unknown| SessionError::UnknownClasses {
        set,
        unknown,
        known: classes.to_vec(),
    })
}

/// Checks that an image has a class, and that none has several.
fn check_single(images: &ImageSet) -> Result<(), SessionError> {
    if (0..images.len()).all(|image| images.label(image).is_none()) {
        return Err(SessionError::NoClasses { set: images.name.clone(), n_images: images.len() });
    }
    for image in 0..images.len() {
        let labels = images.labels(image);
        if labels.len() > 1 {
            let names = labels.iter().map(|label| images.classes()[*label as usize].clone()).collect();
            let (shard, key) = images.describe(image);
            return Err(SessionError::SeveralClasses { shard: shard.unwrap_or_default(), key, names });
        }
    }
    Ok(())
}

/// Checks that there are two classes at least, and an image of each.
fn check_all_used(images: &ImageSet) -> Result<(), SessionError> {
    let mut is_used = vec![false; images.classes().len()];
    for image in 0..images.len() {
        for label in images.labels(image) {
            is_used[label as usize] = true;
        }
    }
    let unused = images.classes().iter().zip(&is_used).filter(|(_, is_used)| !**is_used);
    let unused: Vec<String> = unused.map(|(class, _)| class.clone()).collect();
    if !unused.is_empty() {
        return Err(SessionError::UnusedClasses { classes: unused });
    }
    if let [class] = images.classes() {
        return Err(SessionError::OneClass { set: images.name.clone(), class: class.clone() });
    }
    Ok(())
}

/// Checks that the run in `workdir`, if it has begun, has these classes and labels.
///
/// # Errors
/// [`SessionError::LabelsChanged`], and [`SessionError::Train`] for a plan that cannot be read.
fn check_unchanged(workdir: &Path, classes: &[String], fingerprint: &str) -> Result<(), SessionError> {
    let Some(mut plan) = begun_plan(workdir)? else { return Ok(()) };
    // A run of another method is refused elsewhere.
    let Some(recorded) = plan.recipe.method.labels() else { return Ok(()) };
    let workdir = workdir.to_path_buf();
    if recorded.classes.as_slice() != classes {
        let difference = "other classes, or in another order";
        return Err(SessionError::LabelsChanged { workdir, difference });
    }
    if recorded.fingerprint.as_str() != fingerprint {
        let difference = "the same classes, but not of the same images";
        return Err(SessionError::LabelsChanged { workdir, difference });
    }
    Ok(())
}

/// Returns `dataset` with a weight of 0 for the images that have no label.
fn without_unlabeled(dataset: Dataset, labels: &Labels) -> Result<Dataset, SessionError> {
    let mut sampling = dataset.sampling().clone();
    let mut weights = sampling.weights.take().unwrap_or_else(|| vec![1.0; labels.len()]);
    for (image, weight) in weights.iter_mut().enumerate() {
        if labels.classes(image).is_empty() {
            *weight = 0.0;
        }
    }
    sampling.weights = Some(weights);
    Ok(dataset.sampled(sampling)?)
}

#[cfg(test)]
mod tests {
    use trainer::TrainError;

    use super::*;

    /// A run whose plan cannot be read is not taken for one that has not begun.
    #[test]
    fn labels_of_a_run_with_an_unreadable_plan_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let classes = ["cat", "dog"].map(String::from);
        assert!(check_unchanged(folder.path(), &classes, "f").is_ok(), "no run has begun");
        std::fs::write(folder.path().join("plan.toml"), "labels = 'of another release'\n").unwrap();
        let result = check_unchanged(folder.path(), &classes, "f");
        assert!(matches!(result, Err(SessionError::Train(TrainError::Recipe { .. }))), "{result:?}");
    }
}
