//! Heads whose columns are divided: each rank of a column group computes its columns for the images of the whole group.
//!
//! ```text
//! z       output of the units before the last, gathered over the group       [B·V, 1, D] by micro-batch of the group
//! s_p     part p of the scores, on rank p                                     [B, V, K / C]
//! ∂L/∂z   = Σ_p ∂L/∂s_p · ∂s_p/∂z, each rank's own micro-batches by a sum over the group
//! ```
//!
//! The weights of a part and their gradient never leave the ranks that compute this part.

use std::collections::BTreeMap;

use burn_tensor::{Tensor, TensorData};
use kernels::device::host::add;
use networks::draws::Draws;
use networks::features::{Features, by_image};
use networks::leaves::Leaves;
use networks::unit::{Context, StatSets, Types};
use ranks::EngineError;
use ranks::column_group::ColumnGroup;
use ranks::ordered;

use super::batch::Groups;
use super::heads::{Flats, GraphInput, HeadLeaves, HeadPass};
use super::scalars::Scalars;
use crate::method::{BatchLoss, ColumnScores};

/// The divided heads of a network.
#[derive(Clone, Copy)]
pub(super) struct ColumnPass<'a> {
    pub(super) heads: HeadPass<'a>,
    pub(super) group: ColumnGroup<'a>,
    /// Images of a micro-batch.
    pub(super) n_images: usize,
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

/// Gradients from the graph of a micro-batch, summed for parameters, by micro-batch of the group for inputs.
#[derive(Default)]
struct GraphGrads {
    /// Gradients at the inputs, one after another by head and view size, by micro-batch of the group.
    inputs: BTreeMap<usize, Tensor<1>>,
    flats: BTreeMap<usize, Tensor<1>>,
}

impl<'a> ColumnPass<'a> {
    /// Gathers the inputs of the divided heads, of which `inputs` holds those of this rank's micro-batches.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(super) fn gather(&self, inputs: &[GraphInput]) -> Result<ColumnInputs, EngineError> {
        let mut gathered = ColumnInputs::new();
        for name in self.names() {
            let own: Vec<Tensor<1>> = inputs.iter().map(|input| flat(&input.staged[name])).collect();
            let all = self.group.all_micro_batches(name, &own)?;
            let (like, device) = (&inputs[0].staged[name], own[0].device());
            let of_batch = |values: Vec<f32>| {
                let n = values.len();
                let values = Tensor::from_data(TensorData::new(values, [n]), &device);
                cut(&values, like, &mut 0).into_iter().map(Features::vectors).collect()
            };
            gathered.insert(name, all.into_iter().map(of_batch).collect());
        }
        Ok(gathered)
    }

    /// Computes this rank's columns of the scores without a graph.
    pub(super) fn scores(&self, inputs: &ColumnInputs, flats: &Flats) -> ColumnScores {
        let leaves = self.heads.column_leaves(flats, false);
        let of_head = |(name, batches): (&&'static str, &Vec<Groups>)| {
            (*name, batches.iter().map(|groups| self.score(name, groups.clone(), &leaves)).collect())
        };
        inputs.iter().map(of_head).collect()
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
        let sum = |a: Result<GraphGrads, EngineError>, b: Result<GraphGrads, EngineError>| {
            let (mut a, b) = (a?, b?);
            a.inputs.extend(b.inputs);
            for (number, grad) in b.flats {
                let total = a.flats.remove(&number);
                a.flats.insert(number, total.map_or(grad.clone(), |total| add(total, grad)));
            }
            Ok(a)
        };
        let grads = ordered::fold(self.group.n_group(), &mut graph, &sum)?;
        let own = self.group.sum_own("scores", grads.inputs.into_values().collect())?;
        let mut by_head: BTreeMap<&'static str, Vec<Vec<Tensor<3>>>> = BTreeMap::new();
        for values in own {
            let mut start = 0;
            for (name, batches) in inputs {
                by_head.entry(name).or_default().push(cut(&values, &batches[0], &mut start));
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
        let scores =
            inputs.iter().map(|(name, groups)| (*name, self.score(name, groups.clone(), &leaves))).collect();
        let scored = loss.of_columns(t, &scores, self.group)?;
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

    /// Applies this rank's part of the last unit of the head `name`, `[B, V, K / C]` by view size.
    fn score(&self, name: &str, groups: Groups, leaves: &HeadLeaves<'_>) -> Vec<Tensor<3>> {
        let found = self.heads.0.net.heads().find(|placed| placed.head.name == name);
        // Names come from the network's list.
        let number = found.expect("a head of the network").in_graph().start;
        let (draws, sets) = (Draws::default(), StatSets::per_size(groups.len()));
        let leaves: &Leaves<'_> = &leaves[&number];
        let cx = Context { leaves, draws: &draws, totals: &[], sets: &sets, types: Types::F32 };
        let (unit, _) = self.heads.0.computed(number);
        let scored = unit.forward(0, groups, &cx).features;
        scored.iter().map(|group| by_image(group, self.n_images)).collect()
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

/// Cuts `values` from `start` on into the shapes of `like`, the inverse of [`flat`], and moves `start` behind them.
fn cut(values: &Tensor<1>, like: &Groups, start: &mut usize) -> Vec<Tensor<3>> {
    let of_group = |group: &Features| {
        let shape = group.x.dims();
        let range = *start..*start + shape.iter().product::<usize>();
        *start = range.end;
        values.clone().slice([range]).reshape(shape)
    };
    like.iter().map(of_group).collect()
}
