//! Divided units: results equal those of undivided units, except for the rounding of gradients
//! where the columns of a product are divided.

use std::collections::BTreeMap;

use burn_tensor::{DType, Device};
use kernels::device::host::to_host;
use networks::backbone::Readout;
use networks::divided::{divided, numel};
use networks::tensor::{NamedTensor, joined as joined_rows};
use networks::unit::{Types, Unit};

use super::methods::{on_ranks, resume_newest, save, take_steps, train};
use super::units::{Chain, chains};
use super::{pair, plans};
use crate::bench::compare::difference;
use crate::checkpoint::{Checkpoint, resume};
use crate::method::network::UpdateRule;
use crate::optim::state::UnitShard;
use crate::recipe::plan::RankResources;
use crate::step::Trainer;
use crate::{Plan, TrainError};

/// Largest difference of a gradient, relative to the largest of its parameter.
const GRADIENT_TOLERANCE: f64 = 2e-5;

/// Largest difference of a loss, relative to its value.
const LOSS_TOLERANCE: f64 = 2e-5;

/// Returns the units of `plan`'s trained backbone, divided into parts of at most `max_numel`
/// parameters where possible.
fn divided_units(plan: &Plan, max_numel: usize) -> Vec<Box<dyn Unit>> {
    let networks = plan.method().unwrap().networks();
    let trained = networks.iter().find(|network| network.update_rule == UpdateRule::Gradient).unwrap();
    let units = trained.units_to(Readout::All, &plan.recipe.model);
    divided(units, Some(max_numel)).into_iter().map(|part| part.unit).collect()
}

/// Returns the number of parameters of the largest unit.
fn largest_numel(units: &[Box<dyn Unit>]) -> usize {
    units.iter().map(|unit| numel(unit.as_ref())).max().unwrap()
}

/// Returns bounds from just below the largest unit down to the finest division; empty for a
/// backbone that cannot be divided.
fn bounds(plan: &Plan) -> Vec<usize> {
    let undivided = largest_numel(&divided_units(plan, usize::MAX));
    let finest = largest_numel(&divided_units(plan, 1));
    if undivided == finest {
        return Vec::new();
    }
    let mut bounds = vec![undivided - 1, (2 * undivided + finest) / 3, (undivided + 2 * finest) / 3, finest];
    bounds.dedup();
    bounds.retain(|bound| *bound >= finest && *bound < undivided);
    bounds
}

/// Returns whether the method of `plan` reads levels of a network.
fn reads_levels(plan: &Plan) -> bool {
    plan.method().unwrap().networks().iter().any(|network| network.n_levels > 0)
}

/// Returns the plans of backbones that can be divided, each with its first method; and the first
/// plan whose method reads levels, which end with the last part of a divided unit.
fn dividing(overrides: &[&str]) -> Vec<Plan> {
    let mut chosen: Vec<Plan> = Vec::new();
    for plan in plans(overrides) {
        let is_new = chosen.iter().all(|other| other.recipe.model != plan.recipe.model);
        let adds_levels = reads_levels(&plan) && !chosen.iter().any(reads_levels);
        if (is_new || adds_levels) && !bounds(&plan).is_empty() {
            chosen.push(plan);
        }
    }
    assert!(chosen.len() > 4, "backbones that are divided");
    assert!(chosen.iter().any(reads_levels), "a method that reads levels");
    chosen
}

/// Returns `plan` with units of at most `bound` parameters.
fn with_bound(plan: &Plan, bound: usize) -> Plan {
    let mut plan = plan.clone();
    plan.recipe.run.max_unit_parameters = Some(bound);
    plan
}

/// Returns the gradients of all parameters of the units of `chain`.
fn gradients(chain: &Chain, types: Types, keeps_graph: bool) -> Vec<NamedTensor> {
    let flats = chain.gradients_in(types, keeps_graph).into_iter().zip(&chain.shards);
    let mut tensors = joined_rows(flats.flat_map(|(flat, shard)| shard.layout.tensors(&flat)).collect());
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    tensors
}

/// Returns the output of `chain`, by size of view.
fn outputs(chain: &Chain) -> Vec<Vec<f32>> {
    chain.output(&chain.weights()).into_iter().map(|group| to_host(group.x.flatten(0, 1))).collect()
}

/// Outputs of divided units have the same bits as those of undivided ones, and so have gradients,
/// unless columns of one product are divided.
#[test]
fn divided_units_equal_undivided_ones() {
    let mut n_equal = 0;
    let mut n_sliced = 0;
    for plan in dividing(&[]) {
        let undivided = chains(&plan).remove(0);
        let expected_outputs = outputs(&undivided);
        let expected_gradients = gradients(&undivided, Types::F32, true);
        for bound in bounds(&plan) {
            let units = divided_units(&plan, bound);
            assert!(units.len() > undivided.units.len() && largest_numel(&units) <= bound);
            let is_sliced = units.iter().flat_map(|unit| unit.params()).any(|param| param.slice.is_some());
            let divided = Chain::new(units, undivided.inputs.clone());
            assert!(outputs(&divided) == expected_outputs, "{} at {bound}", pair(&plan));
            let divided_gradients = gradients(&divided, Types::F32, true);
            let recomputed = gradients(&divided, Types::F32, false);
            assert!(recomputed == divided_gradients, "recomputed: {} at {bound}", pair(&plan));
            assert_eq!(divided_gradients.len(), expected_gradients.len());
            for (gradient, expected) in divided_gradients.iter().zip(&expected_gradients) {
                assert_eq!((&gradient.name, &gradient.shape), (&expected.name, &expected.shape));
                let worst = difference(&expected.values, &gradient.values);
                let allowed = if is_sliced { GRADIENT_TOLERANCE } else { 0.0 };
                assert!(worst <= allowed, "{}: {} at {bound}: {worst}", pair(&plan), gradient.name);
            }
            n_equal += usize::from(!is_sliced);
            n_sliced += usize::from(is_sliced);
        }
    }
    assert!(n_equal > 2 && n_sliced > 2, "{n_equal} divisions between products, {n_sliced} within");
}

/// Returns the L2 norm of `gradients - exact`.
fn rounding_error(gradients: &[NamedTensor], exact: &[NamedTensor]) -> f64 {
    let mut sum = 0.0;
    for (rounded, exact) in gradients.iter().zip(exact) {
        sum += rounded.values.iter().zip(&exact.values).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
    }
    sum.sqrt()
}

/// In bf16, gradients of divided units are as close to those in f32 as gradients of undivided ones.
#[test]
fn dividing_units_does_not_increase_rounding() {
    let types = Types::all(DType::BF16);
    for plan in dividing(&[]) {
        let undivided = chains(&plan).remove(0);
        let exact = gradients(&undivided, Types::F32, true);
        let undivided_error = rounding_error(&gradients(&undivided, types, true), &exact);
        assert!(undivided_error > 0.0, "{}", pair(&plan));
        for bound in bounds(&plan) {
            let divided = Chain::new(divided_units(&plan, bound), undivided.inputs.clone());
            let error = rounding_error(&gradients(&divided, types, true), &exact);
            assert!(
                error <= 1.3 * undivided_error,
                "{} at {bound}: {error} against {undivided_error}",
                pair(&plan)
            );
        }
    }
}

/// Returns the parameters of the unit of `shard`, in its weights or in one of its moments. Buffer 0
/// are the weights.
fn buffer_tensors(shard: &UnitShard, buffer: usize) -> Vec<NamedTensor> {
    let values = match buffer {
        0 => shard.weights.values(),
        _ => &shard.moments[buffer - 1].values,
    };
    shard.layout.tensors(&to_host(values.clone()))
}

/// Returns every buffer of every network by parameter.
fn buffers(trainer: &Trainer) -> BTreeMap<String, Vec<f32>> {
    let mut all = BTreeMap::new();
    for network in &trainer.state.networks {
        let n_buffers = 1 + network.shards[0].moments.len();
        for buffer in 0..n_buffers {
            let tensors = network.shards.iter().flat_map(|shard| buffer_tensors(shard, buffer)).collect();
            for tensor in joined_rows(tensors) {
                all.insert(format!("{}/{buffer}/{}", network.name, tensor.name), tensor.values);
            }
        }
    }
    all
}

/// Results of a single step.
struct StepResult {
    reports: Vec<(&'static str, f64)>,
    buffers_before: BTreeMap<String, Vec<f32>>,
    buffers_after: BTreeMap<String, Vec<f32>>,
}

/// Takes one step of `plan` on one rank.
fn take_one_step(plan: &Plan) -> StepResult {
    let mut results = on_ranks(plan, 1, |plan, mut trainer| {
        let buffers_before = buffers(&trainer);
        let reports = take_steps(plan, &mut trainer, 1);
        StepResult { reports, buffers_before, buffers_after: buffers(&trainer) }
    });
    results.remove(0)
}

/// Takes one step with each optimizer from the same weights. LARS and clipping need the norms of
/// whole parameters.
#[test]
fn step_with_divided_units_equals_undivided_step() {
    let rules = ["optim.algorithm=adamw", "optim.algorithm=lars"];
    for rule in rules {
        let decayed = ["optim.layer_decay=0.7", "optim.clip_norm=0.5", rule];
        for plan in dividing(if rule.ends_with("adamw") { &decayed } else { &decayed[2..] }) {
            let undivided = take_one_step(&plan);
            for bound in bounds(&plan) {
                let divided = take_one_step(&with_bound(&plan, bound));
                let same_start = divided.buffers_before == undivided.buffers_before;
                assert!(same_start, "initial weights: {} at {bound}", pair(&plan));
                for ((name, a), (_, b)) in divided.reports.iter().zip(&undivided.reports) {
                    assert!(
                        (a - b).abs() <= LOSS_TOLERANCE * b.abs().max(1e-3),
                        "{name}: {a} {b}: {}",
                        pair(&plan)
                    );
                }
                assert!(divided.buffers_after.keys().eq(undivided.buffers_after.keys()));
                for (name, expected) in &undivided.buffers_after {
                    if !name.contains("/1/") {
                        continue;
                    }
                    let worst = difference(expected, &divided.buffers_after[name]);
                    assert!(
                        worst <= 10.0 * GRADIENT_TOLERANCE,
                        "{}: {name} at {bound}: {worst}",
                        pair(&plan)
                    );
                }
            }
        }
    }
}

#[test]
fn divided_units_are_bit_identical_across_ranks() {
    for (plan, recomputed) in dividing(&[]).iter().zip(dividing(&["run.keep=0"])) {
        let bound = *bounds(plan).last().unwrap();
        let one = train(&with_bound(plan, bound), 1, 3);
        assert!(train(&with_bound(plan, bound), 4, 3) == one, "{}", pair(plan));
        let mut recomputed = with_bound(&recomputed, bound);
        assert!(train(&recomputed, 2, 3) == one, "recomputed: {}", pair(plan));
        recomputed.segment = 5;
        assert!(train(&recomputed, 2, 3) == one, "recomputed together: {}", pair(plan));
    }
}

/// A checkpoint of divided units can be read by a run with other divisions and by an export, and
/// the other way round.
#[test]
fn checkpoints_do_not_depend_on_unit_division() {
    for plan in dividing(&[]) {
        let bounds = bounds(&plan);
        let finest = with_bound(&plan, *bounds.last().unwrap());
        let coarse = with_bound(&plan, bounds[0]);
        for [from, to] in [[&finest, &plan], [&plan, &finest], [&finest, &coarse]] {
            let folder = tempfile::tempdir().unwrap();
            let saved = on_ranks(from, 4, |plan, mut trainer| {
                take_steps(plan, &mut trainer, 2);
                save(&trainer, plan, folder.path());
            });
            assert_eq!(saved.len(), 4);
            let checkpoint = Checkpoint::open(folder.path()).unwrap();
            let (network, name) = checkpoint.network(None).unwrap();
            let (backbone, _) = checkpoint.backbone(None).unwrap();
            let resumed = on_ranks(to, 1, |plan, mut trainer| {
                assert_eq!(resume_newest(&mut trainer, folder.path()), Some(2));
                let all = buffers(&trainer);
                (all, take_steps(plan, &mut trainer, 1))
            });
            let (all, next) = &resumed[0];
            for tensor in network.iter().chain(&backbone) {
                let resumed = &all[&format!("{name}/0/{}", tensor.name)];
                assert!(*resumed == tensor.values, "{}: {}", tensor.name, pair(&plan));
            }
            let same = on_ranks(from, 1, |plan, mut trainer| {
                let state = &mut trainer.state;
                let comm = &trainer.comm;
                resume(folder.path(), None, state, comm, &Device::flex(), &mut |_| {}).unwrap();
                let all = buffers(&trainer);
                (all, take_steps(plan, &mut trainer, 1))
            });
            assert!(same[0].0 == *all, "moments and weights: {}", pair(&plan));
            let a = next[0].1;
            let b = same[0].1[0].1;
            assert!((a - b).abs() <= LOSS_TOLERANCE * b.abs(), "{a} {b}: {}", pair(&plan));
        }
    }
}

/// A bound below the size of one column of a product is refused, and the error names the key and
/// the smallest bound.
#[test]
fn bounds_that_are_too_small_are_refused() {
    let room = RankResources { n_cores: 1, n_workers: 1, bytes: f64::MAX, is_gpu: false };
    for plan in dividing(&[]) {
        let finest = largest_numel(&divided_units(&plan, 1));
        let error = with_bound(&plan, finest - 1).for_ranks(1, room).unwrap_err();
        let TrainError::Recipe { reason, .. } = &error else { panic!("{error}") };
        assert!(
            reason.contains("run.max_unit_parameters") && reason.contains(&finest.to_string()),
            "{error}"
        );
    }
}
