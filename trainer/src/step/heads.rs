//! Heads: units with statistics over the batch go through the passes of a step; the rest is part of the loss's graph.

use std::collections::BTreeMap;

use burn_tensor::{DType, Tensor};
use kernels::ops::seed;
use networks::features::{Features, Outputs, by_image};
use networks::head::{On, Reads};
use networks::leaves::Leaves;
use networks::unit::{Context, Draws, StatSets};
use ranks::EngineError;
use ranks::prefetch::Gathers;

use super::batch::{FeatureGrads, Groups, MicroBatch};
use super::net::Placed;
use super::networks::{Networks, Observation};
use super::pass::{Passes, SlicedGrads, UnitDraws, UnitTape, over_groups};
use crate::method::Follower;
use crate::optim::state::STUDENT;

/// Gathered weights of heads' units, by number.
pub(super) type Flats = BTreeMap<usize, Tensor<1>>;

/// Parameters of heads' units, by number.
pub(super) type HeadLeaves<'a> = BTreeMap<usize, Leaves<'a>>;

/// What the graph of a micro-batch begins with.
#[derive(Clone)]
pub(super) struct GraphInput {
    /// What the backbone gives, by size of view.
    pub(super) features: Groups,
    /// What the staged units of heads give, by head and size of view.
    pub(super) staged: BTreeMap<&'static str, Groups>,
}

/// A head's staged units after their forward pass.
pub(super) struct StagedHead<'a> {
    pub(super) placed: Placed<'a>,
    /// What they give.
    pub(super) batches: Vec<MicroBatch>,
    tape: Vec<UnitTape<'a>>,
}

/// The heads of a step.
#[derive(Clone, Copy)]
pub(super) struct HeadPass<'a>(pub(super) Networks<'a>);

impl<'a> HeadPass<'a> {
    /// The weights of the heads' units. The next gather is sent for unless statistics are to come first.
    pub(super) fn gather(&self, of: On, gathers: &mut Gathers<'_>) -> Result<Flats, EngineError> {
        let mut flats = Flats::new();
        let mut has_stages = false;
        let mut numbers = Vec::new();
        for placed in self.0.net.heads_of(of) {
            has_stages |= !placed.staged().is_empty();
            numbers.extend(placed.staged().chain(placed.in_graph()));
        }
        for (i, number) in numbers.iter().enumerate() {
            flats.insert(*number, gathers.next_flat()?);
            if i + 1 < numbers.len() || !has_stages {
                gathers.look_ahead()?;
            }
        }
        Ok(flats)
    }

    /// Puts the parameters of heads' units where their methods keep them, and gives their new values.
    pub(super) fn constrain(&self, flats: &mut Flats) -> Vec<Observation> {
        let mut observations = Vec::new();
        for (&unit, flat) in flats {
            let layout = &self.0.shards[unit].layout;
            let constrained = self.0.net.unit(unit).constrain(&Leaves::new(layout, flat, false));
            for (param, values) in constrained {
                // A unit constrains parameters that it lists.
                let at = layout.position(&param).expect("a parameter of the unit");
                let range = layout.params[at].range();
                let before = flat.clone().slice([range.clone()]);
                *flat = flat.clone().slice_assign([range], values.clone());
                observations.push(Observation { of: STUDENT, unit, param, values, before });
            }
        }
        observations
    }

    /// The student's staged units, head by head, on what the backbone gives.
    pub(super) fn staged_by_student(
        &self,
        features: &[MicroBatch],
        flats: &Flats,
        passes: Passes<'_>,
        gathers: &mut Gathers<'_>,
        observations: &mut Vec<Observation>,
    ) -> Result<Vec<StagedHead<'a>>, EngineError> {
        let mut heads = Vec::new();
        for placed in self.0.net.heads_of(On::Student).filter(|placed| !placed.staged().is_empty()) {
            let mut batches = read(placed, features);
            let draws = no_draws(&batches);
            let mut tape = Vec::new();
            for number in placed.staged() {
                let unit = self.0.gathered(number, &flats[&number]);
                let of_unit;
                (batches, of_unit) = passes.forward(unit, batches, &draws, true, true, &mut || Ok(()))?;
                observations.extend(self.0.observed(number, unit, &of_unit.totals(), passes, STUDENT));
                tape.push(of_unit);
            }
            heads.push(StagedHead { placed, batches, tape });
        }
        gathers.look_ahead()?;
        Ok(heads)
    }

    /// The same for a follower, of which nothing is kept: what its graph-less heads begin with, by micro-batch.
    pub(super) fn staged_by_follower(
        &self,
        follower: &Follower,
        features: &[MicroBatch],
        flats: &Flats,
        passes: Passes<'_>,
        gathers: &mut Gathers<'_>,
        observations: &mut Vec<Observation>,
    ) -> Result<Vec<GraphInput>, EngineError> {
        let mut inputs = graph_inputs(features, &[]);
        for placed in self.0.net.heads_of(On::Both).filter(|placed| !placed.staged().is_empty()) {
            let mut batches = read(placed, features);
            for number in placed.staged() {
                let unit = self.0.gathered(number, &flats[&number]);
                let totals;
                (batches, totals) = passes.infer(unit, batches, None, &mut || Ok(()))?;
                let totals: Vec<_> = totals.iter().skip(1).map(over_groups).collect();
                observations.extend(self.0.observed(number, unit, &totals, passes, follower.name));
            }
            for (input, batch) in inputs.iter_mut().zip(&batches) {
                input.staged.insert(placed.head.name, in_f32(batch.joined()));
            }
        }
        gathers.look_ahead()?;
        Ok(inputs)
    }

    /// The way back through a head's staged units. `grads` are those at what they give; what is wanted are the flat
    /// gradients by number of the unit, and those at what the backbone gives, which are added to `at_features`.
    pub(super) fn back_through_staged(
        &self,
        head: StagedHead<'a>,
        mut grads: Vec<SlicedGrads>,
        features: &[MicroBatch],
        flats: &Flats,
        passes: Passes<'_>,
        at_features: &mut [SlicedGrads],
    ) -> Result<BTreeMap<usize, Tensor<1>>, EngineError> {
        let draws = no_draws(&head.batches);
        let mut of_units = BTreeMap::new();
        for (number, tape) in head.placed.staged().zip(head.tape).rev() {
            let unit = self.0.gathered(number, &flats[&number]);
            let flat;
            (grads, flat) = passes.backward(unit, tape, grads, &draws, true, &mut || Ok(()))?;
            of_units.insert(number, flat);
        }
        for ((batch, of_head), at_features) in features.iter().zip(grads).zip(at_features) {
            for ((groups, of_head), at_features) in batch.slices.iter().zip(of_head).zip(at_features) {
                for ((group, of_head), at_features) in groups.iter().zip(of_head).zip(at_features) {
                    let grad = unread(head.placed.head.reads, group, of_head);
                    at_features.x = at_features.x.clone() + grad;
                }
            }
        }
        Ok(of_units)
    }

    /// The parameters of the heads' units that are part of the graph.
    pub(super) fn leaves(&self, flats: &Flats, of: On, track: bool) -> HeadLeaves<'a> {
        let numbers = self.0.net.heads_of(of).flat_map(|placed| placed.in_graph());
        let leaves = |number: usize| Leaves::new(&self.0.shards[number].layout, &flats[&number], track);
        numbers.map(|number| (number, leaves(number))).collect()
    }

    /// What the student's head `name` makes of vectors `[n, V, D]`, by the units in the graph.
    pub(super) fn score(&self, name: &str, x: Tensor<3>, leaves: &HeadLeaves<'_>) -> Tensor<3> {
        let [n, v, d] = x.dims();
        let mut groups = vec![Features::vectors(x.reshape([n * v, 1, d]))];
        let (draws, sets) = (Draws::default(), StatSets::joint(1));
        for placed in self.0.net.heads_of(On::Student).filter(|placed| placed.head.name == name) {
            for (number, unit) in placed.in_graph().zip(&placed.head.units[placed.staged().len()..]) {
                let leaves = &leaves[&number];
                let cx = Context { leaves, draws: &draws, totals: &[], sets: &sets, compute: DType::F32 };
                groups = unit.forward(0, groups, &cx).features;
            }
        }
        by_image(&groups[0], n)
    }

    /// What the heads make of `input`, by name and size of view.
    pub(super) fn heads(
        &self,
        input: &GraphInput,
        leaves: &HeadLeaves<'_>,
        of: On,
        n_images: usize,
    ) -> BTreeMap<&'static str, Vec<Tensor<3>>> {
        let (draws, sets) = (Draws::default(), StatSets::per_size(input.features.len()));
        let mut given = BTreeMap::<&'static str, Groups>::new();
        for placed in self.0.net.heads_of(of) {
            let head = placed.head;
            let read = |group: &Features| head.reads.of_backbone(group);
            let mut groups: Groups = match (input.staged.get(head.name), head.reads) {
                (Some(staged), _) => staged.clone(),
                (None, Reads::Head(name)) => given.get(name).cloned().unwrap_or_default(),
                (None, _) => input.features.iter().filter_map(read).collect(),
            };
            for (number, unit) in placed.in_graph().zip(&head.units[placed.staged().len()..]) {
                let leaves = &leaves[&number];
                let cx = Context { leaves, draws: &draws, totals: &[], sets: &sets, compute: DType::F32 };
                groups = unit.forward(0, groups, &cx).features;
            }
            given.insert(head.name, groups);
        }
        let by_view = |groups: Groups| groups.iter().map(|group| by_image(group, n_images)).collect();
        given.into_iter().map(|(name, groups)| (name, by_view(groups))).collect()
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

/// What the graphs begin with, by micro-batch.
pub(super) fn graph_inputs(features: &[MicroBatch], heads: &[StagedHead<'_>]) -> Vec<GraphInput> {
    let of_batch = |(number, batch): (usize, &MicroBatch)| {
        let of_head = |head: &StagedHead<'_>| (head.placed.head.name, head.batches[number].joined());
        GraphInput { features: in_f32(batch.joined()), staged: heads.iter().map(of_head).collect() }
    };
    features.iter().enumerate().map(of_batch).collect()
}

/// What a head is given, in f32.
fn read(placed: Placed<'_>, features: &[MicroBatch]) -> Vec<MicroBatch> {
    let of_group = |group: &Features| placed.head.reads.of_backbone(&group.in_f32());
    let of_slice = |groups: &Groups| groups.iter().filter_map(of_group).collect();
    let of_batch = |batch: &MicroBatch| MicroBatch { slices: batch.slices.iter().map(of_slice).collect() };
    features.iter().map(of_batch).collect()
}

/// The gradient at what the backbone gives of the one at what a head reads of it.
fn unread(reads: Reads, group: &Features, grad: FeatureGrads) -> Tensor<3> {
    let leaf = group.in_f32().map(|x| x.clone().autodiff().require_grad());
    // Staged heads read the backbone: the network was built so.
    let read = reads.of_backbone(&leaf).expect("a head that reads the backbone");
    let mut grads = seed(read.x, grad.x).backward();
    leaf.x.grad_remove(&mut grads).expect("what is read has a gradient")
}

/// Heads draw nothing.
fn no_draws(batches: &[MicroBatch]) -> UnitDraws {
    batches.iter().map(|batch| vec![Draws::default(); batch.slices.len()]).collect()
}

/// The same features in f32.
fn in_f32(groups: Groups) -> Groups {
    groups.iter().map(|group| group.in_f32()).collect()
}
