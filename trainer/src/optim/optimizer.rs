//! The optimizer of a run: its rule, its inputs for each parameter, and the device of the shards.

use std::ops::Range;

use burn_tensor::Tensor;
use kernels::device::host::{self, is_host};
use kernels::device::readback::read_back_while;
use networks::params::Role;
use ranks::EngineError;
use ranks::fixed::FixedPoint;
use rayon::prelude::*;

use super::adamw::{self, AdamW};
use super::clip::{ClipNorms, ClipRule, Decision, QueuedNorms};
#[cfg(feature = "cube")]
use super::cube;
use super::follow::{Follower, follow_all};
#[cfg(feature = "cuda")]
use super::native;
use super::sgd::{self, ParamNorms, RateRule, Sgd};
use super::state::{Segment, UnitShard};
use crate::schedule::ScheduledValues;

/// The optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Optimizer {
    /// Update rule of a parameter.
    pub rule: Rule,
    /// Largest norm of a clip group; zero for no clipping.
    pub clip_norm: f64,
    /// Parameters that share a clip norm.
    pub clip: ClipRule,
    /// Whether biases, gains and other vectors are decayed as well.
    pub decays_vectors: bool,
}

/// Update rule of a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// Moments of the gradient, with decoupled weight decay.
    AdamW(AdamW),
    /// Gradient descent with momentum.
    Sgd(Sgd),
}

/// Squared norms that an optimizer needs: this rank's shares, or the sums over all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Norms<T = f64> {
    grads: ClipNorms<T>,
    /// Norms of the parameters, where rates depend on them.
    params: Option<ClipNorms<T>>,
    /// Norms of the sums of gradients and decay, where rates depend on them.
    directions: Option<ClipNorms<T>>,
}

/// Norms of a step whose computation is queued.
#[derive(Debug, Clone)]
pub struct QueuedStepNorms {
    grads: QueuedNorms,
    params: Option<QueuedNorms>,
    directions: Option<QueuedNorms>,
}

impl QueuedStepNorms {
    /// Returns the tensors whose values [`QueuedStepNorms::read`] needs.
    pub fn tensors(&self) -> Vec<Tensor<1>> {
        let queued = std::iter::once(&self.grads).chain(&self.params).chain(&self.directions);
        queued.filter_map(QueuedNorms::tensor).collect()
    }

    /// Returns the norms, given the values of [`QueuedStepNorms::tensors`].
    pub fn read(self, values: &mut impl Iterator<Item = Vec<f32>>) -> Norms<FixedPoint> {
        let grads = self.grads.read(values);
        let params = self.params.map(|params| params.read(values));
        let directions = self.directions.map(|directions| directions.read(values));
        Norms { grads, params, directions }
    }
}

/// Source of the clip factors of a step.
#[derive(Debug, Clone, Copy)]
pub enum Clip<'a> {
    /// Finite norms over all ranks.
    Norms(&'a Norms),
    /// Factors computed by the device, which makes no update if the step is not finite.
    Device(&'a Decision),
}

impl Norms<FixedPoint> {
    /// Squares of all norms, one after another.
    pub fn squares(&self) -> Vec<FixedPoint> {
        let others = self.params.iter().chain(&self.directions).flat_map(|norms| &norms.squares);
        self.grads.squares.iter().chain(others).copied().collect()
    }

    /// Returns the norms over all ranks, given the sums of [`Norms::squares`] over the ranks.
    pub fn with_squares(self, squares: &[f64]) -> Norms {
        let mut remaining = squares;
        Norms {
            grads: take_squares(self.grads, &mut remaining),
            params: self.params.map(|params| take_squares(params, &mut remaining)),
            directions: self.directions.map(|directions| take_squares(directions, &mut remaining)),
        }
    }
}

/// Returns `norms` over all ranks, whose squares are the first of `squares`, and removes these.
fn take_squares(norms: ClipNorms<FixedPoint>, squares: &mut &[f64]) -> ClipNorms {
    let (first, rest) = squares.split_at(norms.squares.len());
    *squares = rest;
    norms.with_squares(first)
}

impl Norms {
    /// Norm of all gradients together, before clipping.
    pub fn total(&self) -> f64 {
        self.grads.total()
    }

    /// Norms of a parameter, if its rate depends on them.
    fn param_norms(&self, unit: usize, param: usize) -> Option<ParamNorms> {
        let params = self.params.as_ref()?;
        Some(ParamNorms {
            param: params.norm(unit, param),
            grad: self.grads.norm(unit, param),
            direction: self.directions.as_ref().map_or(0.0, |directions| directions.norm(unit, param)),
        })
    }
}

/// Constants of one update of a shard.
#[derive(Debug, Clone)]
enum Update {
    AdamW(adamw::Update),
    Sgd(sgd::Update),
}

impl Optimizer {
    /// Names of the moments that are kept for each parameter, in checkpoints.
    pub fn moments(&self) -> &'static [&'static str] {
        match self.rule {
            Rule::AdamW(_) => &AdamW::MOMENTS,
            Rule::Sgd(_) => &Sgd::MOMENTS,
        }
    }

    /// Queues the computation of this rank's share of the norms that a step at the weight decay of
    /// `scheduled_values` needs; `modules` has the index of each unit's module.
    pub fn queue_norms(
        &self,
        shards: &[UnitShard],
        grads: &[Tensor<1>],
        modules: &[usize],
        scheduled_values: &ScheduledValues,
    ) -> QueuedStepNorms {
        let Rule::Sgd(Sgd { adaptation: Some(adaptation), .. }) = self.rule else {
            let grads = QueuedNorms::queue(self.clip, shards, grads, modules);
            return QueuedStepNorms { grads, params: None, directions: None };
        };
        let params: Vec<Tensor<1>> = shards.iter().map(|shard| shard.weights.values().clone()).collect();
        let directions = match adaptation.rule {
            RateRule::Larc => None,
            RateRule::Lars => {
                let mut directions = Vec::with_capacity(grads.len());
                for (grad, param) in grads.iter().zip(&params) {
                    directions.push(grad.clone() + param.clone() * scheduled_values.weight_decay);
                }
                Some(QueuedNorms::queue(ClipRule::PerTensor, shards, &directions, modules))
            }
        };
        QueuedStepNorms {
            grads: QueuedNorms::queue(ClipRule::PerTensor, shards, grads, modules),
            params: Some(QueuedNorms::queue(ClipRule::PerTensor, shards, &params, modules)),
            directions,
        }
    }

    /// Computes the norms of [`Optimizer::queue_norms`], and waits for them.
    ///
    /// # Errors
    /// [`EngineError::Device`] when the device of the gradients has failed.
    pub fn norms(
        &self,
        shards: &[UnitShard],
        grads: &[Tensor<1>],
        modules: &[usize],
        scheduled_values: &ScheduledValues,
    ) -> Result<Norms<FixedPoint>, EngineError> {
        let queued = self.queue_norms(shards, grads, modules, scheduled_values);
        let (values, ()) = read_back_while(&queued.tensors(), || ());
        Ok(queued.read(&mut values?.into_iter()))
    }

    /// Lets the device of the queued norms compute the clip factors and decide whether the update
    /// is made, so that [`Optimizer::step`] need not wait for the norms; `None` where it cannot.
    /// `losses` are `[1]` each.
    pub fn decide(&self, queued: &QueuedStepNorms, losses: Vec<Tensor<1>>) -> Option<Decision> {
        #[cfg(feature = "cuda")]
        if let Rule::AdamW(_) = self.rule {
            return queued.grads.decide(losses, self.clip_norm);
        }
        let _ = (queued, losses);
        None
    }

    /// Updates every shard, and then its followers, which are listed by unit. `grads` are this
    /// rank's shards of the mean gradients. A parameter that is frozen at this step keeps its value
    /// and its moments. Shards without moments never change, nor do their followers, which have the
    /// same weights.
    pub fn step(
        &self,
        shards: &mut [UnitShard],
        grads: Vec<Tensor<1>>,
        clip: Clip<'_>,
        scheduled_values: &ScheduledValues,
        followers: Vec<Vec<Follower<'_>>>,
    ) {
        #[cfg(feature = "cuda")]
        if let (Rule::AdamW(rule), Some(kernels)) =
            (self.rule, shards.first().and_then(|shard| native::kernels(shard.weights.values())))
        {
            let units = shards.iter_mut().enumerate();
            let segments = units
                .map(|(unit, shard)| self.native_segments(rule, shard, unit, clip, scheduled_values))
                .collect();
            let factors = match clip {
                Clip::Norms(_) => None,
                Clip::Device(decision) => Some(&decision.factors),
            };
            return native::step(&kernels, rule, shards, segments, grads, factors, followers);
        }
        let Clip::Norms(norms) = clip else { unreachable!("only the kernels above decide") };
        // A device has one queue, for which several threads would only wait.
        if shards.first().is_some_and(|shard| is_host(shard.weights.values())) {
            shards.par_iter_mut().zip(grads).zip(followers).enumerate().for_each(
                |(unit, ((shard, grad), followers))| {
                    self.update_unit(shard, unit, grad, norms, scheduled_values, followers);
                },
            );
        } else {
            for (unit, ((shard, grad), followers)) in shards.iter_mut().zip(grads).zip(followers).enumerate()
            {
                self.update_unit(shard, unit, grad, norms, scheduled_values, followers);
            }
        }
    }

    /// Updates the parameters of `shard` that are not frozen, and then its followers.
    fn update_unit(
        &self,
        shard: &mut UnitShard,
        unit: usize,
        grad: Tensor<1>,
        norms: &Norms,
        scheduled_values: &ScheduledValues,
        followers: Vec<Follower<'_>>,
    ) {
        if shard.moments.is_empty() {
            return;
        }
        let frozen = frozen_at(shard, scheduled_values.step);
        if frozen.iter().all(|frozen| *frozen) {
            return follow_all(followers, &shard.weights);
        }
        for (n_updates, frozen) in shard.n_updates.iter_mut().zip(&frozen) {
            *n_updates += u64::from(!frozen);
        }
        let update = self.update_constants(shard, unit, norms, scheduled_values);
        let frozen_values = copy_frozen_values(shard, &frozen);
        apply(shard, grad, update, &frozen_values, followers);
    }

    /// Counts an update of the parameters of `shard` that are not frozen, and returns the constants
    /// of all for the kernels for NVIDIA GPUs.
    #[cfg(feature = "cuda")]
    fn native_segments(
        &self,
        rule: AdamW,
        shard: &mut UnitShard,
        unit: usize,
        clip: Clip<'_>,
        scheduled_values: &ScheduledValues,
    ) -> Vec<kernels::native::update::Segment> {
        if shard.moments.is_empty() {
            return Vec::new();
        }
        let frozen = frozen_at(shard, scheduled_values.step);
        for (n_updates, frozen) in shard.n_updates.iter_mut().zip(&frozen) {
            *n_updates += u64::from(!frozen);
        }
        let mut segments = Vec::new();
        for segment in shard.segments() {
            let (lr, decay) = self.rate_and_decay(&segment, scheduled_values);
            let (factor, group) = match clip {
                Clip::Norms(norms) => (norms.grads.factor(unit, segment.param, self.clip_norm), 0),
                Clip::Device(decision) => (1.0, decision.groups[unit][segment.param]),
            };
            let constants =
                rule.constants(shard.n_updates[segment.param].max(1), lr, decay.unwrap_or(0.0), factor);
            segments.push(kernels::native::update::Segment {
                end: segment.end,
                shrink: constants.shrink,
                clip: constants.clip,
                group,
                rate: constants.rate,
                root: constants.root,
                is_frozen: frozen[segment.param],
            });
        }
        segments
    }

    /// Returns the rate of a parameter, and the weight decay if it is decayed.
    fn rate_and_decay(
        &self,
        segment: &Segment<'_>,
        scheduled_values: &ScheduledValues,
    ) -> (f64, Option<f64>) {
        let spec = &segment.slot.spec;
        let decays = spec.decay || (self.decays_vectors && spec.role.is_trained());
        let is_frozen = scheduled_values.step < spec.frozen_steps;
        let lr = if is_frozen { 0.0 } else { scheduled_values.lr * spec.lr_scale };
        (lr, decays.then_some(scheduled_values.weight_decay))
    }

    /// Returns the constants of an update of `shard`, which is unit `unit`.
    fn update_constants(
        &self,
        shard: &UnitShard,
        unit: usize,
        norms: &Norms,
        scheduled_values: &ScheduledValues,
    ) -> Update {
        match self.rule {
            Rule::AdamW(rule) => {
                // Running and fixed parameters have zero gradients, and so their moments are zero.
                let mut update = adamw::Update::new();
                for segment in shard.segments() {
                    let (lr, decay) = self.rate_and_decay(&segment, scheduled_values);
                    let clip = norms.grads.factor(unit, segment.param, self.clip_norm);
                    let n_updates = shard.n_updates[segment.param];
                    let constants = rule.constants(n_updates, lr, decay.unwrap_or(0.0), clip);
                    update.push((segment.start..segment.end, constants));
                }
                Update::AdamW(update)
            }
            Rule::Sgd(rule) => {
                let mut update = sgd::Update::new();
                for segment in shard.segments() {
                    let (lr, decay) = self.rate_and_decay(&segment, scheduled_values);
                    let clip = norms.grads.factor(unit, segment.param, self.clip_norm);
                    let param_norms = norms.param_norms(unit, segment.param);
                    let constants = match segment.slot.spec.role {
                        Role::Running | Role::Fixed => rule.identity_constants(),
                        Role::Weight | Role::Vector => rule.constants(lr, decay, clip, param_norms),
                    };
                    update.push((segment.start..segment.end, constants));
                }
                Update::Sgd(update)
            }
        }
    }
}

/// Returns whether each parameter of `shard` is frozen at `step` together with its moments.
fn frozen_at(shard: &UnitShard, step: u64) -> Vec<bool> {
    let slots = shard.layout.params.iter();
    slots.map(|slot| step < slot.spec.frozen_steps && !slot.spec.warms_moments).collect()
}

/// Ranges of a shard whose parameters are frozen, with their values and those of each moment.
type FrozenValues = Vec<(Range<usize>, Vec<Tensor<1>>)>;

/// Copies the values and moments of the parameters that are `frozen`.
fn copy_frozen_values(shard: &UnitShard, frozen: &[bool]) -> FrozenValues {
    let mut frozen_values = FrozenValues::new();
    for segment in shard.segments().filter(|segment| frozen[segment.param]) {
        let range = segment.start..segment.end;
        let mut values = vec![shard.weights.values().clone().slice([range.clone()])];
        for moment in &shard.moments {
            values.push(moment.values.clone().slice([range.clone()]));
        }
        frozen_values.push((range, values));
    }
    frozen_values
}

/// Updates a shard on its device, except for the `frozen` ranges, and then its followers.
fn apply(
    shard: &mut UnitShard,
    grad: Tensor<1>,
    update: Update,
    frozen: &FrozenValues,
    followers: Vec<Follower<'_>>,
) {
    match (update, is_host(shard.weights.values())) {
        (Update::AdamW(update), true) => adamw::on_slices(shard, &grad, update),
        #[cfg(feature = "cube")]
        (Update::AdamW(update), false) if frozen.is_empty() && cube::is_cube(&grad) => {
            return cube::update(shard, grad, update, followers);
        }
        (Update::AdamW(update), false) => adamw::on_tensors(shard, grad, &update),
        (Update::Sgd(update), true) => sgd::on_slices(shard, &grad, update),
        (Update::Sgd(update), false) => sgd::on_tensors(shard, grad, &update),
    }
    for (range, values) in frozen {
        let moments = shard.moments.iter_mut().map(|moment| &mut moment.values);
        for (buffer, values) in std::iter::once(shard.weights.values_mut()).chain(moments).zip(values) {
            host::assign(buffer, range.start, values);
        }
    }
    follow_all(followers, &shard.weights);
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Device, Distribution};
    use proptest::prelude::*;

    use super::super::sgd::Adaptation;
    use super::super::weights::ShardWeights;
    use super::*;
    use kernels::device::host::to_host;
    use kernels::ops::testing::devices;
    use networks::head::mlp::Mlp;
    use networks::head::projection::{Normalizes, Projection};
    use networks::head::prototypes::{Lengths, Prototypes};
    use networks::params::ParamSpec;
    use networks::tokens::Tokens;
    use networks::unit::{Context, Cost, GroupShape, StageOutput, Unit};
    use ranks::topology::Topology;

    /// A shard with two followers.
    struct FollowedShard {
        leader: UnitShard,
        followers: [ShardWeights; 2],
    }

    impl FollowedShard {
        fn new(
            unit: &dyn Unit,
            seed: u64,
            topology: Topology,
            optimizer: Optimizer,
            device: &Device,
        ) -> Self {
            let leader = UnitShard::init(unit, seed, topology, optimizer.moments(), device);
            let followers = [leader.weights.clone(), leader.weights.clone()];
            Self { leader, followers }
        }

        fn parts(&mut self) -> (&mut UnitShard, Vec<Follower<'_>>) {
            let followers = self.followers.iter_mut().zip([0.9, 0.0]);
            let followers = followers.map(|(weights, decay)| Follower { weights, decay, is_rounded: false });
            let followers = followers.collect();
            (&mut self.leader, followers)
        }

        fn buffers(&self) -> Vec<Tensor<1>> {
            let moments = self.leader.moments.iter().map(|moment| &moment.values);
            let weights = std::iter::once(&self.leader.weights).chain(&self.followers);
            weights.map(|weights| weights.values().clone()).chain(moments.cloned()).collect()
        }
    }

    /// Applies the update by tensor operations or by a kernel, whichever the device has.
    fn apply_on_device(followed: &mut FollowedShard, grad: Tensor<1>, update: Update) {
        let (shard, followers) = followed.parts();
        #[cfg(feature = "cube")]
        if let (Update::AdamW(update), true) = (&update, cube::is_cube(&grad)) {
            return cube::update(shard, grad, update.clone(), followers);
        }
        match update {
            Update::AdamW(update) => adamw::on_tensors(shard, grad, &update),
            Update::Sgd(update) => sgd::on_tensors(shard, grad, &update),
        }
        follow_all(followers, &shard.weights);
    }

    /// Compares a unit's updates and norms on the host and on `device`; a tensor that a checkpoint
    /// shares keeps its values.
    fn check(optimizer: Optimizer, unit: &dyn Unit, seed: u64, topology: Topology, device: &Device) {
        let scheduled_values = ScheduledValues { step: 0, lr: 0.01, weight_decay: 0.1 };
        let mut host_state = FollowedShard::new(unit, seed, topology, optimizer, &Device::flex());
        let mut device_state = FollowedShard::new(unit, seed, topology, optimizer, device);
        let len = host_state.leader.len();
        assert_eq!(unit.layout(3).padded / 3, len);
        // The padding of a unit has no gradient.
        let n_unpadded = host_state.leader.segments().last().map_or(0, |segment| segment.end);
        let mask: Vec<f32> = (0..len).map(|i| f32::from(u8::from(i < n_unpadded))).collect();
        let mask = Tensor::<1>::from_floats(mask.as_slice(), &Device::flex());
        for step in 0..3 {
            Device::flex().seed(seed + step);
            let normal = Distribution::Normal(0.0, 1.0);
            let grad = Tensor::<1>::random([len], normal, &Device::flex()) * mask.clone();
            let device_grad = grad.clone().to_device(device);
            let shards = [host_state.leader.clone()];
            let norms =
                optimizer.norms(&shards, std::slice::from_ref(&grad), &[0], &scheduled_values).unwrap();
            let squares: Vec<f64> =
                norms.squares().iter().map(|s| FixedPoint::from_limbs(&s.limbs())).collect();
            let device_squares =
                super::super::clip::on_device_for_tests(&shards, std::slice::from_ref(&device_grad));
            // The norms of gradients come first; those of parameters follow.
            for (a, b) in squares.iter().zip(device_squares) {
                assert!((a - b).abs() <= 1e-5 * a.abs(), "{a} {b}");
            }
            let norms = norms.with_squares(&squares);
            // As if parameters had been frozen for different times.
            for (i, n_updates) in host_state.leader.n_updates.iter_mut().enumerate() {
                *n_updates = step + 1 + i as u64 % 2;
            }
            let update = optimizer.update_constants(&host_state.leader, 0, &norms, &scheduled_values);
            let (shard, followers) = host_state.parts();
            apply(shard, grad, update.clone(), &FrozenValues::new(), followers);
            // As a checkpoint shares them.
            let shared_weights = device_state.leader.weights.values().clone();
            let before = to_host(shared_weights.clone());
            let shared_weights = (step == 1).then_some(shared_weights);
            apply_on_device(&mut device_state, device_grad, update);
            if let Some(shared_weights) = shared_weights {
                assert_eq!(to_host(shared_weights), before);
            }
        }
        for (a, b) in host_state.buffers().into_iter().zip(device_state.buffers()) {
            for (a, b) in to_host(a).iter().zip(to_host(b)) {
                assert!((a - b).abs() <= 1e-6 + 1e-5 * a.abs(), "{a} {b}");
            }
        }
    }

    /// Returns the weights of a shard and its moments.
    fn weights_and_moments(shard: &UnitShard) -> Vec<Vec<f32>> {
        let moments = shard.moments.iter().map(|moment| moment.values.clone());
        std::iter::once(shard.weights.values().clone()).chain(moments).map(to_host).collect()
    }

    /// A frozen parameter keeps its values while the others of its unit are updated, on any device,
    /// and its moments are zero until it is updated.
    #[test]
    fn parameters_are_frozen_individually() {
        let prototypes = Prototypes {
            name: "last".into(),
            input: 6,
            count: 20,
            lengths: Lengths::Gain,
            frozen_steps: 0,
            warms_moments: false,
        };
        struct FrozenGain(Prototypes);
        impl Unit for FrozenGain {
            fn name(&self) -> &str {
                self.0.name()
            }
            fn params(&self) -> Vec<ParamSpec> {
                let mut params = self.0.params();
                params.iter_mut().filter(|p| p.name == "weight_g").for_each(|p| p.frozen_steps = 2);
                params
            }
            fn forward(&self, stage: usize, groups: Vec<Tokens>, cx: &Context<'_>) -> StageOutput {
                self.0.forward(stage, groups, cx)
            }
            fn cost(&self, groups: &[GroupShape]) -> (Cost, Vec<GroupShape>) {
                self.0.cost(groups)
            }
        }
        let unit = FrozenGain(prototypes);
        for rule in [
            Rule::AdamW(AdamW { betas: [0.9, 0.99] }),
            Rule::Sgd(Sgd { momentum: 0.9, nesterov: false, adaptation: None }),
        ] {
            for device in devices() {
                let optimizer =
                    Optimizer { rule, clip_norm: 1.0, clip: ClipRule::PerTensor, decays_vectors: false };
                let mut shards =
                    [UnitShard::init(&unit, 3, Topology::SINGLE_RANK, optimizer.moments(), &device)];
                let gain = shards[0].layout.params[shards[0].layout.position("weight_g").unwrap()].range();
                for step in 0..3 {
                    let before = weights_and_moments(&shards[0]);
                    let scheduled_values = ScheduledValues { step, lr: 0.1, weight_decay: 0.1 };
                    let grads = vec![Tensor::ones([shards[0].len()], &device)];
                    let norms = optimizer.norms(&shards, &grads, &[0], &scheduled_values).unwrap();
                    let squares: Vec<f64> =
                        norms.squares().iter().map(|s| FixedPoint::from_limbs(&s.limbs())).collect();
                    optimizer.step(
                        &mut shards,
                        grads,
                        Clip::Norms(&norms.with_squares(&squares)),
                        &scheduled_values,
                        vec![Vec::new()],
                    );
                    for (before, after) in before.iter().zip(weights_and_moments(&shards[0])) {
                        let values = before.iter().zip(&after).take(shards[0].layout.numel);
                        for (i, (before, after)) in values.enumerate() {
                            let is_updated = step >= 2 || !gain.contains(&i);
                            assert_eq!(before != after, is_updated, "{rule:?} step {step}: element {i}");
                        }
                    }
                }
                assert_eq!(shards[0].n_updates, [1, 3], "{rule:?}");
            }
        }
    }

    fn sgd_rule(nesterov: bool, adaptation: Option<Adaptation>) -> Rule {
        Rule::Sgd(Sgd { momentum: 0.9, nesterov, adaptation })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        /// All implementations of an update agree: on the host in one pass, by tensor operations,
        /// by a kernel.
        #[test]
        fn every_device_updates_like_the_host(
            seed in 0u64..1000,
            clip_norm in 0.0..2.0f64,
            rank in 0usize..3,
        ) {
            let mlp = Mlp { name: "mlp".into(), input: 8, hidden: 12, output: 6, init_std: 0.1 };
            let last = Prototypes {
                name: "last".into(),
                input: 6,
                count: 20,
                lengths: Lengths::Gain,
                frozen_steps: 0,
                warms_moments: false,
            };
            let normalized = Projection {
                name: "norm".into(),
                widths: vec![6, 10, 4],
                normalizes: Normalizes::Hidden,
                has_biases: true,
            };
            let head: [&dyn Unit; 3] = [&mlp, &last, &normalized];
            let topology = Topology { rank, world_size: 3, group_size: 3, ..Topology::SINGLE_RANK };
            let rules = [
                Rule::AdamW(AdamW { betas: [0.9, 0.99] }),
                sgd_rule(true, None),
                sgd_rule(false, Some(Adaptation { trust: 0.02, rule: RateRule::Lars })),
                sgd_rule(false, Some(Adaptation { trust: 0.02, rule: RateRule::Larc })),
            ];
            for rule in rules {
                let optimizer =
                    Optimizer { rule, clip_norm, clip: ClipRule::PerTensor, decays_vectors: false };
                for unit in head {
                    for device in devices() {
                        check(optimizer, unit, seed, topology, &device);
                    }
                }
            }
        }
    }
}
