//! AdamW (Loshchilov and Hutter 2019).
//!
//! ```text
//! θ ← θ · (1 - η·λ)                                  η the rate of the parameter, λ = 0 where it is not decayed
//! m ← β₁ m + (1 - β₁) g      v ← β₂ v + (1 - β₂) g²   g after clipping
//! θ ← θ - η / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)
//! θ_F ← d θ_F + (1 - d) θ                             for every follower, d its decay
//! ```

use burn_tensor::Tensor;
use rayon::prelude::*;

use super::clip::{ClipNorms, ClipRule};
#[cfg(feature = "cube")]
use super::cube;
use super::state::{Segment, UnitShard};
use super::update::{Constants, Update};
use super::{host, tensors};
use crate::device::host::is_host;
use crate::schedule::Knobs;

/// AdamW's constants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay rates of the two moments.
    pub betas: [f64; 2],
    /// Largest norm of a clip group; zero for no clipping.
    pub clip_norm: f64,
    /// What a clip group is.
    pub clip: ClipRule,
}

impl AdamW {
    /// Names of its moments in checkpoints.
    pub const MOMENTS: [&'static str; 2] = ["exp_avg", "exp_avg_sq"];

    /// Updates every shard and its followers, whose decays are `decays` by name. `grads` are this rank's shards of the
    /// mean gradients.
    pub fn step(
        &self,
        shards: &mut [UnitShard],
        grads: Vec<Tensor<1>>,
        norms: &ClipNorms,
        knobs: &Knobs,
        decays: &[(&'static str, f64)],
    ) {
        let update = |(unit, (shard, grad)): (usize, (&mut UnitShard, Tensor<1>))| {
            let on_host = is_host(&shard.student);
            let frozen = shard.layout.params.iter().any(|slot| knobs.step < slot.spec.frozen_steps);
            if !frozen {
                shard.n_updates += 1;
                let constants = self.update_of(shard, unit, norms, knobs);
                match on_host {
                    true => host::update(shard, &grad, constants),
                    #[cfg(feature = "cube")]
                    false if cube::is_cube(&grad) => return cube::update(shard, grad, constants, decays),
                    false => tensors::update(shard, grad, constants),
                }
            }
            match on_host {
                true => host::follow(shard, decays),
                false => tensors::follow(shard, decays),
            }
        };
        // A device has one queue, which several threads would only make them wait for.
        match shards.first().is_some_and(|shard| is_host(&shard.student)) {
            true => shards.par_iter_mut().zip(grads).enumerate().for_each(update),
            false => shards.iter_mut().zip(grads).enumerate().for_each(update),
        }
    }

    fn update_of(&self, shard: &UnitShard, unit: usize, norms: &ClipNorms, knobs: &Knobs) -> Update {
        let t = shard.n_updates as i32;
        let [beta1, beta2] = self.betas;
        let constants = |segment: Segment<'_>| {
            let spec = &segment.slot.spec;
            let lr = knobs.lr * spec.lr_scale;
            let decay = if spec.decay { lr * knobs.weight_decay } else { 0.0 };
            let constants = Constants {
                shrink: (1.0 - decay) as f32,
                clip: norms.factor(unit, segment.param, self.clip_norm),
                beta1: beta1 as f32,
                beta2: beta2 as f32,
                rate: (lr / (1.0 - beta1.powi(t))) as f32,
                root: (1.0 / (1.0 - beta2.powi(t)).sqrt()) as f32,
            };
            (segment.start..segment.end, constants)
        };
        shard.segments().map(constants).collect()
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Device, Distribution};
    use proptest::prelude::*;

    use super::*;
    use crate::comm::topology::Topology;
    use crate::device::host::to_host;
    use crate::model::head::mlp::Mlp;
    use crate::model::head::prototypes::Prototypes;
    use crate::model::unit::Unit;
    use crate::ops::twin::devices;

    /// The update that `device` makes by tensors or by a kernel.
    fn update_there(shard: &mut UnitShard, grad: Tensor<1>, update: Update) {
        #[cfg(feature = "cube")]
        if cube::is_cube(&grad) {
            return cube::update(shard, grad, update, &DECAYS);
        }
        tensors::update(shard, grad, update);
        tensors::follow(shard, &DECAYS);
    }

    const DECAYS: [(&str, f64); 2] = [("teacher", 0.9), ("past", 0.0)];

    /// A unit's updates on the host and on `device`, and the norms of both; a shard that somebody holds stays as it is.
    fn check(unit: &dyn Unit, seed: u64, clip_norm: f64, topology: Topology, device: &Device) {
        let optimizer = AdamW { betas: [0.9, 0.99], clip_norm, clip: ClipRule::PerTensor };
        let knobs = Knobs { step: 0, lr: 0.01, weight_decay: 0.1, teacher_decay: 0.9 };
        let init = |device: &Device| {
            let names = ["teacher", "past"];
            UnitShard::init(unit, seed, topology, &names, &AdamW::MOMENTS, device)
        };
        let (mut here, mut there) = (init(&Device::flex()), init(device));
        assert_eq!(unit.layout(3).padded / 3, here.len());
        // What pads a unit has no gradient.
        let n_real = here.segments().last().map_or(0, |segment| segment.end);
        let is_real: Vec<f32> = (0..here.len()).map(|i| f32::from(u8::from(i < n_real))).collect();
        let is_real = Tensor::<1>::from_floats(is_real.as_slice(), &Device::flex());
        for step in 0..3 {
            Device::flex().seed(seed + step);
            let normal = Distribution::Normal(0.0, 1.0);
            let grad = Tensor::<1>::random([here.len()], normal, &Device::flex()) * is_real.clone();
            let sent = grad.clone().to_device(device);
            let shards = [here.clone()];
            let norms =
                ClipNorms::of(ClipRule::PerTensor, &shards, std::slice::from_ref(&grad), &[0]).unwrap();
            let squares: Vec<f64> =
                norms.squares.iter().map(|s| crate::comm::fixed::Fixed::from_limbs(&s.limbs())).collect();
            let by_device = super::super::clip::on_device_for_tests(&shards, std::slice::from_ref(&sent));
            for (a, b) in squares.iter().zip(by_device) {
                assert!((a - b).abs() <= 1e-5 * a.abs(), "{a} {b}");
            }
            let norms = norms.agreed(&squares);
            here.n_updates += 1;
            there.n_updates += 1;
            let update = optimizer.update_of(&here, 0, &norms, &knobs);
            host::update(&mut here, &grad, update.clone());
            host::follow(&mut here, &DECAYS);
            // As a checkpoint holds it.
            let held = (step == 1).then(|| (there.student.clone(), to_host(there.student.clone())));
            update_there(&mut there, sent, update);
            if let Some((held, before)) = held {
                assert_eq!(to_host(held), before);
            }
        }
        for ((_, a), (_, b)) in here.buffers().zip(there.buffers()) {
            for (a, b) in to_host(a.clone()).iter().zip(to_host(b.clone())) {
                assert!((a - b).abs() <= 1e-6 + 1e-5 * a.abs(), "{a} {b}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        /// All ways of updating are one formula: on the host in one pass, by tensor operations, by a kernel.
        #[test]
        fn every_device_updates_like_the_host(seed in 0u64..1000, clip_norm in 0.0..2.0f64, rank in 0usize..3) {
            let mlp = Mlp { name: "mlp".into(), input: 8, hidden: 12, output: 6, init_std: 0.1 };
            let last = Prototypes {
                name: "last".into(), input: 6, count: 20, trains_gain: true, frozen_steps: 0,
            };
            let head: [&dyn Unit; 2] = [&mlp, &last];
            let topology = Topology { rank, world_size: 3, group_size: 3 };
            for (unit, device) in head.into_iter().flat_map(|unit| devices().into_iter().map(move |d| (unit, d))) {
                check(unit, seed, clip_norm, topology, &device);
            }
        }
    }
}
