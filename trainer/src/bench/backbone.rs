//! The backbone against one whole graph.

use std::time::Instant;

use augment::ViewRng;
use burn_tensor::{DType, Device, Tensor};

use super::median;
use crate::comm::topology::Place;
use crate::device::workers::Workers;
use crate::model::backbone::Readout;
use crate::model::features::Tokens;
use crate::model::leaves::Leaves;
use crate::model::unit::{Draws, Unit};
use crate::optim::state::UnitShard;
use crate::recipe::plan::Plan;
use crate::step::batch::tokens_of;
use crate::step::tape::Gathered;

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
    units: Vec<Box<dyn Unit>>,
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
