//! Heads and loss of the trained network: one ordinary graph per micro-batch, after the staged
//! units of heads.

use std::collections::BTreeMap;

use augment::{SoftLabel, ViewMasks};
use burn_tensor::{Gradients, Tensor};
use kernels::device::host::add;
use networks::outputs::{HeadOutputs, Outputs};
use networks::tokens::Tokens;
use ranks::EngineError;
use ranks::in_flight::GatherQueue;
use ranks::ordered;
use ranks::peers::Peers;
use ranks::wire::Wire;

use super::batch::MicroBatch;
use super::columns::{ColumnInputs, ColumnPass};
use super::heads::{Flats, GraphInput, HeadPass, StagedHead, graph_inputs};
use super::inferred::Inferred;
use super::pass::{Passes, SlicedGrads};
use super::scalars::Scalars;
use super::sharded::{Observation, ShardedNet};
use super::tape::{take_gradient, tracked_leaves};
use crate::method::{BatchLoss, BatchOutputs, ColumnOutputs, Method};

/// Results of heads and loss.
pub(super) struct LossResult {
    /// Loss and gauges of this rank's micro-batches; then of its columns, if heads are divided.
    pub(super) scalars: Vec<Scalars>,
    /// Gradients at the backbone's outputs, by micro-batch.
    pub(super) grads: Vec<SlicedGrads>,
    /// Flat gradients of the heads' units, by index of the unit.
    pub(super) param_grads: BTreeMap<usize, Tensor<1>>,
    /// Values that the method needs after the step, by name.
    pub(super) observed: Vec<(&'static str, Tensor<1>)>,
    /// Values of heads' parameters that were constrained before the step.
    pub(super) constrained: Vec<Observation>,
    /// New values of heads' running parameters.
    pub(super) observations: Vec<Observation>,
    /// The trained network's features by micro-batch, without a graph.
    pub(super) trained: Vec<Outputs>,
}

/// Inputs of the loss of a step.
pub(super) struct Scoring<'a> {
    /// The trained network.
    pub(super) network: ShardedNet<'a>,
    pub(super) method: &'a dyn Method,
    pub(super) peers: Peers<'a>,
    /// Divided heads of the trained network.
    pub(super) columns: ColumnPass<'a>,
    /// Passes that take micro-batches through staged units of heads.
    pub(super) passes: Passes<'a>,
    /// Labels of the images of each micro-batch; empty lists if the batch has none.
    pub(super) labels: &'a [Vec<SoftLabel>],
    /// Classes of the pixels of the images' views, by micro-batch; empty lists unless the method
    /// reads them.
    pub(super) masks: &'a [Vec<ViewMasks>],
    /// Index of the step.
    pub(super) step: u64,
    /// Type in which gradients of heads are sent.
    pub(super) wire: Wire,
}

/// Gradients from the graph of a micro-batch.
struct GraphGrads {
    /// Gradients at the backbone's outputs.
    features: SlicedGrads,
    /// Gradients at the outputs of staged units, by head.
    staged: Vec<SlicedGrads>,
    /// Gradients with respect to the parameters in the graph, by index of the unit.
    flats: Vec<Tensor<1>>,
}

/// Gradients from the graphs of all micro-batches.
struct GraphSums {
    /// Loss and gauges.
    scalars: Vec<Scalars>,
    /// Gradients at the outputs of staged units, by head and micro-batch.
    staged: Vec<Vec<SlicedGrads>>,
    /// Sums of the gradients with respect to the parameters in the graphs, by index of the unit.
    flats: BTreeMap<usize, Tensor<1>>,
}

impl<'a> Scoring<'a> {
    fn heads(&self) -> HeadPass<'a> {
        HeadPass { network: self.network }
    }

    /// Computes the loss, its gradient at the backbone's outputs, and the gradients of the heads'
    /// units, whose gathered weights are `flats`. `pixels` are those of the views, or empty. The
    /// outputs of heads and the levels in `others` are dropped once the method has prepared its
    /// loss with them.
    pub(super) fn run(
        &self,
        batches: &[MicroBatch],
        pixels: &[MicroBatch],
        mut flats: Flats,
        others: &mut Inferred,
        gathers: &mut GatherQueue<'_>,
    ) -> Result<LossResult, EngineError> {
        let constrained = self.heads().constrain(&mut flats);
        let mut observations = Vec::new();
        let heads = self.heads().forward_staged(batches, &flats, self.passes, gathers, &mut observations)?;
        let mut inputs = graph_inputs(batches, &heads);
        for (input, batch) in inputs.iter_mut().zip(pixels) {
            input.pixels = batch.concat();
        }
        let mut trained = self.detached_outputs(&inputs, &flats);
        let column_inputs = self.columns.gather(&inputs)?;
        let loss = self.prepare(&trained, others, &column_inputs, &flats)?;
        // The graphs need their memory. The loss has its own references to those that it needs.
        others.drop_heads_and_levels();
        trained.iter_mut().for_each(Outputs::drop_heads_and_levels);
        let (mut sums, mut grads) = self.run_graphs(batches, &inputs, &heads, &flats, &*loss);
        if self.network.net.has_parts() {
            self.add_columns(&mut sums, &column_inputs, &heads, &flats, &*loss)?;
            gathers.look_ahead()?;
        }
        let GraphSums { scalars, staged, flats: mut param_grads } = sums;
        let staged = self.heads().backward_staged(heads, staged, batches, &flats, self.passes, &mut grads)?;
        param_grads.extend(staged);
        let observed = loss.observed();
        Ok(LossResult { scalars, grads, param_grads, observed, constrained, observations, trained })
    }

    /// Prepares the losses of all micro-batches together.
    fn prepare(
        &self,
        trained: &[Outputs],
        others: &Inferred,
        column_inputs: &ColumnInputs,
        flats: &Flats,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        let mut leaves = self.heads().leaves(flats, false);
        leaves.extend(self.heads().column_leaves(flats, false));
        let mut trained_columns = Vec::new();
        if self.method.prepares_with_heads() {
            trained_columns = self.columns.scores(column_inputs, flats);
        }
        let mut columns = None;
        if self.network.net.has_parts() {
            let group = self.columns.batch.group;
            columns = Some(ColumnOutputs { group, trained: &trained_columns, others: &others.columns });
        }
        let outputs = BatchOutputs {
            trained,
            others: &others.outputs,
            labels: self.labels,
            masks: self.masks,
            columns,
            score: &|head: &str, x: Tensor<3>| self.heads().score(head, x, &leaves),
        };
        self.method.prepare(&outputs, self.step, self.peers)
    }

    /// Runs the graphs of this rank's micro-batches. Also returns the gradients at the backbone's
    /// outputs, by micro-batch.
    fn run_graphs(
        &self,
        batches: &[MicroBatch],
        inputs: &[GraphInput],
        heads: &[StagedHead<'_>],
        flats: &Flats,
        loss: &dyn BatchLoss,
    ) -> (GraphSums, Vec<SlicedGrads>) {
        let mut grads: Vec<SlicedGrads> = vec![Vec::new(); batches.len()];
        let mut staged: Vec<Vec<SlicedGrads>> = heads.iter().map(|_| grads.clone()).collect();
        let mut scalars = Scalars::new(self.peers.n_micro_batches());
        let flat_grads = ordered::fold(
            batches.len(),
            &mut |index: usize| {
                let graph =
                    self.run_graph(index, &inputs[index], &batches[index], heads, flats, loss, &mut scalars);
                grads[index] = graph.features;
                for (head_grads, graph_grads) in staged.iter_mut().zip(graph.staged) {
                    head_grads[index] = graph_grads;
                }
                graph.flats
            },
            &add_all,
        );
        let undivided = self.network.net.heads().filter(|placed| !placed.is_divided());
        let indices = undivided.flat_map(|placed| placed.in_graph());
        let flats = indices.zip(flat_grads).collect();
        (GraphSums { scalars: vec![scalars], staged, flats }, grads)
    }

    /// Runs the graphs of divided heads for the column group, and adds their gradients to `sums`.
    fn add_columns(
        &self,
        sums: &mut GraphSums,
        column_inputs: &ColumnInputs,
        heads: &[StagedHead<'_>],
        flats: &Flats,
        loss: &dyn BatchLoss,
    ) -> Result<(), EngineError> {
        let mut scalars = Scalars::new(self.peers.n_micro_batches());
        let column_grads = self.columns.backward(column_inputs, flats, loss, &mut scalars)?;
        sums.scalars.push(scalars);
        sums.flats.extend(column_grads.flats);
        for (head, staged) in heads.iter().zip(&mut sums.staged) {
            let Some(grads) = column_grads.inputs.get(head.placed.head.name) else { continue };
            let batches = head.batches.iter().zip(grads);
            *staged = batches.map(|(batch, grads)| batch.split_gradients(grads)).collect();
        }
        Ok(())
    }

    /// Runs the graph of micro-batch `index` forwards and backwards.
    #[allow(clippy::too_many_arguments)]
    fn run_graph(
        &self,
        index: usize,
        input: &GraphInput,
        batch: &MicroBatch,
        heads: &[StagedHead<'_>],
        flats: &Flats,
        loss: &dyn BatchLoss,
        scalars: &mut Scalars,
    ) -> GraphGrads {
        let leaves = self.heads().leaves(flats, true);
        let input = GraphInput {
            features: tracked_leaves(&input.features),
            pixels: input.pixels.clone(),
            staged: input.staged.iter().map(|(name, sizes)| (*name, tracked_leaves(sizes))).collect(),
        };
        let head_outputs = self.heads().undivided_outputs(&input, &leaves, self.columns.batch.n_images);
        let trained = Outputs::new(input.features.clone(), head_outputs).with_pixels(input.pixels.clone());
        let scored = loss.micro_batch_loss(index, &trained);
        scalars.add(scored.loss.clone().inner(), scored.gauges);
        drop(trained);
        let mut grads = scored.loss.backward();
        let features = batch.split_gradients(&take_gradients(&input.features, &mut grads));
        let mut staged = Vec::with_capacity(heads.len());
        for head in heads {
            let head_grads = take_gradients(&input.staged[head.placed.head.name], &mut grads);
            staged.push(head.batches[index].split_gradients(&head_grads));
        }
        let flats = leaves.values().map(|leaves| leaves.gradient(&mut grads)).collect();
        GraphGrads { features, staged, flats }
    }

    /// Returns the trained network's outputs without a graph, with those of heads if the method
    /// prepares its loss with them.
    fn detached_outputs(&self, inputs: &[GraphInput], flats: &Flats) -> Vec<Outputs> {
        if self.method.prepares_with_heads() {
            return self.heads().outputs(inputs.to_vec(), flats, self.columns.batch.n_images);
        }
        inputs
            .iter()
            .map(|input| {
                let heads = HeadOutputs::new(self.columns.batch.n_images, &input.features, BTreeMap::new());
                Outputs::new(input.features.clone(), heads).with_pixels(input.pixels.clone())
            })
            .collect()
    }
}

/// Removes the gradients of leaves from `grads` and returns them; zeros if there are none.
fn take_gradients(sizes: &[Tokens], grads: &mut Gradients) -> Vec<Tensor<2>> {
    sizes.iter().map(|tokens| take_gradient(&tokens.x, grads)).collect()
}

/// Adds gradients, unit by unit.
fn add_all(a: Vec<Tensor<1>>, b: Vec<Tensor<1>>) -> Vec<Tensor<1>> {
    a.into_iter().zip(b).map(|(a, b)| add(a, b)).collect()
}
