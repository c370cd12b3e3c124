//! The forward passes of a step: followers without a graph, the student with what the way back needs.

use std::collections::BTreeMap;

use burn_tensor::{DType, Tensor};

use super::batch::{Groups, MicroBatch};
use super::net::Net;
use super::pass::{Passes, UnitDraws, UnitTape};
use super::tape::Gathered;
use crate::comm::engine::EngineError;
use crate::comm::prefetch::Gathers;
use crate::method::Follower;
use crate::model::features::{Outputs, by_image};
use crate::model::head::{On, Reads};
use crate::model::leaves::Leaves;
use crate::model::unit::{Context, Draws, StatSets};
use crate::optim::state::UnitShard;

/// What a forward pass works with.
#[derive(Clone, Copy)]
pub(super) struct Networks<'a> {
    pub(super) net: &'a Net,
    pub(super) shards: &'a [UnitShard],
}

/// New values of running parameters: number of the unit, name of the parameter, values.
pub(super) type Observations = Vec<(usize, String, Tensor<1>)>;

/// The student's way through the backbone.
pub(super) struct StudentPass<'a> {
    /// What it gives.
    pub(super) batches: Vec<MicroBatch>,
    /// By unit, with the gathered weights where they stay.
    pub(super) tape: Vec<(UnitTape<'a>, Option<Tensor<1>>)>,
    pub(super) observations: Observations,
}

impl<'a> Networks<'a> {
    fn gathered<'f>(&self, number: usize, flat: &'f Tensor<1>) -> Gathered<'a, 'f> {
        let unit = self.net.backbone[number].as_ref();
        Gathered { unit, layout: &self.shards[number].layout, flat }
    }

    /// What `follower` gives for the sizes of views that it sees, by micro-batch of `n_images`.
    pub(super) fn follow(
        &self,
        follower: &Follower,
        batches: &[MicroBatch],
        passes: Passes<'_>,
        gathers: &mut Gathers<'_>,
        n_images: usize,
    ) -> Result<Vec<Outputs>, EngineError> {
        let mut seen: Vec<MicroBatch> = batches.iter().map(|batch| batch.seen(&follower.sees)).collect();
        let sets = passes.sets.of(&follower.sees);
        let passes = Passes { sets: &sets, ..passes };
        for number in 0..self.net.backbone.len() {
            let flat = gathers.next_flat()?;
            seen = passes.infer(self.gathered(number, &flat), seen)?;
        }
        let features = seen.into_iter().map(|batch| in_f32(batch.joined())).collect();
        let flats: Result<Vec<_>, _> =
            (0..self.net.n_shared_head_units()).map(|_| gathers.next_flat()).collect();
        Ok(self.outputs(features, &flats?, On::Both, n_images))
    }

    /// The student through the backbone. `keeps` says whether a unit keeps its graph and its gathered weights.
    pub(super) fn forward(
        &self,
        mut batches: Vec<MicroBatch>,
        draws: &[UnitDraws],
        passes: Passes<'_>,
        gathers: &mut Gathers<'_>,
        keeps: impl Fn(usize) -> Keeps,
    ) -> Result<StudentPass<'a>, EngineError> {
        let mut tape = Vec::with_capacity(self.net.backbone.len());
        let mut observations = Vec::new();
        for (number, draws) in draws.iter().enumerate() {
            let flat = gathers.next_flat()?;
            let unit = self.gathered(number, &flat);
            let keeps = keeps(number);
            let of_unit;
            (batches, of_unit) = passes.forward(unit, batches, draws, keeps.graph, number > 0)?;
            let leaves = Leaves::new(unit.layout, &flat, false);
            let cx = Context {
                leaves: &leaves,
                draws: &Draws::default(),
                totals: &[],
                sets: passes.sets,
                compute: passes.compute,
            };
            let observed = unit.unit.observe(&of_unit.totals(), &cx);
            observations.extend(observed.into_iter().map(|(name, values)| (number, name, values)));
            tape.push((of_unit, keeps.weights.then_some(flat)));
        }
        Ok(StudentPass { batches, tape, observations })
    }

    /// Features with what the heads make of them, without a graph. `flats` are the gathered weights of the heads' units,
    /// of those that followers have too for [`On::Both`].
    pub(super) fn outputs(
        &self,
        features: Vec<Groups>,
        flats: &[Tensor<1>],
        of: On,
        n_images: usize,
    ) -> Vec<Outputs> {
        let leaves = self.leaves(flats, of, false);
        let of_batch = |features: Groups| {
            let heads = self.heads(&features, &leaves, of, n_images);
            Outputs { n_images, features, heads }
        };
        features.into_iter().map(of_batch).collect()
    }

    /// The parameters of the heads' units.
    pub(super) fn leaves<'f>(&self, flats: &'f [Tensor<1>], of: On, track: bool) -> Vec<Leaves<'a>> {
        let heads = self.net.units().filter(|unit| unit.module > 0);
        let heads = heads.filter(|unit| of == On::Student || unit.on == On::Both);
        heads
            .zip(flats)
            .map(|(unit, flat)| Leaves::new(&self.shards[unit.number].layout, flat, track))
            .collect()
    }

    /// What the heads make of `features`, by name and size of view.
    pub(super) fn heads(
        &self,
        features: &Groups,
        leaves: &[Leaves<'_>],
        of: On,
        n_images: usize,
    ) -> BTreeMap<&'static str, Vec<Tensor<3>>> {
        let (draws, sets) = (Draws::default(), StatSets::per_size(features.len()));
        let mut given = BTreeMap::<&'static str, Groups>::new();
        let mut leaves = leaves.iter();
        for head in self.net.heads.iter().filter(|head| of == On::Student || head.on == On::Both) {
            let mut groups: Groups = match head.reads {
                Reads::Pooled => features.iter().map(|group| group.pooled()).collect(),
                Reads::Patches => features.iter().map(|group| group.patches()).collect(),
                Reads::Head(name) => given.get(name).cloned().unwrap_or_default(),
            };
            for (unit, leaves) in head.units.iter().zip(leaves.by_ref()) {
                let cx = Context { leaves, draws: &draws, totals: &[], sets: &sets, compute: DType::F32 };
                groups = unit.forward(0, groups, &cx).features;
            }
            given.insert(head.name, groups);
        }
        let by_view = |groups: Groups| groups.iter().map(|group| by_image(group, n_images)).collect();
        given.into_iter().map(|(name, groups)| (name, by_view(groups))).collect()
    }
}

/// What a unit keeps until its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Keeps {
    pub(super) graph: bool,
    pub(super) weights: bool,
}

/// The same features in f32.
pub(super) fn in_f32(groups: Groups) -> Groups {
    groups.iter().map(|group| group.in_f32()).collect()
}
