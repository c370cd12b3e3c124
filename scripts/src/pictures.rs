//! Pictures in the work directory of a run. A picture that cannot be drawn does not stop a run.

use std::path::Path;
use std::sync::Arc;

use eval::{FeatureSet, ImageSet, Table};
use pipeline::Dataset;
use report::ReportError;
use report::picture::sheets;
use trainer::Plan;
use trainer::run::events::Events;

use crate::console::say;

/// Number of images on the contact sheet.
const SHEET_IMAGES: u64 = 8;

/// Draws a few images with all of their views: `views.png`. They are spread over the data set.
/// Nothing is drawn for remote shards, several of which would be fetched before the first step.
pub(crate) fn views(workdir: &Path, dataset: &Dataset, plan: &Plan) {
    if !dataset.is_local() {
        return;
    }
    let path = workdir.join("views.png");
    let seed = plan.recipe.seed;
    let rules = plan.recipe.data.rules();
    let result = sheets::contact_sheet(&path, dataset, &plan.multicrop(), &rules, seed, SHEET_IMAGES);
    print_result("augmented views", &path, result);
    show(workdir, "views", 0);
}

/// Draws some of `images`, whose features after `step` steps are `table`, with their nearest
/// neighbors: `neighbors.png`.
pub(crate) fn neighbors(workdir: &Path, images: &ImageSet, table: &Arc<Table>, step: u64) {
    let path = workdir.join("neighbors.png");
    let rows = FeatureSet::from_table(Arc::clone(table), |_| Some(0));
    print_result("nearest neighbors", &path, sheets::neighbor_sheet(&path, (images, &rows), None));
    show(workdir, "neighbors", step);
}

/// Adds the picture `name` of `workdir` to the run's TensorBoard events.
pub(crate) fn show(workdir: &Path, name: &str, step: u64) {
    let Ok(png) = std::fs::read(workdir.join(format!("{name}.png"))) else { return };
    let result = Events::open(workdir).and_then(|mut events| events.picture(step, name, &png));
    if let Err(error) = result {
        say(format!("warning: could not add {name}.png to TensorBoard: {error}"));
    }
}

/// Prints the path of a picture, or the error.
fn print_result(name: &str, path: &Path, result: Result<(), ReportError>) {
    match result {
        Ok(()) => say(format!("{name}: {}", path.display())),
        Err(error) => say(format!("warning: {error}")),
    }
}
