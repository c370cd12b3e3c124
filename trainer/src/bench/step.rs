//! Measurements of `ocelli bench step`: steps on noise.

use std::time::Instant;

use augment::Batch;
use burn_tensor::{Device, Distribution, Tensor};
use kernels::ops::matmul;
use kernels::ops::tally::products_of;
use ranks::EngineError;
use ranks::communicator::Communicator;

use super::noise::noise_batch;
use super::products::{alone_ms, flops, square_ms};
use super::{Times, median};
use crate::cost::model_cost;
use crate::error::TrainError;
use crate::estimate::{Placement, StepFlops, step_flops};
use crate::recipe::plan::Plan;
use crate::schedule::ScheduledValues;
use crate::step::precision::Arithmetic;
use crate::step::upload::Uploads;
use crate::step::{Phases, Trainer, Votes};

/// Number of measurements of a product, whose best is the result.
const ROUNDS: usize = 6;

/// Number of products that are timed together.
const MATRIX_PRODUCTS: usize = 4;

/// Times, operations and memory of steps.
#[derive(Debug, Clone, Copy)]
pub struct StepBench {
    /// Median times by phase, in steps whose phases wait for the device.
    pub phases: Phases,
    /// Times of steps one after another.
    pub step: Times,
    /// The step's matrix products alone; `None` on a device other than the CPU.
    pub products: Option<ProductsAlone>,
    /// Floating-point operations of a step's matrix products.
    pub flops: StepFlops,
    /// Most bytes that the device's pools have held, including scratch of tuning; `None` for the
    /// host.
    pub peak_bytes: Option<u64>,
}

/// Matrix products of a step, computed alone.
#[derive(Debug, Clone, Copy)]
pub struct ProductsAlone {
    /// Time in milliseconds.
    pub ms: f64,
    /// Number of floating-point operations.
    pub flops: f64,
}

/// Takes `repeats` steps by phase and as many one after another, after two for warm-up.
///
/// # Errors
/// [`TrainError::Recipe`] for an invalid plan.
pub fn steps(plan: &Plan, repeats: usize, device: &Device) -> Result<StepBench, TrainError> {
    let mut trainer = plan.trainer(Communicator::solo(), device)?;
    let batch = noise_batch(&plan.multicrop(), plan.recipe.data.format(), plan.recipe.optim.batch_size, 0);
    let scheduled_values = plan.schedules().at(plan.warmup_steps);
    let repeats = repeats.max(1);
    trainer.step(&batch, &scheduled_values)?;
    trainer.time_phases(true);
    let mut all = Vec::new();
    for _ in 0..repeats {
        all.push(trainer.step(&batch, &scheduled_values)?.phases);
    }
    trainer.time_phases(false);
    let (stepped, recorded) = products_of(|| trainer.step(&batch, &scheduled_values));
    stepped?;
    let step = Times::new(whole_steps_ms(&mut trainer, batch, &scheduled_values, repeats, device)?);
    let mut products = None;
    if *device == Device::flex() {
        products = Some(ProductsAlone { ms: alone_ms(&recorded, plan.n_workers), flops: flops(&recorded) });
    }
    let phases = Phases {
        input_ms: median_phase_ms(&all, |phases| phases.input_ms),
        targets_ms: median_phase_ms(&all, |phases| phases.targets_ms),
        forward_ms: median_phase_ms(&all, |phases| phases.forward_ms),
        head_ms: median_phase_ms(&all, |phases| phases.head_ms),
        backward_ms: median_phase_ms(&all, |phases| phases.backward_ms),
        update_ms: median_phase_ms(&all, |phases| phases.update_ms),
        wait_ms: median_phase_ms(&all, |phases| phases.wait_ms),
    };
    let flops = step_flops(&model_cost(plan)?, &Placement::from_plan(plan));
    let pools = device.memory_pool_report();
    let peak = pools.map(|pools| pools.iter().map(|pool| pool.page_size * pool.pages_peak).sum());
    let held = device.memory_pool_usage().map(|usage| usage.bytes_reserved);
    Ok(StepBench { phases, step, products, flops, peak_bytes: held.max(peak) })
}

/// Returns the median over steps of the time that `phase` selects.
fn median_phase_ms(steps: &[Phases], phase: fn(&Phases) -> f64) -> f64 {
    median(steps.iter().map(phase).collect())
}

/// Returns the times of consecutive steps, as in a run: the next batch is uploaded to a device
/// while it computes.
fn whole_steps_ms(
    trainer: &mut Trainer,
    batch: Batch,
    scheduled_values: &ScheduledValues,
    repeats: usize,
    device: &Device,
) -> Result<Vec<f64>, EngineError> {
    let mut all = Vec::with_capacity(repeats);
    if *device == Device::flex() {
        trainer.step(&batch, scheduled_values)?;
        for _ in 0..repeats {
            let start = Instant::now();
            trainer.step(&batch, scheduled_values)?;
            all.push(start.elapsed().as_secs_f64() * 1e3);
        }
        return Ok(all);
    }
    let uploads = Uploads::start(trainer.uploader())?;
    let mut upload = uploads.push(batch);
    let mut start = Instant::now();
    for repeat in 0..=repeats {
        let (batch, sent) = upload.wait()?;
        let gradients = trainer.gradients_from_device_batch(sent, scheduled_values, &mut |_| {})?;
        upload = uploads.push(batch);
        trainer.update(gradients, Votes::default(), scheduled_values)?;
        if repeat == 0 || repeat == repeats {
            let _ = device.sync();
        }
        // The first one warms up.
        if repeat > 0 {
            all.push(start.elapsed().as_secs_f64() * 1e3);
        }
        start = Instant::now();
    }
    Ok(all)
}

/// Draws a matrix of `shape` of normal numbers.
pub(super) fn random_matrix(
    device: &Device,
    shape: [usize; 2],
    arithmetic: Arithmetic,
    seed: u64,
) -> Tensor<2> {
    device.seed(seed);
    Tensor::<2>::random(shape, Distribution::Normal(0.0, 1.0), device).cast(arithmetic.dtype())
}

/// Returns the floating-point operations per second of the fastest of a few products of two square
/// matrices of side `n`, with the kernels that multiply matrices in a step.
pub fn matrix_peak(device: &Device, n: usize, arithmetic: Arithmetic) -> f64 {
    let flops = 2.0 * (n as f64).powi(3);
    if *device == Device::flex() {
        let best_ms =
            (0..ROUNDS).map(|_| square_ms(n, arithmetic == Arithmetic::Bf16)).fold(f64::INFINITY, f64::min);
        return flops / (best_ms / 1e3);
    }
    let a = random_matrix(device, [n, n], arithmetic, 1);
    let b = random_matrix(device, [n, n], arithmetic, 2);
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let mut product = matmul(a.clone(), b.clone());
        for _ in 1..MATRIX_PRODUCTS {
            // Each product depends on the one before, so that none can be skipped.
            product = matmul(product, b.clone());
        }
        let _ = device.sync();
        drop(product);
        best = best.min(start.elapsed().as_secs_f64() / MATRIX_PRODUCTS as f64);
    }
    flops / best
}
