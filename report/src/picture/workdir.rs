//! Pictures in the work directory of a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use eval::{ClassifiedImage, FeatureSet, ImageSet, Table};
use pipeline::Dataset;
use trainer::Plan;
use trainer::run::events::Events;

use super::sheets::{classified_sheet, contact_sheet, neighbor_sheet};
use crate::ReportError;

/// Name of the picture of the images on which a classifier has the largest losses.
pub const WORST: &str = "worst.png";

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
    neighbor_sheet(&path, (images, &rows), None)?;
    Ok(path)
}

/// Draws `worst`, the images of `images` on which a classifier has the largest losses: `worst.png`.
/// Returns the path.
///
/// # Errors
/// [`ReportError::Picture`].
pub fn draw_worst(
    workdir: &Path,
    images: &ImageSet,
    worst: &[ClassifiedImage],
) -> Result<PathBuf, ReportError> {
    let path = workdir.join(WORST);
    classified_sheet(&path, images, worst)?;
    Ok(path)
}

/// Adds the picture `name` of `workdir`, if it exists, to the run's TensorBoard events; warns if
/// that fails.
pub fn add_to_events(workdir: &Path, name: &str, step: u64) {
    let Ok(png) = std::fs::read(workdir.join(format!("{name}.png"))) else { return };
    let result = Events::open(workdir).and_then(|mut events| events.picture(step, name, &png));
    if let Err(error) = result {
        tracing::warn!("could not add {name}.png to TensorBoard: {error}");
    }
}
