//! Divided units: the same numbers as undivided ones, but for the rounding of gradients where the
//! columns of a product are divided.

use std::collections::BTreeMap;

use burn_tensor::{DType, Device};
use kernels::device::host::to_host;
use networks::backbone::Readout;
use networks::divided::{divided, numel};
use networks::tensor::{NamedTensor, joined as joined_rows};
use networks::unit::{Types, Unit};

use super::methods::{on_ranks, save, take, train};
use super::units::{Chain, chains};
use super::{pair, plans};
use crate::Plan;
use crate::bench::compare::difference;
use crate::checkpoint::{Checkpoint, resume};
use crate::method::network::UpdateRule;
use crate::optim::state::UnitShard;
use crate::recipe::plan::RankResources;
use crate::step::Trainer;

/// Largest difference of a gradient, relative to the largest of its parameter.
const GRADIENT_TOLERANCE: f64 = 2e-5;

/// Largest difference of a loss, relative to its value.
const LOSS_TOLERANCE: f64 = 2e-5;

/// Returns the units of `plan`'s trained backbone, divided as far as `max_numel`.
fn parts(plan: &Plan, max_numel: usize) -> Vec<Box<dyn Unit>> {
    let networks = plan.method().unwrap().networks();
    let trained = networks.iter().find(|network| network.update_rule == UpdateRule::Gradient).unwrap();
    let units = trained.units_to(Readout::All, &plan.recipe.model);
    divided(units, Some(max_numel)).into_iter().map(|part| part.unit).collect()
}

fn largest(units: &[Box<dyn Unit>]) -> usize {
    units.iter().map(|unit| numel(unit.as_ref())).max().unwrap()
}

/// Bounds from just below the largest unit down to the finest division; none for a backbone that is
/// not divided.
fn bounds(plan: &Plan) -> Vec<usize> {
    let whole = largest(&parts(plan, usize::MAX));
    let finest = largest(&parts(plan, 1));
    if whole == finest {
        return Vec::new();
    }
    let mut bounds = vec![whole - 1, (2 * whole + finest) / 3, (whole + 2 * finest) / 3, finest];
    bounds.dedup();
    bounds.retain(|bound| *bound >= finest && *bound < whole);
    bounds
}

/// Plans of backbones that are divided, each with its first method.
fn dividing(overrides: &[&str]) -> Vec<Plan> {
    let mut chosen: Vec<Plan> = Vec::new();
    for plan in plans(overrides) {
        let is_new = chosen.iter().all(|other| other.recipe.model != plan.recipe.model);
        if is_new && !bounds(&plan).is_empty() {
            chosen.push(plan);
        }
    }
    assert!(chosen.len() > 4, "backbones that are divided");
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

/// Outputs of parts have the bits of the whole's. So have gradients, unless columns of one product
/// are divided.
#[test]
fn parts_compute_what_the_whole_does() {
    let mut n_equal = 0;
    let mut n_sliced = 0;
    for plan in dividing(&[]) {
        let whole = chains(&plan).remove(0);
        let output = |chain: &Chain| -> Vec<Vec<f32>> {
            chain.output(&chain.weights()).into_iter().map(|group| to_host(group.x.flatten(0, 2))).collect()
        };
        let expected = output(&whole);
        let of_whole = gradients(&whole, Types::F32, true);
        for bound in bounds(&plan) {
            let units = parts(&plan, bound);
            assert!(units.len() > whole.units.len() && largest(&units) <= bound);
            let is_sliced = units.iter().flat_map(|unit| unit.params()).any(|param| param.slice.is_some());
            let chain = Chain::new(units, whole.inputs.clone());
            assert!(output(&chain) == expected, "{} at {bound}", pair(&plan));
            let of_parts = gradients(&chain, Types::F32, true);
            assert!(
                gradients(&chain, Types::F32, false) == of_parts,
                "recomputed: {} at {bound}",
                pair(&plan)
            );
            assert_eq!(of_parts.len(), of_whole.len());
            for (part, whole) in of_parts.iter().zip(&of_whole) {
                assert_eq!((&part.name, &part.shape), (&whole.name, &whole.shape));
                let worst = difference(&whole.values, &part.values);
                let allowed = if is_sliced { GRADIENT_TOLERANCE } else { 0.0 };
                assert!(worst <= allowed, "{}: {} at {bound}: {worst}", pair(&plan), part.name);
            }
            n_equal += usize::from(!is_sliced);
            n_sliced += usize::from(is_sliced);
        }
    }
    assert!(n_equal > 2 && n_sliced > 2, "{n_equal} divisions between products, {n_sliced} within");
}

/// In bf16 gradients of parts are as near to those in f32 as gradients of the whole are.
#[test]
fn parts_round_no_more_than_the_whole() {
    let types = Types::all(DType::BF16);
    for plan in dividing(&[]) {
        let whole = chains(&plan).remove(0);
        let exact = gradients(&whole, Types::F32, true);
        let distance = |chain: &Chain| -> f64 {
            gradients(chain, types, true)
                .into_iter()
                .zip(&exact)
                .map(|(a, b)| -> f64 {
                    a.values.iter().zip(&b.values).map(|(a, b)| f64::from(a - b).powi(2)).sum()
                })
                .sum::<f64>()
                .sqrt()
        };
        let of_whole = distance(&whole);
        assert!(of_whole > 0.0, "{}", pair(&plan));
        for bound in bounds(&plan) {
            let of_parts = distance(&Chain::new(parts(&plan, bound), whole.inputs.clone()));
            assert!(of_parts <= 1.3 * of_whole, "{} at {bound}: {of_parts} against {of_whole}", pair(&plan));
        }
    }
}

/// Every buffer of every network by parameter.
fn buffers(trainer: &Trainer) -> BTreeMap<String, Vec<f32>> {
    let mut all = BTreeMap::new();
    for network in &trainer.state.networks {
        let n_buffers = 1 + network.shards[0].moments.len();
        for buffer in 0..n_buffers {
            let of_shard = |shard: &UnitShard| {
                let moments = shard.moments.iter().map(|moment| &moment.values);
                let values = std::iter::once(shard.weights.values()).chain(moments).nth(buffer).unwrap();
                shard.layout.tensors(&to_host(values.clone()))
            };
            let tensors = joined_rows(network.shards.iter().flat_map(of_shard).collect());
            all.extend(
                tensors.into_iter().map(|t| (format!("{}/{buffer}/{}", network.name, t.name), t.values)),
            );
        }
    }
    all
}

/// One step with each optimizer from the same weights, of which LARS and clipping need the lengths
/// of whole parameters.
#[test]
fn a_step_with_parts_equals_one_without() {
    let rules = ["optim.algorithm=adamw", "optim.algorithm=lars"];
    for rule in rules {
        let decayed = ["optim.layer_decay=0.7", "optim.clip_norm=0.5", rule];
        for plan in dividing(if rule.ends_with("adamw") { &decayed } else { &decayed[2..] }) {
            let step = |plan: &Plan| {
                let of_rank = on_ranks(plan, 1, |plan, mut trainer| {
                    let start = buffers(&trainer);
                    (take(plan, &mut trainer, 1), start, buffers(&trainer))
                });
                of_rank.into_iter().next().unwrap()
            };
            let (of_whole, start, whole) = step(&plan);
            for bound in bounds(&plan) {
                let (of_parts, start_of_parts, parts) = step(&with_bound(&plan, bound));
                assert!(start_of_parts == start, "initial weights: {} at {bound}", pair(&plan));
                let close = |(a, b): (&(&str, f64), &(&str, f64))| {
                    (a.1 - b.1).abs() <= LOSS_TOLERANCE * b.1.abs().max(1e-3)
                };
                assert!(
                    of_parts.iter().zip(&of_whole).all(close),
                    "{of_parts:?} {of_whole:?}: {}",
                    pair(&plan)
                );
                assert!(parts.keys().eq(whole.keys()));
                for (name, whole) in whole.iter().filter(|(name, _)| name.contains("/1/")) {
                    let worst = difference(whole, &parts[name]);
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
fn ranks_do_not_change_the_bits_of_parts() {
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

/// A checkpoint of divided units is read by a run with other ones and by an export, and the other
/// way round.
#[test]
fn checkpoints_do_not_know_how_units_are_divided() {
    for plan in dividing(&[]) {
        let bounds = bounds(&plan);
        let finest = with_bound(&plan, *bounds.last().unwrap());
        let coarse = with_bound(&plan, bounds[0]);
        for [from, to] in [[&finest, &plan], [&plan, &finest], [&finest, &coarse]] {
            let folder = tempfile::tempdir().unwrap();
            let saved = on_ranks(from, 4, |plan, mut trainer| {
                take(plan, &mut trainer, 2);
                save(&trainer, plan, folder.path());
            });
            assert_eq!(saved.len(), 4);
            let checkpoint = Checkpoint::open(folder.path()).unwrap();
            let (network, name) = checkpoint.network(None).unwrap();
            let (backbone, _) = checkpoint.backbone(None).unwrap();
            let resumed = on_ranks(to, 1, |plan, mut trainer| {
                let state = &mut trainer.state;
                let comm = &trainer.comm;
                let mut warn = |warning: &str| panic!("{warning}");
                let step = resume(folder.path(), u64::MAX, state, comm, &Device::flex(), &mut warn).unwrap();
                assert_eq!(step, Some(2));
                let all = buffers(&trainer);
                (all, take(plan, &mut trainer, 1))
            });
            let (all, next) = &resumed[0];
            for tensor in network.iter().chain(&backbone) {
                let there = &all[&format!("{name}/0/{}", tensor.name)];
                assert!(*there == tensor.values, "{}: {}", tensor.name, pair(&plan));
            }
            let same = on_ranks(from, 1, |plan, mut trainer| {
                let state = &mut trainer.state;
                let comm = &trainer.comm;
                resume(folder.path(), u64::MAX, state, comm, &Device::flex(), &mut |_| {}).unwrap();
                let all = buffers(&trainer);
                (all, take(plan, &mut trainer, 1))
            });
            assert!(same[0].0 == *all, "moments and weights: {}", pair(&plan));
            let a = next[0].1;
            let b = same[0].1[0].1;
            assert!((a - b).abs() <= LOSS_TOLERANCE * b.abs(), "{a} {b}: {}", pair(&plan));
        }
    }
}

/// A bound below what one column of a product has is refused with the key and the remedy.
#[test]
fn bounds_that_are_too_small_are_refused() {
    let room = RankResources { n_cores: 1, n_workers: 1, bytes: f64::MAX, is_gpu: false };
    for plan in dividing(&[]) {
        let finest = largest(&parts(&plan, 1));
        let error = with_bound(&plan, finest - 1).over(1, room).unwrap_err().to_string();
        assert!(error.contains("run.max_unit_parameters") && error.contains(&finest.to_string()), "{error}");
    }
}
