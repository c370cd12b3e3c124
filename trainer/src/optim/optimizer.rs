//! The optimizer of a run: a rule, what it is given of each parameter, and where the shards lie.

use burn_tensor::Tensor;
use kernels::device::host::is_host;
use networks::params::Role;
use ranks::EngineError;
use ranks::fixed::Fixed;
use rayon::prelude::*;

use super::adamw::{self, AdamW};
use super::clip::{ClipNorms, ClipRule};
#[cfg(feature = "cube")]
use super::cube;
use super::follow::{Decays, follow};
use super::sgd::{self, Lengths, RateRule, Sgd};
use super::state::{Segment, UnitShard};
use crate::schedule::Knobs;

/// The optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Optimizer {
    /// How a parameter moves.
    pub rule: Rule,
    /// Largest norm of a clip group; zero for no clipping.
    pub clip_norm: f64,
    /// What a clip group is.
    pub clip: ClipRule,
    /// Whether biases, gains and other vectors are decayed as well.
    pub decays_vectors: bool,
}

/// How a parameter moves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// By moments of its gradient.
    AdamW(AdamW),
    /// Along its gradient.
    Sgd(Sgd),
}

/// The lengths that an optimizer needs, squared: this rank's shares, or those of all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Norms<T = f64> {
    grads: ClipNorms<T>,
    /// Lengths of the parameters, where rates depend on them.
    params: Option<ClipNorms<T>>,
    /// Lengths of gradients and decay together, where rates depend on them.
    directions: Option<ClipNorms<T>>,
}

impl Norms<Fixed> {
    /// All squares, one after another.
    pub fn squares(&self) -> Vec<Fixed> {
        let others = self.params.iter().chain(&self.directions).flat_map(|norms| &norms.squares);
        self.grads.squares.iter().chain(others).copied().collect()
    }

    /// The norms of all ranks, whose squares are `squares`.
    pub fn agreed(self, squares: &[f64]) -> Norms {
        let mut rest = squares;
        let mut agreed = |norms: ClipNorms<Fixed>| {
            let (here, behind) = rest.split_at(norms.squares.len());
            rest = behind;
            norms.agreed(here)
        };
        Norms {
            grads: agreed(self.grads),
            params: self.params.map(&mut agreed),
            directions: self.directions.map(&mut agreed),
        }
    }
}

impl Norms {
    /// Norm of all gradients together, before clipping.
    pub fn total(&self) -> f64 {
        self.grads.total()
    }

    /// Lengths of a parameter, where rates depend on them.
    fn lengths(&self, unit: usize, param: usize) -> Option<Lengths> {
        let params = self.params.as_ref()?;
        Some(Lengths {
            param: params.length(unit, param),
            grad: self.grads.length(unit, param),
            direction: self.directions.as_ref().map_or(0.0, |directions| directions.length(unit, param)),
        })
    }
}

/// What is done to a shard in one update.
#[derive(Debug, Clone)]
enum Update {
    AdamW(adamw::Update),
    Sgd(sgd::Update),
}

impl Optimizer {
    /// Names of what it keeps for each parameter, in checkpoints.
    pub fn moments(&self) -> &'static [&'static str] {
        match self.rule {
            Rule::AdamW(_) => &AdamW::MOMENTS,
            Rule::Sgd(_) => &Sgd::MOMENTS,
        }
    }

    /// This rank's share of the norms that a step at the weight decay of `knobs` needs; `modules` has the number of each
    /// unit's module.
    ///
    /// # Errors
    /// [`EngineError::Device`] when the device of the gradients has failed.
    pub fn norms(
        &self,
        shards: &[UnitShard],
        grads: &[Tensor<1>],
        modules: &[usize],
        knobs: &Knobs,
    ) -> Result<Norms<Fixed>, EngineError> {
        let Rule::Sgd(Sgd { adaptation: Some(adaptation), .. }) = self.rule else {
            let grads = ClipNorms::of(self.clip, shards, grads, modules)?;
            return Ok(Norms { grads, params: None, directions: None });
        };
        let per_tensor = |values: &[Tensor<1>]| ClipNorms::of(ClipRule::PerTensor, shards, values, modules);
        let params: Vec<Tensor<1>> = shards.iter().map(|shard| shard.student.clone()).collect();
        let directions = match adaptation.rule {
            RateRule::Larc => None,
            RateRule::Lars => {
                let sum = |(grad, param): (&Tensor<1>, &Tensor<1>)| {
                    grad.clone() + param.clone() * knobs.weight_decay
                };
                Some(per_tensor(&grads.iter().zip(&params).map(sum).collect::<Vec<_>>())?)
            }
        };
        Ok(Norms { grads: per_tensor(grads)?, params: Some(per_tensor(&params)?), directions })
    }

    /// Updates every shard and its followers, whose decays are `decays` by name. `grads` are this rank's shards of the
    /// mean gradients.
    pub fn step(
        &self,
        shards: &mut [UnitShard],
        grads: Vec<Tensor<1>>,
        norms: &Norms,
        knobs: &Knobs,
        decays: &Decays<'_>,
    ) {
        let update = |(unit, (shard, grad)): (usize, (&mut UnitShard, Tensor<1>))| {
            let frozen = shard.layout.params.iter().any(|slot| knobs.step < slot.spec.frozen_steps);
            if frozen {
                return follow(shard, decays);
            }
            shard.n_updates += 1;
            let update = self.update_of(shard, unit, norms, knobs);
            apply(shard, grad, update, decays);
        };
        // A device has one queue, which several threads would only make them wait for.
        match shards.first().is_some_and(|shard| is_host(&shard.student)) {
            true => shards.par_iter_mut().zip(grads).enumerate().for_each(update),
            false => shards.iter_mut().zip(grads).enumerate().for_each(update),
        }
    }

    fn update_of(&self, shard: &UnitShard, unit: usize, norms: &Norms, knobs: &Knobs) -> Update {
        let of_param = |segment: &Segment<'_>| {
            let spec = &segment.slot.spec;
            let decays = spec.decay || (self.decays_vectors && spec.role != Role::Running);
            let clip = norms.grads.factor(unit, segment.param, self.clip_norm);
            (knobs.lr * spec.lr_scale, decays.then_some(knobs.weight_decay), clip)
        };
        match self.rule {
            Rule::AdamW(rule) => {
                // Their gradients are zero, and so are their moments.
                let constants = |segment: Segment<'_>| {
                    let (lr, decay, clip) = of_param(&segment);
                    let constants = rule.constants(shard.n_updates, lr, decay.unwrap_or(0.0), clip);
                    (segment.start..segment.end, constants)
                };
                Update::AdamW(shard.segments().map(constants).collect())
            }
            Rule::Sgd(rule) => {
                let constants = |segment: Segment<'_>| {
                    let (lr, decay, clip) = of_param(&segment);
                    let lengths = norms.lengths(unit, segment.param);
                    let constants = match segment.slot.spec.role {
                        Role::Running => rule.still(),
                        Role::Weight | Role::Vector => rule.constants(lr, decay, clip, lengths),
                    };
                    (segment.start..segment.end, constants)
                };
                Update::Sgd(shard.segments().map(constants).collect())
            }
        }
    }
}

/// Updates a shard where it lies; then its followers follow.
fn apply(shard: &mut UnitShard, grad: Tensor<1>, update: Update, decays: &Decays<'_>) {
    match (update, is_host(&shard.student)) {
        (Update::AdamW(update), true) => adamw::on_slices(shard, &grad, update),
        #[cfg(feature = "cube")]
        (Update::AdamW(update), false) if cube::is_cube(&grad) => {
            return cube::update(shard, grad, update, decays);
        }
        (Update::AdamW(update), false) => adamw::on_tensors(shard, grad, &update),
        (Update::Sgd(update), true) => sgd::on_slices(shard, &grad, update),
        (Update::Sgd(update), false) => sgd::on_tensors(shard, grad, &update),
    }
    follow(shard, decays);
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Device, Distribution};
    use proptest::prelude::*;

    use super::super::sgd::Adaptation;
    use super::*;
    use kernels::device::host::to_host;
    use kernels::ops::twin::devices;
    use networks::head::mlp::Mlp;
    use networks::head::projection::Projection;
    use networks::head::prototypes::Prototypes;
    use networks::unit::Unit;
    use ranks::topology::Topology;

    const DECAYS: [(&str, f64); 2] = [("teacher", 0.9), ("past", 0.0)];

    /// The update by tensor operations or by a kernel, whichever `device` has.
    fn apply_there(shard: &mut UnitShard, grad: Tensor<1>, update: Update) {
        #[cfg(feature = "cube")]
        if let (Update::AdamW(update), true) = (&update, cube::is_cube(&grad)) {
            return cube::update(shard, grad, update.clone(), &DECAYS);
        }
        match update {
            Update::AdamW(update) => adamw::on_tensors(shard, grad, &update),
            Update::Sgd(update) => sgd::on_tensors(shard, grad, &update),
        }
        follow(shard, &DECAYS);
    }

    /// A unit's updates on the host and on `device`, and the norms of both; a shard that somebody holds stays as it is.
    fn check(optimizer: Optimizer, unit: &dyn Unit, seed: u64, topology: Topology, device: &Device) {
        let knobs = Knobs { step: 0, lr: 0.01, weight_decay: 0.1, teacher_decay: 0.9 };
        let init = |device: &Device| {
            let names = ["teacher", "past"];
            UnitShard::init(unit, seed, topology, &names, optimizer.moments(), device)
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
            let norms = optimizer.norms(&shards, std::slice::from_ref(&grad), &[0], &knobs).unwrap();
            let squares: Vec<f64> = norms.squares().iter().map(|s| Fixed::from_limbs(&s.limbs())).collect();
            let by_device = super::super::clip::on_device_for_tests(&shards, std::slice::from_ref(&sent));
            // Gradients come first; lengths by layer follow.
            for (a, b) in squares.iter().zip(by_device) {
                assert!((a - b).abs() <= 1e-5 * a.abs(), "{a} {b}");
            }
            let norms = norms.agreed(&squares);
            here.n_updates += 1;
            there.n_updates += 1;
            let update = optimizer.update_of(&here, 0, &norms, &knobs);
            apply(&mut here, grad, update.clone(), &DECAYS);
            // As a checkpoint holds it.
            let held = (step == 1).then(|| (there.student.clone(), to_host(there.student.clone())));
            apply_there(&mut there, sent, update);
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
            let normalized = Projection { name: "norm".into(), widths: vec![6, 10, 4], normalizes: true };
            let head: [&dyn Unit; 3] = [&mlp, &last, &normalized];
            let topology = Topology { rank, world_size: 3, group_size: 3 };
            let sgd = |nesterov, adaptation| Rule::Sgd(Sgd { momentum: 0.9, nesterov, adaptation });
            let rules = [
                Rule::AdamW(AdamW { betas: [0.9, 0.99] }),
                sgd(true, None),
                sgd(false, Some(Adaptation { trust: 0.02, rule: RateRule::Lars })),
                sgd(false, Some(Adaptation { trust: 0.02, rule: RateRule::Larc })),
            ];
            for rule in rules {
                let optimizer = Optimizer { rule, clip_norm, clip: ClipRule::PerTensor, decays_vectors: false };
                for (unit, device) in head.into_iter().flat_map(|unit| devices().into_iter().map(move |d| (unit, d))) {
                    check(optimizer, unit, seed, topology, &device);
                }
            }
        }
    }
}
