//! Heads: units with statistics over the batch go through the passes of a step; the rest is part of
//! the loss's graph.

use std::collections::BTreeMap;

use burn_tensor::{DType, Tensor};
use kernels::ops::seed;
use networks::draws::Draws;
use networks::features::{Features, HeadOutput, HeadOutputs, Outputs, by_image};
use networks::head::Reads;
use networks::leaves::Leaves;
use networks::unit::{Context, StatSets, Types};
use ranks::EngineError;
use ranks::prefetch::GatherQueue;
use ranks::topology::Extent;

use super::batch::{FeatureGrads, GroupGrads, Groups, MicroBatch};
use super::net::Placed;
use super::pass::{Passes, SlicedGrads, UnitDraws, UnitTape, over_groups};
use super::sharded::{Observation, ShardedNet};

/// Gathered weights of heads' units, by number.
pub(super) type Flats = BTreeMap<usize, Tensor<1>>;

/// Parameters of heads' units, by number.
pub(super) type HeadLeaves<'a> = BTreeMap<usize, Leaves<'a>>;

/// Tokens of the views and masked cells of one size, together or apart.
pub(super) type Parts = Vec<Features>;

/// Inputs of a micro-batch's graph.
#[derive(Clone)]
pub(super) struct GraphInput {
    /// Features of the backbone, by view size.
    pub(super) features: Groups,
    /// Outputs of the heads' staged units, by head and view size.
    pub(super) staged: BTreeMap<&'static str, Groups>,
}

/// A head's staged units after their forward pass.
pub(super) struct StagedHead<'a> {
    pub(super) placed: Placed<'a>,
    /// Outputs of the units, by micro-batch.
    pub(super) batches: Vec<MicroBatch>,
    tape: Vec<UnitTape<'a>>,
}

/// The heads of a network.
#[derive(Clone, Copy)]
pub(super) struct HeadPass<'a>(pub(super) ShardedNet<'a>);

impl<'a> HeadPass<'a> {
    /// Gathers the weights of the heads' units. The next gather is submitted unless statistics must
    /// come first.
    pub(super) fn gather(&self, gathers: &mut GatherQueue<'_>) -> Result<Flats, EngineError> {
        let mut flats = Flats::new();
        let mut has_stages = false;
        let mut numbers = Vec::new();
        for placed in self.0.net.heads() {
            has_stages |= placed.has_passes();
            numbers.extend(placed.staged().chain(placed.in_graph()));
        }
        for (i, number) in numbers.iter().enumerate() {
            flats.insert(*number, gathers.next_flat(self.0.unit_name(*number))?);
            if i + 1 < numbers.len() || !has_stages {
                gathers.look_ahead()?;
            }
        }
        Ok(flats)
    }

    /// Applies the constraints of heads' units to their parameters, and returns the new values.
    /// `part` is the number of this rank's columns.
    pub(super) fn constrain(&self, flats: &mut Flats, part: usize) -> Vec<Observation> {
        let mut observations = Vec::new();
        for (&unit, flat) in flats {
            let (computed, layout) = self.0.computed(unit);
            let constrained = computed.constrain(&Leaves::new(layout, flat, false));
            for (param, values) in constrained {
                // A unit constrains parameters that it lists.
                let at = layout.position(&param).expect("a parameter of the unit");
                let range = layout.params[at].range();
                // A slice would keep the memory of the whole gathered unit until the end of the
                // step.
                let before = flat.clone().slice([range.clone()]).mul_scalar(1.0);
                *flat = flat.clone().slice_assign([range], values.clone());
                let first = match self.0.extent(unit) {
                    Extent::Whole => 0,
                    Extent::Columns => part * layout.params[at].spec.numel(),
                };
                observations.push(Observation { of: self.0.net.name, unit, param, values, before, first });
            }
        }
        observations
    }

    /// Runs the trained network's staged units, head by head, on the backbone's features.
    pub(super) fn staged(
        &self,
        features: &[MicroBatch],
        flats: &Flats,
        passes: Passes<'_>,
        gathers: &mut GatherQueue<'_>,
        observations: &mut Vec<Observation>,
    ) -> Result<Vec<StagedHead<'a>>, EngineError> {
        let mut heads: Vec<StagedHead<'a>> = Vec::new();
        for placed in self.0.net.heads().filter(Placed::has_passes) {
            let mut batches = match found(&heads, placed.head.reads) {
                Some(read) => heads[read].batches.clone(),
                None => read(placed.head.reads, features),
            };
            let draws = no_draws(&batches);
            let mut tape = Vec::new();
            for number in placed.staged() {
                let unit = self.0.gathered(number, &flats[&number]);
                let of_unit;
                (batches, of_unit) = passes.forward(unit, batches, &draws, true, true, &mut || Ok(()))?;
                observations.extend(self.0.observed(number, unit, &of_unit.totals(), passes));
                tape.push(of_unit);
            }
            heads.push(StagedHead { placed, batches, tape });
        }
        // The exchanges of divided heads come first.
        if !self.0.net.has_parts() {
            gathers.look_ahead()?;
        }
        Ok(heads)
    }

    /// Runs the staged units of a network without gradients, and keeps nothing. Returns the inputs
    /// of its heads' other units, by micro-batch.
    pub(super) fn staged_without_graph(
        &self,
        features: &[MicroBatch],
        flats: &Flats,
        passes: Passes<'_>,
        gathers: &mut GatherQueue<'_>,
        observations: &mut Vec<Observation>,
    ) -> Result<Vec<GraphInput>, EngineError> {
        let mut given: BTreeMap<&'static str, Vec<MicroBatch>> = BTreeMap::new();
        for placed in self.0.net.heads().filter(Placed::has_passes) {
            let reads = placed.head.reads;
            let mut batches = match reads.head().and_then(|name| given.get(name)) {
                Some(batches) => batches.clone(),
                None => read(reads, features),
            };
            for number in placed.staged() {
                let unit = self.0.gathered(number, &flats[&number]);
                let totals;
                (batches, totals) = passes.infer(unit, batches, None, &mut || Ok(()))?;
                if !passes.evaluates {
                    let totals: Vec<_> = totals.iter().skip(1).map(over_groups).collect();
                    observations.extend(self.0.observed(number, unit, &totals, passes));
                }
            }
            given.insert(placed.head.name, batches);
        }
        if !self.0.net.has_parts() {
            gathers.look_ahead()?;
        }
        let mut inputs = graph_inputs(features, &[]);
        for (name, batches) in given {
            for (input, batch) in inputs.iter_mut().zip(&batches) {
                input.staged.insert(name, in_f32(batch.joined()));
            }
        }
        Ok(inputs)
    }

    /// Runs the backward pass through all staged units, from the last head to the first. `grads`
    /// are the gradients at the outputs of each head; gradients at the backbone's features are
    /// added to `at_features`. Returns the flat gradients by number of the unit.
    pub(super) fn back_through_staged(
        &self,
        mut heads: Vec<StagedHead<'a>>,
        mut grads: Vec<Vec<SlicedGrads>>,
        features: &[MicroBatch],
        flats: &Flats,
        passes: Passes<'_>,
        at_features: &mut [SlicedGrads],
    ) -> Result<BTreeMap<usize, Tensor<1>>, EngineError> {
        let mut of_units = BTreeMap::new();
        while let (Some(head), Some(mut grads_of_head)) = (heads.pop(), grads.pop()) {
            let draws = no_draws(&head.batches);
            for (number, tape) in head.placed.staged().zip(head.tape).rev() {
                let unit = self.0.gathered(number, &flats[&number]);
                let params;
                (grads_of_head, params) =
                    passes.backward(unit, tape, grads_of_head, &draws, true, &mut || Ok(()))?;
                of_units.insert(number, params.flat(unit.layout, DType::F32));
            }
            let reads = head.placed.head.reads;
            match found(&heads, reads) {
                Some(read) => add_to(&mut grads[read], grads_of_head),
                None => add_to(at_features, unread(reads, features, grads_of_head)),
            }
        }
        Ok(of_units)
    }

    /// The parameters of the heads' units that are part of the graph, without those of divided
    /// heads.
    pub(super) fn leaves(&self, flats: &Flats, track: bool) -> HeadLeaves<'a> {
        self.leaves_of(false, flats, track)
    }

    /// This rank's part of the parameters of the divided heads' last units.
    pub(super) fn column_leaves(&self, flats: &Flats, track: bool) -> HeadLeaves<'a> {
        self.leaves_of(true, flats, track)
    }

    fn leaves_of(&self, is_divided: bool, flats: &Flats, track: bool) -> HeadLeaves<'a> {
        let heads = self.0.net.heads().filter(|placed| placed.is_divided() == is_divided);
        let leaves = |number: usize| Leaves::new(self.0.computed(number).1, &flats[&number], track);
        heads.flat_map(|placed| placed.in_graph()).map(|number| (number, leaves(number))).collect()
    }

    /// Applies the head `name` to vectors `[n, V, D]`; of a divided head, this rank's columns.
    ///
    /// # Panics
    /// If there is no such head, or it has statistics over the batch: a bug in the method, which
    /// lists its heads itself.
    pub(super) fn score(&self, name: &str, x: Tensor<3>, leaves: &HeadLeaves<'_>) -> Tensor<3> {
        let [n, v, d] = x.dims();
        let mut groups = vec![Features::vectors(x.reshape([n * v, 1, d]))];
        let draws = Draws::default();
        let sets = StatSets::joint(1);
        let found = self.0.net.heads().find(|placed| placed.head.name == name);
        let placed = found.unwrap_or_else(|| panic!("the trained network has no head {name}"));
        assert!(placed.staged().is_empty(), "the head {name} has statistics over the batch");
        for number in placed.in_graph() {
            let leaves = &leaves[&number];
            let cx = Context { leaves, draws: &draws, totals: &[], sets: &sets, types: Types::F32 };
            groups = self.0.computed(number).0.forward(0, groups, &cx).features;
        }
        by_image(&groups[0], n)
    }

    /// Computes the outputs of the heads that are not divided for `input`.
    pub(super) fn heads(&self, input: &GraphInput, leaves: &HeadLeaves<'_>, n_images: usize) -> HeadOutputs {
        let draws = Draws::default();
        let sets = StatSets::joint(1);
        let mut given = BTreeMap::<&'static str, Vec<Parts>>::new();
        for placed in self.0.net.heads().filter(|placed| !placed.is_divided()) {
            let head = placed.head;
            let mut sizes: Vec<Parts> = match (input.staged.get(head.name), head.reads.head()) {
                (Some(staged), _) => staged.iter().map(|group| vec![group.clone()]).collect(),
                // The head that is read comes before.
                (None, Some(name)) => given[name].clone(),
                (None, None) => input.features.iter().map(|group| vec![head.reads.select(group)]).collect(),
            };
            for (number, unit) in placed.in_graph().zip(&head.units[placed.staged().len()..]) {
                if number + 1 == placed.in_graph().end {
                    sizes = apart(&sizes);
                }
                let of_part = |part: Features| {
                    let leaves = &leaves[&number].used_on(&part.x);
                    let cx = Context { leaves, draws: &draws, totals: &[], sets: &sets, types: Types::F32 };
                    unit.forward(0, vec![part], &cx).features
                };
                sizes = through(sizes, |parts| parts.into_iter().flat_map(of_part).collect());
            }
            given.insert(head.name, sizes);
        }
        let of_head = |(name, sizes): (&'static str, Vec<Parts>)| (name, head_outputs(&sizes, n_images));
        HeadOutputs::new(n_images, &input.features, given.into_iter().map(of_head).collect())
    }

    /// Returns the features and the outputs of the heads, without a graph.
    pub(super) fn outputs(&self, inputs: Vec<GraphInput>, flats: &Flats, n_images: usize) -> Vec<Outputs> {
        let leaves = self.leaves(flats, false);
        inputs
            .into_iter()
            .map(|input| {
                let heads = self.heads(&input, &leaves, n_images);
                Outputs { features: input.features, heads }
            })
            .collect()
    }
}

/// Returns the inputs of the graphs, by micro-batch.
pub(super) fn graph_inputs(features: &[MicroBatch], heads: &[StagedHead<'_>]) -> Vec<GraphInput> {
    features
        .iter()
        .enumerate()
        .map(|(number, batch)| GraphInput {
            features: in_f32(batch.joined()),
            staged: heads.iter().map(|head| (head.placed.head.name, head.batches[number].joined())).collect(),
        })
        .collect()
}

/// Returns the inputs of a head's last unit by view size, with views and masked cells apart. Scores
/// are the largest tensors of a loss: autodiff would pad the gradient at each part of them to the
/// size of both.
pub(super) fn apart(sizes: &[Parts]) -> Vec<Parts> {
    sizes.iter().map(|parts| parts.iter().flat_map(Features::split_selection).collect()).collect()
}

/// Returns the outputs of `unit`, which is given the parts of all view sizes at once, by view size.
pub(super) fn through(sizes: Vec<Parts>, unit: impl FnOnce(Parts) -> Parts) -> Vec<Parts> {
    let n_parts: Vec<usize> = sizes.iter().map(Vec::len).collect();
    let mut outputs = unit(sizes.into_iter().flatten().collect()).into_iter();
    n_parts.into_iter().map(|n| outputs.by_ref().take(n).collect()).collect()
}

/// Returns a head's outputs by view size, given the parts of each.
pub(super) fn head_outputs(sizes: &[Parts], n_images: usize) -> Vec<HeadOutput> {
    sizes.iter().map(|parts| HeadOutput::from_parts(parts, n_images)).collect()
}

/// Position of the staged head that `reads` names, if it names one.
fn found(heads: &[StagedHead<'_>], reads: Reads) -> Option<usize> {
    reads.head().and_then(|name| heads.iter().position(|head| head.placed.head.name == name))
}

/// The input of a head that reads the backbone, in f32. Masked cells come behind all views of a
/// micro-batch, in one slice.
fn read(reads: Reads, features: &[MicroBatch]) -> Vec<MicroBatch> {
    let of_slice = |groups: &Groups| groups.iter().map(|group| reads.select(&group.in_f32())).collect();
    features
        .iter()
        .map(|batch| {
            if reads.has_masked() {
                MicroBatch { slices: vec![of_slice(&batch.joined())] }
            } else {
                MicroBatch { slices: batch.slices.iter().map(of_slice).collect() }
            }
        })
        .collect()
}

/// Returns the gradients at the backbone's features, given the gradients at the part that a head
/// reads.
fn unread(reads: Reads, features: &[MicroBatch], grads: Vec<SlicedGrads>) -> Vec<SlicedGrads> {
    let of_group = |(group, grad): (&Features, FeatureGrads)| {
        let leaf = group.in_f32().map(|x| x.clone().autodiff().require_grad());
        let mut grads = seed(reads.select(&leaf).x, grad.x).backward();
        // What is read is a part of the leaf.
        FeatureGrads::from(leaf.x.grad_remove(&mut grads).expect("what is read has a gradient"))
    };
    let of_slice = |(groups, grads): (&Groups, GroupGrads)| -> GroupGrads {
        groups.iter().zip(grads).map(of_group).collect()
    };
    features
        .iter()
        .zip(grads)
        .map(|(batch, mut grads)| match grads.pop() {
            Some(of_all) if reads.has_masked() => {
                let of_all = of_slice((&batch.joined(), of_all));
                batch.sliced(of_all.into_iter().map(|grad| grad.x).collect())
            }
            last => batch.slices.iter().zip(grads.into_iter().chain(last)).map(of_slice).collect(),
        })
        .collect()
}

/// Adds `grads` to `sums`, place by place.
fn add_to(sums: &mut [SlicedGrads], grads: Vec<SlicedGrads>) {
    for (sums, grads) in sums.iter_mut().flatten().flatten().zip(grads.into_iter().flatten().flatten()) {
        sums.x = sums.x.clone() + grads.x;
    }
}

/// Empty draws: heads use no random numbers.
fn no_draws(batches: &[MicroBatch]) -> UnitDraws {
    batches.iter().map(|batch| vec![Draws::default(); batch.slices.len()]).collect()
}

/// Converts features to f32.
fn in_f32(groups: Groups) -> Groups {
    groups.iter().map(|group| group.in_f32()).collect()
}
