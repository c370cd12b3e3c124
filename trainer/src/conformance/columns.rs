//! Methods that divide prototypes among ranks: the same losses, gradients and weights as without,
//! up to rounding, and the same bits on any number of ranks with groups of a size.

use burn_tensor::Device;

use super::methods::{Trained, joined, on_ranks, save, take, train};
use super::{pair, plans};
use crate::bench::compare::difference;
use crate::checkpoint::resume;
use crate::{Plan, Recipe};

/// Prototypes whose layers divide among four ranks with any embedding of the examples, with and
/// without lengths.
const N_PROTOTYPES: usize = 256;

/// Steps of a run.
const N_STEPS: u64 = 3;

/// Largest difference of a loss or gauge, relative to its value.
const REPORT_TOLERANCE: f64 = 2e-5;

/// Largest difference of a center or a row of a queue, relative to the largest.
const STATE_TOLERANCE: f64 = 2e-6;

/// Largest difference of a moment, relative to the largest of its unit.
const MOMENT_TOLERANCE: f64 = 2e-4;

/// Returns `plan` with prototypes that groups of `size` ranks divide; `None` if its method does not
/// divide any.
pub(super) fn divided(plan: &Plan, size: usize) -> Option<Plan> {
    let mut method = serde_json::to_value(&plan.recipe.method).unwrap();
    method["prototype_group"].as_u64()?;
    method["prototype_group"] = size.into();
    for prototypes in ["/prototypes", "/patch_head/prototypes"] {
        method.pointer_mut(prototypes).into_iter().for_each(|number| *number = N_PROTOTYPES.into());
    }
    // Heads of a teacher that has been read.
    for head in ["head", "patch_head"] {
        let layer = format!("/teacher/heads/{head}.last_layer.weight/0");
        method.pointer_mut(&layer).into_iter().for_each(|number| *number = N_PROTOTYPES.into());
    }
    let recipe = Recipe { method: serde_json::from_value(method).unwrap(), ..plan.recipe.clone() };
    Some(crate::resolve(recipe, 100).unwrap())
}

/// The plans of methods that divide prototypes, each with the first backbone of its examples.
pub(super) fn dividing(overrides: &[&str]) -> Vec<Plan> {
    let mut chosen: Vec<Plan> = Vec::new();
    for plan in plans(overrides).into_iter().filter(|plan| divided(plan, 1).is_some()) {
        if chosen.iter().all(|other| other.recipe.method != plan.recipe.method) {
            chosen.push(plan);
        }
    }
    assert!(chosen.len() > 8, "methods that divide prototypes");
    chosen
}

/// Asserts that runs are equal up to rounding. Moments follow gradients, without the steps of full
/// size that AdamW takes where these are nearly zero.
fn assert_close(a: &Trained, b: &Trained, plan: &Plan) {
    // Gauges of divided heads come last.
    let [mut of_a, mut of_b] = [a, b].map(|run| run.reports.clone());
    [&mut of_a, &mut of_b].into_iter().for_each(|reports| reports.sort_by_key(|(name, _)| *name));
    assert_eq!(of_a.len(), of_b.len(), "{}", pair(plan));
    for ((name, a), (other, b)) in of_a.into_iter().zip(of_b) {
        assert_eq!(name, other, "{}", pair(plan));
        let off = (a - b).abs();
        assert!(off <= REPORT_TOLERANCE * b.abs().max(1e-3), "{name}: {a} {b}, {}", pair(plan));
    }
    for ((name, a), (_, b)) in a.state.iter().zip(&b.state) {
        let worst = difference(b, a);
        assert!(a.len() == b.len() && worst <= STATE_TOLERANCE, "{name}: {worst}, {}", pair(plan));
    }
    for ((unit, name, a), (.., b)) in
        a.buffers.iter().zip(&b.buffers).filter(|((_, name, _), _)| *name == "exp_avg")
    {
        let worst = difference(b, a);
        assert!(worst <= MOMENT_TOLERANCE, "{unit} {name}: {worst} of the largest, {}", pair(plan));
    }
}

/// One step from the same weights: later ones multiply what rounding has changed.
#[test]
fn a_step_with_divided_prototypes_equals_one_without() {
    for plan in dividing(&[]) {
        let whole = train(&divided(&plan, 1).unwrap(), 2, 1);
        for (size, world_size) in [(2, 2), (2, 4), (4, 4)] {
            let parts = train(&divided(&plan, size).unwrap(), world_size, 1);
            assert!(parts.reports != whole.reports || parts.buffers != whole.buffers, "nothing was divided");
            assert_close(&parts, &whole, &plan);
        }
    }
}

#[test]
fn ranks_and_groups_of_shards_do_not_change_the_bits() {
    let eight = "optim.micro_batches=8";
    let overrides =
        [&[eight][..], &[eight, "run.keep=0"], &[eight, "run.shard_group=2"], &[eight, "run.shard='grad'"]];
    let variants: Vec<Vec<Plan>> = overrides.iter().map(|overrides| dividing(overrides)).collect();
    // Two replicas of four ranks, of which two each have the same columns.
    let replicas = dividing(&[eight, "run.shard_group=4"]);
    for (number, plan) in variants[0].iter().enumerate() {
        let two = train(&divided(plan, 2).unwrap(), 2, N_STEPS);
        for variant in &variants {
            let four = train(&divided(&variant[number], 2).unwrap(), 4, N_STEPS);
            assert!(four == two, "{}", pair(&variant[number]));
        }
        assert!(train(&divided(&replicas[number], 2).unwrap(), 8, N_STEPS) == two, "{}", pair(plan));
    }
}

/// Batches in which no cell is masked, and some in which few micro-batches have masked cells.
#[test]
fn groups_may_have_no_masked_cells() {
    let plans = dividing(&[]);
    let masking = plans.iter().filter(|plan| plan.method().unwrap().masks().is_some());
    assert!(masking.clone().count() > 3, "methods that mask cells");
    for plan in masking {
        for share in [0.0, 0.15] {
            let masked = |size: usize| {
                let divided = divided(plan, size).unwrap();
                let mut method = serde_json::to_value(&divided.recipe.method).unwrap();
                method["masked_share"] = share.into();
                let recipe =
                    Recipe { method: serde_json::from_value(method).unwrap(), ..divided.recipe.clone() };
                crate::resolve(recipe, 100).unwrap()
            };
            let two = train(&masked(2), 2, 1);
            assert!(train(&masked(2), 4, 1) == two, "{share}: {}", pair(plan));
            assert_close(&two, &train(&masked(1), 2, 1), plan);
        }
    }
}

/// Weights that are sent in 16 bits.
#[test]
fn rounded_transfers_do_not_know_ranks() {
    for plan in dividing(&["optim.precision={head_gather='bf16'}"]) {
        let plan = divided(&plan, 2).unwrap();
        let two = train(&plan, 2, N_STEPS);
        assert!(train(&plan, 4, N_STEPS) == two, "{}", pair(&plan));
    }
}

/// A run that divides prototypes continues from its checkpoint with the same bits, and also without
/// dividing.
#[test]
fn a_checkpoint_does_not_know_who_divides() {
    for plan in dividing(&[]) {
        let folder = tempfile::tempdir().unwrap();
        let parts = divided(&plan, 2).unwrap();
        let all = train(&parts, 2, 4);
        let first = on_ranks(&parts, 4, |plan, mut trainer| {
            let reports = take(plan, &mut trainer, 2);
            save(&trainer, plan, folder.path());
            reports
        });
        let rest_of = |plan: &Plan, world_size| {
            joined(on_ranks(plan, world_size, |plan, mut trainer| {
                let state = &mut trainer.state;
                let comm = &trainer.comm;
                let mut warn = |warning: &str| panic!("{warning}");
                let step = resume(folder.path(), u64::MAX, state, comm, &Device::flex(), &mut warn).unwrap();
                assert_eq!(step, Some(2));
                (take(plan, &mut trainer, 2), trainer)
            }))
        };
        let rest = rest_of(&parts, 2);
        assert_eq!([&first[0][..], &rest.reports[..]].concat(), all.reports, "{}", pair(&plan));
        assert!(rest.buffers == all.buffers && rest.state == all.state, "{}", pair(&plan));
        let whole = rest_of(&divided(&plan, 1).unwrap(), 1);
        let a = whole.reports[0].1;
        let b = rest.reports[0].1;
        assert!((a - b).abs() <= REPORT_TOLERANCE * b.abs(), "{a} {b}: {}", pair(&plan));
    }
}

/// Sizes that do not divide are refused with the key.
#[test]
fn groups_that_do_not_divide_are_refused() {
    let room =
        crate::recipe::plan::RankResources { n_cores: 1, n_workers: 1, bytes: f64::MAX, is_gpu: false };
    let refused = |plan: Plan, world_size| plan.over(world_size, room).unwrap_err().to_string();
    for plan in dividing(&[]) {
        for (size, world_size) in [(2, 1), (4, 2)] {
            let error = refused(divided(&plan, size).unwrap(), world_size);
            assert!(error.contains("method.prototype_group"), "{error}");
        }
    }
}
