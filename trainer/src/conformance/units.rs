//! Individual units: those of every backbone, and those of the heads of every method on each of
//! them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn_tensor::{DType, Device, Distribution, Tensor, TensorData};
use kernels::device::host::to_host;
use kernels::device::workers::Workers;
use kernels::ops::flops_of;
use networks::backbone::Readout;
use networks::draws::Draws;
use networks::leaves::Leaves;
use networks::mask::Masking;
use networks::params::Role;
use networks::tokens::{Masked, SequenceRole, Tokens};
use networks::unit::{Context, GroupShape, StatSets, Types, Unit};
use ranks::communicator::Communicator;
use ranks::topology::Topology;

use super::{BATCH, batch, pair, plans};
use crate::Plan;
use crate::method::network::UpdateRule;
use crate::optim::state::UnitShard;
use crate::step::backbone::BackbonePass;

/// A sequence of units with weights, and the input of the first one by view size.
pub(super) struct Chain {
    pub(super) units: Vec<Box<dyn Unit>>,
    pub(super) shards: Vec<UnitShard>,
    pub(super) inputs: Vec<Tokens>,
}

impl Chain {
    /// Creates a chain with initial weights.
    pub(super) fn new(units: Vec<Box<dyn Unit>>, inputs: Vec<Tokens>) -> Self {
        let device = Device::flex();
        let shards = units
            .iter()
            .map(|unit| UnitShard::init(unit.as_ref(), 1, Topology::SINGLE_RANK, &[], &device))
            .collect();
        Self { units, shards, inputs }
    }

    /// Computes the output with these weights, by view size.
    pub(super) fn output(&self, flats: &[Tensor<1>]) -> Vec<Tokens> {
        self.output_from(0, self.inputs_as(flats[0].dtype()), flats)
    }

    /// Returns the input of the first unit in another data type.
    fn inputs_as(&self, compute: DType) -> Vec<Tokens> {
        self.inputs.iter().map(|input| input.map(|x| x.clone().cast(compute))).collect()
    }

    /// Computes the output as [`Chain::output`], given the input `streams` of the unit `first`.
    fn output_from(&self, first: usize, mut streams: Vec<Tokens>, flats: &[Tensor<1>]) -> Vec<Tokens> {
        for (index, flat) in flats.iter().enumerate().skip(first) {
            streams = self.run_unit(index, streams, flat);
        }
        streams.iter().flat_map(Tokens::split_sizes).collect()
    }

    /// Computes the output of the unit `index` with these weights.
    fn run_unit(&self, index: usize, mut streams: Vec<Tokens>, flat: &Tensor<1>) -> Vec<Tokens> {
        let unit = &self.units[index];
        let layout = &self.shards[index].layout;
        let types = Types::all(flat.dtype());
        let draws = Draws::default();
        let sets = StatSets::per_size(self.inputs.len());
        let leaves = Leaves::new(layout, flat, false);
        let mut totals = Vec::new();
        for stage in 0..unit.n_stages() {
            let cx = Context { leaves: &leaves, draws: &draws, totals: &totals, sets: &sets, types };
            let output = unit.forward(stage, streams, &cx);
            streams = output.streams;
            totals = output.sums;
        }
        streams
    }

    /// Returns the weights, by unit.
    pub(super) fn weights(&self) -> Vec<Tensor<1>> {
        self.shards.iter().map(|shard| shard.weights.values().clone()).collect()
    }

    /// Returns the flat gradients of Σ -cos(output), whose gradient at the output is its sine.
    pub(super) fn gradients(&self, keeps_graph: bool) -> Vec<Vec<f32>> {
        self.gradients_in(Types::F32, keeps_graph)
    }

    /// Returns the gradients as [`Chain::gradients`], computed in `types`.
    pub(super) fn gradients_in(&self, types: Types, keeps_graph: bool) -> Vec<Vec<f32>> {
        let workers = Workers::new(1);
        let comm = Communicator::solo();
        let units = &self.units;
        let shards = &self.shards;
        let pass = BackbonePass { units, shards, workers: &workers, comm: &comm, types };
        let slices = vec![self.inputs.clone()];
        let flats = pass.gradients(slices, keeps_graph, |y| y.clone().sin()).unwrap();
        flats.into_iter().map(to_host).collect()
    }

    /// Returns Σ -cos(output), given the input `streams` of the unit `first`.
    fn loss_from(&self, first: usize, streams: Vec<Tokens>, flats: &[Tensor<1>]) -> f64 {
        let mut loss = 0.0;
        for output in self.output_from(first, streams, flats) {
            loss += output.x.cast(DType::F64).into_data().iter::<f64>().map(|y| -y.cos()).sum::<f64>();
        }
        loss
    }
}

/// Returns the chains of `plan`: its backbone on views of all sizes, then its heads.
pub(super) fn chains(plan: &Plan) -> Vec<Chain> {
    let device = Device::flex();
    let input = plan.pixel_input();
    let batch = batch(plan, 0);
    let method = plan.method().unwrap();
    // Followers have the same units as the networks that they follow.
    let mut networks = method.networks().into_iter();
    let trained = networks.find(|network| network.update_rule == UpdateRule::Gradient).unwrap();
    let mut inputs = Vec::new();
    for (size, group) in plan.multicrop().groups().iter().enumerate() {
        let views: Vec<&[u8]> = batch.samples.iter().map(|sample| sample.groups[size].as_slice()).collect();
        let mut pixels = input.tokens(&views, group.size_px as usize, &device);
        if let Some(rule) = method.masks().filter(|rule| rule.size == size) {
            let sampler = rule.at(1, 0, BATCH, group.n_views, pixels.grid());
            let rows = Arc::new(sampler.rows(0..BATCH as u64));
            let seen = trained.sees.iter().find(|views| views.size == size);
            // Where a method masks cells, all parameters are used.
            let masking = match seen.map_or(Masking::Shown, |views| views.masking) {
                Masking::Dropped => Masking::Dropped,
                Masking::Shown | Masking::Replaced => Masking::Replaced,
            };
            pixels.groups[0].masked = Some(Masked { rows, masking });
        }
        inputs.push(pixels);
    }
    let backbone = Chain::new(trained.units_to(Readout::All, &plan.recipe.model), inputs);
    let features = backbone.output(&backbone.weights()).remove(0);
    let mut chains = vec![backbone];
    let mut outputs: BTreeMap<&str, Tokens> = BTreeMap::new();
    for head in trained.heads {
        let source = match head.reads.head() {
            Some(name) => &outputs[name],
            None => &features,
        };
        let chain = Chain::new(head.units, vec![head.reads.select(source)]);
        outputs.insert(head.name, chain.output(&chain.weights()).remove(0));
        chains.push(chain);
    }
    chains
}

#[test]
fn names_are_unique() {
    for plan in plans(&[]) {
        for network in plan.method().unwrap().networks() {
            let mut units = BTreeSet::new();
            let mut params = BTreeSet::new();
            let backbone = network.units(&plan.recipe.model);
            for unit in backbone.iter().chain(network.heads.iter().flat_map(|head| &head.units)) {
                assert!(units.insert(unit.name().to_string()), "{}: two units {}", pair(&plan), unit.name());
                let layout = unit.layout(1);
                for slot in &layout.params {
                    let name = layout.full_name(slot);
                    assert!(params.insert(name.clone()), "{}: two parameters {name}", pair(&plan));
                }
            }
        }
    }
}

/// Every trained parameter has a gradient, and no other parameter has one.
#[test]
fn all_trained_parameters_have_gradients() {
    for plan in plans(&[]) {
        let mut used: BTreeMap<String, (Role, bool)> = BTreeMap::new();
        for chain in chains(&plan) {
            for (shard, grad) in chain.shards.iter().zip(chain.gradients(true)) {
                for slot in &shard.layout.params {
                    let name = shard.layout.full_name(slot);
                    let (_, has_gradient) = used.entry(name).or_insert((slot.spec.role, false));
                    *has_gradient |= grad[slot.range()].iter().any(|value| *value != 0.0);
                }
                assert!(grad.iter().all(|value| value.is_finite()));
            }
        }
        for (name, (role, has_gradient)) in used {
            assert_eq!(has_gradient, role.is_trained(), "{}: {name}", pair(&plan));
        }
    }
}

#[test]
fn recomputed_graphs_give_the_same_gradients() {
    for plan in plans(&[]) {
        for chain in chains(&plan) {
            assert_eq!(chain.gradients(false), chain.gradients(true), "{}", pair(&plan));
        }
    }
}

/// Returns `flat` in f64 with `step` times `direction` added from element `start` on.
fn moved_along(flat: &Tensor<1>, start: usize, direction: &[f64], step: f64, device: &Device) -> Tensor<1> {
    let data = flat.clone().into_data();
    let mut values: Vec<f64> = data.iter::<f64>().collect();
    for (value, direction) in values[start..].iter_mut().zip(direction) {
        *value += step * direction;
    }
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), (device, DType::F64))
}

/// Compares gradients with the slope of the loss along a random direction of each parameter, by
/// central differences in f64. Units in f64 run as compositions of Burn operations, so that kernels
/// are checked as well.
#[test]
fn gradients_equal_finite_differences() {
    // Short, because the loss has kinks where rectifiers switch: with a step ten times as long,
    // slopes of deep rectified networks are off by a hundredth.
    const STEP: f64 = 1e-7;
    // Rounding of f32 gradients that are zero, such as those of a bias before a normalization.
    const ROUNDING: f64 = 1e-4;
    let device = Device::flex();
    device.seed(5);
    for plan in plans(&[]) {
        for chain in chains(&plan) {
            let grads = chain.gradients(true);
            let weights: Vec<_> = chain.weights().into_iter().map(|flat| flat.cast(DType::F64)).collect();
            let mut groups = chain.inputs_as(DType::F64);
            for (index, shard) in chain.shards.iter().enumerate() {
                for slot in shard.layout.params.iter().filter(|slot| slot.spec.role.is_trained()) {
                    let signs =
                        Tensor::<1>::random([slot.spec.numel()], Distribution::Uniform(-1.0, 1.0), &device);
                    let signs: Vec<f64> = to_host(signs).into_iter().map(|s| f64::from(s.signum())).collect();
                    let start = slot.range().start;
                    let mut losses = [0.0; 2];
                    for (loss, step) in losses.iter_mut().zip([-STEP, STEP]) {
                        let mut moved = weights.clone();
                        moved[index] = moved_along(&weights[index], start, &signs, step, &device);
                        *loss = chain.loss_from(index, groups.clone(), &moved);
                    }
                    let grad = &grads[index][slot.range()];
                    let expected: f64 = grad.iter().zip(&signs).map(|(g, s)| f64::from(*g) * s).sum();
                    let norm = grad.iter().map(|g| f64::from(g * g)).sum::<f64>().sqrt();
                    let name = shard.layout.full_name(slot);
                    let slope = (losses[1] - losses[0]) / (2.0 * STEP);
                    assert!(
                        (slope - expected).abs() <= 1e-2 * norm + ROUNDING,
                        "{}: {name}: slope {slope}, gradient {expected} of norm {norm}",
                        pair(&plan)
                    );
                }
                groups = chain.run_unit(index, groups, &weights[index]);
            }
        }
    }
}

/// Returns the shape of `input`, the tokens of `n_images` images.
fn group_shape(input: &Tokens, n_images: usize) -> GroupShape {
    let [n_tokens, width] = input.x.dims();
    let group = &input.groups[0];
    let mut shape = GroupShape {
        drops: false,
        n_views: group.n / n_images,
        n_prefix: group.n_prefix,
        grid: group.grid,
        n_dropped: 0,
        width,
        n_masked: 0,
        n_mask_blocks: 1,
        is_map: false,
        intermediates: None,
    };
    if input.groups.len() > 1 || group.role != SequenceRole::Views {
        // Rows of several roles.
        return GroupShape { n_views: 1, n_prefix: n_tokens / n_images, grid: [0, 0], ..shape };
    }
    if let Some(Masked { rows, masking: Masking::Dropped }) = &group.masked {
        let n_visible: usize = rows.visible_cells(group.n_grid_cells()).iter().map(Vec::len).sum();
        let mean_visible = (n_visible as f64 / group.n as f64).round() as usize;
        shape.n_dropped = group.n_grid_cells() - mean_visible;
        shape.n_masked = rows.n() / n_images;
        shape.n_mask_blocks = rows.n_blocks;
    }
    shape
}

/// Returns whether the sequences of `input` have different numbers of visible cells.
fn has_ragged_sequences(input: &Tokens) -> bool {
    let masked = input.groups[0].masked.as_ref();
    let dropped = masked.filter(|masked| masked.masking == Masking::Dropped);
    dropped.is_some_and(|masked| masked.rows.visible.is_some())
}

/// Costs and output shapes that units state equal those that are measured.
#[test]
fn stated_costs_and_shapes_equal_measured_ones() {
    for plan in plans(&[]) {
        for chain in chains(&plan) {
            // Masked cells, whose number is not a multiple of the images, are the only group.
            let has_cells =
                chain.inputs[0].groups.iter().any(|group| group.role == SequenceRole::MaskedCells);
            let n_images = if has_cells { 1 } else { BATCH };
            // The stated numbers are those of the mean length, rounded, of a few tokens.
            let tolerance = if has_ragged_sequences(&chain.inputs[0]) { 0.2 } else { 1e-9 };
            let mut shapes: Vec<GroupShape> =
                chain.inputs.iter().map(|input| group_shape(input, n_images)).collect();
            let mut flops = 0.0;
            for unit in &chain.units {
                let (cost, next) = unit.cost(&shapes);
                flops += cost.flops * n_images as f64;
                shapes = next;
            }
            let weights = chain.weights();
            // Runs on one thread, because operations are counted by thread.
            let (counted, output) = Workers::new(1)
                .map(vec![()], |_, ()| {
                    let mut output = Vec::new();
                    let flops = flops_of(|| output = chain.output(&weights));
                    (flops, output)
                })
                .remove(0);
            assert!((flops - counted).abs() <= tolerance * counted, "{}: {flops}, {counted}", pair(&plan));
            for (shape, output) in shapes.iter().zip(output) {
                let [n_tokens, width] = output.x.dims();
                let expected = (shape.n_rows() * n_images) as f64;
                let difference = (expected - n_tokens as f64).abs();
                assert!(difference <= tolerance * n_tokens as f64, "{expected} {n_tokens}: {}", pair(&plan));
                assert_eq!(shape.width, width, "{}", pair(&plan));
            }
        }
    }
}
