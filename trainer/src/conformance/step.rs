//! The step itself: [`Trainer::gradients`] against one whole autodiff graph that knows no slices,
//! no tape, no order of gathers and no reductions.

use std::collections::BTreeMap;
use std::sync::Arc;

use augment::Batch;
use burn_tensor::{Device, Distribution, Tensor};
use kernels::device::host::to_host;
use networks::backbone::Readout;
use networks::draws::Draws;
use networks::features::{Features, HeadOutput, HeadOutputs, Masked, Outputs, Selection, by_image};
use networks::leaves::Leaves;
use networks::mask::MaskedCells;
use networks::sampler::UnitSampler;
use networks::unit::{Context, StatSets, Types, Unit};
use ranks::communicator::Communicator;
use ranks::peers::Peers;

use super::{BATCH, batch, pair, plans};
use crate::bench::compare::difference;
use crate::method::network::{NetworkSpec, UpdateRule};
use crate::method::{BatchOutputs, Method};
use crate::optim::state::UnitShard;
use crate::step::{NetworkState, Trainer};
use crate::{Plan, schedule::ScheduledValues};

/// Networks that process the whole batch at once.
struct Whole<'a> {
    plan: &'a Plan,
    method: Box<dyn Method>,
    networks: Vec<NetworkState>,
    step: u64,
}

impl Whole<'_> {
    /// Images in the order of their micro-batches.
    fn images(&self) -> Vec<usize> {
        let n = self.plan.n_micro_batches();
        (0..n).flat_map(|number| (number..BATCH).step_by(n)).collect()
    }

    fn input(&self, batch: &Batch, spec: &NetworkSpec) -> Vec<Features> {
        let groups = self.method.views().groups();
        let input = spec.input(self.plan.pixel_input());
        spec.sees
            .iter()
            .map(|sight| {
                let size = &sight.size;
                let views: Vec<&[u8]> = self
                    .images()
                    .iter()
                    .map(|image| batch.samples[*image].groups[*size].as_slice())
                    .collect();
                let mut features = input.features(&views, groups[*size].size_px as usize, &Device::flex());
                if let Some(rule) = self.method.masks().filter(|rule| rule.size == *size) {
                    let positions = self.images().into_iter().map(|image| image as u64);
                    let seed = self.plan.recipe.seed;
                    let n_views = groups[*size].n_views;
                    let rows = rule.at(seed, self.step, BATCH, n_views, features.grid).rows(positions);
                    let masked =
                        Masked { rows: Arc::new(rows), hides: sight.masked, selection: Selection::All };
                    features.masked = Some(masked);
                }
                features
            })
            .collect()
    }

    /// Specification of the trained network.
    fn trained(&self) -> NetworkSpec {
        let mut networks = self.method.networks().into_iter();
        networks.find(|spec| spec.update_rule == UpdateRule::Gradient).unwrap()
    }

    /// Computes features and heads of the views that `spec` sees with the parameters `leaves`, a
    /// tensor for the whole batch each.
    fn outputs(&self, spec: &NetworkSpec, input: Vec<Features>, leaves: &[Leaves<'_>]) -> Outputs {
        let is_frozen = spec.update_rule == UpdateRule::Frozen;
        let sets = self.method.stat_sets().select(&spec.sizes());
        let views = self.method.views().groups();
        let drawing = UnitSampler {
            seed: self.plan.recipe.seed,
            step: self.step,
            batch_size: BATCH,
            n_views: spec.sizes().into_iter().map(|size| views[size].n_views).collect(),
        };
        let mut groups = input;
        let backbone = spec.units_to(Readout::All, &self.plan.recipe.model);
        for (number, (unit, leaves)) in backbone.iter().zip(leaves).enumerate() {
            let positions = self.images().into_iter().map(|image| image as u64);
            let drawn = match spec.update_rule {
                UpdateRule::Gradient => drawing.for_unit(number, unit.as_ref()).at(positions),
                _ => Draws::default(),
            };
            groups = through(unit.as_ref(), groups, leaves, &drawn, &sets, is_frozen);
        }
        let mut heads: BTreeMap<&'static str, Vec<Features>> = BTreeMap::new();
        let mut leaves = leaves[backbone.len()..].iter();
        for head in &spec.heads {
            let read = head.reads.head().map_or(&groups, |name| &heads[name]);
            let mut given: Vec<Features> = read.iter().map(|group| head.reads.select(group)).collect();
            let sets = self.method.head_stat_sets().select(&spec.sizes());
            for (unit, leaves) in head.units.iter().zip(leaves.by_ref()) {
                given = through(unit.as_ref(), given, leaves, &Draws::default(), &sets, is_frozen);
            }
            heads.insert(head.name, given);
        }
        let by_view = |groups: Vec<Features>| -> Vec<HeadOutput> {
            groups.iter().map(|group| HeadOutput::from_parts(std::slice::from_ref(group), BATCH)).collect()
        };
        let heads = heads.into_iter().map(|(name, groups)| (name, by_view(groups))).collect();
        Outputs { heads: HeadOutputs::new(BATCH, &groups, heads), features: groups }
    }

    /// The shards of the network `name`.
    fn shards(&self, name: &str) -> &[UnitShard] {
        &self.networks.iter().find(|network| network.name == name).unwrap().shards
    }

    /// Applies the trained network's head `name` to vectors.
    fn score(&self, name: &str, x: Tensor<3>) -> Tensor<3> {
        let [n, v, d] = x.dims();
        let mut given = vec![Features::vectors(x.reshape([n * v, 1, d]))];
        let spec = self.trained();
        let n_backbone = spec.units_to(Readout::All, &self.plan.recipe.model).len();
        let mut shards = self.shards(spec.name)[n_backbone..].iter();
        for head in &spec.heads {
            for (unit, shard) in head.units.iter().zip(shards.by_ref().take(head.units.len())) {
                if head.name == name {
                    let leaves = Leaves::new(&shard.layout, &constrained(unit.as_ref(), shard), false);
                    let sets = StatSets::joint(1);
                    given = through(unit.as_ref(), given, &leaves, &Draws::default(), &sets, false);
                }
            }
        }
        by_image(&given[0], n)
    }

    /// The outputs of each micro-batch.
    fn cut(&self, whole: &Outputs) -> Vec<Outputs> {
        let n = self.plan.n_micro_batches();
        let part = |len: usize, number: usize| number * len / n..(number + 1) * len / n;
        let features = |group: &Features, number: usize| {
            let sequences = part(group.x.dims()[0], number);
            let mut cut = group.with(group.x.clone().slice(sequences.clone()));
            cut.masked.iter_mut().for_each(|masked| {
                masked.rows = Arc::new(MaskedCells { cells: masked.rows.cells[sequences.clone()].to_vec() });
            });
            cut
        };
        let head = |group: usize, output: &HeadOutput, number: usize| {
            let of_views = |x: &Tensor<3>| x.clone().slice(part(x.dims()[0], number));
            HeadOutput {
                views: output.views.as_ref().map(of_views),
                masked: output.masked.as_ref().and_then(|x| {
                    let cells = &whole.heads.masked(group).cells;
                    let sequences = part(cells.len(), number);
                    let n_rows = |cells: &[Vec<usize>]| -> usize { cells.iter().map(Vec::len).sum() };
                    let first = n_rows(&cells[..sequences.start]);
                    let n_masked = n_rows(&cells[sequences]);
                    (n_masked > 0).then(|| x.clone().slice(first..first + n_masked))
                }),
                cells: output.cells.as_ref().map(of_views),
            }
        };
        (0..n)
            .map(|number: usize| {
                let of_head = |(name, groups): (&&'static str, &Vec<HeadOutput>)| {
                    let groups = groups.iter().enumerate();
                    (*name, groups.map(|(group, output)| head(group, output, number)).collect())
                };
                let features: Vec<_> = whole.features.iter().map(|group| features(group, number)).collect();
                let heads = whole.heads.by_name.iter().map(of_head).collect();
                Outputs { heads: HeadOutputs::new(BATCH / n, &features, heads), features }
            })
            .collect()
    }

    /// Mean loss of the batch, and the gradients of all units.
    fn gradients(&self, batch: &Batch, scheduled_values: &ScheduledValues) -> (f64, Vec<Tensor<1>>) {
        let comm = Communicator::solo();
        let others = |spec: &NetworkSpec| {
            let shards = self.shards(spec.name).iter();
            let leaves: Vec<_> =
                shards.map(|shard| Leaves::new(&shard.layout, shard.weights.values(), false)).collect();
            (spec.name, self.cut(&self.outputs(spec, self.input(batch, spec), &leaves)))
        };
        let specs = self.method.networks();
        let others: Vec<_> =
            specs.iter().filter(|spec| spec.update_rule != UpdateRule::Gradient).map(others).collect();
        let spec = self.trained();
        let trained = |track| {
            let backbone = spec.units_to(Readout::All, &self.plan.recipe.model);
            let units = backbone.iter().chain(spec.heads.iter().flat_map(|head| &head.units));
            let leaves: Vec<_> = units
                .zip(self.shards(spec.name))
                .map(|(unit, shard)| Leaves::new(&shard.layout, &constrained(unit.as_ref(), shard), track))
                .collect();
            let mut input = self.input(batch, &spec);
            if track {
                input.iter_mut().for_each(|group| group.x = group.x.clone().autodiff());
            }
            let outputs = self.outputs(&spec, input, &leaves);
            (leaves, self.cut(&outputs))
        };
        let (_, plain) = trained(false);
        let (leaves, tracked) = trained(true);
        let score = |name: &str, x: Tensor<3>| self.score(name, x);
        let outputs = BatchOutputs { trained: &plain, others: &others, columns: None, score: &score };
        let peers = Peers::new(&comm, self.plan.n_micro_batches());
        let prepared = self.method.prepare(&outputs, scheduled_values.step, peers).unwrap();
        let losses = tracked
            .iter()
            .enumerate()
            .map(|(number, outputs)| prepared.micro_batch_loss(number, outputs).loss);
        let loss = losses.reduce(|a, b| a + b).unwrap() / self.plan.n_micro_batches() as f64;
        let value = f64::from(loss.clone().inner().into_scalar::<f32>());
        let mut grads = loss.backward();
        (value, leaves.iter().map(|leaves| leaves.gradient(&mut grads)).collect())
    }
}

/// Returns the trained network's weights, constrained as its method constrains them.
fn constrained(unit: &dyn Unit, shard: &UnitShard) -> Tensor<1> {
    let mut flat = shard.weights.values().clone();
    let constrained = unit.constrain(&Leaves::new(&shard.layout, &flat, false));
    let n_constrained: usize = constrained.iter().map(|(_, values)| values.dims()[0]).sum();
    assert_eq!(n_constrained, unit.n_constrained(), "{}", unit.name());
    for (param, values) in constrained {
        let at = shard.layout.position(&param).unwrap();
        flat = flat.slice_assign([shard.layout.params[at].range()], values);
    }
    flat
}

/// Runs all stages of a unit: the sums of the whole batch are its totals, unless it `evaluates`.
fn through(
    unit: &dyn Unit,
    mut groups: Vec<Features>,
    leaves: &Leaves<'_>,
    draws: &Draws,
    sets: &StatSets,
    evaluates: bool,
) -> Vec<Features> {
    let mut totals = Vec::new();
    for stage in 0..unit.n_stages() {
        let cx = Context { leaves, draws, totals: &totals, sets, types: Types::F32 };
        let given = unit.forward(stage, groups, &cx);
        groups = given.features;
        totals = if evaluates { Vec::new() } else { given.sums };
    }
    groups
}

/// Number of roundings of the weights that are tried.
pub(super) const ROUNDINGS: u64 = 4;

/// Moves every weight by up to half the spacing of f32. Where gradients change by more than is
/// allowed, their own rounding is larger, as it can be behind normalizations over few cells.
pub(super) fn rounded(networks: &[NetworkState], seed: u64) -> Vec<NetworkState> {
    let device = Device::flex();
    device.seed(seed);
    let mut networks = networks.to_vec();
    for shard in networks.iter_mut().flat_map(|network| &mut network.shards) {
        let half = Distribution::Uniform(-6e-8, 6e-8);
        let weights = shard.weights.values();
        let factors = Tensor::random(weights.dims(), half, &device) + 1.0;
        shard.weights = (weights.clone() * factors).into();
    }
    networks
}

fn check(plan: &Plan, number: u64) {
    let mut trainer: Trainer = plan.trainer(Communicator::solo(), &Device::flex()).unwrap();
    // After one step the averages differ from the trained network.
    trainer.step(&batch(plan, 0), &plan.schedules().at(number - 1)).unwrap();
    let scheduled_values = plan.schedules().at(number);
    let batch = batch(plan, number);
    let given = trainer.gradients(&batch, &scheduled_values, &mut |_| {}).unwrap();
    let mut method = plan.method().unwrap();
    method.load_state(&trainer.state.method.state()).unwrap();
    let mut whole =
        Whole { plan, method, networks: trainer.state.networks.clone(), step: trainer.state.step };
    let (loss, grads) = whole.gradients(&batch, &scheduled_values);
    let of_step = given.loss().unwrap();
    assert!((of_step - loss).abs() <= 1e-5 * loss.abs(), "{}: loss {of_step}, {loss}", pair(plan));
    let expected: Vec<Vec<f32>> = grads.into_iter().map(to_host).collect();
    let units = trainer.trained().iter().map(|shard| &shard.layout.name);
    let worst = |given: &[Vec<f32>]| -> Vec<f64> {
        expected.iter().zip(given).map(|(expected, given)| difference(expected, given)).collect()
    };
    let given: Vec<Vec<f32>> = given.shards().iter().map(|shard| to_host(shard.clone())).collect();
    let mut allowed = vec![1e-4; expected.len()];
    if worst(&given).iter().any(|worst| *worst > 1e-4) {
        for draw in 0..ROUNDINGS {
            whole.networks = rounded(&trainer.state.networks, draw);
            let moved: Vec<Vec<f32>> =
                whole.gradients(&batch, &scheduled_values).1.into_iter().map(to_host).collect();
            allowed =
                allowed.into_iter().zip(worst(&moved)).map(|(a, moved)| f64::max(a, 2.0 * moved)).collect();
        }
    }
    for (((unit, worst), allowed), expected) in units.zip(worst(&given)).zip(allowed).zip(&expected) {
        assert!(expected.iter().any(|value| *value != 0.0), "{}: {unit} has no gradient", pair(plan));
        assert!(worst <= allowed, "{}: {unit}: {worst} of the largest, {allowed} allowed", pair(plan));
    }
}

/// One batch, several micro-batches, graphs kept and recomputed, on one worker and on two.
#[test]
fn gradients_equal_one_whole_graph() {
    for overrides in [
        &["optim.micro_batches=1"][..],
        &["optim.micro_batches=1", "run.workers=2", "run.keep=0"],
        &["optim.micro_batches=4"],
        &["optim.micro_batches=4", "run.workers=2"],
        &["optim.micro_batches=4", "run.keep=1"],
    ] {
        for plan in plans(overrides) {
            check(&plan, 5);
        }
    }
}
