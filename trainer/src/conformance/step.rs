//! The step itself: [`Trainer::gradients`] against one whole autodiff graph that knows no slices, no tape, no order
//! of gathers and no reductions.

use std::collections::BTreeMap;

use augment::Batch;
use burn_tensor::{DType, Device, Distribution, Tensor};
use kernels::device::host::to_host;
use networks::backbone::Readout;
use networks::drop_path::Drawing;
use networks::features::{Features, Outputs, by_image};
use networks::head::{Head, On, Reads};
use networks::leaves::Leaves;
use networks::unit::{Context, Draws, StatSets, Unit};
use ranks::communicator::Comm;
use ranks::peers::Peers;

use super::{BATCH, batch, pair, plans};
use crate::bench::compare::difference;
use crate::method::{BatchOutputs, Method};
use crate::optim::state::UnitShard;
use crate::step::Trainer;
use crate::{Plan, schedule::Knobs};

/// A network whose batch goes through at once.
struct Whole<'a> {
    plan: &'a Plan,
    backbone: Vec<Box<dyn Unit>>,
    heads: Vec<Head>,
    method: Box<dyn Method>,
    shards: Vec<UnitShard>,
    step: u64,
}

impl Whole<'_> {
    /// Images in the order of their micro-batches.
    fn images(&self) -> Vec<usize> {
        let n = self.plan.n_micro_batches();
        (0..n).flat_map(|number| (number..BATCH).step_by(n)).collect()
    }

    fn input(&self, batch: &Batch, sizes: &[usize]) -> Vec<Features> {
        let groups = self.method.views().groups();
        let of_size = |size: &usize| {
            let views: Vec<&[u8]> =
                self.images().iter().map(|image| batch.samples[*image].groups[*size].as_slice()).collect();
            let size_px = groups[*size].size_px as usize;
            self.plan.pixel_input().features(&views, size_px, &Device::flex())
        };
        sizes.iter().map(of_size).collect()
    }

    /// Features and heads of the views of `sizes` for the parameters `leaves`, a tensor for the whole batch each.
    fn outputs(
        &self,
        input: Vec<Features>,
        sizes: &[usize],
        leaves: &[Leaves<'_>],
        draws: bool,
        on: On,
    ) -> Outputs {
        let sets = self.method.stat_sets().of(sizes);
        let views = self.method.views().groups();
        let drawing = Drawing {
            seed: self.plan.recipe.seed,
            step: self.step,
            n_views: sizes.iter().map(|size| views[*size].n_views).collect(),
        };
        let mut groups = input;
        for (number, (unit, leaves)) in self.backbone.iter().zip(leaves).enumerate() {
            let positions = self.images().into_iter().map(|image| image as u64);
            let drawn = match draws {
                true => drawing.draw(number, unit.drop_path(), positions),
                false => Draws::default(),
            };
            groups = through(unit.as_ref(), groups, leaves, &drawn, &sets);
        }
        let mut heads: BTreeMap<&'static str, Vec<Features>> = BTreeMap::new();
        let mut leaves = leaves[self.backbone.len()..].iter();
        for head in &self.heads {
            let leaves: Vec<&Leaves<'_>> = leaves.by_ref().take(head.units.len()).collect();
            if on == On::Both && head.on == On::Student {
                continue;
            }
            let mut given: Vec<Features> = match head.reads {
                Reads::Pooled => groups.iter().map(Features::pooled).collect(),
                Reads::Patches => groups.iter().map(Features::patches).collect(),
                Reads::Head(name) => heads[name].clone(),
            };
            let sets = self.method.head_stat_sets().of(sizes);
            for (unit, leaves) in head.units.iter().zip(leaves) {
                given = through(unit.as_ref(), given, leaves, &Draws::default(), &sets);
            }
            heads.insert(head.name, given);
        }
        let by_view = |groups: Vec<Features>| groups.iter().map(|group| by_image(group, BATCH)).collect();
        let heads = heads.into_iter().map(|(name, groups)| (name, by_view(groups))).collect();
        Outputs { n_images: BATCH, features: groups, heads }
    }

    /// What the student's head `name` makes of vectors.
    fn score(&self, name: &str, x: Tensor<3>) -> Tensor<3> {
        let [n, v, d] = x.dims();
        let mut given = vec![Features::vectors(x.reshape([n * v, 1, d]))];
        let mut shards = self.shards[self.backbone.len()..].iter();
        for head in &self.heads {
            for (unit, shard) in head.units.iter().zip(shards.by_ref().take(head.units.len())) {
                if head.name == name {
                    let leaves = Leaves::new(&shard.layout, &constrained(unit.as_ref(), shard), false);
                    given = through(unit.as_ref(), given, &leaves, &Draws::default(), &StatSets::joint(1));
                }
            }
        }
        by_image(&given[0], n)
    }

    /// The outputs of each micro-batch.
    fn cut(&self, whole: &Outputs) -> Vec<Outputs> {
        let n = self.plan.n_micro_batches();
        let rows = |x: &Tensor<3>, number: usize| {
            let [b, _, _] = x.dims();
            x.clone().slice(number * b / n..(number + 1) * b / n)
        };
        let of_number = |number: usize| Outputs {
            n_images: BATCH / n,
            features: whole.features.iter().map(|group| group.with(rows(&group.x, number))).collect(),
            heads: whole
                .heads
                .iter()
                .map(|(name, sizes)| (*name, sizes.iter().map(|x| rows(x, number)).collect()))
                .collect(),
        };
        (0..n).map(of_number).collect()
    }

    /// Mean loss of the batch, and the gradients of all units.
    fn gradients(&self, batch: &Batch, knobs: &Knobs) -> (f64, Vec<Tensor<1>>) {
        let comm = Comm::solo();
        let follow = |follower: crate::method::Follower| {
            // Units of the student alone are passed over.
            let weights = |shard: &UnitShard| shard.follower(follower.name).unwrap_or(&shard.student).clone();
            let leaves: Vec<_> =
                self.shards.iter().map(|shard| Leaves::new(&shard.layout, &weights(shard), false)).collect();
            let input = self.input(batch, &follower.sees);
            self.cut(&self.outputs(input, &follower.sees, &leaves, false, On::Both))
        };
        let followers: Vec<_> = self.method.followers().into_iter().map(follow).collect();
        let sees = self.method.student_sees();
        let student = |track| {
            let heads = self.heads.iter().flat_map(|head| &head.units);
            let units = self.backbone.iter().chain(heads);
            let leaves: Vec<_> = units
                .zip(&self.shards)
                .map(|(unit, shard)| Leaves::new(&shard.layout, &constrained(unit.as_ref(), shard), track))
                .collect();
            let mut input = self.input(batch, &sees);
            if track {
                input.iter_mut().for_each(|group| group.x = group.x.clone().autodiff());
            }
            let outputs = self.outputs(input, &sees, &leaves, true, On::Student);
            (leaves, self.cut(&outputs))
        };
        let (_, plain) = student(false);
        let (leaves, tracked) = student(true);
        let score = |name: &str, x: Tensor<3>| self.score(name, x);
        let outputs = BatchOutputs { student: &plain, followers: &followers, score: &score };
        let peers = Peers::new(&comm, self.plan.n_micro_batches());
        let prepared = self.method.prepare(&outputs, knobs.step, peers).unwrap();
        let losses = tracked.iter().enumerate().map(|(number, outputs)| prepared.of(number, outputs).loss);
        let loss = losses.reduce(|a, b| a + b).unwrap() / self.plan.n_micro_batches() as f64;
        let value = f64::from(loss.clone().inner().into_scalar::<f32>());
        let mut grads = loss.backward();
        (value, leaves.iter().map(|leaves| leaves.gradient(&mut grads)).collect())
    }
}

/// The student's weights, where its method keeps them.
fn constrained(unit: &dyn Unit, shard: &UnitShard) -> Tensor<1> {
    let mut flat = shard.student.clone();
    for (param, values) in unit.constrain(&Leaves::new(&shard.layout, &flat, false)) {
        let at = shard.layout.position(&param).unwrap();
        flat = flat.slice_assign([shard.layout.params[at].range()], values);
    }
    flat
}

/// All stages of a unit: the sums of the whole batch are its totals.
fn through(
    unit: &dyn Unit,
    mut groups: Vec<Features>,
    leaves: &Leaves<'_>,
    draws: &Draws,
    sets: &StatSets,
) -> Vec<Features> {
    let mut totals = Vec::new();
    for stage in 0..unit.n_stages() {
        let cx = Context { leaves, draws, totals: &totals, sets, compute: DType::F32 };
        let given = unit.forward(stage, groups, &cx);
        (groups, totals) = (given.features, given.sums);
    }
    groups
}

/// Roundings of the weights that are tried.
pub(super) const ROUNDINGS: u64 = 4;

/// Every weight moved by up to half of what f32 can tell apart. Where gradients follow by more than is allowed, their own
/// rounding is larger: behind normalizations over few cells it can be.
pub(super) fn rounded(shards: &[UnitShard], seed: u64) -> Vec<UnitShard> {
    let device = Device::flex();
    device.seed(seed);
    let mut shards = shards.to_vec();
    for shard in &mut shards {
        let half = Distribution::Uniform(-6e-8, 6e-8);
        shard.student = shard.student.clone() * (Tensor::random(shard.student.dims(), half, &device) + 1.0);
    }
    shards
}

fn check(plan: &Plan, number: u64) {
    let mut trainer: Trainer = plan.trainer(Comm::solo(), &Device::flex()).unwrap();
    // A step ahead the followers are no longer the student.
    trainer.step(&batch(plan, 0), &plan.schedules().at(number - 1)).unwrap();
    let knobs = plan.schedules().at(number);
    let batch = batch(plan, number);
    let given = trainer.gradients(&batch, &knobs, &mut |_| {}).unwrap();
    let mut method = plan.method().unwrap();
    method.load_state(&trainer.state.method.state()).unwrap();
    let mut whole = Whole {
        plan,
        backbone: plan.recipe.model.units(Readout::All),
        heads: method.heads(),
        method,
        shards: trainer.state.shards.clone(),
        step: trainer.state.step,
    };
    let (loss, grads) = whole.gradients(&batch, &knobs);
    let of_step = given.loss().unwrap();
    assert!((of_step - loss).abs() <= 1e-5 * loss.abs(), "{}: loss {of_step}, {loss}", pair(plan));
    let expected: Vec<Vec<f32>> = grads.into_iter().map(to_host).collect();
    let units = trainer.state.shards.iter().map(|shard| &shard.layout.name);
    let worst = |given: &[Vec<f32>]| -> Vec<f64> {
        expected.iter().zip(given).map(|(expected, given)| difference(expected, given)).collect()
    };
    let given: Vec<Vec<f32>> = given.shards().iter().map(|shard| to_host(shard.clone())).collect();
    let mut allowed = vec![1e-4; expected.len()];
    if worst(&given).iter().any(|worst| *worst > 1e-4) {
        for draw in 0..ROUNDINGS {
            whole.shards = rounded(&trainer.state.shards, draw);
            let moved: Vec<Vec<f32>> = whole.gradients(&batch, &knobs).1.into_iter().map(to_host).collect();
            allowed =
                allowed.into_iter().zip(worst(&moved)).map(|(a, moved)| f64::max(a, 2.0 * moved)).collect();
        }
    }
    for (((unit, worst), allowed), expected) in units.zip(worst(&given)).zip(allowed).zip(&expected) {
        assert!(expected.iter().any(|value| *value != 0.0), "{}: {unit} has no gradient", pair(plan));
        assert!(worst <= allowed, "{}: {unit}: {worst} of the largest, {allowed} allowed", pair(plan));
    }
}

/// One batch, several micro-batches, graphs kept and recomputed, on one worker and on two.
#[test]
fn gradients_equal_one_whole_graph() {
    for overrides in [
        &["optim.micro_batches=1"][..],
        &["optim.micro_batches=1", "run.workers=2", "run.keep=0"],
        &["optim.micro_batches=4"],
        &["optim.micro_batches=4", "run.workers=2"],
        &["optim.micro_batches=4", "run.keep=1"],
    ] {
        for plan in plans(overrides) {
            check(&plan, 5);
        }
    }
}
