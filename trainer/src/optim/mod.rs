//! AdamW (Loshchilov and Hutter 2019) and the moving-average teacher, in one pass over a flat shard.
//!
//! ```text
//! θ ← θ · (1 - η·λ)                                  λ = 0 where weight decay does not apply
//! m ← β₁ m + (1 - β₁) g      v ← β₂ v + (1 - β₂) g²   g after clipping
//! θ ← θ - η / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)
//! θ_T ← d θ_T + (1 - d) θ
//! ```

mod clip;
#[cfg(feature = "cube")]
mod cube;
mod host;
pub mod state;
mod tensors;

use rayon::prelude::*;

pub use crate::optim::clip::{ClipNorms, ClipRule};

use burn_tensor::Tensor;

use crate::device::host::is_host;
use crate::optim::state::UnitShard;
use crate::schedule::Knobs;

/// PyTorch's epsilon; Burn's default of 1e-5 is another optimizer.
const EPSILON: f32 = 1e-8;

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

/// The numbers of one update of one parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Constants {
    keep: f32,
    clip: f32,
    beta1: f32,
    beta2: f32,
    rate: f32,
    root: f32,
}

/// The numbers of one update of a shard, by ranges of it.
type Segments = Vec<(std::ops::Range<usize>, Constants)>;

impl AdamW {
    /// Updates every shard and its teacher. `grads` are this rank's parts of the mean gradients.
    pub fn step(&self, shards: &mut [UnitShard], grads: Vec<Tensor<1>>, norms: &ClipNorms, knobs: &Knobs) {
        let update = |(unit, (shard, grad)): (usize, (&mut UnitShard, Tensor<1>))| {
            let on_host = is_host(&shard.student);
            let frozen = knobs.freeze_last_layer && shard.layout.params.iter().any(|p| p.spec.last_layer);
            let decay = knobs.teacher_decay;
            let segments = (!frozen).then(|| {
                shard.adam_steps += 1;
                self.segments(shard, unit, norms, knobs)
            });
            match (on_host, segments) {
                (true, Some(segments)) => host::update(shard, &grad, segments, decay),
                (true, None) => host::move_teacher(shard, decay),
                #[cfg(feature = "cube")]
                (false, Some(segments)) if cube::is_cube(&grad) => cube::update(shard, grad, segments, decay),
                (false, Some(segments)) => tensors::update(shard, grad, segments, decay),
                (false, None) => tensors::move_teacher(shard, decay),
            }
        };
        // A device has one queue, which several threads would only make them wait for.
        match shards.first().is_some_and(|shard| is_host(&shard.student)) {
            true => shards.par_iter_mut().zip(grads).enumerate().for_each(update),
            false => shards.iter_mut().zip(grads).enumerate().for_each(update),
        }
    }

    fn segments(&self, shard: &UnitShard, unit: usize, norms: &ClipNorms, knobs: &Knobs) -> Segments {
        let t = shard.adam_steps as i32;
        let [beta1, beta2] = self.betas;
        let constants = |segment: crate::optim::state::Segment<'_>| {
            let decay = if segment.slot.spec.decay { knobs.lr * knobs.weight_decay } else { 0.0 };
            let constants = Constants {
                keep: (1.0 - decay) as f32,
                clip: norms.factor(unit, segment.param, self.clip_norm),
                beta1: beta1 as f32,
                beta2: beta2 as f32,
                rate: (knobs.lr / (1.0 - beta1.powi(t))) as f32,
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
    use crate::comm::topology::Place;
    use crate::device::host::to_host;
    use crate::model::layout::UnitLayout;
    use crate::ops::twin::devices;

    /// The update that `device` makes by tensors or by a kernel.
    fn update_there(shard: &mut UnitShard, grad: Tensor<1>, segments: Segments, decay: f64) {
        #[cfg(feature = "cube")]
        if cube::is_cube(&grad) {
            return cube::update(shard, grad, segments, decay);
        }
        tensors::update(shard, grad, segments, decay);
    }

    /// A unit's updates on the host and on `device`, and the norms of both; a shard that somebody holds stays as it is.
    fn check(unit: &dyn crate::model::unit::Unit, seed: u64, clip_norm: f64, place: Place, device: &Device) {
        let optimizer = AdamW { betas: [0.9, 0.99], clip_norm, clip: ClipRule::PerTensor };
        let knobs = Knobs {
            lr: 0.01,
            weight_decay: 0.1,
            teacher_decay: 0.9,
            teacher_temp: 0.1,
            freeze_last_layer: false,
        };
        let mut here = UnitShard::init(unit, seed, place, &Device::flex());
        let mut there = UnitShard::init(unit, seed, place, device);
        assert_eq!(UnitLayout::of(unit, 3).padded / 3, here.len());
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
            let norms = ClipNorms::of(ClipRule::PerTensor, &shards, std::slice::from_ref(&grad), 0).unwrap();
            let squares: Vec<f64> =
                norms.squares.iter().map(|s| crate::comm::fixed::Fixed::from_limbs(&s.limbs())).collect();
            let by_device = clip::on_device_for_tests(&shards, std::slice::from_ref(&sent));
            for (a, b) in squares.iter().zip(by_device) {
                assert!((a - b).abs() <= 1e-5 * a.abs(), "{a} {b}");
            }
            let norms = norms.agreed(&squares);
            here.adam_steps += 1;
            there.adam_steps += 1;
            let segments = optimizer.segments(&here, 0, &norms, &knobs);
            host::update(&mut here, &grad, segments.clone(), knobs.teacher_decay);
            // As a checkpoint holds it.
            let held = (step == 1).then(|| (there.student.clone(), to_host(there.student.clone())));
            update_there(&mut there, sent, segments, knobs.teacher_decay);
            if let Some((held, before)) = held {
                assert_eq!(to_host(held), before);
            }
        }
        for (a, b) in [
            (&here.student, &there.student),
            (&here.teacher, &there.teacher),
            (&here.exp_avg, &there.exp_avg),
            (&here.exp_avg_sq, &there.exp_avg_sq),
        ] {
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
            let head = crate::model::head::units(crate::model::head::HeadSizes {
                input: 8, hidden: 12, bottleneck: 6, prototypes: 20, init_std: 0.1,
            });
            let place = Place { rank, world_size: 3, group_size: 3 };
            for (unit, device) in head.iter().flat_map(|unit| devices().into_iter().map(move |d| (unit, d))) {
                check(unit.as_ref(), seed, clip_norm, place, &device);
            }
        }
    }
}
