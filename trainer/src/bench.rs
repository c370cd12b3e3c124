//! What `ocelli bench step` measures: steps on noise, and the backbone against one whole graph.

use std::time::Instant;

use augment::{Batch, MultiCrop, ViewRng, Views};
use burn::tensor::{DType, Device, Distribution, Tensor};

use crate::backbone::Readout;
use crate::estimate;
use crate::input::Uploads;
use crate::plan::Plan;
use crate::run::trainer_of;
use crate::schedule::Knobs;
use crate::shard::comm::Comm;
use crate::shard::engine::EngineError;
use crate::shard::mesh::Place;
use crate::shard::store::UnitShard;
use crate::shard::wire::Arithmetic;
use crate::slices::tokens_of;
use crate::step::{Phases, Trainer, Votes};
use crate::tape::Gathered;
use crate::unit::{Draws, Leaves, Tokens};
use crate::workers::Workers;

/// Products that are timed together.
const MATRIX_PRODUCTS: usize = 4;

/// Median times of the backbone's forward and backward pass, in milliseconds.
#[derive(Debug, Clone, Copy)]
pub struct BackboneTimes {
    /// One autodiff graph over all units, one thread.
    pub whole_graph_ms: f64,
    /// Unit by unit, one thread, graphs kept.
    pub kept_ms: f64,
    /// Unit by unit, one thread, every unit run again on the way back.
    pub recomputed_ms: f64,
    /// Unit by unit on the plan's workers, graphs kept.
    pub workers_ms: f64,
}

/// A batch of noise for `multicrop`.
pub fn noise_batch(multicrop: &MultiCrop, n_samples: usize, seed: u64) -> Batch {
    let mut rng = ViewRng::from_words([seed, 0x6e6f_6973_6500_0000, 0, 0]);
    let mut views = || Views {
        groups: multicrop
            .groups()
            .iter()
            .map(|g| {
                (0..g.n_views * 3 * (g.size_px * g.size_px) as usize).map(|_| rng.below(256) as u8).collect()
            })
            .collect(),
    };
    Batch {
        index: 0,
        samples: (0..n_samples).map(|_| views()).collect(),
        labels: vec![None; n_samples],
        sample_ids: (0..n_samples as u64).collect(),
    }
}

/// What steps take.
#[derive(Debug, Clone, Copy)]
pub struct StepBench {
    /// Median times by phase, in steps whose phases wait for the device.
    pub phases: Phases,
    /// Mean time of steps one after another, in milliseconds.
    pub step_ms: f64,
    /// Floating-point operations of a step's matrix products: what must be done, and with what is done twice.
    pub flops: [f64; 2],
    /// The most bytes that the device's pools have held, scratch of tuning among them; `None` for the host.
    pub peak_bytes: Option<u64>,
}

/// Takes `repeats` steps by phase and as many one after another, after two that warm up.
///
/// # Errors
/// None in practice: one rank has nobody to lose.
pub fn steps(plan: &Plan, repeats: usize, device: &Device) -> Result<StepBench, EngineError> {
    let mut trainer = trainer_of(plan, Comm::solo(), device);
    let batch = noise_batch(&plan.multicrop(), plan.recipe.optim.batch_size, 0);
    let knobs = plan.schedules().at(plan.warmup_steps);
    let repeats = repeats.max(1);
    trainer.step(&batch, &knobs)?;
    trainer.time_phases(true);
    let mut all = Vec::new();
    for _ in 0..repeats {
        all.push(trainer.step(&batch, &knobs)?.phases);
    }
    trainer.time_phases(false);
    let step_ms = whole_steps_ms(&mut trainer, batch, &knobs, repeats, device)?;
    let of = |f: fn(&Phases) -> f64| median(all.iter().map(f).collect());
    let phases = Phases {
        input_ms: of(|p| p.input_ms),
        teacher_ms: of(|p| p.teacher_ms),
        forward_ms: of(|p| p.forward_ms),
        head_ms: of(|p| p.head_ms),
        backward_ms: of(|p| p.backward_ms),
        update_ms: of(|p| p.update_ms),
        wait_ms: of(|p| p.wait_ms),
    };
    let flops = estimate::step_flops(&estimate::of_plan(plan), &plan.spread());
    let pools = device.memory_pool_report();
    let peak = pools.map(|pools| pools.iter().map(|pool| pool.page_size * pool.pages_peak).sum());
    let held = device.memory_pool_usage().map(|usage| usage.bytes_reserved);
    Ok(StepBench { phases, step_ms, flops, peak_bytes: held.max(peak) })
}

/// Mean time of steps one after another, as a run takes them: a device is sent the next batch while it computes.
fn whole_steps_ms(
    trainer: &mut Trainer,
    batch: Batch,
    knobs: &Knobs,
    repeats: usize,
    device: &Device,
) -> Result<f64, EngineError> {
    let mut start = Instant::now();
    if *device == Device::flex() {
        for repeat in 0..=repeats {
            if repeat == 1 {
                start = Instant::now();
            }
            trainer.step(&batch, knobs)?;
        }
        return Ok(start.elapsed().as_secs_f64() * 1e3 / repeats as f64);
    }
    let uploads = Uploads::start(trainer.uplink())?;
    let mut upload = uploads.push(batch);
    for repeat in 0..=repeats {
        if repeat == 1 {
            let _ = device.sync();
            start = Instant::now();
        }
        let (batch, sent) = upload.wait()?;
        let gradients = trainer.gradients_of_sent(sent, knobs, &mut |_| {})?;
        upload = uploads.push(batch);
        trainer.update(gradients, Votes::default(), knobs)?;
    }
    let _ = device.sync();
    Ok(start.elapsed().as_secs_f64() * 1e3 / repeats as f64)
}

/// Floating-point operations a second of the best of a few products of two square matrices of side `n`.
pub fn matrix_peak(device: &Device, n: usize, arithmetic: Arithmetic) -> f64 {
    let random = |seed| {
        device.seed(seed);
        Tensor::<2>::random([n, n], Distribution::Normal(0.0, 1.0), device).cast(arithmetic.dtype())
    };
    let (a, b) = (random(1), random(2));
    let mut best = f64::INFINITY;
    for _ in 0..6 {
        let start = Instant::now();
        let mut product = a.clone().matmul(b.clone());
        for _ in 1..MATRIX_PRODUCTS {
            // Each waits for the one before, and none can be left out.
            product = product.matmul(b.clone());
        }
        let _ = device.sync();
        drop(product);
        best = best.min(start.elapsed().as_secs_f64() / MATRIX_PRODUCTS as f64);
    }
    2.0 * (n as f64).powi(3) / best
}

/// Times of the plan's backbone at its own image size. Variants take turns, so that what else the
/// machine does falls on all of them.
pub fn backbone(plan: &Plan, repeats: usize, device: &Device) -> BackboneTimes {
    let bench = BackboneBench::new(plan, device);
    let one = Workers::on(device, 1);
    let workers = Workers::on(device, plan.step_config().n_workers);
    let mut times: [Vec<f64>; 4] = Default::default();
    for repeat in 0..=repeats.max(1) {
        let timed = [
            time_ms(&bench.device, || bench.whole_graph(&one)),
            time_ms(&bench.device, || bench.units(&one, true)),
            time_ms(&bench.device, || bench.units(&one, false)),
            time_ms(&bench.device, || bench.units(&workers, true)),
        ];
        // The first round warms caches and pools.
        if repeat > 0 {
            times.iter_mut().zip(timed).for_each(|(all, ms)| all.push(ms));
        }
    }
    let [whole_graph_ms, kept_ms, recomputed_ms, workers_ms] = times.map(median);
    BackboneTimes { whole_graph_ms, kept_ms, recomputed_ms, workers_ms }
}

/// A backbone with weights and one global view an image.
pub struct BackboneBench {
    units: Vec<Box<dyn crate::unit::Unit>>,
    shards: Vec<UnitShard>,
    images: Vec<Vec<u8>>,
    size_px: usize,
    patch_px: usize,
    device: Device,
}

impl BackboneBench {
    /// The backbone of `plan` on noise, on `device`.
    pub fn new(plan: &Plan, device: &Device) -> Self {
        let model = &plan.recipe.model;
        let units = model.units(Readout::All);
        let shards =
            units.iter().map(|unit| UnitShard::init(unit.as_ref(), 0, Place::SOLO, device)).collect();
        let size_px = model.image_px();
        let mut rng = ViewRng::from_words([0, 0x6e6f_6973_6500_0000, 1, 0]);
        let mut image = || (0..3 * size_px * size_px).map(|_| rng.below(256) as u8).collect();
        let images = (0..plan.recipe.optim.batch_size).map(|_| image()).collect();
        Self { units, shards, images, size_px, patch_px: model.patch_px(), device: device.clone() }
    }

    fn input(&self, range: std::ops::Range<usize>) -> Vec<Tokens> {
        let views: Vec<&[u8]> = self.images[range].iter().map(Vec::as_slice).collect();
        vec![tokens_of(&views, self.size_px, self.patch_px, &self.device, DType::F32)]
    }

    /// Flat gradients of all units from one graph.
    pub fn whole_graph(&self, one: &Workers) -> Vec<Tensor<1>> {
        let run = || {
            let mut groups = self.input(0..self.images.len());
            groups.iter_mut().for_each(|tokens| tokens.x = tokens.x.clone().autodiff());
            let mut leaves = Vec::new();
            for (unit, shard) in self.units.iter().zip(&self.shards) {
                let of_unit = Leaves::new(&shard.layout, &shard.student, true);
                groups = unit.forward(&of_unit, groups, &Draws::default());
                leaves.push(of_unit);
            }
            let grad = seed_gradient(&groups[0].x.clone().inner());
            let mut grads = (groups[0].x.clone() * grad.autodiff()).sum().backward();
            leaves.iter().map(|leaves| leaves.gradient(&mut grads)).collect::<Vec<_>>()
        };
        one.map(vec![()], |_, ()| run()).remove(0)
    }

    /// Flat gradients of all units, unit by unit.
    pub fn units(&self, workers: &Workers, keep: bool) -> Vec<Tensor<1>> {
        let ranges = workers.slices(self.images.len());
        let mut slices = workers.map(ranges, |_, range| self.input(range));
        let mut tape = Vec::new();
        let gathered = |number: usize| {
            let shard = &self.shards[number];
            Gathered { unit: self.units[number].as_ref(), layout: &shard.layout, flat: &shard.student }
        };
        for number in 0..self.units.len() {
            let results = workers
                .map(slices, |_, input| gathered(number).forward(input, &Draws::default(), keep, number > 0));
            let (outputs, kept): (Vec<_>, Vec<_>) = results.into_iter().unzip();
            slices = outputs;
            tape.push(kept);
        }
        let mut grads: Vec<Vec<Tensor<3>>> =
            slices.iter().map(|groups| vec![seed_gradient(&groups[0].x)]).collect();
        let mut flats = Vec::new();
        for number in (0..self.units.len()).rev() {
            let inputs = tape.pop().unwrap_or_default().into_iter().zip(grads).collect();
            let results = workers.map(inputs, |_, (kept, grad)| {
                gathered(number).backward(kept, grad, &Draws::default(), number > 0)
            });
            let (next, flat): (Vec<_>, Vec<Tensor<1>>) = results.into_iter().unzip();
            grads = next;
            flats.extend(flat.into_iter().reduce(|sum, flat| sum + flat));
        }
        flats.reverse();
        flats
    }
}

/// A gradient that depends on the image alone, so that slices see what the whole batch sees.
fn seed_gradient(y: &Tensor<3>) -> Tensor<3> {
    y.clone().sin()
}

fn time_ms<T>(device: &Device, f: impl FnOnce() -> T) -> f64 {
    let start = Instant::now();
    let result = f();
    let _ = device.sync();
    let elapsed = start.elapsed().as_secs_f64() * 1e3;
    drop(result);
    elapsed
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
