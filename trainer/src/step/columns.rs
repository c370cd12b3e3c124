//! Heads whose columns are divided: each rank of a column group computes its columns for the images
//! of the whole group.
//!
//! ```text
//! z       output of the units before the last, gathered over the group       [B·V, 1, D] by micro-batch of the group
//! s_p     part p of the scores, on rank p                                     [B, V, K / C]
//!         of R masked cells                                                   [R, 1, D] and [R, 1, K / C]
//! ∂L/∂z   = Σ_p ∂L/∂s_p · ∂s_p/∂z, each rank's own micro-batches by a sum over the group
//! ```
//!
//! The weights of a part and their gradient are never sent to ranks that compute other parts. The
//! masked cells of the micro-batches of other ranks are not exchanged: every rank draws them
//! itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::{Tensor, TensorData};
use kernels::device::host::add;
use networks::draws::Draws;
use networks::mask::MaskedCells;
use networks::outputs::{HeadOutput, HeadOutputs};
use networks::tokens::{SequenceRole, Sequences, Tokens};
use networks::unit::{Context, StatSets, Types};
use ranks::EngineError;
use ranks::column_group::ColumnGroup;
use ranks::ordered;

use super::batch::Streams;
use super::heads::{
    Flats, GraphInput, HeadLeaves, HeadPass, Parts, apply_to_parts, head_outputs, split_parts,
};
use super::scalars::Scalars;
use super::tape::{take_gradient, tracked_leaves};
use crate::method::BatchLoss;

/// The micro-batches of a column group.
#[derive(Clone, Copy)]
pub(super) struct GroupBatch<'a> {
    pub(super) group: ColumnGroup<'a>,
    /// Images of a micro-batch.
    pub(super) n_images: usize,
    /// Masked cells of each micro-batch of the group; empty if none are drawn.
    pub(super) masked: &'a [Arc<MaskedCells>],
}

/// The divided heads of a network.
#[derive(Clone, Copy)]
pub(super) struct ColumnPass<'a> {
    pub(super) heads: HeadPass<'a>,
    pub(super) batch: GroupBatch<'a>,
}

/// Inputs of divided heads by name and micro-batch of the group.
pub(super) type ColumnInputs = BTreeMap<&'static str, Vec<Streams>>;

/// Gradients from the graphs of divided heads.
pub(super) struct ColumnGrads {
    /// Gradients at the inputs of each head, by micro-batch of this rank and view size.
    pub(super) inputs: BTreeMap<&'static str, Vec<Vec<Tensor<2>>>>,
    /// Gradients with respect to this rank's part of the parameters, by index of the unit.
    pub(super) flats: BTreeMap<usize, Tensor<1>>,
}

/// Sequences of the input of a head for the views of one size, and its number of channels.
struct InputShape {
    groups: Vec<Sequences>,
    width: usize,
}

/// Gradients from the graphs of one or more micro-batches: sums for parameters, separate ones for
/// inputs.
#[derive(Default)]
struct GraphGrads {
    /// Gradients at the inputs, concatenated over heads and view sizes, by micro-batch of the
    /// group.
    inputs: BTreeMap<usize, Tensor<1>>,
    /// Gradients with respect to this rank's part of the parameters, by index of the unit.
    flats: BTreeMap<usize, Tensor<1>>,
}

impl<'a> ColumnPass<'a> {
    /// Gathers the inputs of the divided heads, of which `inputs` holds those of this rank's
    /// micro-batches.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(super) fn gather(&self, inputs: &[GraphInput]) -> Result<ColumnInputs, EngineError> {
        let mut gathered = ColumnInputs::new();
        for name in self.names() {
            let local: Vec<Tensor<1>> = inputs.iter().map(|input| flatten(&input.staged[name])).collect();
            let device = local[0].device();
            let shapes: Vec<Vec<InputShape>> =
                (0..self.batch.group.n_group()).map(|t| self.shapes(t, &inputs[0].staged[name])).collect();
            let n_values: Vec<usize> =
                shapes.iter().map(|shapes| shapes.iter().map(InputShape::n_elements).sum()).collect();
            let all = self.batch.group.all_micro_batches(name, &local, &n_values)?;
            let mut batches = Vec::with_capacity(all.len());
            for (values, shapes) in all.into_iter().zip(shapes) {
                let n = values.len();
                let values = Tensor::from_data(TensorData::new(values, [n]), &device);
                let mut sizes = Streams::with_capacity(shapes.len());
                for (x, shape) in unflatten(&values, &shapes, &mut 0).into_iter().zip(shapes) {
                    sizes.push(Tokens::new(x, shape.groups));
                }
                batches.push(sizes);
            }
            gathered.insert(name, batches);
        }
        Ok(gathered)
    }

    /// Computes this rank's columns of the scores without a graph, by micro-batch of the group.
    pub(super) fn scores(&self, inputs: &ColumnInputs, flats: &Flats) -> Vec<HeadOutputs> {
        let leaves = self.heads.column_leaves(flats, false);
        if inputs.is_empty() {
            return Vec::new();
        }
        let mut scores = Vec::with_capacity(self.batch.group.n_group());
        for t in 0..self.batch.group.n_group() {
            let mut by_head = BTreeMap::new();
            for (name, batches) in inputs {
                by_head.insert(*name, batches[t].clone());
            }
            scores.push(self.outputs(by_head, &leaves));
        }
        scores
    }

    /// Runs the graphs of the group's micro-batches forwards and backwards.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(super) fn backward(
        &self,
        inputs: &ColumnInputs,
        flats: &Flats,
        loss: &dyn BatchLoss,
        scalars: &mut Scalars,
    ) -> Result<ColumnGrads, EngineError> {
        let group = self.batch.group;
        let grads = ordered::fold(
            group.n_group(),
            &mut |t: usize| self.graph(t, inputs, flats, loss, scalars),
            &|a: Result<GraphGrads, EngineError>, b: Result<GraphGrads, EngineError>| Ok(a?.plus(b?)),
        )?;
        let local = group.reduce_scatter("scores", grads.inputs.into_values().collect())?;
        let mut by_head: BTreeMap<&'static str, Vec<Vec<Tensor<2>>>> = BTreeMap::new();
        for (values, t) in local.iter().zip(group.part_micro_batches(group.part())) {
            let mut start = 0;
            for (name, batches) in inputs {
                let shapes: Vec<InputShape> = batches[t].iter().map(InputShape::new).collect();
                by_head.entry(name).or_default().push(unflatten(values, &shapes, &mut start));
            }
        }
        Ok(ColumnGrads { inputs: by_head, flats: grads.flats })
    }

    /// Runs the graph of micro-batch `t` of the group forwards and backwards.
    fn graph(
        &self,
        t: usize,
        inputs: &ColumnInputs,
        flats: &Flats,
        loss: &dyn BatchLoss,
        scalars: &mut Scalars,
    ) -> Result<GraphGrads, EngineError> {
        let leaves = self.heads.column_leaves(flats, true);
        let inputs: BTreeMap<&'static str, Streams> =
            inputs.iter().map(|(name, batches)| (*name, tracked_leaves(&batches[t]))).collect();
        let scores = self.outputs(inputs.clone(), &leaves);
        let scored = loss.column_loss(t, &scores, self.batch.group)?;
        drop(scores);
        scalars.add(scored.loss.clone().inner(), scored.gauges);
        let mut grads = scored.loss.backward();
        let mut input_grads: Vec<Tensor<1>> = Vec::new();
        for group in inputs.values().flatten() {
            let grad = take_gradient(&group.x, &mut grads);
            let [n, d] = grad.dims();
            input_grads.push(grad.reshape([n * d]));
        }
        let flats = leaves.iter().map(|(index, leaves)| (*index, leaves.gradient(&mut grads))).collect();
        Ok(GraphGrads { inputs: BTreeMap::from([(t, Tensor::cat(input_grads, 0))]), flats })
    }

    /// Returns the names of the divided heads.
    fn names(&self) -> impl Iterator<Item = &'static str> {
        let divided = self.heads.network.net.heads().filter(|placed| placed.is_divided());
        divided.map(|placed| placed.head.name)
    }

    /// Returns the shapes of the inputs of a head in micro-batch `t` of the group, by view size.
    /// `local` are the inputs in a micro-batch of this rank.
    fn shapes(&self, t: usize, local: &Streams) -> Vec<InputShape> {
        local
            .iter()
            .map(|input| match self.batch.masked.get(t) {
                Some(rows) => InputShape::with_masked(input, rows),
                None => InputShape::new(input),
            })
            .collect()
    }

    /// Computes this rank's columns for the inputs of a micro-batch, by head and view size.
    fn outputs(&self, inputs: BTreeMap<&'static str, Streams>, leaves: &HeadLeaves<'_>) -> HeadOutputs {
        let n_sizes = inputs.values().map(Vec::len).max().unwrap_or_default();
        let mut masked = vec![None; n_sizes];
        for (size, rows) in masked.iter_mut().enumerate() {
            *rows = inputs.values().find_map(|sizes| sizes.get(size)?.masked_cells().cloned());
        }
        let by_name =
            inputs.into_iter().map(|(name, sizes)| (name, self.score(name, sizes, leaves))).collect();
        HeadOutputs { n_images: self.batch.n_images, masked, by_name }
    }

    /// Returns the output of this rank's part of the last unit of the head `name`, K / C columns,
    /// by view size.
    fn score(&self, name: &str, sizes: Streams, leaves: &HeadLeaves<'_>) -> Vec<HeadOutput> {
        let placed = self.heads.network.net.heads().find(|placed| placed.head.name == name);
        // Names come from the network's list.
        let index = placed.expect("a head of the network").in_graph().start;
        let sizes: Vec<Parts> = sizes.into_iter().map(|tokens| vec![tokens]).collect();
        let (unit, _) = self.heads.network.computed_unit(index);
        let outputs = apply_to_parts(split_parts(&sizes), |parts| {
            let draws = Draws::default();
            let sets = StatSets::per_size(parts.len());
            let leaves = &leaves[&index];
            let cx = Context { leaves, draws: &draws, totals: &[], sets: &sets, types: Types::F32 };
            unit.forward(0, parts, &cx).streams
        });
        head_outputs(&outputs, self.batch.n_images)
    }
}

impl GraphGrads {
    /// Returns the sum of both for parameters, and the gradients at the inputs of both.
    fn plus(mut self, other: Self) -> Self {
        self.inputs.extend(other.inputs);
        for (index, grad) in other.flats {
            let total = match self.flats.remove(&index) {
                Some(total) => add(total, grad),
                None => grad,
            };
            self.flats.insert(index, total);
        }
        self
    }
}

impl InputShape {
    /// Returns the shape of `input`.
    fn new(input: &Tokens) -> Self {
        let [_, width] = input.x.dims();
        Self { groups: input.groups.clone(), width }
    }

    /// Returns the shape that `input`, of a micro-batch of this rank, has in the micro-batch whose
    /// masked cells are `rows`: its own shape where no cells are masked.
    fn with_masked(input: &Tokens, rows: &Arc<MaskedCells>) -> Self {
        let mut shape = Self::new(input);
        let has_masks = input.masked_cells().is_some_and(|rows| !rows.cells.is_empty());
        if !has_masks {
            return shape;
        }
        for group in &mut shape.groups {
            if let Some(masked) = &mut group.masked {
                masked.rows = Arc::clone(rows);
            }
        }
        match shape.groups[0].role {
            // Without masked cells there is one row, which has no meaning.
            SequenceRole::MaskedCells => shape.groups[0].n = rows.n().max(1),
            SequenceRole::Views if !shape.groups.iter().any(|group| group.role == SequenceRole::Cells) => {
                shape.groups.truncate(1);
                if rows.n() > 0 {
                    let masked = shape.groups[0].masked.clone();
                    let cells = Sequences::vectors(rows.n());
                    shape.groups.push(Sequences { masked, role: SequenceRole::MaskedCells, ..cells });
                }
            }
            SequenceRole::Views | SequenceRole::Cells => {}
        }
        shape
    }

    /// Returns the number of elements.
    fn n_elements(&self) -> usize {
        self.groups.iter().map(Sequences::n_tokens).sum::<usize>() * self.width
    }
}

/// Concatenates the values of all view sizes.
fn flatten(sizes: &Streams) -> Tensor<1> {
    let mut values: Vec<Tensor<1>> = Vec::with_capacity(sizes.len());
    for tokens in sizes {
        let [n, d] = tokens.x.dims();
        values.push(tokens.x.clone().reshape([n * d]));
    }
    Tensor::cat(values, 0)
}

/// Splits `values` from `start` on into tensors of `shapes`, the inverse of [`flatten`], and
/// advances `start` past them.
fn unflatten(values: &Tensor<1>, shapes: &[InputShape], start: &mut usize) -> Vec<Tensor<2>> {
    let mut tensors = Vec::with_capacity(shapes.len());
    for shape in shapes {
        let range = *start..*start + shape.n_elements();
        *start = range.end;
        let n_rows = range.len() / shape.width;
        tensors.push(values.clone().slice([range]).reshape([n_rows, shape.width]));
    }
    tensors
}
