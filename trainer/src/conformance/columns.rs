//! Methods that divide prototypes among ranks: losses, gradients and weights equal those of
//! undivided prototypes up to rounding, and have the same bits on any number of ranks with groups
//! of one size.

use std::path::Path;

use super::methods::{Trained, merge_ranks, on_ranks, resume_newest, save, take_steps, train};
use super::{pair, plans};
use crate::bench::compare::difference;
use crate::recipe::plan::RankResources;
use crate::{Plan, Recipe, TrainError};

/// Number of prototypes. Their layers can be divided among four ranks at any embedding width of the
/// examples, with and without lengths.
const N_PROTOTYPES: usize = 256;

/// Number of steps of a run.
const N_STEPS: u64 = 3;

/// Largest difference of a loss or gauge, relative to its value.
const REPORT_TOLERANCE: f64 = 2e-5;

/// Largest difference of a center or a row of a queue, relative to the largest.
const STATE_TOLERANCE: f64 = 2e-6;

/// Largest difference of a moment, relative to the largest of its unit.
const MOMENT_TOLERANCE: f64 = 2e-4;

/// Returns `plan` with prototypes that are divided among groups of `size` ranks; `None` if its
/// method cannot divide any.
pub(super) fn divided(plan: &Plan, size: usize) -> Option<Plan> {
    let mut method = serde_json::to_value(&plan.recipe.method).unwrap();
    method["prototype_group"].as_u64()?;
    method["prototype_group"] = size.into();
    for prototypes in ["/prototypes", "/patch_head/prototypes"] {
        method.pointer_mut(prototypes).into_iter().for_each(|number| *number = N_PROTOTYPES.into());
    }
    // Heads of a teacher whose file has been read.
    for head in ["head", "patch_head"] {
        let layer = format!("/teacher/heads/{head}.last_layer.weight/0");
        method.pointer_mut(&layer).into_iter().for_each(|number| *number = N_PROTOTYPES.into());
    }
    let recipe = Recipe { method: serde_json::from_value(method).unwrap(), ..plan.recipe.clone() };
    Some(crate::resolve(recipe, 100).unwrap())
}

/// Returns the plans of methods that divide prototypes, each with the first backbone of its
/// examples.
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

/// Asserts that runs are equal up to rounding. Moments are compared instead of weights: AdamW takes
/// steps of full size where gradients are nearly zero, which magnifies their rounding.
fn assert_close(a: &Trained, b: &Trained, plan: &Plan) {
    let a_reports = sorted_reports(a);
    let b_reports = sorted_reports(b);
    assert_eq!(a_reports.len(), b_reports.len(), "{}", pair(plan));
    for ((a_name, a), (b_name, b)) in a_reports.into_iter().zip(b_reports) {
        assert_eq!(a_name, b_name, "{}", pair(plan));
        let error = (a - b).abs();
        assert!(error <= REPORT_TOLERANCE * b.abs().max(1e-3), "{a_name}: {a} {b}, {}", pair(plan));
    }
    for ((name, a), (_, b)) in a.state.iter().zip(&b.state) {
        let worst = difference(b, a);
        assert!(a.len() == b.len() && worst <= STATE_TOLERANCE, "{name}: {worst}, {}", pair(plan));
    }
    for ((unit, name, a), (.., b)) in a.buffers.iter().zip(&b.buffers) {
        if *name != "exp_avg" {
            continue;
        }
        let worst = difference(b, a);
        assert!(worst <= MOMENT_TOLERANCE, "{unit} {name}: {worst} of the largest, {}", pair(plan));
    }
}

/// Returns the losses and gauges of a run, sorted by name: gauges of divided heads come last in
/// reports.
fn sorted_reports(run: &Trained) -> Vec<(&'static str, f64)> {
    let mut reports = run.reports.clone();
    reports.sort_by_key(|(name, _)| *name);
    reports
}

/// Takes a single step from the same weights, because later steps amplify rounding.
#[test]
fn step_with_divided_prototypes_equals_undivided_step() {
    for plan in dividing(&[]) {
        let undivided = train(&divided(&plan, 1).unwrap(), 2, 1);
        for (size, world_size) in [(2, 2), (2, 4), (4, 4)] {
            let run = train(&divided(&plan, size).unwrap(), world_size, 1);
            let differs = run.reports != undivided.reports || run.buffers != undivided.buffers;
            assert!(differs, "nothing was divided");
            assert_close(&run, &undivided, &plan);
        }
    }
}

#[test]
fn divided_prototypes_are_bit_identical_across_ranks_and_shard_groups() {
    let micro_batches = "optim.micro_batches=8";
    let overrides = [
        &[micro_batches][..],
        &[micro_batches, "run.keep=0"],
        &[micro_batches, "run.shard_group=2"],
        &[micro_batches, "run.shard='grad'"],
    ];
    let variants: Vec<Vec<Plan>> = overrides.iter().map(|overrides| dividing(overrides)).collect();
    // Two replicas of four ranks, of which two each have the same columns.
    let replicas = dividing(&[micro_batches, "run.shard_group=4"]);
    for (index, plan) in variants[0].iter().enumerate() {
        let two = train(&divided(plan, 2).unwrap(), 2, N_STEPS);
        for variant in &variants {
            let four = train(&divided(&variant[index], 2).unwrap(), 4, N_STEPS);
            assert!(four == two, "{}", pair(&variant[index]));
        }
        assert!(train(&divided(&replicas[index], 2).unwrap(), 8, N_STEPS) == two, "{}", pair(plan));
    }
}

/// Returns `plan` with prototypes divided as by [`divided`], and a share of masked images.
fn divided_with_masks(plan: &Plan, size: usize, share: f64) -> Plan {
    let divided = divided(plan, size).unwrap();
    let mut method = serde_json::to_value(&divided.recipe.method).unwrap();
    method["masked_share"] = share.into();
    let recipe = Recipe { method: serde_json::from_value(method).unwrap(), ..divided.recipe.clone() };
    crate::resolve(recipe, 100).unwrap()
}

/// Covers batches in which no cell is masked, and some in which few micro-batches have masked
/// cells.
#[test]
fn groups_may_have_no_masked_cells() {
    let plans = dividing(&[]);
    let masking = plans.iter().filter(|plan| plan.method().unwrap().masks().is_some());
    assert!(masking.clone().count() > 3, "methods that mask cells");
    for plan in masking {
        for share in [0.0, 0.15] {
            let divided = divided_with_masks(plan, 2, share);
            let undivided = divided_with_masks(plan, 1, share);
            let two = train(&divided, 2, 1);
            assert!(train(&divided, 4, 1) == two, "{share}: {}", pair(plan));
            assert_close(&two, &train(&undivided, 2, 1), plan);
        }
    }
}

#[test]
fn bf16_head_gathers_are_bit_identical_across_ranks() {
    for plan in dividing(&["optim.precision={head_gather='bf16'}"]) {
        let plan = divided(&plan, 2).unwrap();
        let two = train(&plan, 2, N_STEPS);
        assert!(train(&plan, 4, N_STEPS) == two, "{}", pair(&plan));
    }
}

/// Takes two steps of `plan` on `world_size` ranks from the checkpoint of step 2 in `folder`.
fn resume_run(plan: &Plan, world_size: usize, folder: &Path) -> Trained {
    merge_ranks(on_ranks(plan, world_size, |plan, mut trainer| {
        assert_eq!(resume_newest(&mut trainer, folder), Some(2));
        (take_steps(plan, &mut trainer, 2), trainer)
    }))
}

/// A run with divided prototypes resumes from its checkpoint with the same bits, and can also
/// resume without dividing them.
#[test]
fn checkpoints_do_not_depend_on_prototype_groups() {
    for plan in dividing(&[]) {
        let folder = tempfile::tempdir().unwrap();
        let grouped = divided(&plan, 2).unwrap();
        let all = train(&grouped, 2, 4);
        let first = on_ranks(&grouped, 4, |plan, mut trainer| {
            let reports = take_steps(plan, &mut trainer, 2);
            save(&trainer, plan, folder.path());
            reports
        });
        let rest = resume_run(&grouped, 2, folder.path());
        assert_eq!([&first[0][..], &rest.reports[..]].concat(), all.reports, "{}", pair(&plan));
        assert!(rest.buffers == all.buffers && rest.state == all.state, "{}", pair(&plan));
        let undivided = resume_run(&divided(&plan, 1).unwrap(), 1, folder.path());
        let a = undivided.reports[0].1;
        let b = rest.reports[0].1;
        assert!((a - b).abs() <= REPORT_TOLERANCE * b.abs(), "{a} {b}: {}", pair(&plan));
    }
}

/// Group sizes that do not divide the number of ranks are refused, and the error names the key.
#[test]
fn group_sizes_that_do_not_divide_the_ranks_are_refused() {
    let room = RankResources { n_cores: 1, n_workers: 1, bytes: f64::MAX, is_gpu: false };
    for plan in dividing(&[]) {
        for (size, world_size) in [(2, 1), (4, 2)] {
            let plan = divided(&plan, size).unwrap();
            let error = plan.for_ranks(world_size, room).unwrap_err();
            let TrainError::Recipe { reason, .. } = &error else { panic!("{error}") };
            assert!(reason.contains("method.prototype_group"), "{error}");
        }
    }
}
