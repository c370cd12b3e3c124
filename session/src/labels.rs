//! Labels of images: those of a run whose method learns from labels, how often images are shown by
//! them, and the labels of the images on which its classifier is scored.
//!
//! ```text
//! n_c = Σ w_i over the images of class c          w_i the weight by data.weights, 1 without
//! w_i ← w_i · Σ n_c^-p over the classes of image i          p = data.balance
//! ```
//!
//! This is what drawing a class with a probability in proportion to n_c^(1-p), and then an image of
//! it by its weight, shows on average: with p = 1, each class is drawn equally often. An image of
//! several classes is drawn for each of them. Images that state that they are of no class are a
//! class of their own.

use std::path::Path;
use std::sync::Arc;

use augment::Transform;
use eval::image_sets::{set_name, with_names};
use eval::{ImageSet, Source};
use pipeline::words::{counted, thousands};
use pipeline::{Dataset, Storage};
use prep::classes::{report_class_folders, warn_of_parts};
use trainer::Recipe;
use trainer::run::Labels;

use crate::error::SessionError;
use crate::initial::begun_plan;
use crate::validation::{LabeledImage, check_held_out, held_out, report_left_out, with_only};

/// Images of a run.
pub(crate) struct RunImages {
    /// The images; those without a class, and those that are held out, are not shown if the run
    /// learns from labels.
    pub(crate) dataset: Dataset,
    /// Labels of all images that are shown, if the run learns from them.
    pub(crate) labels: Option<Arc<Labels>>,
    /// Images that are held out of training, to validate on.
    pub(crate) held_out: Vec<LabeledImage>,
}

/// Reads the labels of `dataset`, the images of `recipe`, if its method learns from labels, and
/// records in the recipe the names of the classes and the fingerprint of the labels. A run that has
/// begun in `workdir` is resumed only with the same labels. The share `data.validation` of the
/// images is held out. Rank 0 reports what is assumed.
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
    let balance = recipe.data.balance;
    let is_multi_label = recipe.method.is_multi_label();
    let transform = Transform::new(recipe.evaluated_px() as u32);
    let share = recipe.data.validation.unwrap_or_default();
    let Some(facts) = recipe.method.labels() else {
        return Ok(RunImages { dataset, labels: None, held_out: Vec::new() });
    };
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
    check_labels(&images, is_multi_label)?;
    let classes =
        if facts.classes.is_empty() { images.distinct_classes() } else { std::mem::take(facts.classes) };
    let images = images.numbered(&classes).map_err(|classes| SessionError::UnlistedClasses { classes })?;
    let labels = read_labels(&images, is_multi_label)?;
    check_all_used(&images, &labels)?;
    if rank == 0 {
        warn_of_parts(&classes, &images.name);
    }
    let n_unlabeled = labels.len() as u64 - labels.n_labeled();
    if n_unlabeled > 0 && rank == 0 {
        let hint =
            if is_multi_label { ": an empty list of labels says that an image is of none" } else { "" };
        tracing::info!(
            "{} of {} of {} have no class, and are not shown{hint}",
            thousands(n_unlabeled),
            counted(labels.len() as u64, "image"),
            images.name
        );
    }
    let fingerprint = format!("{:016x}", labels.fingerprint());
    check_unchanged(workdir, &classes, &fingerprint)?;
    let name = images.name.clone();
    drop(images);
    // The set of images had the only other reference.
    let mut dataset = Arc::into_inner(shared).expect("a data set that nothing else reads");
    let held_out = held_out(&dataset, &labels, &classes, share);
    check_held_out(&held_out, &name, share, labels.n_labeled(), rank)?;
    let mut hidden = Vec::with_capacity(held_out.len());
    for image in &held_out {
        hidden.push(image.index);
    }
    let labels = labels.without(&hidden);
    if labels.n_labeled() < labels.len() as u64 {
        dataset = without_unlabeled(dataset, &labels)?;
    }
    // Other values are refused with the plan.
    if (f64::MIN_POSITIVE..=1.0).contains(&balance) {
        dataset = balanced(dataset, &labels, balance)?;
        if rank == 0 {
            report_balance(&dataset, &labels, &classes, balance);
        }
    }
    *facts.classes = classes;
    *facts.fingerprint = fingerprint;
    Ok(RunImages { dataset, labels: Some(Arc::new(labels)), held_out })
}

/// Returns `images`, on which a classifier of `classes` is scored, with the numbers of these
/// classes, and without the images that have no class, whose number is reported. If
/// `is_multi_label` is set, images may have several classes, and those that state that they are of
/// none are kept.
///
/// # Errors
/// [`SessionError`] when no image has a class, an image has several and may not, or a class is not
/// one of `classes`.
pub fn classified_images(
    images: ImageSet,
    classes: &[String],
    is_multi_label: bool,
) -> Result<ImageSet, SessionError> {
    check_labels(&images, is_multi_label)?;
    let n_images = images.len();
    let images = if is_multi_label { images.with_known_labels()? } else { images.labeled()? };
    report_left_out(&images, n_images, "have no class");
    let set = images.name.clone();
    images.numbered(classes).map_err(|unknown| SessionError::UnknownClasses {
        set,
        unknown,
        known: classes.to_vec(),
    })
}

/// Checks that an image has a class, and that none has several, unless `is_multi_label` is set.
fn check_labels(images: &ImageSet, is_multi_label: bool) -> Result<(), SessionError> {
    if (0..images.len()).all(|image| images.label(image).is_none()) {
        return Err(SessionError::NoClasses { set: images.name.clone(), n_images: images.len() });
    }
    if is_multi_label {
        return Ok(());
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

/// Returns the labels of `images`. If `is_multi_label` is set, an image that states that it is of
/// no class has a label, too.
fn read_labels(images: &ImageSet, is_multi_label: bool) -> Result<Labels, SessionError> {
    let mut by_image = Vec::with_capacity(images.len());
    for image in 0..images.len() {
        by_image.push(if is_multi_label {
            images.known_labels(image)?
        } else {
            Some(images.labels(image)).filter(|labels| !labels.is_empty())
        });
    }
    Ok(Labels::new(by_image))
}

/// Checks that there is an image of each class, and one that is not of it.
fn check_all_used(images: &ImageSet, labels: &Labels) -> Result<(), SessionError> {
    let mut is_used = vec![false; images.classes().len()];
    let mut has_image_of_none = false;
    for image in 0..labels.len() {
        let classes = labels.classes(image);
        for class in classes {
            is_used[*class as usize] = true;
        }
        has_image_of_none |= classes.is_empty() && labels.is_labeled(image);
    }
    let unused = images.classes().iter().zip(&is_used).filter(|(_, is_used)| !**is_used);
    let unused: Vec<String> = unused.map(|(class, _)| class.clone()).collect();
    if !unused.is_empty() {
        return Err(SessionError::UnusedClasses { classes: unused });
    }
    if let [class] = images.classes()
        && !has_image_of_none
    {
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
    let mut is_shown = Vec::with_capacity(labels.len());
    for image in 0..labels.len() {
        is_shown.push(labels.is_labeled(image));
    }
    with_only(dataset, &is_shown)
}

/// Returns `dataset` with the weights of its images multiplied by those of their classes.
fn balanced(dataset: Dataset, labels: &Labels, balance: f64) -> Result<Dataset, SessionError> {
    let mut sampling = dataset.sampling().clone();
    let weights = sampling.weights.take().unwrap_or_else(|| vec![1.0; labels.len()]);
    sampling.weights = Some(balanced_weights(&weights, labels, balance));
    Ok(dataset.sampled(sampling)?)
}

/// Returns `weights`, those of the images of `labels`, each multiplied by the sum of n_c^-p over
/// the classes c of its image: n_c is the sum of the weights of class c, and p is `balance`.
fn balanced_weights(weights: &[f64], labels: &Labels, balance: f64) -> Vec<f64> {
    let sums = weights_by_class(weights, labels);
    let mut factors = Vec::with_capacity(sums.len());
    for sum in &sums {
        // In f32, the last bit of a power, which differs from machine to machine, is rounded away.
        factors.push(f64::from(sum.powf(-balance) as f32));
    }
    let mut balanced = Vec::with_capacity(weights.len());
    for (image, weight) in weights.iter().enumerate() {
        // An image that is not shown may be the only one of its class, whose sum is 0.
        let mut factor = 0.0;
        if *weight > 0.0 {
            for group in groups(labels, image, sums.len()) {
                factor += factors[group];
            }
        }
        balanced.push(weight * factor);
    }
    balanced
}

/// Returns the sum of the weights of the images of each class, and last, of those of no class.
fn weights_by_class(weights: &[f64], labels: &Labels) -> Vec<f64> {
    let mut n_classes = 0;
    for image in 0..labels.len() {
        for class in labels.classes(image) {
            n_classes = n_classes.max(*class as usize + 1);
        }
    }
    let mut sums = vec![0.0_f64; n_classes + 1];
    for (image, weight) in weights.iter().enumerate() {
        for group in groups(labels, image, sums.len()) {
            sums[group] += weight;
        }
    }
    sums
}

/// Returns the groups that `image` belongs to, of `n_groups`: those of its classes, or else the
/// last.
fn groups(labels: &Labels, image: usize, n_groups: usize) -> Vec<usize> {
    let classes = labels.classes(image);
    if classes.is_empty() {
        vec![n_groups - 1]
    } else {
        classes.iter().map(|class| *class as usize).collect()
    }
}

/// Reports how often an epoch shows images of the class with the most images and of that with the
/// fewest.
fn report_balance(dataset: &Dataset, labels: &Labels, classes: &[String], balance: f64) {
    let Some(weights) = &dataset.sampling().weights else { return };
    let mut n_images = vec![0u64; classes.len()];
    let mut shares = vec![0.0_f64; classes.len()];
    for (image, weight) in weights.iter().enumerate() {
        for class in labels.classes(image) {
            n_images[*class as usize] += 1;
            shares[*class as usize] += weight;
        }
    }
    let total: f64 = weights.iter().sum();
    let n_shown = labels.n_labeled();
    let mut by_size: Vec<usize> = (0..classes.len()).collect();
    by_size.sort_by_key(|class| std::cmp::Reverse(n_images[*class]));
    if by_size.len() > 2 {
        by_size.drain(1..by_size.len() - 1);
    }
    let mut parts = Vec::with_capacity(by_size.len());
    for class in by_size {
        let shown = (n_shown as f64 * shares[class] / total).round() as u64;
        parts.push(format!(
            "{} of {}, which has {}",
            thousands(shown),
            classes[class],
            thousands(n_images[class])
        ));
    }
    tracing::info!(
        "data.balance {balance}: of the {} of an epoch, {}",
        counted(n_shown, "image"),
        parts.join(", and ")
    );
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

    fn labels(by_image: &[&[u32]]) -> Labels {
        Labels::new(by_image.iter().map(|classes| Some(classes.to_vec())))
    }

    /// Returns the sum of the weights of each class, and last, of images of no class, relative to
    /// the sum of all weights.
    fn shares(weights: &[f64], labels: &Labels) -> Vec<f64> {
        let total: f64 = weights.iter().sum();
        weights_by_class(weights, labels).into_iter().map(|sum| sum / total).collect()
    }

    fn assert_near(actual: &[f64], expected: &[f64]) {
        assert_eq!(actual.len(), expected.len(), "{actual:?}");
        for (actual_value, expected_value) in actual.iter().zip(expected) {
            assert!((actual_value - expected_value).abs() < 1e-6, "{actual:?} {expected:?}");
        }
    }

    /// Nine images of one class and one of another: half and half, or 3 to 1 with the square root.
    #[test]
    fn classes_are_shown_equally_often() {
        let labels = labels(&[&[0], &[0], &[0], &[0], &[0], &[0], &[0], &[0], &[0], &[1]]);
        let weights = vec![1.0; 10];
        assert_near(&shares(&balanced_weights(&weights, &labels, 1.0), &labels), &[0.5, 0.5, 0.0]);
        assert_near(&shares(&balanced_weights(&weights, &labels, 0.5), &labels), &[0.75, 0.25, 0.0]);
    }

    /// Weights of images count as numbers of images, and an image with a weight of 0 stays hidden,
    /// even as the only one of its class.
    #[test]
    fn weights_of_images_are_kept_within_their_class() {
        let labels = labels(&[&[0], &[0], &[1], &[2]]);
        let balanced = balanced_weights(&[3.0, 1.0, 8.0, 0.0], &labels, 1.0);
        assert_near(&balanced, &[0.75, 0.25, 1.0, 0.0]);
    }

    /// An image of two classes is drawn for both, and images of none are a class of their own.
    #[test]
    fn images_of_several_classes_are_drawn_for_each() {
        let labels = labels(&[&[0], &[0, 1], &[1], &[1], &[], &[]]);
        let balanced = balanced_weights(&[1.0; 6], &labels, 1.0);
        let third = 1.0 / 3.0;
        assert_near(&balanced, &[0.5, 0.5 + third, third, third, 0.5, 0.5]);
    }
}
