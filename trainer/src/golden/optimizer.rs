//! Three steps of each optimizer with gradients that shrink from one to the next.

use burn_tensor::Device;
use networks::head::mlp::Mlp;
use networks::head::projection::{Normalizes, Projection};
use networks::unit::Unit;
use ranks::fixed::FixedPoint;
use ranks::topology::Topology;

use super::Golden;
use crate::optim::state::UnitShard;
use crate::optim::{AdamW, Adaptation, Clip, ClipRule, Optimizer, RateRule, Rule, Sgd};
use crate::schedule::ScheduledValues;

/// Checks the steps of `unit` from the golden parameters that begin with `prefix`, with the
/// learning rates and weight decays of `schedule`.
fn check(golden: &Golden, prefix: &str, unit: &dyn Unit, rule: Rule, schedule: [(f64, f64); 3]) {
    let adaptation = match rule {
        Rule::Sgd(sgd) => sgd.adaptation,
        Rule::AdamW(_) => None,
    };
    // LARC decays every parameter whose rate it adapts.
    let decays_vectors = adaptation.is_some_and(|adaptation| adaptation.rule == RateRule::Larc);
    let optimizer = Optimizer { rule, clip_norm: 0.0, clip: ClipRule::PerTensor, decays_vectors };
    let device = Device::flex();
    let mut shards = [UnitShard::init(unit, 0, Topology::SINGLE_RANK, optimizer.moments(), &device)];
    shards[0].weights = golden.flat(&format!("{prefix}param"), &shards[0]).into();
    for (step, (lr, weight_decay)) in schedule.into_iter().enumerate() {
        let scheduled_values = ScheduledValues { step: step as u64, lr, weight_decay };
        let grads = vec![golden.flat(&format!("{prefix}grad_{step}"), &shards[0])];
        let norms = optimizer.norms(&shards, &grads, &[0], &scheduled_values).unwrap();
        let squares: Vec<f64> =
            norms.squares().iter().map(|square| FixedPoint::from_limbs(&square.limbs())).collect();
        let norms = norms.with_squares(&squares);
        optimizer.step(&mut shards, grads, Clip::Norms(&norms), &scheduled_values, vec![Vec::new()]);
        golden.assert_params(&format!("{prefix}after_{step}"), &shards[0], shards[0].weights.values(), 1e-6);
    }
}

#[test]
fn adamw_equals_pytorch() {
    let unit = Mlp { name: ".mlp".into(), input: 12, hidden: 10, output: 6, init_std: 0.02 };
    let rule = Rule::AdamW(AdamW { betas: [0.9, 0.95] });
    check(&Golden::open("adamw"), "", &unit, rule, [(1e-2, 0.04), (3e-2, 0.1), (2e-2, 0.4)]);
}

#[test]
fn sgd_equals_pytorch() {
    let unit = Projection {
        name: "mlp".into(),
        widths: vec![12, 10, 6],
        normalizes: Normalizes::Nothing,
        has_biases: true,
    };
    let lars = Adaptation { trust: 0.02, rule: RateRule::Lars };
    let larc = Adaptation { trust: 0.02, rule: RateRule::Larc };
    for (name, nesterov, adaptation) in [
        ("sgd", false, None),
        ("nesterov", true, None),
        ("lars", false, Some(lars)),
        ("larc", false, Some(larc)),
    ] {
        let rule = Rule::Sgd(Sgd { momentum: 0.9, nesterov, adaptation });
        let golden = Golden::open("descent");
        let schedule = [(1e-1, 0.04), (3e-1, 0.1), (2e-1, 0.4)];
        check(&golden, &format!("{name}."), &unit, rule, schedule);
    }
}
