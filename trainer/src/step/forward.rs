//! The forward passes of a step: followers without a graph, the student with what the way back needs.

use burn_tensor::Tensor;

use super::batch::{Groups, MicroBatch};
use super::heads::{Flats, GraphInput};
use super::net::Net;
use super::pass::{Passes, UnitDraws, UnitTape, over_groups};
use super::tape::Gathered;
use crate::comm::engine::EngineError;
use crate::comm::prefetch::Gathers;
use crate::method::Follower;
use crate::model::features::Outputs;
use crate::model::head::On;
use crate::model::leaves::Leaves;
use crate::model::unit::{Context, Draws};
use crate::optim::state::{STUDENT, UnitShard};

/// What a forward pass works with.
#[derive(Clone, Copy)]
pub(super) struct Networks<'a> {
    pub(super) net: &'a Net,
    pub(super) shards: &'a [UnitShard],
}

/// A new value of a parameter that no gradient gives.
pub(super) struct Observation {
    /// Whose it is: name of the buffer, of the student or a follower.
    pub(super) of: &'static str,
    /// Number of the unit.
    pub(super) unit: usize,
    /// Name of the parameter.
    pub(super) param: String,
    /// Its values.
    pub(super) values: Tensor<1>,
}

/// What followers give.
pub(super) struct Followed {
    /// By micro-batch.
    pub(super) outputs: Vec<Outputs>,
    pub(super) observations: Vec<Observation>,
}

/// The student's way through the backbone.
pub(super) struct StudentPass<'a> {
    /// What it gives.
    pub(super) batches: Vec<MicroBatch>,
    /// By unit, with the gathered weights where they stay.
    pub(super) tape: Vec<(UnitTape<'a>, Option<Tensor<1>>)>,
    pub(super) observations: Vec<Observation>,
}

impl<'a> Networks<'a> {
    pub(super) fn gathered<'f>(&self, number: usize, flat: &'f Tensor<1>) -> Gathered<'a, 'f> {
        Gathered { unit: self.net.unit(number), layout: &self.shards[number].layout, flat }
    }

    /// What `follower` gives for the sizes of views that it sees, by micro-batch of `n_images`. `head_sets` says which
    /// sizes share statistics in heads.
    pub(super) fn follow(
        &self,
        follower: &Follower,
        batches: &[MicroBatch],
        [passes, of_heads]: [Passes<'_>; 2],
        gathers: &mut Gathers<'_>,
        n_images: usize,
    ) -> Result<Followed, EngineError> {
        let mut seen: Vec<MicroBatch> = batches.iter().map(|batch| batch.seen(&follower.sees)).collect();
        let [sets, head_sets] = [passes, of_heads].map(|passes| passes.sets.of(&follower.sees));
        let passes = Passes { sets: &sets, ..passes };
        let of_heads = Passes { sets: &head_sets, ..of_heads };
        let mut observations = Vec::new();
        for number in 0..self.net.backbone.len() {
            let flat = gathers.next_flat()?;
            let unit = self.gathered(number, &flat);
            let totals;
            (seen, totals) = passes.infer(unit, seen, None, &mut || gathers.look_ahead())?;
            let totals: Vec<_> = totals.iter().skip(1).map(over_groups).collect();
            observations.extend(self.observed(number, unit, &totals, passes, follower.name));
        }
        let flats = self.gather_heads(On::Both, gathers)?;
        let inputs =
            self.staged_by_follower(follower, &seen, &flats, of_heads, gathers, &mut observations)?;
        Ok(Followed { outputs: self.outputs(inputs, &flats, On::Both, n_images), observations })
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
            let clear = &mut || gathers.look_ahead();
            (batches, of_unit) = passes.forward(unit, batches, draws, keeps.graph, number > 0, clear)?;
            observations.extend(self.observed(number, unit, &of_unit.totals(), passes, STUDENT));
            tape.push((of_unit, keeps.weights.then_some(flat)));
        }
        Ok(StudentPass { batches, tape, observations })
    }

    /// What unit `number` makes of the totals that its stages met.
    pub(super) fn observed(
        &self,
        number: usize,
        unit: Gathered<'_, '_>,
        totals: &[Vec<Tensor<1>>],
        passes: Passes<'_>,
        of: &'static str,
    ) -> Vec<Observation> {
        let leaves = Leaves::new(unit.layout, unit.flat, false);
        let draws = Draws::default();
        let Passes { sets, compute, .. } = passes;
        let cx = Context { leaves: &leaves, draws: &draws, totals: &[], sets, compute };
        let observed = unit.unit.observe(totals, &cx).into_iter();
        observed.map(|(param, values)| Observation { of, unit: number, param, values }).collect()
    }

    /// Features with what the heads make of them, without a graph.
    pub(super) fn outputs(
        &self,
        inputs: Vec<GraphInput>,
        flats: &Flats,
        of: On,
        n_images: usize,
    ) -> Vec<Outputs> {
        let leaves = self.leaves(flats, of, false);
        let of_batch = |input: GraphInput| {
            let heads = self.heads(&input, &leaves, of, n_images);
            Outputs { n_images, features: input.features, heads }
        };
        inputs.into_iter().map(of_batch).collect()
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
