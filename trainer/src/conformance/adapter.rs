//! Adapters of low rank: of a backbone, they alone are trained; their gradients are those of one
//! graph; and whoever reads a run sees their sums with the weights.

use burn_tensor::{Device, Tensor};
use kernels::device::host::to_host;
use networks::Network;
use networks::adapter::{Adapter, UnitAdapters, takes_adapters};
use networks::backbone::Readout;
use networks::divided::{divided, numel};
use networks::init::fill;
use networks::layout::UnitLayout;
use networks::params::Init;
use networks::patches::Normalization;
use networks::tensor::by_name;
use ranks::communicator::Communicator;

use super::methods::{check_resumed, save, take_steps, train};
use super::{BATCH, batch, first_by_backbone, pair, plans, trained_network};
use crate::Plan;
use crate::bench::compare::difference;
use crate::checkpoint::Checkpoint;
use crate::optim::state::UnitShard;
use crate::run::evaluated::evaluated_network;
use crate::step::Trainer;

const ADAPTER: Adapter = Adapter { rank: 2, alpha: 4.0 };

/// Factor of a product of two matrices.
const SCALE: f32 = 2.0;

/// Largest difference of a gradient, relative to the largest of its unit.
const TOLERANCE: f64 = 5e-5;

/// Settings that round weights and send them in fewer bits.
const BF16: &str = "optim.precision={compute='bf16',memory='bf16',gather='bf16'}";

/// Returns the plans, without adapters, of all pairs of a method and a backbone that takes them.
fn plans_without(overrides: &[&str]) -> Vec<Plan> {
    let mut chosen = Vec::new();
    for plan in plans(overrides) {
        if plan.recipe.model.units(Readout::All).iter().any(|unit| takes_adapters(unit.as_ref())) {
            chosen.push(plan);
        }
    }
    chosen
}

/// Returns the first of [`plans_without`] of each backbone.
fn plan_by_backbone(overrides: &[&str]) -> Vec<Plan> {
    first_by_backbone(plans_without(overrides))
}

/// Returns `plan` with adapters.
fn with_adapters(plan: &Plan) -> Plan {
    let mut recipe = plan.recipe.clone();
    recipe.optim.adapter = Some(ADAPTER);
    crate::resolve(recipe, 100).unwrap()
}

/// Creates the trainer of `plan` on one rank.
fn trainer(plan: &Plan) -> Trainer {
    plan.trainer(Communicator::solo(), &Device::flex()).unwrap()
}

fn values(shard: &UnitShard) -> Vec<f32> {
    to_host(shard.weights.values().clone())
}

/// Returns the adapters of a unit, given both of its shards.
fn buffers<'a>(base: &'a UnitShard, adapters: &'a UnitShard) -> UnitAdapters<'a> {
    UnitAdapters { adapter: ADAPTER, base: &base.layout, adapters: &adapters.layout }
}

/// Adapters begin with zeros, which change no output, in f32 and in bf16.
#[test]
fn the_first_loss_is_that_without_adapters() {
    let settings: [&[&str]; 2] = [&[], &[BF16]];
    for overrides in settings {
        for plan in plans_without(overrides) {
            let without = train(&plan, 1, 1);
            let with = train(&with_adapters(&plan), 1, 1);
            assert_eq!(with.reports[0], without.reports[0], "{}", pair(&plan));
        }
    }
}

/// All networks keep the weights that they started with, bit for bit, and parameters without
/// adapters have no moments.
#[test]
fn adapters_and_heads_alone_are_trained() {
    for plan in plan_by_backbone(&[]) {
        let plan = with_adapters(&plan);
        let trained = trained_network(&plan).name;
        let mut trainer = trainer(&plan);
        let before = trainer.state.networks.clone();
        take_steps(&plan, &mut trainer, 3);
        for (before, after) in before.iter().zip(&trainer.state.networks) {
            let n_adapted = after.bases.len();
            assert_eq!(n_adapted, plan.recipe.model.levels().units.len(), "{}", pair(&plan));
            for (unit, base) in &before.bases {
                assert!(values(base) == values(&after.bases[unit]), "{}: {}", base.layout.name, pair(&plan));
                assert!(base.moments.is_empty());
            }
            for (unit, (old, new)) in before.shards.iter().zip(&after.shards).enumerate() {
                let name = format!("{} of {}: {}", new.layout.name, after.name, pair(&plan));
                let is_fixed = unit < after.n_backbone && !after.bases.contains_key(&unit);
                if is_fixed {
                    assert!(values(old) == values(new), "{name}");
                } else if after.name == trained && unit < after.n_backbone {
                    assert!(values(old) != values(new), "{name}");
                }
                let has_moments = after.name == trained && !is_fixed;
                assert_eq!(!new.moments.is_empty(), has_moments, "{name}");
            }
        }
    }
}

/// Copies step, weights and the state of the method to a trainer without adapters, whose weights
/// become the sums.
fn copy_sums(from: &Trainer, to: &mut Trainer) {
    to.state.step = from.state.step;
    to.state.method.load_state(&from.state.method.state()).unwrap();
    for (network, source) in to.state.networks.iter_mut().zip(&from.state.networks) {
        for (unit, (shard, adapters)) in network.shards.iter_mut().zip(&source.shards).enumerate() {
            let mut weights = adapters.weights.clone();
            if let Some(base) = source.bases.get(&unit) {
                let sums = buffers(base, adapters).merged(base.weights.values(), adapters.weights.values());
                weights = sums.into();
            }
            shard.weights = weights;
        }
    }
}

/// Returns the gradients of the next step of `trainer`, by unit.
fn gradients(plan: &Plan, trainer: &Trainer) -> Vec<Vec<f32>> {
    let scheduled_values = plan.schedules().at(5);
    let gradients = trainer.gradients(&batch(plan, 5), &scheduled_values, &mut |_| {}).unwrap();
    gradients.shards().iter().map(|shard| to_host(shard.clone())).collect()
}

/// Returns the matrix `name` of the buffer `flat`.
fn matrix(layout: &UnitLayout, name: &str, flat: &Tensor<1>) -> Tensor<2> {
    let slot = &layout.params[layout.position(name).unwrap()];
    let shape: [usize; 2] = slot.spec.shape.as_slice().try_into().unwrap();
    flat.clone().slice([slot.range()]).reshape(shape)
}

/// Returns the gradient of the adapters in `shard` by autodiff's graph of the formula, given the
/// `gradient` of the sums.
fn gradient_by_graph(shard: &UnitShard, base: &UnitShard, gradient: &[f32]) -> Vec<f32> {
    let flat = shard.weights.values().clone().autodiff().require_grad();
    let gradient = Tensor::<1>::from_floats(gradient, &Device::flex()).autodiff();
    let mut loss = Tensor::<1>::zeros([1], &Device::flex()).autodiff();
    for slot in base.layout.params.iter().filter(|slot| slot.spec.is_adaptable) {
        let name = &slot.spec.name;
        let a = matrix(&shard.layout, &format!("{name}.lora_a"), &flat);
        let b = matrix(&shard.layout, &format!("{name}.lora_b"), &flat);
        let product = (b.matmul(a) * SCALE).reshape([slot.spec.numel()]);
        loss = loss + (product * gradient.clone().slice([slot.range()])).sum();
    }
    to_host(flat.grad(&loss.backward()).unwrap())
}

/// The sums are the weights of a network without adapters, whose gradients are those of one graph
/// over the whole batch (`step`); those of adapters follow by one more graph.
#[test]
fn gradients_are_those_of_one_graph() {
    for overrides in [&["run.keep=100"][..], &["run.keep=0", "run.workers=2"]] {
        for plan in plan_by_backbone(overrides) {
            let adapted_plan = with_adapters(&plan);
            let mut adapted = trainer(&adapted_plan);
            // After two steps no matrix is zero, and averages differ from the trained network.
            take_steps(&adapted_plan, &mut adapted, 2);
            let mut whole = trainer(&plan);
            copy_sums(&adapted, &mut whole);
            let sum_gradients = gradients(&plan, &whole);
            let actual = gradients(&adapted_plan, &adapted);
            assert_eq!(actual.len(), sum_gradients.len());
            let network = adapted.state.network(trained_network(&plan).name).unwrap();
            for (unit, shard) in network.shards.iter().enumerate() {
                let name = format!("{}: {}", shard.layout.name, pair(&plan));
                let mut expected = sum_gradients[unit].clone();
                if let Some(base) = network.bases.get(&unit) {
                    expected = gradient_by_graph(shard, base, &sum_gradients[unit]);
                } else if unit < network.n_backbone {
                    expected.fill(0.0);
                    assert!(actual[unit] == expected, "{name}");
                    continue;
                }
                assert!(expected.iter().any(|value| *value != 0.0), "{name} has no gradient");
                let worst = difference(&expected, &actual[unit]);
                assert!(worst <= TOLERANCE, "{name}: {worst} of the largest");
            }
        }
    }
}

#[test]
fn runs_are_bit_identical_across_ranks_and_with_recomputed_graphs() {
    let recomputed = plans_without(&["run.keep=0"]);
    for (plan, recomputed) in plans_without(&[]).iter().zip(&recomputed) {
        let plan = with_adapters(plan);
        let one = train(&plan, 1, 3);
        for world_size in [2, 4] {
            assert!(train(&plan, world_size, 3) == one, "{world_size} ranks: {}", pair(&plan));
        }
        let mut recomputed = with_adapters(recomputed);
        assert!(train(&recomputed, 2, 3) == one, "recomputed on 2 ranks: {}", pair(&plan));
        recomputed.segment = 2;
        assert!(train(&recomputed, 2, 3) == one, "recomputed by 2 on 2 ranks: {}", pair(&plan));
    }
}

/// Covers rounded sums, weights that are kept without graphs, units that are divided, and adapters
/// of the last units alone.
#[test]
fn other_settings_are_bit_identical_across_ranks() {
    let settings: [&[&str]; 3] =
        [&[BF16], &["run.keep=0", "run.shard=grad"], &["optim.trained_units=2", "optim.layer_decay=0.5"]];
    for overrides in settings {
        for plan in plan_by_backbone(overrides) {
            let plan = with_adapters(&plan);
            let one = train(&plan, 1, 2);
            assert!(train(&plan, 2, 2) == one, "2 ranks, {overrides:?}: {}", pair(&plan));
        }
    }
    for plan in plan_by_backbone(&[]) {
        let units = trained_network(&plan).units(&plan.recipe.model);
        let n_undivided = units.len();
        let parts = divided(units, Some(1));
        assert!(parts.len() > n_undivided, "{}", pair(&plan));
        let mut divided_plan = plan.clone();
        divided_plan.recipe.run.max_unit_parameters =
            parts.iter().map(|part| numel(part.unit.as_ref())).max();
        let divided_plan = with_adapters(&divided_plan);
        let one = train(&divided_plan, 1, 2);
        assert!(train(&divided_plan, 2, 2) == one, "2 ranks: {}", pair(&plan));
        let undivided = train(&with_adapters(&plan), 1, 2);
        assert_eq!(one.reports[0], undivided.reports[0], "divided: {}", pair(&plan));
    }
}

#[test]
fn resumed_runs_equal_uninterrupted_ones() {
    for plan in plan_by_backbone(&[]) {
        check_resumed(&with_adapters(&plan), &[1, 4], clear_bases);
    }
}

/// Sets the bases of `trainer` to zeros: they are those of the checkpoint, whatever a run would
/// begin with.
fn clear_bases(trainer: &mut Trainer) {
    for base in trainer.state.networks.iter_mut().flat_map(|network| network.bases.values_mut()) {
        base.weights = base.weights.values().zeros_like().into();
    }
}

/// A run that starts from weights has these, and adapters as without them.
#[test]
fn runs_start_from_given_weights() {
    for plan in plan_by_backbone(&[]) {
        let plan = with_adapters(&plan);
        let model = &plan.recipe.model;
        let pixels = Normalization::half(model.n_channels());
        let weights = Network::random(model, pixels, 99, 1, &Device::flex()).tensors();
        let mut trainer = trainer(&plan);
        let before = trainer.state.networks.clone();
        trainer.start_from(&weights, false).unwrap();
        for (before, after) in before.iter().zip(&trainer.state.networks) {
            for unit in after.bases.keys() {
                assert!(values(&before.shards[*unit]) == values(&after.shards[*unit]), "{}", pair(&plan));
            }
        }
        let evaluated = evaluated_network(&trainer, &plan, false).unwrap().unwrap().network;
        assert!(evaluated.tensors() == weights, "{}", pair(&plan));
    }
}

/// Returns the features that `network` computes of the views of the first size of the images of
/// each micro-batch.
fn features(plan: &Plan, network: &Network, step: u64) -> Vec<Vec<f32>> {
    let global = batch(plan, step);
    let group = plan.multicrop().groups().remove(0);
    let n_micro_batches = plan.n_micro_batches();
    let mut features = Vec::with_capacity(n_micro_batches);
    for index in 0..n_micro_batches {
        let mut views: Vec<&[u8]> = Vec::new();
        for image in (index..BATCH).step_by(n_micro_batches) {
            let bytes = &global.samples[image].groups[0];
            views.extend(bytes.chunks_exact(bytes.len() / group.n_views));
        }
        let rows = network.embed(&views, group.size_px as usize);
        let [n, d] = rows.dims();
        features.push(to_host(rows.reshape([n * d])));
    }
    features
}

/// Gives all adapters of `trainer` random values that change features by far more than rounding.
fn fill_adapters(trainer: &mut Trainer) {
    for (seed, network) in trainer.state.networks.iter_mut().enumerate() {
        for unit in network.bases.keys() {
            let shard = &mut network.shards[*unit];
            let mut values = vec![0.0; shard.layout.padded];
            let numel = shard.layout.numel;
            fill(Init::Normal(0.2), seed as u64, &shard.layout.name, 0, &mut values[..numel]);
            shard.weights = Tensor::<1>::from_floats(&values[..], &Device::flex()).into();
        }
    }
}

/// The evaluated network of a run in progress, that of its checkpoint, with and without heads, and
/// the features of the training step are those of the sums, and not of the weights that the run
/// began with.
#[test]
fn every_reader_of_a_run_sees_the_sums() {
    for plan in plan_by_backbone(&[]) {
        let plan = with_adapters(&plan);
        let model = &plan.recipe.model;
        let mut trainer = trainer(&plan);
        let start = evaluated_network(&trainer, &plan, false).unwrap().unwrap().network;
        take_steps(&plan, &mut trainer, 1);
        fill_adapters(&mut trainer);
        let folder = tempfile::tempdir().unwrap();
        save(&trainer, &plan, folder.path());
        let evaluated = evaluated_network(&trainer, &plan, false).unwrap().unwrap().network;
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let (backbone, name) = checkpoint.backbone(None).unwrap();
        assert!(evaluated.tensors() == backbone, "{}", pair(&plan));
        let (with_heads, _) = checkpoint.network(None).unwrap();
        assert!(with_heads.iter().all(|tensor| !tensor.name.contains("lora")), "{}", pair(&plan));
        let tensors = by_name(&with_heads);
        assert!(backbone.iter().all(|tensor| *tensors[tensor.name.as_str()] == *tensor), "{}", pair(&plan));
        let exported = Network::new(model, plan.recipe.data.pixels(), &backbone, 1, &Device::flex()).unwrap();
        assert_eq!(exported.fingerprint(), evaluated.fingerprint(), "{}", pair(&plan));

        let network = trainer.state.network(&name).unwrap();
        for (unit, base) in &network.bases {
            let adapters = &network.shards[*unit];
            let sums = buffers(base, adapters).merged(base.weights.values(), adapters.weights.values());
            for tensor in base.layout.tensors(&to_host(sums)) {
                assert!(*tensors[tensor.name.as_str()] == tensor, "{}: {}", tensor.name, pair(&plan));
            }
        }
        let scheduled_values = plan.schedules().at(6);
        let gradients = trainer.gradients(&batch(&plan, 3), &scheduled_values, &mut |_| {}).unwrap();
        let expected = features(&plan, &exported, 3);
        let before = features(&plan, &start, 3);
        assert_eq!(gradients.embeddings().len(), expected.len());
        for (index, embeddings) in gradients.embeddings().iter().enumerate() {
            let [n, d] = embeddings.dims();
            let trained = to_host(embeddings.clone().reshape([n * d]));
            let worst = difference(&expected[index], &trained);
            assert!(worst <= 1e-5, "{worst} of the largest: {}", pair(&plan));
            let changed = difference(&before[index], &trained);
            assert!(changed > 1e-2, "adapters change features by {changed}: {}", pair(&plan));
        }
    }
}

#[test]
fn adapters_that_would_not_be_trained_are_refused() {
    let mut n_refused = 0;
    for plan in plans(&[]) {
        let units = plan.recipe.model.units(Readout::All);
        let takes = units.iter().any(|unit| takes_adapters(unit.as_ref()));
        let mut recipe = plan.recipe.clone();
        recipe.optim.adapter = Some(ADAPTER);
        assert_eq!(crate::resolve(recipe, 100).is_ok(), takes, "{}", pair(&plan));
        n_refused += usize::from(!takes);
    }
    assert!(n_refused > 4, "{n_refused} plans have backbones without adapters");
    let plan = plan_by_backbone(&[]).remove(0);
    for (n_trained, is_valid) in [(0, false), (1, false), (2, true), (4, true)] {
        let mut recipe = plan.recipe.clone();
        recipe.optim.adapter = Some(ADAPTER);
        recipe.optim.trained_units = Some(n_trained);
        assert_eq!(crate::resolve(recipe, 100).is_ok(), is_valid, "{n_trained}");
    }
    for adapter in [Adapter { rank: 0, ..ADAPTER }, Adapter { alpha: 0.0, ..ADAPTER }] {
        let mut recipe = plan.recipe.clone();
        recipe.optim.adapter = Some(adapter);
        assert!(crate::resolve(recipe, 100).is_err(), "{adapter:?}");
    }
    assert!(with_adapters(&plan).check_random_start().is_err(), "random weights would stay");
}
