//! Times and memory of a backbone that runs unit by unit, as in a training step, compared with one
//! graph over all units.
//!
//! With one worker and one size of views, the gradients of both are bit-identical, whether graphs
//! are kept or recomputed.

use std::time::Instant;

use augment::ViewRng;
use burn_tensor::{Device, Tensor};
use kernels::device::workers::Workers;
use networks::backbone::Readout;
use networks::draws::Draws;
use networks::leaves::Leaves;
use networks::tokens::Tokens;
use networks::unit::{Context, StatSets, Types, Unit};
use ranks::EngineError;
use ranks::communicator::Communicator;
use ranks::topology::Topology;

use super::median;
use super::memory_gauge::MemoryGauge;
use super::noise::{DOMAIN, noise};
use crate::optim::state::UnitShard;
use crate::recipe::plan::Plan;
use crate::step::backbone::BackbonePass;

/// Costs of the backbone's forward and backward pass in each of its variants.
#[derive(Debug, Clone, Copy)]
pub struct BackboneCosts {
    /// One autodiff graph over all units, one thread.
    pub whole_graph: Cost,
    /// Unit by unit, one thread, graphs kept.
    pub kept: Cost,
    /// Unit by unit, one thread, every unit run again in the backward pass.
    pub recomputed: Cost,
    /// Unit by unit on the plan's workers, graphs kept.
    pub workers: Cost,
}

/// Cost of a forward and backward pass.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// Median time, in milliseconds.
    pub ms: f64,
    /// Most bytes in use during the first pass, beyond those in use before the backbone was made.
    pub peak_bytes: usize,
}

/// Measures the plan's backbone at its default image size. Variants take turns, so that other load
/// of the machine affects all of them.
///
/// # Errors
/// [`EngineError`]; never in practice, because a single rank has no others to lose.
pub fn backbone(
    plan: &Plan,
    repeats: usize,
    memory: &dyn MemoryGauge,
    device: &Device,
) -> Result<BackboneCosts, EngineError> {
    let before = memory.bytes();
    let bench = BackboneBench::new(plan, device);
    let one = Workers::for_device(device, 1);
    let workers = Workers::for_device(device, plan.step_config().n_workers);
    let mut variants = [
        Variant::new(Pass::WholeGraph, &one),
        Variant::new(Pass::Kept, &one),
        Variant::new(Pass::Recomputed, &one),
        Variant::new(Pass::Kept, &workers),
    ];
    // The first round warms caches and pools. It alone measures memory: measuring empties a GPU's
    // pool.
    for variant in &mut variants {
        memory.reset_peak();
        bench.time_ms(variant.pass, variant.workers)?;
        variant.peak_bytes = memory.peak_bytes().saturating_sub(before);
    }
    for _ in 0..repeats.max(1) {
        for variant in &mut variants {
            let ms = bench.time_ms(variant.pass, variant.workers)?;
            variant.times_ms.push(ms);
        }
    }
    let [whole_graph, kept, recomputed, workers] = variants.map(Variant::cost);
    Ok(BackboneCosts { whole_graph, kept, recomputed, workers })
}

/// Way in which the gradients are computed.
#[derive(Debug, Clone, Copy)]
enum Pass {
    /// One autodiff graph over all units.
    WholeGraph,
    /// Unit by unit, graphs kept.
    Kept,
    /// Unit by unit, every unit run again in the backward pass.
    Recomputed,
}

/// A pass that is measured, with its measurements.
struct Variant<'a> {
    pass: Pass,
    workers: &'a Workers,
    peak_bytes: usize,
    times_ms: Vec<f64>,
}

impl<'a> Variant<'a> {
    fn new(pass: Pass, workers: &'a Workers) -> Self {
        Self { pass, workers, peak_bytes: 0, times_ms: Vec::new() }
    }

    fn cost(self) -> Cost {
        Cost { ms: median(self.times_ms), peak_bytes: self.peak_bytes }
    }
}

/// Flat gradients of all units.
type Gradients = Result<Vec<Tensor<1>>, EngineError>;

/// A backbone with weights, and one view per image.
struct BackboneBench {
    units: Vec<Box<dyn Unit>>,
    shards: Vec<UnitShard>,
    plan: Plan,
    images: Vec<Vec<u8>>,
    device: Device,
}

impl BackboneBench {
    /// Creates the backbone of `plan` on `device`, with images of noise.
    fn new(plan: &Plan, device: &Device) -> Self {
        let model = &plan.recipe.model;
        let units = model.units(Readout::All);
        let shards = units
            .iter()
            .map(|unit| UnitShard::init(unit.as_ref(), 0, Topology::SINGLE_RANK, &[], device))
            .collect();
        let size_px = model.image_px();
        let mut rng = ViewRng::from_words([0, DOMAIN, 1, 0]);
        let format = plan.recipe.data.format();
        let mut images = Vec::with_capacity(plan.recipe.optim.batch_size);
        for _ in 0..plan.recipe.optim.batch_size {
            images.push(noise(&mut rng, format, size_px * size_px));
        }
        Self { units, shards, plan: plan.clone(), images, device: device.clone() }
    }

    /// Returns the number types of the plan.
    fn types(&self) -> Types {
        self.plan.recipe.optim.precision.types()
    }

    /// Converts a range of the images to the input of the first unit.
    fn input(&self, range: std::ops::Range<usize>) -> Vec<Tokens> {
        let views: Vec<&[u8]> = self.images[range].iter().map(Vec::as_slice).collect();
        vec![self.plan.pixel_input().tokens(&views, self.plan.recipe.model.image_px(), &self.device)]
    }

    /// Returns the flat gradients of all units, computed from one graph on a worker.
    fn whole_graph(&self, one: &Workers) -> Gradients {
        Ok(one.map(vec![()], |_, ()| self.graph_gradients()).remove(0))
    }

    /// Computes the flat gradients of all units from one graph, on the calling thread.
    fn graph_gradients(&self) -> Vec<Tensor<1>> {
        let draws = Draws::default();
        let sets = StatSets::per_size(1);
        let mut streams = self.input(0..self.images.len());
        streams.iter_mut().for_each(|tokens| tokens.x = tokens.x.clone().autodiff());
        let leaves: Vec<Leaves<'_>> = self
            .shards
            .iter()
            .map(|shard| Leaves::new(&shard.layout, shard.weights.values(), true))
            .collect();
        for (unit, leaves) in self.units.iter().zip(&leaves) {
            let mut totals = Vec::new();
            for stage in 0..unit.n_stages() {
                let types = self.types();
                let cx = Context { leaves, draws: &draws, totals: &totals, sets: &sets, types };
                let output = unit.forward(stage, streams, &cx);
                streams = output.streams;
                totals = output.sums;
            }
        }
        let grad = start_gradient(&streams[0].x.clone().inner());
        let mut grads = (streams[0].x.clone() * grad.autodiff()).sum().backward();
        leaves.iter().map(|leaves| leaves.gradient(&mut grads)).collect()
    }

    /// Returns the flat gradients of all units, computed unit by unit.
    fn units(&self, workers: &Workers, keeps_graph: bool) -> Gradients {
        let ranges = workers.slices(self.images.len());
        let slices = workers.map(ranges, |_, range| self.input(range));
        let comm = Communicator::solo();
        let units = &self.units;
        let shards = &self.shards;
        let types = self.types();
        let pass = BackbonePass { units, shards, workers, comm: &comm, types };
        pass.gradients(slices, keeps_graph, start_gradient)
    }

    /// Returns the flat gradients of all units.
    fn gradients(&self, pass: Pass, workers: &Workers) -> Gradients {
        match pass {
            Pass::WholeGraph => self.whole_graph(workers),
            Pass::Kept => self.units(workers, true),
            Pass::Recomputed => self.units(workers, false),
        }
    }

    /// Returns the time of `pass` in milliseconds, including the work of the device.
    fn time_ms(&self, pass: Pass, workers: &Workers) -> Result<f64, EngineError> {
        let start = Instant::now();
        let result = self.gradients(pass, workers)?;
        let _ = self.device.sync();
        let elapsed = start.elapsed().as_secs_f64() * 1e3;
        drop(result);
        Ok(elapsed)
    }
}

/// Returns a gradient of the output that depends on each image alone, so that slices get the same
/// as the whole batch.
fn start_gradient(y: &Tensor<2>) -> Tensor<2> {
    y.clone().sin()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::compare::difference;
    use crate::conformance::plans;
    use kernels::device::host::to_host;

    /// Returns the largest difference between the gradients of units, relative to `expected`.
    fn largest_difference(actual: Vec<Tensor<1>>, expected: Vec<Tensor<1>>) -> f64 {
        assert_eq!(actual.len(), expected.len());
        let mut largest = 0.0;
        for (actual, expected) in actual.into_iter().zip(expected) {
            let expected = to_host(expected);
            assert!(expected.iter().any(|value| *value != 0.0), "every unit has a gradient");
            largest = f64::max(largest, difference(&expected, &to_host(actual)));
        }
        largest
    }

    /// The vector-Jacobian product unit by unit equals that of one graph over all units; with one
    /// worker and one size of views bit for bit, recomputed or kept.
    #[test]
    fn units_equal_one_graph() {
        for plan in plans(&[]) {
            let bench = BackboneBench::new(&plan, &Device::flex());
            let one = Workers::new(1);
            let expected = bench.whole_graph(&one).unwrap();
            let kept = bench.units(&one, true).unwrap();
            assert_eq!(largest_difference(kept, expected.clone()), 0.0);
            let recomputed = bench.units(&one, false).unwrap();
            assert_eq!(largest_difference(recomputed, expected.clone()), 0.0);
            let on_three_workers = bench.units(&Workers::new(3), false).unwrap();
            assert!(largest_difference(on_three_workers, expected) < 1e-5);
        }
    }
}
