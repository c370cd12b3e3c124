//! Rehearsal of what a run does beside its steps: a run that is given minutes is as long as its
//! steps, its evaluations and the pictures of its report together.

use std::sync::Arc;
use std::time::Instant;

use augment::Transform;
use eval::probe::wanted;
use eval::{EvalError, ImageSet, Source, features};
use kernels::device::Device;
use networks::Network;
use networks::probe::Probe;
use pipeline::{Dataset, NoProgress};
use trainer::{Plan, TrainError};

use crate::error::SessionError;

/// Number of images whose features are timed.
const N_TIMED: u64 = 32;

/// Seconds of drawing beside the features of images: views before the first step; attention,
/// neighbors and the page after the last. Not measured: a guess for two cores.
const DRAWING_S: f64 = 2.0;

/// Times of a rehearsal, in seconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Rehearsal {
    /// An evaluation by each probe.
    pub(crate) probes_s: Vec<f64>,
    /// The pictures of the report.
    pub(crate) ending_s: f64,
}

/// Evaluates each of `probes` with a random network of `plan`, and returns their times, with that
/// of a report after the run, which computes the features of `n_pictured` images of `dataset` if
/// these are on a disk.
///
/// # Errors
/// [`SessionError::Train`] if a probe fails.
pub(crate) fn rehearse(
    plan: &Plan,
    dataset: &Arc<Dataset>,
    device: &Device,
    probes: &mut [Box<dyn Probe>],
    n_pictured: u64,
) -> Result<Rehearsal, SessionError> {
    let recipe = &plan.recipe;
    let mut rehearsal = Rehearsal::default();
    if probes.is_empty() && !dataset.is_local() {
        return Ok(rehearsal);
    }
    let network = Network::random(&recipe.model, recipe.data.pixels(), recipe.seed, plan.n_workers, device);
    for probe in probes.iter_mut() {
        let start = Instant::now();
        if let Err(reason) = probe.rehearse(&network) {
            let name = probe.name().to_string();
            return Err(SessionError::Train(TrainError::Probe { name, reason }));
        }
        rehearsal.probes_s.push(start.elapsed().as_secs_f64());
    }
    let has_pictures = recipe.evaluated_px().is_multiple_of(recipe.model.stride_px());
    if dataset.is_local() && has_pictures {
        let n_images = n_pictured.min(dataset.n_samples()) as f64;
        match image_s(plan, dataset, &network) {
            Ok(image_s) => rehearsal.ending_s = n_images * image_s + DRAWING_S,
            // Nobody has asked for the report: a failure is reported after the run.
            Err(error) => tracing::debug!("features could not be timed: {error}"),
        }
    }
    Ok(rehearsal)
}

/// Returns the seconds of the features of one of the images of `dataset`.
fn image_s(plan: &Plan, dataset: &Arc<Dataset>, network: &Network) -> Result<f64, EvalError> {
    let source = Source::Shards(Arc::clone(dataset));
    let transform = Transform::new(plan.recipe.evaluated_px() as u32);
    let rules = plan.recipe.data.rules();
    let images = ImageSet::open_some(source, transform, rules, "the training set", N_TIMED)?;
    // The first pass compiles kernels and reads files.
    features(None, network, &images, wanted(&[]), &NoProgress)?;
    let start = Instant::now();
    features(None, network, &images, wanted(&[]), &NoProgress)?;
    Ok(start.elapsed().as_secs_f64() / images.len().max(1) as f64)
}
