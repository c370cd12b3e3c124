//! Backbones of which only the last units are trained: the others keep their weights, and the
//! trained ones have the gradients that they have where all are trained.

use std::collections::BTreeMap;

use burn_tensor::Device;
use kernels::device::host::to_host;
use networks::params::{ParamSpec, Role};
use networks::unit::Unit;
use ranks::communicator::Communicator;

use super::methods::{Trained, check_resumed, first_moments, train};
use super::{batch, first_by_backbone, pair, plans, trained_network};
use crate::Plan;
use crate::bench::compare::difference;
use crate::step::Trainer;

/// Numbers of units that are trained, with the setting for each. Of none, heads alone are trained.
const TRAINED_UNITS: [(usize, &str); 3] =
    [(2, "optim.trained_units=2"), (1, "optim.trained_units=1"), (0, "optim.trained_units=0")];

/// Largest difference of a gradient, relative to the largest of its unit.
const TOLERANCE: f64 = 1e-5;

/// Returns the plans of all backbones, each with the first method that fits it.
fn plan_by_backbone(overrides: &[&str]) -> Vec<Plan> {
    first_by_backbone(plans(overrides))
}

/// Returns `plan` with all units trained.
fn with_all_units(plan: &Plan) -> Plan {
    let mut recipe = plan.recipe.clone();
    recipe.optim.trained_units = None;
    crate::resolve(recipe, 100).unwrap()
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
    for (n_trained, setting) in TRAINED_UNITS {
        for keep in ["run.keep=0", "run.keep=1", "run.keep=100"] {
            for last in &plan_by_backbone(&[keep, setting]) {
                check_gradients(last, n_trained);
            }
        }
    }
}

/// Compares the gradients of `last`, of which `n_trained` units of the backbone are trained, with
/// those of the same run where all are.
fn check_gradients(last: &Plan, n_trained: usize) {
    let plan = with_all_units(last);
    let n_fixed = trained_network(&plan).units(&plan.recipe.model).len() - n_trained;
    let mut whole = trainer(&plan);
    // After one step the averages differ from the trained network.
    whole.step(&batch(&plan, 0), &plan.schedules().at(4)).unwrap();
    let mut partial = trainer(last);
    copy_state(&whole, &mut partial);
    let expected = gradients(&plan, &whole);
    let actual = gradients(last, &partial);
    assert_eq!(actual.len(), expected.len());
    for (unit, (expected, actual)) in expected.iter().zip(&actual).enumerate() {
        if unit < n_fixed {
            assert!(actual.iter().all(|value| *value == 0.0), "{unit}: {}", pair(last));
        } else {
            let worst = difference(expected, actual);
            assert!(worst <= TOLERANCE, "{unit}: {worst} of the largest: {}", pair(last));
        }
    }
}

/// Returns the weights of the units of `network` after a run: those of the backbone, then those of
/// the heads.
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

/// Returns the parameters of `unit` with their values, of the weights `flat` of a run, in which
/// they follow one another in the order of their names.
fn parameters<'a>(unit: &dyn Unit, flat: &'a [f32]) -> Vec<(ParamSpec, &'a [f32])> {
    let mut specs = BTreeMap::new();
    let layout = unit.layout(1);
    for slot in &layout.params {
        specs.insert(layout.full_name(slot), slot.spec.clone());
    }
    let mut parameters = Vec::new();
    let mut rest = flat;
    for spec in specs.into_values() {
        let (values, others) = rest.split_at(spec.numel());
        parameters.push((spec, values));
        rest = others;
    }
    assert!(rest.is_empty(), "all weights of {}", unit.name());
    parameters
}

/// Running statistics of units that are not trained follow the batches; all other parameters of
/// these units keep their values, and have no moments.
#[test]
fn fixed_units_keep_their_weights() {
    for (n_trained, setting) in TRAINED_UNITS {
        let mut n_staged = 0;
        for plan in plan_by_backbone(&[setting]) {
            let network = trained_network(&plan);
            let units = network.units(&plan.recipe.model);
            let n_fixed = units.len() - n_trained;
            let before = train(&plan, 1, 0);
            let after = train(&plan, 1, 3);
            let moments = first_moments(&after);
            let weights_before = weights(&before, network.name);
            let weights_after = weights(&after, network.name);
            for (index, unit) in units.iter().enumerate() {
                let is_fixed = index < n_fixed;
                let name = format!("{}: {}", unit.name(), pair(&plan));
                let has_moments = moments[index].iter().any(|value| *value != 0.0);
                assert_eq!(has_moments, !is_fixed, "{name}");
                n_staged += usize::from(is_fixed && unit.n_stages() > 1);
                let old = parameters(unit.as_ref(), weights_before[index]);
                let new = parameters(unit.as_ref(), weights_after[index]);
                let mut has_changed = false;
                for ((spec, old), (_, new)) in old.iter().zip(&new) {
                    if spec.role == Role::Running {
                        assert_ne!(old, new, "{}: {name}", spec.name);
                    } else {
                        has_changed |= old != new;
                    }
                }
                assert_eq!(has_changed, !is_fixed, "{name}");
            }
            let heads_before = &weights_before[units.len()..];
            let heads_after = &weights_after[units.len()..];
            assert_ne!(heads_before, heads_after, "heads are trained: {}", pair(&plan));
        }
        assert!(n_staged > 0, "no fixed unit with statistics over the batch, of {n_trained} trained");
    }
}

#[test]
fn runs_of_the_last_units_are_bit_identical_across_ranks_and_with_recomputed_graphs() {
    for (_, setting) in TRAINED_UNITS {
        let recomputed = plan_by_backbone(&[setting, "run.keep=0"]);
        for (plan, recomputed) in plan_by_backbone(&[setting]).iter().zip(&recomputed) {
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

/// Covers backbones with statistics over the batch, whose running values a checkpoint has, too.
#[test]
fn resumed_runs_of_the_last_units_equal_uninterrupted_ones() {
    for (_, setting) in TRAINED_UNITS {
        for plan in plan_by_backbone(&[setting]) {
            check_resumed(&plan, &[4], |_| {});
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
