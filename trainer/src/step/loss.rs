//! Heads and loss of the trained network: one ordinary graph per micro-batch, behind the staged
//! units of heads.

use std::collections::BTreeMap;

use burn_tensor::Tensor;
use kernels::device::host::add;
use networks::features::{HeadOutputs, Outputs};
use ranks::EngineError;
use ranks::ordered;
use ranks::peers::Peers;
use ranks::prefetch::{GatherQueue, ReductionQueue};
use ranks::wire::Wire;

use super::batch::{Groups, MicroBatch};
use super::columns::{ColumnInputs, ColumnPass};
use super::forward::Inferred;
use super::heads::{Flats, GraphInput, HeadPass, StagedHead, graph_inputs};
use super::pass::{Passes, SlicedGrads};
use super::scalars::Scalars;
use super::sharded::{Observation, ShardedNet};
use crate::method::{BatchLoss, BatchOutputs, ColumnOutputs, Method};

/// Results of heads and loss.
pub(super) struct LossResult {
    /// Loss and gauges of this rank's micro-batches; then of its columns, where heads are divided.
    pub(super) scalars: Vec<Scalars>,
    /// Gradients at the backbone's outputs, by micro-batch.
    pub(super) grads: Vec<SlicedGrads>,
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
    /// Gradients with respect to the parameters in the graph, by number of the unit.
    flats: Vec<Tensor<1>>,
}

/// Gradients from the graphs of all micro-batches.
struct GraphSums {
    /// Loss and gauges.
    scalars: Vec<Scalars>,
    /// Gradients at the outputs of staged units, by head and micro-batch.
    staged: Vec<Vec<SlicedGrads>>,
    /// Sums of the gradients with respect to the parameters in the graphs, by number of the unit.
    flats: BTreeMap<usize, Tensor<1>>,
}

impl<'a> Scoring<'a> {
    fn heads(&self) -> HeadPass<'a> {
        HeadPass(self.network)
    }

    /// Computes the loss and its gradient at the backbone's outputs, and starts the reductions of
    /// the heads' gradients. `others` loses the outputs of heads when the method has prepared its
    /// loss with them.
    pub(super) fn run(
        &self,
        batches: &[MicroBatch],
        others: &mut Inferred,
        gathers: &mut GatherQueue<'_>,
        reductions: &mut ReductionQueue<'a>,
    ) -> Result<LossResult, EngineError> {
        let mut flats = self.heads().gather(gathers)?;
        let constrained = self.heads().constrain(&mut flats, self.columns.batch.group.part());
        let mut observations = Vec::new();
        let heads = self.heads().staged(batches, &flats, self.passes, gathers, &mut observations)?;
        let inputs = graph_inputs(batches, &heads);
        let mut trained = self.plain(&inputs, &flats);
        let group = self.columns.gather(&inputs)?;
        let loss = self.prepared(&trained, others, &group, &flats)?;
        // The graphs need their memory. What the loss has kept of them stays.
        others.drop_heads();
        trained.iter_mut().for_each(Outputs::drop_heads);
        let (mut sums, mut grads) = self.graphs(batches, &inputs, &heads, &flats, &*loss);
        if self.network.net.has_parts() {
            self.add_columns(&mut sums, &group, &heads, &flats, &*loss)?;
            gathers.look_ahead()?;
        }
        let GraphSums { scalars, staged, flats: mut of_heads } = sums;
        let staged =
            self.heads().back_through_staged(heads, staged, batches, &flats, self.passes, &mut grads)?;
        of_heads.extend(staged);
        for (number, grad) in of_heads {
            let unit = (number, self.network.unit_name(number));
            reductions.push_part(unit, grad, self.wire, self.network.extent(number));
        }
        let observed = loss.observed();
        Ok(LossResult { scalars, grads, observed, constrained, observations, trained })
    }

    /// Computes what the losses of all micro-batches share. `group` are the inputs of divided
    /// heads.
    fn prepared(
        &self,
        trained: &[Outputs],
        others: &Inferred,
        group: &ColumnInputs,
        flats: &Flats,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        let mut leaves = self.heads().leaves(flats, false);
        leaves.extend(self.heads().column_leaves(flats, false));
        let score = |head: &str, x: Tensor<3>| self.heads().score(head, x, &leaves);
        let of_trained =
            if self.method.prepares_with_heads() { self.columns.scores(group, flats) } else { Vec::new() };
        let group = self.columns.batch.group;
        let has_parts = self.network.net.has_parts();
        let of_others = &others.columns;
        let columns = has_parts.then_some(ColumnOutputs { group, trained: &of_trained, others: of_others });
        let outputs = BatchOutputs { trained, others: &others.outputs, columns, score: &score };
        self.method.prepare(&outputs, self.step, self.peers)
    }

    /// Runs the graphs of this rank's micro-batches. Also returns the gradients at the backbone's
    /// outputs, by micro-batch.
    fn graphs(
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
        let mut score = |number: usize| {
            let given =
                self.graph(number, &inputs[number], &batches[number], heads, flats, loss, &mut scalars);
            grads[number] = given.features;
            staged.iter_mut().zip(given.staged).for_each(|(of_head, given)| of_head[number] = given);
            given.flats
        };
        let sum =
            |a: Vec<Tensor<1>>, b: Vec<Tensor<1>>| a.into_iter().zip(b).map(|(a, b)| add(a, b)).collect();
        let whole = self.network.net.heads().filter(|placed| !placed.is_divided());
        let in_graph = whole.flat_map(|placed| placed.in_graph());
        let flats = in_graph.zip(ordered::fold(batches.len(), &mut score, &sum)).collect();
        (GraphSums { scalars: vec![scalars], staged, flats }, grads)
    }

    /// Runs the graphs of divided heads for the column group, of which `group` are the inputs.
    fn add_columns(
        &self,
        sums: &mut GraphSums,
        group: &ColumnInputs,
        heads: &[StagedHead<'_>],
        flats: &Flats,
        loss: &dyn BatchLoss,
    ) -> Result<(), EngineError> {
        let mut scalars = Scalars::new(self.peers.n_micro_batches());
        let of_columns = self.columns.backward(group, flats, loss, &mut scalars)?;
        sums.scalars.push(scalars);
        sums.flats.extend(of_columns.flats);
        for (head, staged) in heads.iter().zip(&mut sums.staged) {
            let Some(grads) = of_columns.inputs.get(head.placed.head.name) else { continue };
            let own = head.batches.iter().zip(grads);
            *staged = own.map(|(batch, grads)| batch.sliced(grads.clone())).collect();
        }
        Ok(())
    }

    /// Runs the graph of micro-batch `number` forwards and backwards.
    #[allow(clippy::too_many_arguments)]
    fn graph(
        &self,
        number: usize,
        input: &GraphInput,
        batch: &MicroBatch,
        heads: &[StagedHead<'_>],
        flats: &Flats,
        loss: &dyn BatchLoss,
        scalars: &mut Scalars,
    ) -> GraphGrads {
        let leaves = self.heads().leaves(flats, true);
        let tracked = |groups: &Groups| -> Groups {
            groups.iter().map(|group| group.map(|x| x.clone().autodiff().require_grad())).collect()
        };
        let input = GraphInput {
            features: tracked(&input.features),
            staged: input.staged.iter().map(|(name, groups)| (*name, tracked(groups))).collect(),
        };
        let of_heads = self.heads().heads(&input, &leaves, self.columns.batch.n_images);
        let trained = Outputs { features: input.features.clone(), heads: of_heads };
        let scored = loss.micro_batch_loss(number, &trained);
        scalars.add(scored.loss.clone().inner(), scored.gauges);
        drop(trained);
        let mut of_loss = scored.loss.backward();
        let mut of_groups = |groups: &Groups| -> Vec<Tensor<3>> {
            groups
                .iter()
                .map(|group| &group.x)
                .map(|x| x.grad_remove(&mut of_loss).unwrap_or_else(|| x.clone().inner().zeros_like()))
                .collect()
        };
        let features = batch.sliced(of_groups(&input.features));
        let staged = heads
            .iter()
            .map(|head| head.batches[number].sliced(of_groups(&input.staged[head.placed.head.name])))
            .collect();
        let flats = leaves.values().map(|leaves| leaves.gradient(&mut of_loss)).collect();
        GraphGrads { features, staged, flats }
    }

    /// The trained network's outputs without a graph, with heads where the method prepares its loss
    /// with them.
    fn plain(&self, inputs: &[GraphInput], flats: &Flats) -> Vec<Outputs> {
        if self.method.prepares_with_heads() {
            return self.heads().outputs(inputs.to_vec(), flats, self.columns.batch.n_images);
        }
        inputs
            .iter()
            .map(|input| Outputs {
                heads: HeadOutputs::new(self.columns.batch.n_images, &input.features, BTreeMap::new()),
                features: input.features.clone(),
            })
            .collect()
    }
}
