//! A step up to its gradients, event by event ([`super::events`]).

use std::collections::BTreeMap;

use burn_tensor::{DType, Device, Tensor};
use kernels::device::host;
use kernels::ops::cast;
use networks::tokens::Tokens;
use ranks::EngineError;
use ranks::in_flight::{GatherQueue, ReductionQueue};
use ranks::wire::Wire;

use super::batch::MicroBatch;
use super::columns::{ColumnPass, GroupBatch};
use super::events::{Activations, Event, Retention, StepNetwork};
use super::heads::HeadPass;
use super::inferred::Inferred;
use super::loss::{LossResult, Scoring};
use super::pass::{Passes, SlicedGrads, UnitDraws, UnitTape, sum_over_groups};
use super::report::embeddings;
use super::scalars::Scalars;
use super::sharded::{Observation, ShardedNet};

/// A network of a step, and the passes that take micro-batches through it.
#[derive(Clone, Copy)]
pub(super) struct RunningNetwork<'a> {
    pub(super) network: ShardedNet<'a>,
    /// Passes through the backbone.
    pub(super) passes: Passes<'a>,
    /// Passes through staged units of heads.
    pub(super) head_passes: Passes<'a>,
}

/// What all events of a step need.
pub(super) struct StepInputs<'a> {
    /// Networks without gradients that see views.
    pub(super) others: Vec<RunningNetwork<'a>>,
    /// The trained network.
    pub(super) trained: RunningNetwork<'a>,
    /// Random numbers of each unit of the trained backbone.
    pub(super) draws: Vec<UnitDraws>,
    /// Number of units at the beginning of the trained backbone that are never trained.
    pub(super) n_fixed: usize,
    /// Micro-batches of the column group.
    pub(super) group: GroupBatch<'a>,
    /// Heads and loss of the trained network.
    pub(super) scoring: Scoring<'a>,
    /// Type in which gradients of the backbone are sent.
    pub(super) wire: Wire,
    /// Type in which gathered weights of backbones are held.
    pub(super) gathered: DType,
}

/// A step under way.
pub(super) struct Execution<'a> {
    inputs: StepInputs<'a>,
    gathers: GatherQueue<'a>,
    reductions: ReductionQueue<'a>,
    /// Micro-batches by pixel input; empty once the trained network has its views.
    batches: Vec<Vec<MicroBatch>>,
    /// Features of the network that runs, by micro-batch.
    features: Vec<MicroBatch>,
    /// Tokens at the levels that the network that runs outputs, by level and micro-batch.
    levels: Vec<Vec<MicroBatch>>,
    /// Pixels that the trained network sees, if the method reads them.
    pixels: Vec<MicroBatch>,
    /// Weights that have arrived for the next computation, by index of the unit; adapters are added
    /// to them.
    flats: BTreeMap<usize, Tensor<1>>,
    /// Adapters of the trained network that have arrived, by index of the unit, until their
    /// gradients are computed.
    adapters: BTreeMap<usize, Tensor<1>>,
    /// Outputs of the networks without gradients, until the loss has run.
    inferred: Inferred,
    /// Tapes of the trained backbone's units, with the gathered weights if they are kept.
    tapes: Vec<(UnitTape<'a>, Option<Tensor<1>>)>,
    /// Gradients at the trained backbone's features, by micro-batch.
    grads: Vec<SlicedGrads>,
    /// Flat gradients that are not yet sent, by index of the unit.
    flat_grads: BTreeMap<usize, Tensor<1>>,
    /// Input of the next unit that runs again, by micro-batch, within a segment.
    repeated: Option<Vec<MicroBatch>>,
    results: StepResults,
}

/// Results of a step beside the gradients of parameters.
#[derive(Default)]
pub(super) struct StepResults {
    /// Loss and gauges of this rank's micro-batches; then of its columns, if heads are divided.
    pub(super) scalars: Vec<Scalars>,
    /// Values that the method needs after the step, by name.
    pub(super) observed: Vec<(&'static str, Tensor<1>)>,
    /// Values of heads' parameters that were constrained before the step.
    pub(super) constrained: Vec<Observation>,
    /// New values of running parameters.
    pub(super) observations: Vec<Observation>,
    /// Embeddings of the evaluated network, by micro-batch.
    pub(super) embeddings: Vec<Tensor<2>>,
}

impl<'a> Execution<'a> {
    /// Begins a step on `batches`, which are listed by pixel input.
    pub(super) fn new(
        inputs: StepInputs<'a>,
        gathers: GatherQueue<'a>,
        reductions: ReductionQueue<'a>,
        batches: Vec<Vec<MicroBatch>>,
    ) -> Self {
        Self {
            inputs,
            gathers,
            reductions,
            batches,
            features: Vec::new(),
            levels: Vec::new(),
            pixels: Vec::new(),
            flats: BTreeMap::new(),
            adapters: BTreeMap::new(),
            inferred: Inferred::default(),
            tapes: Vec::new(),
            grads: Vec::new(),
            flat_grads: BTreeMap::new(),
            repeated: None,
            results: StepResults::default(),
        }
    }

    /// Runs the events of a phase.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(super) fn run(&mut self, events: &[Event]) -> Result<(), EngineError> {
        for (position, event) in events.iter().enumerate() {
            match *event {
                Event::Gather { network, unit, .. } => {
                    let is_followed = matches!(events.get(position + 1), Some(Event::Gather { .. }));
                    self.gather(network, unit, is_followed)?;
                }
                Event::Infer { network, unit } => self.infer(self.inputs.others[network], unit)?,
                Event::InferHeads { network } => self.infer_heads(self.inputs.others[network])?,
                Event::Forward { unit, retention } => self.forward(unit, retention)?,
                Event::Loss => self.loss()?,
                Event::Repeat { unit } => self.repeat(unit)?,
                Event::Backward { unit, .. } => self.backward(unit)?,
                Event::Reduce { unit } => self.reduce(unit),
            }
        }
        Ok(())
    }

    /// Waits for all reductions. Returns the shards of the mean gradients over `n_micro_batches` on
    /// `device`, by unit of the trained network, and the other results. Gradients of units that are
    /// never trained are zero.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(super) fn finish(
        self,
        n_micro_batches: usize,
        device: &Device,
    ) -> Result<(Vec<Tensor<1>>, StepResults), EngineError> {
        let mut sums = self.reductions.finish()?;
        let ShardedNet { net, shards, .. } = self.inputs.trained.network;
        let factor = 1.0 / n_micro_batches as f32;
        let mut means = Vec::with_capacity(shards.len());
        for (unit, shard) in shards.iter().enumerate() {
            if unit < self.inputs.n_fixed || net.is_fixed(unit) {
                means.push(Tensor::zeros([shard.len()], device));
                continue;
            }
            // The schedule reduces the gradients of all trained units.
            let sum = sums.remove(&unit).expect("a gradient for every trained unit");
            let mean = if n_micro_batches > 1 { host::scale(sum, factor) } else { sum };
            means.push(mean.to_device(device));
        }
        assert!(sums.is_empty(), "no gradient for units that are never trained");
        Ok((means, self.results))
    }

    /// Waits for the weights of a unit, and adds its adapters to them if it has some. The next
    /// gather is submitted at once if it is for the same computation; otherwise the computation
    /// submits it after its statistics.
    fn gather(&mut self, network: StepNetwork, unit: usize, is_followed: bool) -> Result<(), EngineError> {
        let sharded = match network {
            StepNetwork::Other(index) => self.inputs.others[index].network,
            StepNetwork::Trained => self.inputs.trained.network,
        };
        let flat;
        if let Some(buffers) = sharded.adapters(unit) {
            // The base comes first: unlike the adapters, it takes time, while the unit before
            // computes.
            let base = self.gathers.next_flat(&buffers.base.name)?;
            let adapters = self.gathers.next_flat(sharded.unit_name(unit))?;
            flat = cast(buffers.merged(&base, &adapters), self.inputs.gathered);
            if network == StepNetwork::Trained {
                self.adapters.insert(unit, adapters);
            }
        } else {
            flat = self.gathers.next_flat(sharded.unit_name(unit))?;
        }
        self.flats.insert(unit, flat);
        if is_followed {
            self.gathers.look_ahead()?;
        }
        Ok(())
    }

    /// Takes the weights of unit `unit`, which the event before this one has gathered.
    ///
    /// # Panics
    /// If they were not gathered: a bug in the schedule.
    fn take_flat(&mut self, unit: usize) -> Tensor<1> {
        self.flats.remove(&unit).expect("the weights are gathered before their unit runs")
    }

    /// Runs a unit of the backbone of a network without gradients.
    fn infer(&mut self, running: RunningNetwork<'a>, unit: usize) -> Result<(), EngineError> {
        let RunningNetwork { network, passes, .. } = running;
        if unit == 0 {
            self.features = select_views(&self.batches, network);
        }
        let flat = self.take_flat(unit);
        let gathered = network.gathered(unit, &flat);
        let batches = std::mem::take(&mut self.features);
        let totals;
        (self.features, totals) = passes.infer(gathered, batches, None, &mut || self.gathers.look_ahead())?;
        if network.net.level_ends.contains(&unit) {
            self.levels.push(self.features.clone());
        }
        if !passes.evaluates {
            let totals: Vec<_> = totals.iter().skip(1).map(sum_over_groups).collect();
            self.results.observations.extend(network.observed(unit, gathered, &totals, passes));
        }
        Ok(())
    }

    /// Runs the heads of a network without gradients.
    fn infer_heads(&mut self, running: RunningNetwork<'a>) -> Result<(), EngineError> {
        let RunningNetwork { network, head_passes, .. } = running;
        let heads = HeadPass { network };
        let flats = std::mem::take(&mut self.flats);
        let features = std::mem::take(&mut self.features);
        let observations = &mut self.results.observations;
        let inputs = heads.infer_staged(&features, &flats, head_passes, &mut self.gathers, observations)?;
        let divided = ColumnPass { heads, batch: self.inputs.group };
        let column_inputs = divided.gather(&inputs)?;
        self.gathers.look_ahead()?;
        let columns = divided.scores(&column_inputs, &flats);
        let mut outputs = heads.outputs(inputs, &flats, self.inputs.group.n_images);
        for level in std::mem::take(&mut self.levels) {
            for (output, batch) in outputs.iter_mut().zip(&level) {
                output.levels.push(batch.concat().iter().map(Tokens::in_f32).collect());
            }
        }
        self.inferred.outputs.push((network.net.name, outputs));
        self.inferred.columns.push((network.net.name, columns));
        Ok(())
    }

    /// Runs a unit of the trained backbone forward.
    fn forward(&mut self, unit: usize, retention: Retention) -> Result<(), EngineError> {
        let RunningNetwork { network, passes, .. } = self.inputs.trained;
        if unit == 0 {
            self.features = select_views(&self.batches, network);
            self.batches.clear();
            if self.inputs.scoring.method.reads_pixels() {
                self.pixels = self.features.clone();
            }
        }
        let flat = self.take_flat(unit);
        let gathered = network.gathered(unit, &flat);
        let batches = std::mem::take(&mut self.features);
        let draws = &self.inputs.draws[unit];
        let on_sent = &mut || self.gathers.look_ahead();
        let tape;
        (self.features, tape) = match retention.activations {
            Activations::Graph => passes.forward(gathered, batches, draws, unit > 0, on_sent)?,
            Activations::Input => passes.forward_from_input(gathered, batches, draws, on_sent)?,
            Activations::Nothing => passes.forward_in_segment(gathered, batches, draws, on_sent)?,
        };
        self.results.observations.extend(network.observed(unit, gathered, &tape.totals(), passes));
        self.tapes.push((tape, retention.weights.then_some(flat)));
        Ok(())
    }

    /// Runs the heads of the trained network and the loss, forward and backward.
    fn loss(&mut self) -> Result<(), EngineError> {
        let flats = std::mem::take(&mut self.flats);
        let features = std::mem::take(&mut self.features);
        let pixels = std::mem::take(&mut self.pixels);
        let scoring = &self.inputs.scoring;
        let scored = scoring.run(&features, &pixels, flats, &mut self.inferred, &mut self.gathers)?;
        let LossResult { scalars, grads, param_grads, observed, constrained, observations, trained } = scored;
        let evaluated = self.inputs.scoring.method.evaluated();
        self.results.embeddings = embeddings(evaluated, &self.inferred.outputs, &trained);
        self.results.scalars = scalars;
        self.results.observed = observed;
        self.results.constrained = constrained;
        self.results.observations.extend(observations);
        self.grads = grads;
        self.flat_grads = param_grads;
        // The backward pass needs their memory.
        self.inferred = Inferred::default();
        Ok(())
    }

    /// Runs unit `unit` of a segment forward again, and stores its output as the input of the next
    /// unit.
    fn repeat(&mut self, unit: usize) -> Result<(), EngineError> {
        let RunningNetwork { network, passes, .. } = self.inputs.trained;
        let kept = self.tapes[unit].1.clone();
        let flat = kept.unwrap_or_else(|| self.take_flat(unit));
        let batches = match self.repeated.take() {
            Some(batches) => batches,
            // The first unit of a segment keeps its input.
            None => self.tapes[unit].0.input().expect("the input of a segment"),
        };
        let totals = self.tapes[unit].0.totals_by_stage();
        let draws = &self.inputs.draws[unit];
        let on_sent = &mut || self.gathers.look_ahead().and_then(|()| self.reductions.release());
        let batches = passes.repeat(network.gathered(unit, &flat), batches, draws, &totals, on_sent)?;
        let next = &mut self.tapes[unit + 1].0;
        let n_stages = network.net.backbone[unit + 1].n_stages();
        *next = std::mem::replace(next, UnitTape::Totals(Vec::new())).with_input(n_stages, &batches);
        self.repeated = Some(batches);
        Ok(())
    }

    /// Runs a unit of the trained backbone backward.
    fn backward(&mut self, unit: usize) -> Result<(), EngineError> {
        let RunningNetwork { network, passes, .. } = self.inputs.trained;
        self.repeated = None;
        // The forward pass leaves a tape for every unit.
        let (tape, kept) = self.tapes.pop().expect("a tape for every unit");
        let flat = kept.unwrap_or_else(|| self.take_flat(unit));
        let adapters = self.adapters.remove(&unit);
        let gathered = network.gathered_with_adapters(unit, &flat, adapters.as_ref());
        let grads = std::mem::take(&mut self.grads);
        let draws = &self.inputs.draws[unit];
        let on_sent = &mut || self.gathers.look_ahead().and_then(|()| self.reductions.release());
        let params;
        (self.grads, params) = passes.backward(gathered, tape, grads, draws, unit > 0, on_sent)?;
        if !network.net.is_fixed(unit) {
            // Rounding to the type on the wire gives the same values here as before the transfer.
            let grad = params.flat(&network.shards[unit].layout, self.inputs.wire.dtype());
            self.flat_grads.insert(unit, grad);
        }
        Ok(())
    }

    /// Hands the gradient of a unit of the trained network to the reductions.
    fn reduce(&mut self, unit: usize) {
        let network = self.inputs.trained.network;
        // The event before this one has computed it.
        let grad = self.flat_grads.remove(&unit).expect("a gradient before its reduction");
        let is_backbone = network.net.is_backbone(unit);
        let wire = if is_backbone { self.inputs.wire } else { self.inputs.scoring.wire };
        self.reductions.push_part((unit, network.unit_name(unit)), grad, wire, network.extent(unit));
    }
}

/// Returns the views that `network` sees of `batches`, which are listed by pixel input.
fn select_views(batches: &[Vec<MicroBatch>], network: ShardedNet<'_>) -> Vec<MicroBatch> {
    let seen_views = &network.net.seen_views;
    batches[network.net.input].iter().map(|batch| batch.select_views(seen_views)).collect()
}
