//! Pictures in the work directory of a run. A picture that cannot be drawn does not stop a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use eval::{ClassifiedImage, ImageSet, MaskPicture, Table};
use pipeline::Dataset;
use report::ReportError;
use report::picture::workdir::{
    add_to_events, draw_masks, draw_neighbors, draw_views, draw_worst, masks_name, worst_name,
};
use trainer::Plan;

use crate::console::say;
use crate::progress::Activity;

/// Most images among which neighbors are searched after a run.
pub(crate) const CANDIDATES: u64 = 1000;

/// Least number of images among which neighbors are searched after a short run.
const LEAST_CANDIDATES: u64 = 100;

/// Images that a run has trained on for each image whose neighbors are searched after it: a step
/// takes several times as long for an image as its features, so that pictures take a few percent
/// of the time of a run.
const TRAINED_PER_CANDIDATE: u64 = 4;

/// Returns the number of images among which neighbors are searched after `n_steps` steps of
/// `batch_size` images.
pub(crate) fn candidates_after(n_steps: u64, batch_size: usize) -> u64 {
    let n_trained = n_steps.saturating_mul(batch_size as u64);
    (n_trained / TRAINED_PER_CANDIDATE).clamp(LEAST_CANDIDATES, CANDIDATES)
}

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

/// Draws `pictures`, images of the set called `set` beside their true and predicted classes after
/// `step` steps.
pub(crate) fn masks(workdir: &Path, set: &str, pictures: &[MaskPicture], step: u64) {
    print_result("images with the smallest shares of right pixels", draw_masks(workdir, set, pictures));
    add_to_events(workdir, &masks_name(set), step);
}

/// Prints the path of a picture, or the error.
fn print_result(name: &str, result: Result<PathBuf, ReportError>) {
    match result {
        Ok(path) => say(format!("{name}: {}", path.display())),
        Err(error) => say(format!("warning: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_runs_have_fewer_candidates() {
        assert_eq!(candidates_after(3, 32), LEAST_CANDIDATES);
        assert_eq!(candidates_after(24, 64), 384);
        assert_eq!(candidates_after(625, 64), CANDIDATES);
        assert_eq!(candidates_after(u64::MAX, 64), CANDIDATES);
    }
}
