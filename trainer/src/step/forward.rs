//! The forward passes of a step: without a graph for networks without gradients; for the trained
//! network with the data that its backward pass needs.

use burn_tensor::Tensor;
use networks::features::{HeadOutputs, Outputs};
use ranks::EngineError;
use ranks::prefetch::GatherQueue;

use super::batch::MicroBatch;
use super::columns::{ColumnPass, GroupBatch};
use super::heads::HeadPass;
use super::net::Net;
use super::pass::{Passes, UnitDraws, UnitTape, sum_over_groups};
use super::sharded::{Observation, ShardedNet};
use crate::method::network::UpdateRule;

/// Results of the forward pass of a network without gradients.
struct InferencePass {
    /// Outputs of the network, by micro-batch.
    outputs: Vec<Outputs>,
    /// This rank's columns of the outputs of divided heads, by micro-batch of the column group.
    columns: Vec<HeadOutputs>,
    /// New values of running parameters.
    observations: Vec<Observation>,
}

/// Results of all networks without gradients.
#[derive(Default)]
pub(super) struct Inferred {
    /// Outputs by network and micro-batch.
    pub(super) outputs: Vec<(&'static str, Vec<Outputs>)>,
    /// This rank's columns of the outputs of divided heads, by network.
    pub(super) columns: Vec<(&'static str, Vec<HeadOutputs>)>,
    /// New values of running parameters.
    pub(super) observations: Vec<Observation>,
}

impl Inferred {
    /// Drops the outputs of all heads.
    pub(super) fn drop_heads(&mut self) {
        self.columns.clear();
        self.outputs.iter_mut().flat_map(|(_, outputs)| outputs).for_each(Outputs::drop_heads);
    }
}

/// Results of the trained network's forward pass through its backbone.
pub(super) struct TrainedPass<'a> {
    /// Features of the backbone, by micro-batch.
    pub(super) batches: Vec<MicroBatch>,
    /// Tapes by unit, with the gathered weights if they are kept.
    pub(super) tapes: Vec<(UnitTape<'a>, Option<Tensor<1>>)>,
    /// New values of running parameters.
    pub(super) observations: Vec<Observation>,
}

/// Data that a unit keeps until its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Retention {
    /// Whether it keeps its graph.
    pub(super) graph: bool,
    /// Whether it keeps its gathered weights.
    pub(super) weights: bool,
    /// Whether it keeps its input if it keeps no graph; otherwise the previous units run again
    /// first.
    pub(super) input: bool,
}

/// Runs the networks without gradients, one after another. `batches` are listed by pixel input. See
/// [`infer`] for the other parameters.
pub(super) fn infer_all(
    networks: &[ShardedNet<'_>],
    batches: &[Vec<MicroBatch>],
    passes: Passes<'_>,
    head_passes: Passes<'_>,
    gathers: &mut GatherQueue<'_>,
    group: GroupBatch<'_>,
) -> Result<Inferred, EngineError> {
    let mut all = Inferred::default();
    for network in networks {
        let evaluates = network.net.update_rule == UpdateRule::Frozen;
        let passes = Passes { evaluates, ..passes };
        let head_passes = Passes { evaluates, ..head_passes };
        let inferred = infer(*network, &batches[network.net.input], passes, head_passes, gathers, group)?;
        all.outputs.push((network.net.name, inferred.outputs));
        all.columns.push((network.net.name, inferred.columns));
        all.observations.extend(inferred.observations);
    }
    Ok(all)
}

/// Computes the outputs of a network without gradients for the view sizes that it sees, by
/// micro-batch. `passes` and `head_passes` take micro-batches through its backbone and through its
/// heads, for all view sizes.
fn infer(
    network: ShardedNet<'_>,
    batches: &[MicroBatch],
    passes: Passes<'_>,
    head_passes: Passes<'_>,
    gathers: &mut GatherQueue<'_>,
    group: GroupBatch<'_>,
) -> Result<InferencePass, EngineError> {
    let Net { seen_views, .. } = network.net;
    let mut batches: Vec<MicroBatch> = batches.iter().map(|batch| batch.select_views(seen_views)).collect();
    let sizes = network.net.sizes();
    let sets = passes.sets.select(&sizes);
    let passes = Passes { sets: &sets, ..passes };
    let head_sets = head_passes.sets.select(&sizes);
    let head_passes = Passes { sets: &head_sets, ..head_passes };
    let mut observations = Vec::new();
    for number in 0..network.net.backbone.len() {
        let flat = gathers.next_flat(network.unit_name(number))?;
        let unit = network.gathered(number, &flat);
        let totals;
        (batches, totals) = passes.infer(unit, batches, None, &mut || gathers.look_ahead())?;
        if !passes.evaluates {
            let totals: Vec<_> = totals.iter().skip(1).map(sum_over_groups).collect();
            observations.extend(network.observed(number, unit, &totals, passes));
        }
    }
    let heads = HeadPass { network };
    let flats = heads.gather(gathers)?;
    let inputs = heads.infer_staged(&batches, &flats, head_passes, gathers, &mut observations)?;
    let divided = ColumnPass { heads, batch: group };
    let column_inputs = divided.gather(&inputs)?;
    gathers.look_ahead()?;
    let columns = divided.scores(&column_inputs, &flats);
    Ok(InferencePass { outputs: heads.outputs(inputs, &flats, group.n_images), columns, observations })
}

/// Runs the trained network's backbone. `retention` returns the data that the unit of a number
/// keeps.
pub(super) fn forward<'a>(
    network: ShardedNet<'a>,
    mut batches: Vec<MicroBatch>,
    draws: &[UnitDraws],
    passes: Passes<'_>,
    gathers: &mut GatherQueue<'_>,
    retention: impl Fn(usize) -> Retention,
) -> Result<TrainedPass<'a>, EngineError> {
    let mut tapes = Vec::with_capacity(network.net.backbone.len());
    let mut observations = Vec::new();
    for (number, draws) in draws.iter().enumerate() {
        let flat = gathers.next_flat(network.unit_name(number))?;
        let unit = network.gathered(number, &flat);
        let retention = retention(number);
        let tape;
        let on_sent = &mut || gathers.look_ahead();
        (batches, tape) = if retention.graph || retention.input {
            passes.forward(unit, batches, draws, retention.graph, number > 0, on_sent)?
        } else {
            passes.forward_in_segment(unit, batches, draws, on_sent)?
        };
        observations.extend(network.observed(number, unit, &tape.totals(), passes));
        tapes.push((tape, retention.weights.then_some(flat)));
    }
    Ok(TrainedPass { batches, tapes, observations })
}
