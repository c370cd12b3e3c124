//! Gradients of a step: [`Trainer::gradients`] against a single autodiff graph over the whole
//! batch, without slices, tape, gathers or reductions. They agree up to rounding.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use augment::{Batch, SoftLabel, ViewMasks};
use burn_tensor::{Device, Distribution, Tensor};
use kernels::device::host::to_host;
use networks::backbone::Readout;
use networks::draws::Draws;
use networks::leaves::Leaves;
use networks::mask::MaskedCells;
use networks::outputs::{HeadOutput, HeadOutputs, Outputs, by_image};
use networks::sampler::UnitSampler;
use networks::tokens::{Masked, Tokens};
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

/// Networks that process the whole batch in one graph.
struct WholeBatch<'a> {
    plan: &'a Plan,
    method: Box<dyn Method>,
    networks: Vec<NetworkState>,
    step: u64,
}

impl WholeBatch<'_> {
    /// Returns the positions of the images, in the order of their micro-batches.
    fn images(&self) -> Vec<usize> {
        let n = self.plan.n_micro_batches();
        (0..n).flat_map(|index| (index..BATCH).step_by(n)).collect()
    }

    /// Returns the labels of the images of each micro-batch.
    fn labels(&self, batch: &Batch) -> Vec<Vec<SoftLabel>> {
        let n = self.plan.n_micro_batches();
        let mut micro_batches = Vec::with_capacity(n);
        for images in self.images().chunks(BATCH / n) {
            micro_batches.push(images.iter().map(|image| batch.labels[*image].clone()).collect());
        }
        micro_batches
    }

    /// Returns the classes of the pixels of the images of each micro-batch.
    fn masks(&self, batch: &Batch) -> Vec<Vec<ViewMasks>> {
        let n = self.plan.n_micro_batches();
        let mut micro_batches = Vec::with_capacity(n);
        for images in self.images().chunks(BATCH / n) {
            micro_batches.push(images.iter().map(|image| batch.samples[*image].masks.clone()).collect());
        }
        micro_batches
    }

    /// Returns the input of the network `spec`, by size of view.
    fn input(&self, batch: &Batch, spec: &NetworkSpec) -> Vec<Tokens> {
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
                let mut tokens = input.tokens(&views, groups[*size].size_px as usize, &Device::flex());
                if let Some(rule) = self.method.masks().filter(|rule| rule.size == *size) {
                    let positions = self.images().into_iter().map(|image| image as u64);
                    let seed = self.plan.recipe.seed;
                    let n_views = groups[*size].n_views;
                    let rows = rule.at(seed, self.step, BATCH, n_views, tokens.grid()).rows(positions);
                    let masked = Masked { rows: Arc::new(rows), masking: sight.masking };
                    tokens.groups[0].masked = Some(masked);
                }
                tokens
            })
            .collect()
    }

    /// Returns the specification of the trained network.
    fn trained(&self) -> NetworkSpec {
        let mut networks = self.method.networks().into_iter();
        networks.find(|spec| spec.update_rule == UpdateRule::Gradient).unwrap()
    }

    /// Computes the tokens and head outputs of the network `spec` for the whole batch. `leaves`
    /// are its parameters by unit.
    fn outputs(&self, spec: &NetworkSpec, input: Vec<Tokens>, leaves: &[Leaves<'_>]) -> Outputs {
        let is_frozen = spec.update_rule == UpdateRule::Frozen;
        let sets = self.method.stat_sets().select(&spec.sizes());
        let views = self.method.views().groups();
        let sampler = UnitSampler {
            seed: self.plan.recipe.seed,
            step: self.step,
            batch_size: BATCH,
            n_views: spec.sizes().into_iter().map(|size| views[size].n_views).collect(),
        };
        let pixels = input.clone();
        let mut streams = input;
        let backbone = spec.units_to(Readout::All, &self.plan.recipe.model);
        let level_units = spec.level_units(&self.plan.recipe.model);
        let mut levels = Vec::with_capacity(level_units.len());
        for (index, (unit, leaves)) in backbone.iter().zip(leaves).enumerate() {
            let positions = self.images().into_iter().map(|image| image as u64);
            let draws = match spec.update_rule {
                UpdateRule::Gradient => sampler.for_unit(index, unit.as_ref()).at(positions),
                _ => Draws::default(),
            };
            streams = run_stages(unit.as_ref(), streams, leaves, &draws, &sets, is_frozen);
            if level_units.contains(&index) {
                levels.push(streams.iter().flat_map(Tokens::split_sizes).collect());
            }
        }
        let sizes: Vec<Tokens> = streams.iter().flat_map(Tokens::split_sizes).collect();
        let mut heads: BTreeMap<&'static str, Vec<Tokens>> = BTreeMap::new();
        let mut leaves = leaves[backbone.len()..].iter();
        for head in &spec.heads {
            let source = match head.reads.head() {
                Some(name) => &heads[name],
                None => &sizes,
            };
            let mut outputs: Vec<Tokens> = source.iter().map(|tokens| head.reads.select(tokens)).collect();
            let sets = self.method.head_stat_sets().select(&spec.sizes());
            for (unit, leaves) in head.units.iter().zip(leaves.by_ref()) {
                outputs = run_stages(unit.as_ref(), outputs, leaves, &Draws::default(), &sets, is_frozen);
            }
            heads.insert(head.name, outputs);
        }
        let heads = heads.into_iter().map(|(name, outputs)| (name, head_outputs(&outputs))).collect();
        let heads = HeadOutputs::new(BATCH, &sizes, heads);
        Outputs::new(sizes, heads).with_levels(levels).with_pixels(pixels)
    }

    /// Returns the shards of the network `name`.
    fn shards(&self, name: &str) -> &[UnitShard] {
        &self.networks.iter().find(|network| network.name == name).unwrap().shards
    }

    /// Applies the trained network's head `name` to vectors.
    fn score(&self, name: &str, x: Tensor<3>) -> Tensor<3> {
        let [n, v, d] = x.dims();
        let mut streams = vec![Tokens::vectors(x.reshape([n * v, d]))];
        let spec = self.trained();
        let n_backbone = spec.units_to(Readout::All, &self.plan.recipe.model).len();
        let mut shards = self.shards(spec.name)[n_backbone..].iter();
        for head in &spec.heads {
            for (unit, shard) in head.units.iter().zip(shards.by_ref().take(head.units.len())) {
                if head.name == name {
                    let leaves = Leaves::new(&shard.layout, &constrained(unit.as_ref(), shard), false);
                    let sets = StatSets::joint(1);
                    streams = run_stages(unit.as_ref(), streams, &leaves, &Draws::default(), &sets, false);
                }
            }
        }
        by_image(&streams[0], n)
    }

    /// Splits the outputs for the whole batch into those of its micro-batches.
    fn split_outputs(&self, batch: &Outputs) -> Vec<Outputs> {
        let n = self.plan.n_micro_batches();
        let mut micro_batches = Vec::with_capacity(n);
        for index in 0..n {
            let features: Vec<_> =
                batch.features.iter().map(|tokens| slice_tokens(tokens, index, n)).collect();
            let mut levels = Vec::with_capacity(batch.levels.len());
            for level in &batch.levels {
                levels.push(level.iter().map(|tokens| slice_tokens(tokens, index, n)).collect());
            }
            let mut heads = BTreeMap::new();
            for (name, groups) in &batch.heads.by_name {
                let mut outputs = Vec::with_capacity(groups.len());
                for (group, output) in groups.iter().enumerate() {
                    let masked = match &output.masked {
                        Some(x) => slice_masked(x, &batch.heads.masked(group).cells, index, n),
                        None => None,
                    };
                    outputs.push(HeadOutput {
                        views: output.views.as_ref().map(|x| slice_rows(x, index, n)),
                        masked,
                        cells: output.cells.as_ref().map(|x| slice_rows(x, index, n)),
                    });
                }
                heads.insert(*name, outputs);
            }
            let heads = HeadOutputs::new(BATCH / n, &features, heads);
            // Pixels are not part of the graph.
            let pixels =
                batch.pixels.iter().map(|tokens| slice_tokens(tokens, index, n).map(detached)).collect();
            micro_batches.push(Outputs::new(features, heads).with_levels(levels).with_pixels(pixels));
        }
        micro_batches
    }

    /// Computes the outputs of the trained network by micro-batch, and returns its parameters as
    /// well. With `track` both are part of an autodiff graph.
    fn trained_outputs(
        &self,
        batch: &Batch,
        spec: &NetworkSpec,
        track: bool,
    ) -> (Vec<Leaves<'_>>, Vec<Outputs>) {
        let backbone = spec.units_to(Readout::All, &self.plan.recipe.model);
        let units = backbone.iter().chain(spec.heads.iter().flat_map(|head| &head.units));
        let leaves: Vec<_> = units
            .zip(self.shards(spec.name))
            .map(|(unit, shard)| Leaves::new(&shard.layout, &constrained(unit.as_ref(), shard), track))
            .collect();
        let mut input = self.input(batch, spec);
        if track {
            input.iter_mut().for_each(|tokens| tokens.x = tokens.x.clone().autodiff());
        }
        let outputs = self.outputs(spec, input, &leaves);
        (leaves, self.split_outputs(&outputs))
    }

    /// Returns the mean loss of the batch, and the gradients of all units.
    fn gradients(&self, batch: &Batch, scheduled_values: &ScheduledValues) -> (f64, Vec<Tensor<1>>) {
        let comm = Communicator::solo();
        let mut others = Vec::new();
        for spec in &self.method.networks() {
            if spec.update_rule == UpdateRule::Gradient || spec.sees.is_empty() {
                continue;
            }
            let leaves: Vec<_> = self
                .shards(spec.name)
                .iter()
                .map(|shard| Leaves::new(&shard.layout, shard.weights.values(), false))
                .collect();
            let outputs = self.outputs(spec, self.input(batch, spec), &leaves);
            others.push((spec.name, self.split_outputs(&outputs)));
        }
        let spec = self.trained();
        let (_, untracked) = self.trained_outputs(batch, &spec, false);
        let (leaves, tracked) = self.trained_outputs(batch, &spec, true);
        let score = |name: &str, x: Tensor<3>| self.score(name, x);
        let labels = self.labels(batch);
        let masks = self.masks(batch);
        let outputs = BatchOutputs {
            trained: &untracked,
            others: &others,
            labels: &labels,
            masks: &masks,
            columns: None,
            score: &score,
        };
        let peers = Peers::new(&comm, self.plan.n_micro_batches());
        let prepared = self.method.prepare(&outputs, scheduled_values.step, peers).unwrap();
        let losses =
            tracked.iter().enumerate().map(|(index, outputs)| prepared.micro_batch_loss(index, outputs).loss);
        let loss = losses.reduce(|a, b| a + b).unwrap() / self.plan.n_micro_batches() as f64;
        let loss_value = f64::from(loss.clone().inner().into_scalar::<f32>());
        let mut grads = loss.backward();
        (loss_value, leaves.iter().map(|leaves| leaves.gradient(&mut grads)).collect())
    }
}

/// Returns the range of micro-batch `index` of `n` in `len` rows of the whole batch.
fn micro_batch_range(len: usize, index: usize, n: usize) -> Range<usize> {
    index * len / n..(index + 1) * len / n
}

/// Returns the rows of micro-batch `index` of `n`.
fn slice_rows(x: &Tensor<3>, index: usize, n: usize) -> Tensor<3> {
    x.clone().slice(micro_batch_range(x.dims()[0], index, n))
}

/// Returns the tokens of micro-batch `index` of `n`, with its masks.
fn slice_tokens(tokens: &Tokens, index: usize, n: usize) -> Tokens {
    let mut group = tokens.only_group().clone();
    let sequences = micro_batch_range(group.n, index, n);
    let ranges: Vec<Range<usize>> = tokens.lengths().ranges().collect();
    let rows = ranges[sequences.start].start..ranges[sequences.end - 1].end;
    group.n = sequences.len();
    if let Some(cells) = &mut group.cells {
        *cells = Arc::new(cells[sequences.clone()].to_vec());
    }
    if let Some(masked) = &mut group.masked {
        let all = &masked.rows;
        let visible = all.visible.as_ref().map(|visible| visible[sequences.clone()].to_vec());
        let cells = all.cells[sequences].to_vec();
        masked.rows = Arc::new(MaskedCells { cells, visible, n_blocks: all.n_blocks });
    }
    Tokens::new(tokens.x.clone().slice([rows]), vec![group])
}

/// Returns `x` without its graph.
fn detached(x: &Tensor<2>) -> Tensor<2> {
    if x.is_autodiff() { x.clone().inner() } else { x.clone() }
}

/// Returns the rows of `x` `[R, 1, K]` that belong to micro-batch `index` of `n`; `None` if it has
/// no masked cell. `cells` are the masked cells of each sequence of the whole batch.
fn slice_masked(x: &Tensor<3>, cells: &[Vec<usize>], index: usize, n: usize) -> Option<Tensor<3>> {
    let sequences = micro_batch_range(cells.len(), index, n);
    let start: usize = cells[..sequences.start].iter().map(Vec::len).sum();
    let n_masked: usize = cells[sequences].iter().map(Vec::len).sum();
    (n_masked > 0).then(|| x.clone().slice(start..start + n_masked))
}

/// Converts the output of a head's last unit, by size of view.
fn head_outputs(sizes: &[Tokens]) -> Vec<HeadOutput> {
    sizes.iter().map(|tokens| HeadOutput::from_parts(std::slice::from_ref(tokens), BATCH)).collect()
}

/// Returns the weights of a unit of the trained network, constrained as its method constrains them.
fn constrained(unit: &dyn Unit, shard: &UnitShard) -> Tensor<1> {
    let mut flat = shard.weights.values().clone();
    let constrained = unit.constrain(&Leaves::new(&shard.layout, &flat, false));
    let params = unit.params();
    let listed = params.iter().filter(|spec| spec.is_constrained).map(|spec| (&spec.name, spec.numel()));
    let values = constrained.iter().map(|(name, values)| (name, values.dims()[0]));
    assert!(values.eq(listed), "constrained parameters of {}", unit.name());
    for (param, values) in constrained {
        let position = shard.layout.position(&param).unwrap();
        flat = flat.slice_assign([shard.layout.params[position].range()], values);
    }
    flat
}

/// Runs all stages of a unit. The sums over the whole batch are the totals of the next stage,
/// unless the unit `evaluates`.
fn run_stages(
    unit: &dyn Unit,
    mut streams: Vec<Tokens>,
    leaves: &Leaves<'_>,
    draws: &Draws,
    sets: &StatSets,
    evaluates: bool,
) -> Vec<Tokens> {
    let mut totals = Vec::new();
    for stage in 0..unit.n_stages() {
        let cx = Context { leaves, draws, totals: &totals, sets, types: Types::F32 };
        let output = unit.forward(stage, streams, &cx);
        streams = output.streams;
        totals = if evaluates { Vec::new() } else { output.sums };
    }
    streams
}

/// Number of random changes of the weights by their rounding that are tried.
pub(super) const N_PERTURBATIONS: u64 = 4;

/// Changes every weight by up to half the spacing of f32. Where this changes gradients by more than
/// the tolerance, their own rounding is larger than it, as can happen with normalizations over few
/// cells.
pub(super) fn perturb_weights(networks: &[NetworkState], seed: u64) -> Vec<NetworkState> {
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

/// Returns the difference of each buffer of `actual` from that of `expected`, as [`difference`].
pub(super) fn differences(expected: &[Vec<f32>], actual: &[Vec<f32>]) -> Vec<f64> {
    expected.iter().zip(actual).map(|(expected, actual)| difference(expected, actual)).collect()
}

/// Compares the gradients of step `step` with those of one graph over the whole batch.
fn check_gradients(plan: &Plan, step: u64) {
    let mut trainer: Trainer = plan.trainer(Communicator::solo(), &Device::flex()).unwrap();
    // After one step the averages differ from the trained network.
    trainer.step(&batch(plan, 0), &plan.schedules().at(step - 1)).unwrap();
    let scheduled_values = plan.schedules().at(step);
    let batch = batch(plan, step);
    let actual = trainer.gradients(&batch, &scheduled_values, &mut |_| {}).unwrap();
    let mut method = plan.method().unwrap();
    method.load_state(&trainer.state.method.state()).unwrap();
    let mut reference =
        WholeBatch { plan, method, networks: trainer.state.networks.clone(), step: trainer.state.step };
    let (loss, grads) = reference.gradients(&batch, &scheduled_values);
    let step_loss = actual.loss().unwrap();
    assert!((step_loss - loss).abs() <= 1e-5 * loss.abs(), "{}: loss {step_loss}, {loss}", pair(plan));
    let expected: Vec<Vec<f32>> = grads.into_iter().map(to_host).collect();
    let actual: Vec<Vec<f32>> = actual.shards().iter().map(|shard| to_host(shard.clone())).collect();
    let differences_by_unit = differences(&expected, &actual);
    let mut tolerances = vec![1e-4; expected.len()];
    if differences_by_unit.iter().any(|difference| *difference > 1e-4) {
        for seed in 0..N_PERTURBATIONS {
            reference.networks = perturb_weights(&trainer.state.networks, seed);
            let (_, grads) = reference.gradients(&batch, &scheduled_values);
            let changed: Vec<Vec<f32>> = grads.into_iter().map(to_host).collect();
            for (tolerance, change) in tolerances.iter_mut().zip(differences(&expected, &changed)) {
                *tolerance = f64::max(*tolerance, 2.0 * change);
            }
        }
    }
    for (i, shard) in trainer.trained().iter().enumerate() {
        let unit = &shard.layout.name;
        let worst = differences_by_unit[i];
        let allowed = tolerances[i];
        assert!(expected[i].iter().any(|value| *value != 0.0), "{}: {unit} has no gradient", pair(plan));
        assert!(worst <= allowed, "{}: {unit}: {worst} of the largest, {allowed} allowed", pair(plan));
    }
}

/// Checks one batch and several micro-batches, with kept and recomputed graphs, on one worker and
/// on two.
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
            check_gradients(&plan, 5);
        }
    }
}
