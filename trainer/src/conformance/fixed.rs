//! Backbones of which only the last units are trained: the others keep their weights, and the
//! trained ones have the gradients that they have where all are trained.

use burn_tensor::Device;
use kernels::device::host::to_host;
use ranks::communicator::Communicator;

use super::methods::{Trained, first_moments, merge_ranks, on_ranks, resume_newest, save, take_steps, train};
use super::{batch, pair, plans};
use crate::Plan;
use crate::bench::compare::difference;
use crate::method::network::{NetworkSpec, UpdateRule};
use crate::step::Trainer;

/// Number of units that are trained.
const N_TRAINED: usize = 2;

/// Setting that trains as many.
const LAST_UNITS: &str = "optim.trained_units=2";

/// Largest difference of a gradient, relative to the largest of its unit.
const TOLERANCE: f64 = 1e-5;

/// Returns the plans of all backbones, each with its first method.
fn plan_by_backbone(overrides: &[&str]) -> Vec<Plan> {
    let mut chosen: Vec<Plan> = Vec::new();
    for plan in plans(overrides) {
        if chosen.iter().all(|other| other.recipe.model != plan.recipe.model) {
            chosen.push(plan);
        }
    }
    chosen
}

/// Returns the specification of the trained network of `plan`.
fn trained_network(plan: &Plan) -> NetworkSpec {
    let networks = plan.method().unwrap().networks();
    networks.into_iter().find(|network| network.update_rule == UpdateRule::Gradient).unwrap()
}

/// Creates the trainer of `plan` on one rank.
fn trainer(plan: &Plan) -> Trainer {
    plan.trainer(Communicator::solo(), &Device::flex()).unwrap()
}

/// Returns the gradients of the next step of `trainer`, by unit.
fn gradients(plan: &Plan, trainer: &Trainer) -> Vec<Vec<f32>> {
    let scheduled_values = plan.schedules().at(5);
    let gradients = trainer.gradients(&batch(plan, 5), &scheduled_values, &mut |_| {}).unwrap();
    gradients.shards().iter().map(|shard| to_host(shard.clone())).collect()
}

/// Copies step, weights and the state of the method.
fn copy_state(from: &Trainer, to: &mut Trainer) {
    to.state.step = from.state.step;
    to.state.method.load_state(&from.state.method.state()).unwrap();
    for (network, source) in to.state.networks.iter_mut().zip(&from.state.networks) {
        for (shard, source) in network.shards.iter_mut().zip(&source.shards) {
            shard.weights = source.weights.clone();
        }
    }
}

#[test]
fn trained_units_have_the_gradients_of_a_whole_backbone() {
    for keep in ["run.keep=0", "run.keep=1", "run.keep=100"] {
        for (plan, last) in plan_by_backbone(&[keep]).iter().zip(&plan_by_backbone(&[keep, LAST_UNITS])) {
            let n_fixed = trained_network(plan).units(&plan.recipe.model).len() - N_TRAINED;
            let mut whole = trainer(plan);
            // After one step the averages differ from the trained network.
            whole.step(&batch(plan, 0), &plan.schedules().at(4)).unwrap();
            let mut partial = trainer(last);
            copy_state(&whole, &mut partial);
            let expected = gradients(plan, &whole);
            let actual = gradients(last, &partial);
            assert_eq!(actual.len(), expected.len());
            for (unit, (expected, actual)) in expected.iter().zip(&actual).enumerate() {
                if unit < n_fixed {
                    assert!(actual.iter().all(|value| *value == 0.0), "{unit}: {}", pair(plan));
                } else {
                    let worst = difference(expected, actual);
                    assert!(worst <= TOLERANCE, "{unit}: {worst} of the largest: {}", pair(plan));
                }
            }
        }
    }
}

/// Returns the weights of the units of `network` after a run.
fn weights<'a>(run: &'a Trained, network: &str) -> Vec<&'a [f32]> {
    let prefix = format!("{network}/");
    let mut weights = Vec::new();
    for (unit, buffer, values) in &run.buffers {
        if *buffer == "weights" && unit.starts_with(&prefix) {
            weights.push(values.as_slice());
        }
    }
    weights
}

/// Running statistics of units that are not trained follow the batches, so that only units without
/// them keep all of their weights.
#[test]
fn fixed_units_keep_their_weights() {
    for plan in plan_by_backbone(&[LAST_UNITS]) {
        let network = trained_network(&plan);
        let units = network.units(&plan.recipe.model);
        let n_fixed = units.len() - N_TRAINED;
        let before = train(&plan, 1, 0);
        let after = train(&plan, 1, 3);
        let moments = first_moments(&after);
        let weights_before = weights(&before, network.name);
        let weights_after = weights(&after, network.name);
        for (index, unit) in units.iter().enumerate() {
            let is_fixed = index < n_fixed;
            let has_moments = moments[index].iter().any(|value| *value != 0.0);
            assert_eq!(has_moments, !is_fixed, "{}: {}", unit.name(), pair(&plan));
            if !is_fixed || unit.n_stages() == 1 {
                let is_same = weights_before[index] == weights_after[index];
                assert_eq!(is_same, is_fixed, "{}: {}", unit.name(), pair(&plan));
            }
        }
    }
}

#[test]
fn runs_of_the_last_units_are_bit_identical_across_ranks_and_with_recomputed_graphs() {
    for trained in [LAST_UNITS, "optim.trained_units=1"] {
        let recomputed = plan_by_backbone(&[trained, "run.keep=0"]);
        for (plan, recomputed) in plan_by_backbone(&[trained]).iter().zip(&recomputed) {
            let one = train(plan, 1, 2);
            assert!(train(plan, 2, 2) == one, "2 ranks: {}", pair(plan));
            assert!(train(plan, 4, 2) == one, "4 ranks: {}", pair(plan));
            let mut recomputed = recomputed.clone();
            assert!(train(&recomputed, 2, 2) == one, "recomputed on 2 ranks: {}", pair(plan));
            recomputed.segment = 2;
            assert!(train(&recomputed, 2, 2) == one, "recomputed by 2 on 2 ranks: {}", pair(plan));
        }
    }
}

/// Heads alone are trained where no unit of the backbone is.
#[test]
fn resumed_runs_of_the_last_units_equal_uninterrupted_ones() {
    for n_trained in [N_TRAINED, 0] {
        let mut recipe = plans(&[]).remove(0).recipe;
        recipe.optim.trained_units = Some(n_trained);
        let plan = crate::resolve(recipe, 100).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let all = train(&plan, 1, 4);
        let first = on_ranks(&plan, 2, |plan, mut trainer| {
            let reports = take_steps(plan, &mut trainer, 2);
            save(&trainer, plan, folder.path());
            reports
        });
        for world_size in [1, 4] {
            let rest = merge_ranks(on_ranks(&plan, world_size, |plan, mut trainer| {
                assert_eq!(resume_newest(&mut trainer, folder.path()), Some(2));
                (take_steps(plan, &mut trainer, 2), trainer)
            }));
            assert_eq!([&first[0][..], &rest.reports[..]].concat(), all.reports, "{n_trained} units");
            assert!(rest.buffers == all.buffers && rest.state == all.state, "{n_trained} units");
        }
    }
}

#[test]
fn settings_that_train_nothing_or_too_much_are_refused() {
    let mut plan = plans(&[]).remove(0);
    let n_units = trained_network(&plan).units(&plan.recipe.model).len();
    for (n_trained, is_valid) in [(0, true), (n_units, true), (n_units + 1, false)] {
        plan.recipe.optim.trained_units = Some(n_trained);
        let error = crate::resolve(plan.recipe.clone(), 100).err();
        assert_eq!(error.is_none(), is_valid, "{n_trained}: {error:?}");
    }
}
