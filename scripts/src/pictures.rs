//! Pictures in the work directory of a run. A picture that cannot be drawn does not stop a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use eval::{ClassifiedImage, ImageSet, Table};
use pipeline::Dataset;
use report::ReportError;
use report::picture::workdir::{add_to_events, draw_neighbors, draw_views, draw_worst, worst_name};
use trainer::Plan;

use crate::console::say;
use crate::progress::Activity;

/// Draws a few images with all of their views. Nothing is drawn for remote shards, several of which
/// would be fetched before the first step.
pub(crate) fn views(workdir: &Path, dataset: &Dataset, plan: &Plan) {
    if dataset.is_local() {
        let _activity = Activity::new("drawing augmented views …");
        print_result("augmented views", draw_views(workdir, dataset, plan));
        add_to_events(workdir, "views", 0);
    }
}

/// Draws some of `images`, whose features after `step` steps are `table`, with their nearest
/// neighbors.
pub(crate) fn neighbors(workdir: &Path, images: &ImageSet, table: &Arc<Table>, step: u64) {
    print_result("nearest neighbors", draw_neighbors(workdir, images, table));
    add_to_events(workdir, "neighbors", step);
}

/// Draws `worst`, the images of `images` on which a classifier has the largest losses after `step`
/// steps.
pub(crate) fn worst(workdir: &Path, images: &ImageSet, worst: &[ClassifiedImage], step: u64) {
    print_result("images with the largest losses", draw_worst(workdir, images, worst));
    add_to_events(workdir, &worst_name(&images.name), step);
}

/// Prints the path of a picture, or the error.
fn print_result(name: &str, result: Result<PathBuf, ReportError>) {
    match result {
        Ok(path) => say(format!("{name}: {}", path.display())),
        Err(error) => say(format!("warning: {error}")),
    }
}
