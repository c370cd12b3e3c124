//! Pictures in the work directory of a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use eval::{ClassifiedImage, FeatureSet, ImageSet, MaskPicture, Table};
use pipeline::Dataset;
use trainer::Plan;
use trainer::run::events::Events;
use xxhash_rust::xxh3::xxh3_64;

use super::masks::mask_sheet;
use super::sheets::{ImageFeatures, classified_sheet, contact_sheet, neighbor_sheet};
use crate::ReportError;

/// Number of characters of the name of a set that the name of its picture has at most.
const MOST_SET_CHARS: usize = 100;

/// Number of images on the contact sheet.
const SHEET_IMAGES: u64 = 8;

/// Draws a few images with all of their views, spread over the data set: `views.png`. Returns the
/// path.
///
/// # Errors
/// [`ReportError::Eval`], [`ReportError::Picture`].
pub fn draw_views(workdir: &Path, dataset: &Dataset, plan: &Plan) -> Result<PathBuf, ReportError> {
    let path = workdir.join("views.png");
    let rules = plan.recipe.data.rules();
    contact_sheet(&path, dataset, &plan.multicrop(), &rules, plan.recipe.seed, SHEET_IMAGES)?;
    Ok(path)
}

/// Draws some of `images`, whose features are `table`, with their nearest neighbors:
/// `neighbors.png`. Returns the path.
///
/// # Errors
/// [`ReportError::Picture`].
pub fn draw_neighbors(workdir: &Path, images: &ImageSet, table: &Arc<Table>) -> Result<PathBuf, ReportError> {
    let path = workdir.join("neighbors.png");
    let rows = FeatureSet::from_table(Arc::clone(table), |_| Some(0));
    neighbor_sheet(&path, ImageFeatures { images, features: &rows }, None)?;
    Ok(path)
}

/// Returns the name, without `.png`, of the picture of the images of the set called `set` on which
/// a classifier has the largest losses: `worst-sets-val` of `sets/val`.
pub fn worst_name(set: &str) -> String {
    set_picture("worst", set)
}

/// Returns the name, without `.png`, of the picture of the images of the set called `set` of which
/// a decoder labels the smallest shares of pixels correctly: `masks-sets-val` of `sets/val`.
pub fn masks_name(set: &str) -> String {
    set_picture("masks", set)
}

/// Returns the name of the picture `kind` of the set called `set`. Names that could be taken for
/// one another so, such as those of `a-b` and `a/b`, get a hash.
fn set_picture(kind: &str, set: &str) -> String {
    let mut words = format!("{kind}-");
    let mut is_unique = set.matches('/').count() <= 1;
    for (index, character) in set.chars().enumerate() {
        if index == MOST_SET_CHARS {
            is_unique = false;
            break;
        }
        let is_kept = character.is_ascii_alphanumeric() || character == '.' || character == '_';
        is_unique &= is_kept || character == '/';
        words.push(if is_kept { character } else { '-' });
    }
    if is_unique { words } else { format!("{words}-{:08x}", xxh3_64(set.as_bytes()) as u32) }
}

/// Returns the file of the picture `name` in `workdir`.
pub fn picture_path(workdir: &Path, name: &str) -> PathBuf {
    workdir.join(format!("{name}.png"))
}

/// Draws `worst`, the images of `images` on which a classifier has the largest losses, into the
/// file that [`worst_name`] names. Returns the path.
///
/// # Errors
/// [`ReportError::Picture`].
pub fn draw_worst(
    workdir: &Path,
    images: &ImageSet,
    worst: &[ClassifiedImage],
) -> Result<PathBuf, ReportError> {
    let path = picture_path(workdir, &worst_name(&images.name));
    classified_sheet(&path, images, worst)?;
    Ok(path)
}

/// Draws `pictures`, images of the set called `set` beside their true and predicted classes, into
/// the file that [`masks_name`] names. Returns the path.
///
/// # Errors
/// [`ReportError::Picture`].
pub fn draw_masks(workdir: &Path, set: &str, pictures: &[MaskPicture]) -> Result<PathBuf, ReportError> {
    let path = picture_path(workdir, &masks_name(set));
    mask_sheet(&path, set, pictures)?;
    Ok(path)
}

/// Adds the picture `name` of `workdir`, if it exists, to the run's TensorBoard events; warns if
/// that fails.
pub fn add_to_events(workdir: &Path, name: &str, step: u64) {
    let Ok(png) = std::fs::read(picture_path(workdir, name)) else { return };
    let result = Events::open(workdir).and_then(|mut events| events.picture(step, name, &png));
    if let Err(error) = result {
        tracing::warn!("could not add {name}.png to TensorBoard: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sets have pictures of their own, with names that are files of the folder.
    #[test]
    fn pictures_are_named_by_their_set() {
        assert_eq!(worst_name("sets/val"), "worst-sets-val");
        assert_eq!(worst_name("val.2024_b"), "worst-val.2024_b");
        assert_eq!(masks_name("sets/val"), "masks-sets-val");
        let long = "x".repeat(300);
        let sets = ["a/b", "a-b", "a b", "a/b/c", "a/b-c", "../../etc", "", "ä", "ö", long.as_str()];
        let mut names: Vec<String> = sets.iter().map(|set| worst_name(set)).collect();
        assert!(names.iter().all(|name| !name.contains('/') && name.len() < 120), "{names:?}");
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), sets.len(), "{names:?}");
    }
}
