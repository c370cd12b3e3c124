//! One training step, unit by unit.
//!
//! ```text
//! teacher, no graph    for each unit: gather → forward the global views → drop
//! student, forwards    for each unit: gather → forward all views → keep input (or graph) → drop
//! heads and loss       ordinary autodiff, part by part → gradient at the backbone's output
//! student, backwards   for each unit from the last: gather → vector-Jacobian product → reduce
//! one small reduce     squared norms by clip group, loss, gauges, votes
//! local                clip, AdamW on the flat shards, teacher moves
//! ```
//!
//! A rank's batch may be cut into parts, which go through a unit one after another while it is gathered: a
//! unit that runs again on the way back has the graph of one part at a time, and weights and gradients travel
//! once a step whatever the number of parts. The order of all gathers of a step is one list ([`Gathers`]), so that the next
//! unit is on its way while one computes.

pub mod batch;
mod passes;
pub mod phases;
pub mod precision;
mod scalars;
pub mod tape;
pub mod upload;

use augment::Batch;
use burn_tensor::{DType, Device, Tensor};

use crate::comm::communicator::Comm;
use crate::comm::engine::{EngineError, Reduction};
use crate::comm::fixed::{Fixed, N_LIMBS};
use crate::comm::prefetch::{Gathers, Reductions, Wanted};
use crate::comm::topology::{Place, Sharding};
use crate::device::readback::read_back;
use crate::device::workers::Workers;
use crate::method::{Gauges, Method};
use crate::model::features::Tokens;
use crate::model::unit::Unit;
use crate::optim::state::UnitShard;
use crate::optim::{AdamW, ClipNorms};
use crate::schedule::Knobs;
use crate::step::batch::Slices;
use crate::step::passes::Scored;
use crate::step::phases::Clock;
pub use crate::step::phases::Phases;
use crate::step::precision::Precision;
use crate::step::scalars::Numbers;
use crate::step::upload::Sent;

/// Everything that changes while a run trains.
pub struct TrainState {
    /// Steps taken; the number of the next one.
    pub step: u64,
    /// Global batches passed over after a rollback: the next batch is `step + skipped_batches`.
    pub skipped_batches: u64,
    /// Steps in a row whose loss or gradient was not finite.
    pub bad_steps: u32,
    /// Backbone units, then head units.
    pub shards: Vec<UnitShard>,
    /// The method, which owns what moves without gradients.
    pub method: Box<dyn Method>,
}

/// A network under training on one rank.
pub struct Trainer {
    /// What changes.
    pub state: TrainState,
    /// The line to the other ranks.
    pub comm: Comm,
    pub(crate) backbone: Vec<Box<dyn Unit>>,
    pub(crate) head: Vec<Box<dyn Unit>>,
    pub(crate) workers: Workers,
    pub(crate) config: StepConfig,
    pub(crate) device: Device,
    state_device: Device,
    /// What is waited for at the end of every phase.
    timed: Option<Device>,
    optimizer: AdamW,
}

/// How steps are taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepConfig {
    /// Seed of the run, for initial weights and drop-path.
    pub seed: u64,
    /// Side of a patch.
    pub patch_px: usize,
    /// Backbone units, from the last on, that keep their graph.
    pub keep: usize,
    /// Worker threads.
    pub n_workers: usize,
    /// Parts of a global batch, N; a multiple of the number of ranks.
    pub n_parts: usize,
    /// What is cut over ranks.
    pub sharding: Sharding,
    /// Whether the shards lie in the host's memory, whatever computes.
    pub offload: bool,
    /// How weights and gradients travel.
    pub precision: Precision,
}

/// What a rank has to say to the others at the end of a step; numbers of ranks once they have agreed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Votes {
    /// It was asked to stop.
    pub stop: f64,
    /// It cannot go on: it has no batch, or what only this rank does has failed.
    pub failed: f64,
    /// Its part of the checkpoint that is being written is on disk.
    pub saved: f64,
    /// That part could not be written.
    pub save_failed: f64,
}

/// A step whose gradients are known and whose update is not made.
pub struct Gradients {
    /// This rank's shards of the mean gradients, by unit.
    shards: Vec<Tensor<1>>,
    numbers: Numbers,
    observed: Tensor<1>,
    embeddings: Vec<Tensor<2>>,
    phases: Phases,
}

impl Gradients {
    /// This rank's part of the loss.
    ///
    /// # Errors
    /// [`EngineError::Failed`] when the device has failed.
    pub fn loss(&self) -> Result<f64, EngineError> {
        Ok(Fixed::from_limbs(&self.numbers.read()?.0.limbs()))
    }

    /// This rank's shards of the mean gradients, by unit.
    pub fn shards(&self) -> &[Tensor<1>] {
        &self.shards
    }

    /// Teacher embeddings, as in [`StepReport::embeddings`].
    pub fn embeddings(&self) -> &[Tensor<2>] {
        &self.embeddings
    }

    /// Makes every gradient a NaN: a drill for what follows.
    pub fn poison(&mut self) {
        self.shards.iter_mut().for_each(|shard| *shard = shard.full_like(f32::NAN));
    }
}

/// What a step says of itself.
#[derive(Debug, Clone)]
pub struct StepReport {
    /// Mean loss of the global batch.
    pub loss: f64,
    /// Norm of all gradients, before clipping.
    pub grad_norm: f64,
    /// False if the step was skipped because loss or gradient was not finite.
    pub finite: bool,
    /// Where the time went.
    pub phases: Phases,
    /// The method's own numbers, over the global batch.
    pub gauges: Gauges,
    /// Teacher embeddings of the global views by part, a row an image: `[B / N, V_t · D]`.
    pub embeddings: Vec<Tensor<2>>,
    /// What the ranks have said.
    pub votes: Votes,
}

impl Trainer {
    /// A fresh network. All ranks call it.
    pub fn new(
        backbone: Vec<Box<dyn Unit>>,
        method: Box<dyn Method>,
        comm: Comm,
        optimizer: AdamW,
        config: StepConfig,
        device: Device,
    ) -> Self {
        let head = method.head();
        let state_device = if config.offload { Device::flex() } else { device.clone() };
        let shards = backbone
            .iter()
            .chain(&head)
            .map(|unit| UnitShard::init(unit.as_ref(), config.seed, comm.place(), &state_device))
            .collect();
        let workers = Workers::on(&device, config.n_workers);
        let state = TrainState { step: 0, skipped_batches: 0, bad_steps: 0, shards, method };
        Self { state, comm, backbone, head, workers, config, device, state_device, timed: None, optimizer }
    }

    /// Lets every phase end when the device has done what it was asked, so that phases tell how long it took and
    /// not how long asking took: for measurements.
    pub fn time_phases(&mut self, yes: bool) {
        self.timed = yes.then(|| self.device.clone());
    }

    /// Where weights, moments and teacher lie.
    pub fn state_device(&self) -> &Device {
        &self.state_device
    }

    /// This rank's place among the others.
    pub fn place(&self) -> Place {
        self.comm.place()
    }

    /// Parts of the batch that this rank holds.
    pub(crate) fn n_parts_here(&self) -> usize {
        (self.config.n_parts / self.place().world_size).max(1)
    }

    /// Takes one step on this rank's share of a batch, by itself.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn step(&mut self, batch: &Batch, knobs: &Knobs) -> Result<StepReport, EngineError> {
        let gradients = self.gradients(batch, knobs, &mut |_| {})?;
        self.update(gradients, Votes::default(), knobs)
    }

    /// Forwards and backwards: everything up to the gradients. `entering` is told of each phase.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn gradients(
        &self,
        batch: &Batch,
        knobs: &Knobs,
        entering: &mut dyn FnMut(&'static str),
    ) -> Result<Gradients, EngineError> {
        self.gradients_of(batch.samples.len(), || self.parts(batch), knobs, entering)
    }

    /// [`Trainer::gradients`] of a batch that has been sent to the device.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn gradients_of_sent(
        &self,
        sent: Sent,
        knobs: &Knobs,
        entering: &mut dyn FnMut(&'static str),
    ) -> Result<Gradients, EngineError> {
        let dtype = self.config.precision.compute.dtype();
        self.gradients_of(sent.n_images, || self.uplink().parts(sent, dtype), knobs, entering)
    }

    fn gradients_of(
        &self,
        n_images: usize,
        parts: impl FnOnce() -> Vec<Slices>,
        knobs: &Knobs,
        entering: &mut dyn FnMut(&'static str),
    ) -> Result<Gradients, EngineError> {
        let waited = self.comm.waited();
        let mut clock = Clock::start(self.timed.clone());
        let mut phases = Phases::default();
        let mut gathers = Gathers::new(&self.comm, self.gather_list(), &self.device)?;
        let mut reductions = Reductions::new(&self.comm);
        let parts = parts();
        phases.input_ms = clock.lap_ms();

        entering("teacher");
        let teacher = self.teacher(&parts, &mut gathers)?;
        phases.teacher_ms = clock.lap_ms();

        entering("forward");
        let draws = self.draw(n_images);
        let (outputs, tape) = self.forward(parts, &draws, &mut gathers)?;
        phases.forward_ms = clock.lap_ms();

        entering("head");
        let Scored { numbers, grad_outputs, observed } =
            self.heads_and_loss(&outputs, &teacher, knobs, &mut gathers, &mut reductions)?;
        phases.head_ms = clock.lap_ms();

        entering("backward");
        self.backward(tape, grad_outputs, &draws, &mut gathers, &mut reductions)?;
        let shards = self.in_layout_order(reductions.finish()?);
        phases.backward_ms = clock.lap_ms();
        phases.wait_ms = (self.comm.waited() - waited).as_secs_f64() * 1e3;

        let embeddings = teacher.into_iter().map(|part| self.image_rows(&part.tokens[0])).collect();
        Ok(Gradients { shards, numbers, observed, embeddings, phases })
    }

    /// Class tokens of a part, a row an image.
    fn image_rows(&self, tokens: &Tokens) -> Tensor<2> {
        let [rows, n, d] = tokens.x.dims();
        let n_views = self.state.method.multicrop().groups()[0].n_views;
        tokens.x.clone().reshape([rows / n_views, n_views * n * d])
    }

    /// Every gather of a step, in order.
    fn gather_list(&self) -> Vec<Wanted<'_>> {
        let n_backbone = self.backbone.len();
        let Precision { compute, gather, head_gather, .. } = self.config.precision;
        let shards = self.state.shards.iter().enumerate();
        let teacher = shards.clone().map(|(number, s)| (number, s, &s.teacher, false));
        let student = shards.clone().map(|(number, s)| (number, s, &s.student, self.keeps_flat(number)));
        let again = shards.clone().take(n_backbone).rev();
        let again = again.filter(|(number, _)| !self.keeps_flat(*number));
        let again = again.map(|(number, s)| (number, s, &s.student, false));
        let all = teacher.chain(student).chain(again);
        let mut list = Vec::new();
        for (number, s, shard, keep) in all {
            let (wire, dtype) = match number < n_backbone {
                true => (gather, compute.dtype()),
                false => (head_gather, DType::F32),
            };
            list.push(Wanted { unit: &s.layout.name, shard, wire, keep, dtype });
        }
        list
    }

    /// Whether the gathered weights of backbone unit `number` stay until its backward pass.
    pub(crate) fn keeps_flat(&self, number: usize) -> bool {
        if number >= self.backbone.len() {
            return false;
        }
        self.config.sharding == Sharding::Grad || self.keeps_graph(number)
    }

    /// Whether backbone unit `number` keeps its graph.
    pub(crate) fn keeps_graph(&self, number: usize) -> bool {
        number >= self.backbone.len().saturating_sub(self.config.keep)
    }

    /// Mean gradients by unit: they came head first, then the backbone from its end.
    fn in_layout_order(&self, mut reduced: Vec<Tensor<1>>) -> Vec<Tensor<1>> {
        let mut backbone = reduced.split_off(self.head.len());
        backbone.reverse();
        backbone.append(&mut reduced);
        let n_parts = self.config.n_parts;
        let scale = 1.0 / n_parts as f32;
        let mean = |grad: Tensor<1>| if n_parts > 1 { grad * scale } else { grad };
        backbone.into_iter().map(|grad| mean(grad).to_device(&self.state_device)).collect()
    }

    /// Agrees with all ranks on loss, norms and finiteness, then updates or skips.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn update(
        &mut self,
        gradients: Gradients,
        votes: Votes,
        knobs: &Knobs,
    ) -> Result<StepReport, EngineError> {
        let Gradients { shards: grads, numbers, observed, embeddings, mut phases } = gradients;
        let waited = self.comm.waited();
        let mut clock = Clock::start(self.timed.clone());
        let (loss, gauges) = numbers.read()?;
        // Read before the optimizer is launched, which would be waited for.
        let observed = read_back(observed)?;
        let norms = ClipNorms::of(self.optimizer.clip, &self.state.shards, &grads, self.backbone.len())?;
        let mut sums = match self.place().replica() {
            // Replicas hold the same shards, which count once; what is no number counts wherever it is.
            0 => norms.squares.clone(),
            _ => norms.squares.iter().map(|square| square.only_bad()).collect(),
        };
        sums.push(loss);
        sums.extend(gauges.iter().map(|(_, value)| *value));
        let mut shared: Vec<f64> = sums.into_iter().flat_map(Fixed::limbs).collect();
        shared.extend([votes.stop, votes.failed, votes.saved, votes.save_failed]);
        let shared = self.comm.all_reduce("norms and votes", shared, Reduction::Sum)?;
        let (limbs, counts) = shared.split_at(shared.len() - 4);
        let numbers: Vec<f64> = limbs.chunks_exact(N_LIMBS).map(Fixed::from_limbs).collect();
        let (squares, rest) = numbers.split_at(norms.squares.len());
        let (loss, means) = (rest[0], &rest[1..]);
        let gauges = gauges.iter().zip(means).map(|((name, _), mean)| (*name, *mean)).collect();

        // The sum of squares is finite only if every gradient is, on every rank.
        let finite = loss.is_finite() && squares.iter().all(|square| square.is_finite());
        let norms = norms.agreed(squares);
        if finite {
            self.optimizer.step(&mut self.state.shards, grads, &norms, knobs);
            self.state.method.after_step(&observed);
            self.state.bad_steps = 0;
        } else {
            self.state.bad_steps += 1;
        }
        self.state.step += 1;
        phases.update_ms = clock.lap_ms();
        phases.wait_ms += (self.comm.waited() - waited).as_secs_f64() * 1e3;
        let votes = Votes { stop: counts[0], failed: counts[1], saved: counts[2], save_failed: counts[3] };
        Ok(StepReport { loss, grad_norm: norms.total(), finite, phases, gauges, embeddings, votes })
    }
}
