//! Heads: units up to the last one with statistics over the batch run in the passes of a step, and
//! so do all units of a head whose output such a head reads; the other units are part of the loss's
//! graph.

use std::collections::BTreeMap;

use burn_tensor::{DType, Tensor};
use kernels::ops::seed;
use networks::draws::Draws;
use networks::head::Reads;
use networks::leaves::Leaves;
use networks::outputs::{HeadOutput, HeadOutputs, Outputs, by_image};
use networks::tokens::Tokens;
use networks::unit::{Context, StatSets, Types};
use ranks::EngineError;
use ranks::in_flight::GatherQueue;

use super::batch::{MicroBatch, StreamGrads, Streams, split_sizes};
use super::net::PlacedHead;
use super::pass::{Passes, SlicedGrads, UnitDraws, UnitTape, sum_over_groups};
use super::sharded::{Observation, ShardedNet};

/// Gathered weights of heads' units, by index.
pub(super) type Flats = BTreeMap<usize, Tensor<1>>;

/// Parameters of heads' units, by index.
pub(super) type HeadLeaves<'a> = BTreeMap<usize, Leaves<'a>>;

/// Tokens of the views and masked cells of one size, as one part or as two.
pub(super) type Parts = Vec<Tokens>;

/// Inputs of a micro-batch's graph.
#[derive(Clone)]
pub(super) struct GraphInput {
    /// Features of the backbone, by view size.
    pub(super) features: Streams,
    /// Pixels of the views, by view size; empty unless the method reads them.
    pub(super) pixels: Streams,
    /// Outputs of staged units, by head and view size.
    pub(super) staged: BTreeMap<&'static str, Streams>,
}

/// A head's staged units after their forward pass.
pub(super) struct StagedHead<'a> {
    pub(super) placed: &'a PlacedHead,
    /// Outputs of the units, by micro-batch.
    pub(super) batches: Vec<MicroBatch>,
    /// Tapes of the units, in their order.
    tapes: Vec<UnitTape<'a>>,
}

/// The heads of a network.
#[derive(Clone, Copy)]
pub(super) struct HeadPass<'a> {
    pub(super) network: ShardedNet<'a>,
}

impl<'a> HeadPass<'a> {
    /// Applies the constraints of heads' units to their parameters, and returns the new values.
    /// This needs no collective: the weights are gathered, and each rank writes its part of the new
    /// values back before the update.
    pub(super) fn constrain(&self, flats: &mut Flats) -> Vec<Observation> {
        let mut observations = Vec::new();
        for (&unit, flat) in flats {
            let (computed, layout) = self.network.computed_unit(unit);
            let constrained = computed.constrain(&Leaves::new(layout, flat, false));
            for (param, values) in constrained {
                // A unit constrains parameters that it lists.
                let position = layout.position(&param).expect("a parameter of the unit");
                let range = layout.params[position].range();
                // A slice would keep the memory of the whole gathered unit until the end of the
                // step.
                let before = flat.clone().slice([range.clone()]).mul_scalar(1.0);
                *flat = flat.clone().slice_assign([range], values.clone());
                let part = self.network.net.part(unit).map_or(0, |part| part.index);
                let first = part * layout.params[position].spec.numel();
                observations.push(Observation {
                    network: self.network.net.name,
                    unit,
                    param,
                    values,
                    before,
                    first,
                });
            }
        }
        observations
    }

    /// Runs the trained network's staged units, head by head, on the backbone's features.
    pub(super) fn forward_staged(
        &self,
        features: &[MicroBatch],
        flats: &Flats,
        passes: Passes<'_>,
        gathers: &mut GatherQueue<'_>,
        observations: &mut Vec<Observation>,
    ) -> Result<Vec<StagedHead<'a>>, EngineError> {
        let mut heads: Vec<StagedHead<'a>> = Vec::new();
        for placed in self.network.net.heads().filter(|placed| placed.has_passes()) {
            let mut batches = match input_head(&heads, placed.head.reads) {
                Some(index) => heads[index].batches.clone(),
                None => head_inputs(placed.head.reads, features),
            };
            let draws = empty_draws(&batches);
            let mut tapes = Vec::new();
            for index in placed.staged() {
                let unit = self.network.gathered(index, &flats[&index]);
                let tape;
                (batches, tape) = passes.forward(unit, batches, &draws, true, &mut || Ok(()))?;
                observations.extend(self.network.observed(index, unit, &tape.totals(), passes));
                tapes.push(tape);
            }
            heads.push(StagedHead { placed, batches, tapes });
        }
        // The exchanges of divided heads must be submitted before the next gather.
        if !self.network.net.has_parts() {
            gathers.look_ahead()?;
        }
        Ok(heads)
    }

    /// Runs the staged units of a network without gradients, and keeps no data for a backward pass.
    /// Returns the inputs of its heads' other units, by micro-batch.
    pub(super) fn infer_staged(
        &self,
        features: &[MicroBatch],
        flats: &Flats,
        passes: Passes<'_>,
        gathers: &mut GatherQueue<'_>,
        observations: &mut Vec<Observation>,
    ) -> Result<Vec<GraphInput>, EngineError> {
        let mut outputs: BTreeMap<&'static str, Vec<MicroBatch>> = BTreeMap::new();
        for placed in self.network.net.heads().filter(|placed| placed.has_passes()) {
            let reads = placed.head.reads;
            let mut batches = match reads.head().and_then(|name| outputs.get(name)) {
                Some(batches) => batches.clone(),
                None => head_inputs(reads, features),
            };
            for index in placed.staged() {
                let unit = self.network.gathered(index, &flats[&index]);
                let totals;
                (batches, totals) = passes.infer(unit, batches, None, &mut || Ok(()))?;
                if !passes.evaluates {
                    let totals: Vec<_> = totals.iter().skip(1).map(sum_over_groups).collect();
                    observations.extend(self.network.observed(index, unit, &totals, passes));
                }
            }
            outputs.insert(placed.head.name, batches);
        }
        if !self.network.net.has_parts() {
            gathers.look_ahead()?;
        }
        let mut inputs = graph_inputs(features, &[]);
        for (name, batches) in outputs {
            for (input, batch) in inputs.iter_mut().zip(&batches) {
                input.staged.insert(name, in_f32(batch.concat()));
            }
        }
        Ok(inputs)
    }

    /// Runs the backward pass through all staged units, from the last head to the first. `grads`
    /// are the gradients at the outputs of each head; gradients at the backbone's features are
    /// added to `feature_grads`. Returns the flat gradients by index of the unit.
    pub(super) fn backward_staged(
        &self,
        mut heads: Vec<StagedHead<'a>>,
        mut grads: Vec<Vec<SlicedGrads>>,
        features: &[MicroBatch],
        flats: &Flats,
        passes: Passes<'_>,
        feature_grads: &mut [SlicedGrads],
    ) -> Result<BTreeMap<usize, Tensor<1>>, EngineError> {
        let mut flat_grads = BTreeMap::new();
        while let (Some(head), Some(mut head_grads)) = (heads.pop(), grads.pop()) {
            let draws = empty_draws(&head.batches);
            for (index, tape) in head.placed.staged().zip(head.tapes).rev() {
                let unit = self.network.gathered(index, &flats[&index]);
                let params;
                (head_grads, params) =
                    passes.backward(unit, tape, head_grads, &draws, true, &mut || Ok(()))?;
                flat_grads.insert(index, params.flat(unit.layout, DType::F32));
            }
            let reads = head.placed.head.reads;
            match input_head(&heads, reads) {
                Some(index) => accumulate(&mut grads[index], head_grads),
                None => accumulate(feature_grads, backbone_gradients(reads, features, head_grads)),
            }
        }
        Ok(flat_grads)
    }

    /// Returns the parameters of the heads' units that are part of the graph, without those of
    /// divided heads.
    pub(super) fn leaves(&self, flats: &Flats, track: bool) -> HeadLeaves<'a> {
        self.graph_leaves(false, flats, track)
    }

    /// Returns this rank's part of the parameters of the divided heads' last units.
    pub(super) fn column_leaves(&self, flats: &Flats, track: bool) -> HeadLeaves<'a> {
        self.graph_leaves(true, flats, track)
    }

    /// Returns the parameters of the units in the graph, either of divided or of undivided heads.
    fn graph_leaves(&self, is_divided: bool, flats: &Flats, track: bool) -> HeadLeaves<'a> {
        let mut leaves = HeadLeaves::new();
        for placed in self.network.net.heads().filter(|placed| placed.is_divided() == is_divided) {
            for index in placed.in_graph() {
                let (_, layout) = self.network.computed_unit(index);
                leaves.insert(index, Leaves::new(layout, &flats[&index], track));
            }
        }
        leaves
    }

    /// Applies the head `name` to vectors `[n, V, D]`; for a divided head, computes only this
    /// rank's columns.
    ///
    /// # Panics
    /// If there is no such head, or it has statistics over the batch: a bug in the method, which
    /// lists its heads itself.
    pub(super) fn score(&self, name: &str, x: Tensor<3>, leaves: &HeadLeaves<'_>) -> Tensor<3> {
        let [n, v, d] = x.dims();
        let mut streams = vec![Tokens::vectors(x.reshape([n * v, d]))];
        let draws = Draws::default();
        let sets = StatSets::joint(1);
        let placed = self.network.net.heads().find(|placed| placed.head.name == name);
        let placed = placed.unwrap_or_else(|| panic!("the trained network has no head {name}"));
        assert!(placed.staged().is_empty(), "the head {name} has statistics over the batch");
        for index in placed.in_graph() {
            let leaves = &leaves[&index];
            let cx = Context { leaves, draws: &draws, totals: &[], sets: &sets, types: Types::F32 };
            let (unit, _) = self.network.computed_unit(index);
            streams = unit.forward(0, streams, &cx).streams;
        }
        by_image(&streams[0], n)
    }

    /// Computes the outputs of the heads that are not divided for `input`.
    pub(super) fn undivided_outputs(
        &self,
        input: &GraphInput,
        leaves: &HeadLeaves<'_>,
        n_images: usize,
    ) -> HeadOutputs {
        let draws = Draws::default();
        let sets = StatSets::joint(1);
        let mut outputs = BTreeMap::<&'static str, Vec<Parts>>::new();
        for placed in self.network.net.heads().filter(|placed| !placed.is_divided()) {
            let head = &placed.head;
            let mut sizes: Vec<Parts> = match (input.staged.get(head.name), head.reads.head()) {
                (Some(staged), _) => staged.iter().map(|group| vec![group.clone()]).collect(),
                // A head comes after the head that it reads.
                (None, Some(name)) => outputs[name].clone(),
                (None, None) => input.features.iter().map(|group| vec![head.reads.select(group)]).collect(),
            };
            for (index, unit) in placed.in_graph().zip(&head.units[placed.staged().len()..]) {
                if index + 1 == placed.in_graph().end {
                    sizes = split_parts(&sizes);
                }
                sizes = apply_to_parts(sizes, |parts| {
                    let mut outputs = Parts::with_capacity(parts.len());
                    for part in parts {
                        let leaves = &leaves[&index].used_on(&part.x);
                        let cx =
                            Context { leaves, draws: &draws, totals: &[], sets: &sets, types: Types::F32 };
                        outputs.extend(unit.forward(0, vec![part], &cx).streams);
                    }
                    outputs
                });
            }
            outputs.insert(head.name, sizes);
        }
        let mut by_name = BTreeMap::new();
        for (name, sizes) in outputs {
            by_name.insert(name, head_outputs(&sizes, n_images));
        }
        HeadOutputs::new(n_images, &input.features, by_name)
    }

    /// Returns the features and the outputs of the undivided heads, by micro-batch, without a
    /// graph, and without levels.
    pub(super) fn outputs(&self, inputs: Vec<GraphInput>, flats: &Flats, n_images: usize) -> Vec<Outputs> {
        let leaves = self.leaves(flats, false);
        inputs
            .into_iter()
            .map(|input| {
                let heads = self.undivided_outputs(&input, &leaves, n_images);
                Outputs::new(input.features, heads).with_pixels(input.pixels)
            })
            .collect()
    }
}

/// Returns the inputs of the graphs, by micro-batch.
pub(super) fn graph_inputs(features: &[MicroBatch], heads: &[StagedHead<'_>]) -> Vec<GraphInput> {
    let mut inputs = Vec::with_capacity(features.len());
    for (index, batch) in features.iter().enumerate() {
        let mut staged = BTreeMap::new();
        for head in heads {
            staged.insert(head.placed.head.name, head.batches[index].concat());
        }
        inputs.push(GraphInput { features: in_f32(batch.concat()), pixels: Streams::new(), staged });
    }
    inputs
}

/// Splits the inputs of a head's last unit, by view size, into views and masked cells. Scores are
/// the largest tensors of a loss: autodiff would pad the gradient at each part of them to the size
/// of both.
pub(super) fn split_parts(sizes: &[Parts]) -> Vec<Parts> {
    sizes.iter().map(|parts| parts.iter().flat_map(Tokens::split_groups).collect()).collect()
}

/// Applies `unit` to the parts of all view sizes at once, and returns its outputs by view size.
pub(super) fn apply_to_parts(sizes: Vec<Parts>, unit: impl FnOnce(Parts) -> Parts) -> Vec<Parts> {
    let n_parts: Vec<usize> = sizes.iter().map(Vec::len).collect();
    let mut outputs = unit(sizes.into_iter().flatten().collect()).into_iter();
    n_parts.into_iter().map(|n| outputs.by_ref().take(n).collect()).collect()
}

/// Combines the parts of a head's output for each view size into one output.
pub(super) fn head_outputs(sizes: &[Parts], n_images: usize) -> Vec<HeadOutput> {
    sizes.iter().map(|parts| HeadOutput::from_parts(parts, n_images)).collect()
}

/// Returns the position of the staged head that `reads` names; `None` if it names none.
fn input_head(heads: &[StagedHead<'_>], reads: Reads) -> Option<usize> {
    let name = reads.head()?;
    heads.iter().position(|head| head.placed.head.name == name)
}

/// Returns the input of a head that reads the backbone, in f32. Masked cells come after all views
/// of a micro-batch, which is then one slice.
fn head_inputs(reads: Reads, features: &[MicroBatch]) -> Vec<MicroBatch> {
    let mut inputs = Vec::with_capacity(features.len());
    for batch in features {
        let slices = if reads.has_masked() {
            vec![select(reads, &batch.concat())]
        } else {
            batch.slices.iter().map(|streams| select(reads, &split_sizes(streams))).collect()
        };
        inputs.push(MicroBatch { slices });
    }
    inputs
}

/// Selects the input of a head from tokens, by size of view, in f32.
fn select(reads: Reads, sizes: &[Tokens]) -> Streams {
    sizes.iter().map(|tokens| reads.select(&tokens.in_f32())).collect()
}

/// Returns the gradients at the backbone's features, given those at the input of a head.
fn backbone_gradients(
    reads: Reads,
    features: &[MicroBatch],
    input_grads: Vec<SlicedGrads>,
) -> Vec<SlicedGrads> {
    let mut feature_grads = Vec::with_capacity(features.len());
    for (batch, mut slices) in features.iter().zip(input_grads) {
        if reads.has_masked()
            && let Some(grads) = slices.pop()
        {
            let grads = selection_gradients(reads, &batch.concat(), grads);
            feature_grads.push(batch.split_gradients(&grads));
        } else {
            let mut slice_grads = SlicedGrads::with_capacity(slices.len());
            for (streams, grads) in batch.slices.iter().zip(slices) {
                let grads = selection_gradients(reads, &split_sizes(streams), grads);
                let slice = MicroBatch { slices: vec![streams.clone()] };
                slice_grads.extend(slice.split_gradients(&grads));
            }
            feature_grads.push(slice_grads);
        }
    }
    feature_grads
}

/// Returns the gradients at tokens, given those at the part of them that a head reads, by size of
/// view.
fn selection_gradients(reads: Reads, sizes: &[Tokens], grads: StreamGrads) -> Vec<Tensor<2>> {
    let mut token_grads = Vec::with_capacity(sizes.len());
    for (tokens, grad) in sizes.iter().zip(grads) {
        let leaf = tokens.in_f32().map(|x| x.clone().autodiff().require_grad());
        let mut grads = seed(reads.select(&leaf).x, grad.x).backward();
        // The selection is a part of the leaf.
        token_grads.push(leaf.x.grad_remove(&mut grads).expect("what is read has a gradient"));
    }
    token_grads
}

/// Adds `grads` to `sums`, element by element.
fn accumulate(sums: &mut [SlicedGrads], grads: Vec<SlicedGrads>) {
    for (sums, grads) in sums.iter_mut().flatten().flatten().zip(grads.into_iter().flatten().flatten()) {
        sums.x = sums.x.clone() + grads.x;
    }
}

/// Returns empty draws, because heads use no random numbers.
fn empty_draws(batches: &[MicroBatch]) -> UnitDraws {
    batches.iter().map(|batch| vec![Draws::default(); batch.slices.len()]).collect()
}

/// Casts tokens to f32.
fn in_f32(streams: Streams) -> Streams {
    streams.iter().map(Tokens::in_f32).collect()
}
