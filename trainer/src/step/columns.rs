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
//! The weights of a part and their gradient never leave the ranks that compute this part. Which
//! cells are masked in the micro-batches of other ranks is not exchanged: every rank draws it
//! itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::{Tensor, TensorData};
use kernels::device::host::add;
use networks::draws::Draws;
use networks::features::{Features, HeadOutput, HeadOutputs, Masked};
use networks::mask::MaskedCells;
use networks::unit::{Context, StatSets, Types};
use ranks::EngineError;
use ranks::column_group::ColumnGroup;
use ranks::ordered;

use super::batch::Groups;
use super::heads::{Flats, GraphInput, HeadLeaves, HeadPass, Parts, apart, head_outputs, through};
use super::scalars::Scalars;
use crate::method::BatchLoss;

/// The micro-batches of a column group.
#[derive(Clone, Copy)]
pub(super) struct GroupBatch<'a> {
    pub(super) group: ColumnGroup<'a>,
    /// Images of a micro-batch.
    pub(super) n_images: usize,
    /// Masked cells of each micro-batch of the group; empty where none are drawn.
    pub(super) masked: &'a [Arc<MaskedCells>],
}

/// The divided heads of a network.
#[derive(Clone, Copy)]
pub(super) struct ColumnPass<'a> {
    pub(super) heads: HeadPass<'a>,
    pub(super) batch: GroupBatch<'a>,
}

/// Inputs of divided heads by name and micro-batch of the group.
pub(super) type ColumnInputs = BTreeMap<&'static str, Vec<Groups>>;

/// Gradients from the graphs of divided heads.
pub(super) struct ColumnGrads {
    /// Gradients at the inputs of each head, by micro-batch of this rank and view size.
    pub(super) inputs: BTreeMap<&'static str, Vec<Vec<Tensor<3>>>>,
    /// Gradients with respect to this rank's part of the parameters, by number of the unit.
    pub(super) flats: BTreeMap<usize, Tensor<1>>,
}

/// Shape of the input of a head for the views of one size, and the description of its masked cells.
type InputShape = ([usize; 3], Option<Masked>);

/// Gradients from the graph of a micro-batch, summed for parameters, by micro-batch of the group
/// for inputs.
#[derive(Default)]
struct GraphGrads {
    /// Gradients at the inputs, one after another by head and view size, by micro-batch of the
    /// group.
    inputs: BTreeMap<usize, Tensor<1>>,
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
            let own: Vec<Tensor<1>> = inputs.iter().map(|input| flat(&input.staged[name])).collect();
            let device = own[0].device();
            let shapes: Vec<Vec<InputShape>> =
                (0..self.batch.group.n_group()).map(|t| self.shapes(t, &inputs[0].staged[name])).collect();
            let n_values: Vec<usize> =
                shapes.iter().map(|shapes| shapes.iter().map(n_elements).sum()).collect();
            let all = self.batch.group.all_micro_batches(name, &own, &n_values)?;
            let of_batch = |(values, shapes): (Vec<f32>, Vec<InputShape>)| {
                let n = values.len();
                let values = Tensor::from_data(TensorData::new(values, [n]), &device);
                let tensors = cut(&values, &shapes, &mut 0);
                tensors
                    .into_iter()
                    .zip(shapes)
                    .map(|(x, (_, masked))| Features { masked, ..Features::vectors(x) })
                    .collect()
            };
            gathered.insert(name, all.into_iter().zip(shapes).map(of_batch).collect());
        }
        Ok(gathered)
    }

    /// Computes this rank's columns of the scores without a graph, by micro-batch of the group.
    pub(super) fn scores(&self, inputs: &ColumnInputs, flats: &Flats) -> Vec<HeadOutputs> {
        let leaves = self.heads.column_leaves(flats, false);
        if inputs.is_empty() {
            Vec::new()
        } else {
            (0..self.batch.group.n_group())
                .map(|t: usize| {
                    let of_head =
                        |(name, batches): (&&'static str, &Vec<Groups>)| (*name, batches[t].clone());
                    self.outputs(inputs.iter().map(of_head).collect(), &leaves)
                })
                .collect()
        }
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
        let mut graph = |t: usize| self.graph(t, inputs, flats, loss, scalars);
        let group = self.batch.group;
        let grads = ordered::fold(
            group.n_group(),
            &mut graph,
            &|a: Result<GraphGrads, EngineError>, b: Result<GraphGrads, EngineError>| {
                let mut a = a?;
                let b = b?;
                a.inputs.extend(b.inputs);
                for (number, grad) in b.flats {
                    let total = a.flats.remove(&number);
                    a.flats.insert(number, total.map_or(grad.clone(), |total| add(total, grad)));
                }
                Ok(a)
            },
        )?;
        let own = group.reduce_scatter("scores", grads.inputs.into_values().collect())?;
        let mut by_head: BTreeMap<&'static str, Vec<Vec<Tensor<3>>>> = BTreeMap::new();
        for (values, t) in own.iter().zip(group.part_micro_batches(group.part())) {
            let mut start = 0;
            for (name, batches) in inputs {
                let shapes: Vec<InputShape> = batches[t].iter().map(|input| (input.x.dims(), None)).collect();
                by_head.entry(name).or_default().push(cut(values, &shapes, &mut start));
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
        let tracked = |groups: &Groups| -> Groups {
            groups.iter().map(|group| group.map(|x| x.clone().autodiff().require_grad())).collect()
        };
        let inputs: BTreeMap<&'static str, Groups> =
            inputs.iter().map(|(name, batches)| (*name, tracked(&batches[t]))).collect();
        let scores = self.outputs(inputs.clone(), &leaves);
        let scored = loss.column_loss(t, &scores, self.batch.group)?;
        drop(scores);
        scalars.add(scored.loss.clone().inner(), scored.gauges);
        let mut grads = scored.loss.backward();
        let mut at = |x: &Tensor<3>| {
            let grad = x.grad_remove(&mut grads).unwrap_or_else(|| x.clone().inner().zeros_like());
            let [n, v, d] = grad.dims();
            grad.reshape([n * v * d])
        };
        let at_inputs: Vec<Tensor<1>> =
            inputs.values().flatten().map(|group| &group.x).map(&mut at).collect();
        let flats = leaves.iter().map(|(number, leaves)| (*number, leaves.gradient(&mut grads))).collect();
        Ok(GraphGrads { inputs: BTreeMap::from([(t, Tensor::cat(at_inputs, 0))]), flats })
    }

    /// Names of the divided heads.
    fn names(&self) -> impl Iterator<Item = &'static str> {
        let divided = self.heads.0.net.heads().filter(|placed| placed.is_divided());
        divided.map(|placed| placed.head.name)
    }

    /// Shapes of the inputs of a head in micro-batch `t` of the group, of which `own` are those of
    /// one on this rank.
    fn shapes(&self, t: usize, own: &Groups) -> Vec<InputShape> {
        own.iter()
            .map(|group| match self.batch.masked.get(t) {
                Some(rows) => group.shape_with(rows),
                None => (group.x.dims(), group.masked.clone()),
            })
            .collect()
    }

    /// Computes this rank's columns for the inputs of a micro-batch by head and view size.
    fn outputs(&self, inputs: BTreeMap<&'static str, Groups>, leaves: &HeadLeaves<'_>) -> HeadOutputs {
        let n_sizes = inputs.values().map(Vec::len).max().unwrap_or_default();
        let masked = |size: usize| {
            let groups = inputs.values().filter_map(|groups| groups.get(size)?.masked.as_ref());
            groups.map(|masked| masked.rows.clone()).next()
        };
        let masked = (0..n_sizes).map(masked).collect();
        let by_name =
            inputs.into_iter().map(|(name, groups)| (name, self.score(name, groups, leaves))).collect();
        HeadOutputs { n_images: self.batch.n_images, masked, by_name }
    }

    /// Returns the output of this rank's part of the last unit of the head `name`, K / C columns,
    /// by view size.
    fn score(&self, name: &str, groups: Groups, leaves: &HeadLeaves<'_>) -> Vec<HeadOutput> {
        let found = self.heads.0.net.heads().find(|placed| placed.head.name == name);
        // Names come from the network's list.
        let number = found.expect("a head of the network").in_graph().start;
        let sizes: Vec<Parts> = groups.into_iter().map(|group| vec![group]).collect();
        let (unit, _) = self.heads.0.computed(number);
        let outputs = through(apart(&sizes), |parts| {
            let draws = Draws::default();
            let sets = StatSets::per_size(parts.len());
            let leaves = &leaves[&number];
            let cx = Context { leaves, draws: &draws, totals: &[], sets: &sets, types: Types::F32 };
            unit.forward(0, parts, &cx).features
        });
        head_outputs(&outputs, self.batch.n_images)
    }
}

/// Concatenates the values of all view sizes.
fn flat(groups: &Groups) -> Tensor<1> {
    let values = |group: &Features| {
        let [b, n, d] = group.x.dims();
        group.x.clone().reshape([b * n * d])
    };
    Tensor::cat(groups.iter().map(values).collect(), 0)
}

/// Cuts `values` from `start` on into `shapes`, the inverse of [`flat`], and moves `start` behind
/// them.
fn cut(values: &Tensor<1>, shapes: &[InputShape], start: &mut usize) -> Vec<Tensor<3>> {
    shapes
        .iter()
        .map(|shape| {
            let range = *start..*start + n_elements(shape);
            *start = range.end;
            values.clone().slice([range]).reshape(shape.0)
        })
        .collect()
}

/// Number of elements of an input of this shape.
fn n_elements((shape, _): &InputShape) -> usize {
    shape.iter().product()
}
