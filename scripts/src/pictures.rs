//! Pictures that a run leaves in its work directory. One that cannot be drawn is no reason to stop a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use eval::picture::report;
use eval::probe::wanted;
use eval::{EvalError, FeatureSet, ImageSet, Silent, Source, Transform};
use pipeline::{Dataset, Storage};
use trainer::device::Device;
use trainer::{Network, Plan};

use crate::console::say;

/// Images on the contact sheet.
const SHEET_IMAGES: u64 = 8;

/// Images among which nearest neighbors are looked for: a few seconds for a small network on a CPU.
const CANDIDATES: u64 = 500;

/// Curves of the picture, where the run has them.
const CURVES: [&str; 8] = [
    "train/loss",
    "health/teacher_entropy",
    "health/prototypes_in_use",
    "health/feature_std",
    "health/effective_rank",
    "knobs/lr",
    "rate/images_per_s",
    "probe/knn_20",
];

/// Draws a few images with all of their views: `views.png`. They come from all over the data set, so that of remote shards
/// several would be fetched before the first step: then nothing is drawn.
pub(crate) fn views(workdir: &Path, dataset: &Dataset, plan: &Plan) {
    if !dataset.is_local() {
        return;
    }
    let path = workdir.join("views.png");
    let (seed, rules) = (plan.recipe.seed, plan.recipe.data.rules());
    let drawn = report::contact_sheet(&path, dataset, &plan.multicrop(), &rules, seed, SHEET_IMAGES);
    tell("augmented views", &path, drawn);
}

/// Draws what `metrics.jsonl` holds: `curves.png`.
pub(crate) fn curves(workdir: &Path) {
    let path = workdir.join("curves.png");
    let drawn = match report::read_curves(&workdir.join("metrics.jsonl"), &CURVES) {
        Ok(curves) => report::draw_curves(&path, &curves),
        Err(error) => Err(error),
    };
    tell("curves", &path, drawn);
}

/// Draws images of the run's shards with those that its network finds most similar: `neighbors.png`. Shards on a server are
/// left alone.
pub(crate) fn neighbors(workdir: &Path, storage: &Storage, plan: &Plan, device: &Device) {
    let draw = || -> anyhow::Result<Option<PathBuf>> {
        let recipe = &plan.recipe;
        let dataset = Dataset::open(&recipe.data.shards, storage)?;
        if !dataset.is_local() {
            return Ok(None);
        }
        let (network, _) = Network::open(workdir, false, plan.n_workers, device)?;
        let transform = Transform::new(recipe.model.image_px() as u32);
        let source = Source::Shards(Arc::new(dataset));
        let images = ImageSet::open_some(source, transform, recipe.data.rules(), "shards", CANDIDATES)?;
        let table = eval::features(None, &network, &images, wanted(&[]), &Silent)?;
        let path = workdir.join("neighbors.png");
        report::neighbor_sheet(&path, (&images, &FeatureSet::of(table, |_| Some(0))), None)?;
        Ok(Some(path))
    };
    match draw() {
        Ok(Some(path)) => say(format!("nearest neighbors: {}", path.display())),
        Ok(None) => {}
        Err(error) => say(format!("warning: nearest neighbors are not drawn: {error:#}")),
    }
}

fn tell(what: &str, path: &Path, drawn: Result<(), EvalError>) {
    match drawn {
        Ok(()) => say(format!("{what}: {}", path.display())),
        Err(error) => say(format!("warning: {error}")),
    }
}
