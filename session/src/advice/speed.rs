//! Time of a step of a candidate, before one is chosen.
//!
//! ```text
//! step = f · compute + data    compute: products and activations alone, in sizes that are measured
//!                              f: how many times as long steps on noise take, of the first one
//!                              data: decoding and views of a few images, on all threads
//! ```
//!
//! A GPU computes while the CPU makes views: there the longer of the two counts.

use std::sync::Arc;
use std::time::Instant;

use augment::{DecodeRules, Transform};
use eval::{ImageSet, Source};
use kernels::device::{DeviceKind, Opened};
use pipeline::Dataset;
use ranks::communicator::Communicator;
use trainer::Plan;
use trainer::bench::noise::noise_batch;
use trainer::bench::speed::{Load, machine_speed};
use trainer::cost::model_cost;
use trainer::estimate::Placement;

use crate::error::SessionError;
use crate::stages::plan_alone;

/// Most images of the steps on noise: those of large networks would take too long with all.
const MOST_NOISE_IMAGES: usize = 16;

/// Number of steps on noise that are timed, after one that warms up.
const N_NOISE_STEPS: usize = 3;

/// Number of images whose views are timed.
const N_VIEWED: u64 = 8;

/// Measurements of this machine.
pub(super) struct Speed<'a> {
    device: &'a Opened,
    /// Images whose views are timed; none if shards would have to be fetched for it.
    images: Option<ImageSet>,
    /// Ratio of steps on noise to their products and activations, once it is measured.
    factor: Option<f64>,
}

impl<'a> Speed<'a> {
    /// Prepares measurements on `device` with images of `dataset`, which are decoded by `rules`.
    pub(super) fn new(device: &'a Opened, dataset: &Arc<Dataset>, rules: DecodeRules) -> Self {
        let mut images = None;
        if dataset.is_local() {
            let source = Source::Shards(Arc::clone(dataset));
            // The views have sizes of their own.
            let transform = Transform::new(32);
            // A shard that cannot be read is reported where the run begins.
            images = ImageSet::open_some(source, transform, rules, "the training set", N_VIEWED).ok();
        }
        Self { device, images, factor: None }
    }

    /// Estimates the seconds of a step of `plan`.
    ///
    /// # Errors
    /// [`SessionError`] if the plan cannot be run.
    pub(super) fn step_s(&mut self, plan: &Plan) -> Result<f64, SessionError> {
        let factor = match self.factor {
            Some(factor) => factor,
            None => measure_factor(plan, self.device)?,
        };
        self.factor = Some(factor);
        let compute_s = factor * compute_s(plan, self.device)?;
        let data_s = self.data_s(plan);
        Ok(match self.device.kind {
            DeviceKind::Cpu => compute_s + data_s,
            DeviceKind::Cuda(_) | DeviceKind::Wgpu => compute_s.max(data_s),
        })
    }

    /// Returns the seconds in which all threads make the views of a step of `plan`; 0 if that is
    /// not known.
    fn data_s(&self, plan: &Plan) -> f64 {
        let Some(images) = &self.images else { return 0.0 };
        let multicrop = plan.multicrop();
        let start = Instant::now();
        let mut n_viewed: u32 = 0;
        for index in 0..images.len() {
            // An image that cannot be used is reported where the run begins.
            if let Ok(Some(_)) = images.views(index, &multicrop, plan.recipe.seed, 0) {
                n_viewed += 1;
            }
        }
        if n_viewed == 0 {
            return 0.0;
        }
        let image_s = start.elapsed().as_secs_f64() / f64::from(n_viewed);
        image_s * plan.recipe.optim.batch_size as f64 / plan.n_data_threads.max(1) as f64
    }
}

/// Estimates the seconds of products and activations of a step of `plan`.
fn compute_s(plan: &Plan, device: &Opened) -> Result<f64, SessionError> {
    let model = model_cost(plan)?;
    let placement = Placement::from_plan(plan);
    let load = Load::new(
        placement.rank_batch,
        placement.rank_micro_batches,
        placement.workers,
        placement.precision.compute,
    );
    Ok(machine_speed(&model, load, &device.device).compute_s(&model, &placement))
}

/// Takes steps of `plan` on noise, with fewer images if it has many; returns how many times as long
/// they take as their products and activations.
fn measure_factor(plan: &Plan, device: &Opened) -> Result<f64, SessionError> {
    let mut recipe = plan.recipe.clone();
    recipe.fit_batch(recipe.optim.batch_size.min(MOST_NOISE_IMAGES));
    let mut plan = match plan_alone(recipe, device) {
        Ok(smaller) => smaller,
        // Micro-batches may not divide so few images.
        Err(_) => plan.clone(),
    };
    plan.choose_kernels(&device.device)?;
    let mut trainer = plan.trainer(Communicator::solo(), &device.device)?;
    let recipe = &plan.recipe;
    let batch = noise_batch(&plan.multicrop(), recipe.data.format(), recipe.optim.batch_size, 0);
    let scheduled_values = plan.schedules().at(0);
    trainer.step(&batch, &scheduled_values)?;
    let start = Instant::now();
    for _ in 0..N_NOISE_STEPS {
        trainer.step(&batch, &scheduled_values)?;
    }
    let _ = device.device.sync();
    let step_s = start.elapsed().as_secs_f64() / N_NOISE_STEPS as f64;
    Ok(step_s / compute_s(&plan, device)?)
}
