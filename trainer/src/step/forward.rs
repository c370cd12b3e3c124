//! The forward passes of a step: followers without a graph, the student with what the way back needs.

use burn_tensor::Tensor;
use networks::features::Outputs;
use networks::head::On;
use ranks::EngineError;
use ranks::prefetch::Gathers;

use super::batch::MicroBatch;
use super::heads::HeadPass;
use super::networks::{Networks, Observation};
use super::pass::{Passes, UnitDraws, UnitTape, over_groups};
use crate::method::Follower;
use crate::optim::state::STUDENT;

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

/// What a unit keeps until its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Keeps {
    pub(super) graph: bool,
    pub(super) weights: bool,
}

/// What `follower` gives for the sizes of views that it sees, by micro-batch of `n_images`. `head_sets` says which
/// sizes share statistics in heads.
pub(super) fn follow(
    networks: Networks<'_>,
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
    for number in 0..networks.net.backbone.len() {
        let flat = gathers.next_flat()?;
        let unit = networks.gathered(number, &flat);
        let totals;
        (seen, totals) = passes.infer(unit, seen, None, &mut || gathers.look_ahead())?;
        let totals: Vec<_> = totals.iter().skip(1).map(over_groups).collect();
        observations.extend(networks.observed(number, unit, &totals, passes, follower.name));
    }
    let heads = HeadPass(networks);
    let flats = heads.gather(On::Both, gathers)?;
    let inputs = heads.staged_by_follower(follower, &seen, &flats, of_heads, gathers, &mut observations)?;
    Ok(Followed { outputs: heads.outputs(inputs, &flats, On::Both, n_images), observations })
}

/// The student through the backbone. `keeps` says whether a unit keeps its graph and its gathered weights.
pub(super) fn forward<'a>(
    networks: Networks<'a>,
    mut batches: Vec<MicroBatch>,
    draws: &[UnitDraws],
    passes: Passes<'_>,
    gathers: &mut Gathers<'_>,
    keeps: impl Fn(usize) -> Keeps,
) -> Result<StudentPass<'a>, EngineError> {
    let mut tape = Vec::with_capacity(networks.net.backbone.len());
    let mut observations = Vec::new();
    for (number, draws) in draws.iter().enumerate() {
        let flat = gathers.next_flat()?;
        let unit = networks.gathered(number, &flat);
        let keeps = keeps(number);
        let of_unit;
        let clear = &mut || gathers.look_ahead();
        (batches, of_unit) = passes.forward(unit, batches, draws, keeps.graph, number > 0, clear)?;
        observations.extend(networks.observed(number, unit, &of_unit.totals(), passes, STUDENT));
        tape.push((of_unit, keeps.weights.then_some(flat)));
    }
    Ok(StudentPass { batches, tape, observations })
}
