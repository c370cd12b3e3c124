//! Three steps of AdamW with gradients that shrink by a hundred from one to the next.

use burn_tensor::Device;

use super::Golden;
use crate::comm::fixed::Fixed;
use crate::comm::topology::Topology;
use crate::model::head::mlp::Mlp;
use crate::optim::state::UnitShard;
use crate::optim::{AdamW, ClipRule, Optimizer, Rule};
use crate::schedule::Knobs;

#[test]
fn adamw_equals_pytorch() {
    let golden = Golden::open("adamw");
    let unit = Mlp { name: ".mlp".into(), input: 12, hidden: 10, output: 6, init_std: 0.02 };
    let device = Device::flex();
    let mut shards = [UnitShard::init(&unit, 0, Topology::SOLO, &[], &AdamW::MOMENTS, &device)];
    shards[0].student = golden.flat("param", &shards[0]);
    let rule = Rule::AdamW(AdamW { betas: [0.9, 0.95] });
    let optimizer = Optimizer { rule, clip_norm: 0.0, clip: ClipRule::PerTensor, decays_vectors: false };
    for (step, (lr, weight_decay)) in [(1e-2, 0.04), (3e-2, 0.1), (2e-2, 0.4)].into_iter().enumerate() {
        let knobs = Knobs { step: step as u64, lr, weight_decay, teacher_decay: 1.0 };
        let grads = vec![golden.flat(&format!("grad_{step}"), &shards[0])];
        let norms = optimizer.norms(&shards, &grads, &[0]).unwrap();
        let squares: Vec<f64> =
            norms.squares().iter().map(|square| Fixed::from_limbs(&square.limbs())).collect();
        optimizer.step(&mut shards, grads, &norms.agreed(&squares), &knobs, &[]);
        golden.assert_params(&format!("after_{step}"), &shards[0], &shards[0].student, 1e-6);
    }
}
