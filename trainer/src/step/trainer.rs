//! A network under training on one rank, and the step that it takes.

use augment::Batch;
use burn_tensor::{DType, Device, Tensor};
use kernels::device::host;
use kernels::device::readback::read_back;
use kernels::device::workers::Workers;
use networks::NetworkError;
use networks::drop_path::Drawing;
use networks::features::Outputs;
use networks::tensor::NamedTensor;
use networks::unit::{StatSets, Unit};
use ranks::EngineError;
use ranks::collectives;
use ranks::communicator::Comm;
use ranks::peers::Peers;
use ranks::prefetch::{Gathers, Reductions};
use ranks::topology::Topology;
use ranks::wire::Wire;

use super::agreement::{Votes, agree};
use super::batch::{MicroBatch, SlicedImages};
use super::config::StepConfig;
use super::forward::{follow, forward};
use super::loss::{Scored, Scoring};
use super::net::Net;
use super::networks::{Networks, Observation};
use super::pass::SlicedGrads;
use super::pass::{Passes, UnitDraws, UnitTape};
use super::phases::{Clock, Phases};
use super::precision::Precision;
use super::report::{Gradients, StepReport};
use super::state::TrainState;
use super::tape::Gathered;
use super::upload::{Sent, Uplink};
use super::weights::Weights;
use crate::method::Method;
use crate::optim::Optimizer;
use crate::optim::state::{STUDENT, UnitShard};
use crate::schedule::Knobs;

/// A network under training on one rank.
pub struct Trainer {
    /// What changes.
    pub state: TrainState,
    /// The line to the other ranks.
    pub comm: Comm,
    net: Net,
    workers: Workers,
    config: StepConfig,
    sets: StatSets,
    head_sets: StatSets,
    device: Device,
    state_device: Device,
    /// What is waited for at the end of every phase.
    timed: Option<Device>,
    optimizer: Optimizer,
}

impl Trainer {
    /// A fresh network. All ranks call it.
    pub fn new(
        backbone: Vec<Box<dyn Unit>>,
        method: Box<dyn Method>,
        comm: Comm,
        optimizer: Optimizer,
        config: StepConfig,
        device: Device,
    ) -> Self {
        let net = Net::new(backbone, method.as_ref());
        let state_device = if config.offload { Device::flex() } else { device.clone() };
        let shards = net
            .units()
            .map(|unit| {
                let followers = net.followers_of(unit.on);
                let (topology, moments) = (comm.topology(), optimizer.moments());
                UnitShard::init(unit.unit, config.seed, topology, &followers, moments, &state_device)
            })
            .collect();
        let workers = Workers::on(&device, config.n_workers);
        let (sets, head_sets) = (method.stat_sets(), method.head_stat_sets());
        let state = TrainState { step: 0, skipped_batches: 0, bad_steps: 0, shards, method };
        Self {
            state,
            comm,
            net,
            workers,
            config,
            sets,
            head_sets,
            device,
            state_device,
            timed: None,
            optimizer,
        }
    }

    /// Starts the backbone of the student and of every follower from `weights`, in the place of random ones.
    ///
    /// # Errors
    /// [`NetworkError::Weights`] for a parameter that is not among them, or has another shape.
    pub fn start_from(&mut self, weights: &[NamedTensor]) -> Result<(), NetworkError> {
        let backbone = &mut self.state.shards[..self.net.backbone.len()];
        backbone.iter_mut().try_for_each(|shard| shard.start_from(weights))
    }

    /// Makes every phase wait for the device, so that phase times include the device's work: for benchmarks.
    pub fn time_phases(&mut self, yes: bool) {
        self.timed = yes.then(|| self.device.clone());
    }

    /// Where weights, moments and followers lie.
    pub fn state_device(&self) -> &Device {
        &self.state_device
    }

    /// What it computes on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// This rank's place among the others.
    pub fn topology(&self) -> Topology {
        self.comm.topology()
    }

    /// The units of the backbone.
    pub(crate) fn backbone(&self) -> &[Box<dyn Unit>] {
        &self.net.backbone
    }

    /// The whole buffer, `[padded]`, of which this rank has the shard `mine`. All ranks of a shard group call it.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn gather_whole(&self, unit: &str, mine: &Tensor<1>) -> Result<Tensor<1>, EngineError> {
        let pending =
            collectives::gather(&self.comm, unit, &mine.clone().to_device(&self.device), Wire::F32, false)?;
        Ok(self.comm.wait(pending)?.to_device(&self.device))
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
        self.gradients_of(
            batch.samples.len(),
            || self.uplink().here(batch, self.slices(batch.samples.len()), &self.workers),
            knobs,
            entering,
        )
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
        self.gradients_of(sent.n_images, || self.uplink().micro_batches(sent), knobs, entering)
    }

    fn gradients_of(
        &self,
        n_images: usize,
        batches: impl FnOnce() -> Vec<MicroBatch>,
        knobs: &Knobs,
        entering: &mut dyn FnMut(&'static str),
    ) -> Result<Gradients, EngineError> {
        let waited = self.comm.waited();
        let mut clock = Clock::start(self.timed.clone());
        let mut phases = Phases::default();
        let networks = Networks { net: &self.net, shards: &self.state.shards };
        let weights = Weights { networks, config: &self.config };
        let mut gathers = Gathers::new(&self.comm, weights.gathers(), &self.device)?;
        let mut reductions = Reductions::new(&self.comm);
        let batches = batches();
        let sees = self.state.method.student_sees();
        let [of_student, of_heads] = [&self.sets, &self.head_sets].map(|sets| sets.of(&sees));
        let n_each = n_images / self.config.share(self.topology()).n_micro_batches;
        phases.input_ms = clock.lap_ms();

        entering("teacher");
        let both = [self.passes(&self.sets), self.head_passes(&self.head_sets)];
        let (mut followers, mut observations) = (Vec::new(), Vec::new());
        for follower in &self.net.followers {
            let followed = follow(networks, follower, &batches, both, &mut gathers, n_each)?;
            followers.push(followed.outputs);
            observations.extend(followed.observations);
        }
        phases.teacher_ms = clock.lap_ms();

        entering("forward");
        let draws = self.draw(n_images, &sees);
        let seen = batches.iter().map(|batch| batch.seen(&sees)).collect();
        drop(batches);
        let passes = self.passes(&of_student);
        let student = forward(networks, seen, &draws, passes, &mut gathers, |number| weights.keeps(number))?;
        phases.forward_ms = clock.lap_ms();

        entering("head");
        let scoring = Scoring {
            networks,
            method: self.state.method.as_ref(),
            peers: Peers::new(&self.comm, self.config.share(self.topology()).n_micro_batches),
            passes: self.head_passes(&of_heads),
            step: knobs.step,
            n_images: n_each,
            wire: self.config.precision.head_reduce,
        };
        let scored = scoring.run(&student.batches, &followers, &mut gathers, &mut reductions)?;
        let Scored { scalars, grads, observed, constrained, observations: of_heads, student: outputs } =
            scored;
        observations.extend(student.observations.into_iter().chain(of_heads));
        phases.head_ms = clock.lap_ms();

        entering("backward");
        self.backward(student.tape, grads, &draws, passes, &mut gathers, &mut reductions)?;
        let shards = self.in_layout_order(reductions.finish()?);
        phases.backward_ms = clock.lap_ms();
        phases.wait_ms = (self.comm.waited() - waited).as_secs_f64() * 1e3;

        let embeddings = followers.first().unwrap_or(&outputs).iter().map(Outputs::image_rows).collect();
        Ok(Gradients { shards, scalars, observed, constrained, observations, embeddings, phases })
    }

    /// Sends the flat gradients of the backbone's units on their way, from the last unit on.
    fn backward<'a>(
        &'a self,
        mut tape: Vec<(UnitTape<'a>, Option<Tensor<1>>)>,
        mut grads: Vec<SlicedGrads>,
        draws: &[UnitDraws],
        passes: Passes<'_>,
        gathers: &mut Gathers<'_>,
        reductions: &mut Reductions<'a>,
    ) -> Result<(), EngineError> {
        for number in (0..self.net.backbone.len()).rev() {
            let shard = &self.state.shards[number];
            // The forward pass has left one for every unit.
            let (of_unit, flat) = tape.pop().expect("a tape for every unit");
            let flat = match flat {
                Some(flat) => flat,
                None => gathers.next_flat()?,
            };
            let unit = self.net.backbone[number].as_ref();
            let gathered = Gathered { unit, layout: &shard.layout, flat: &flat };
            let sum;
            let clear = &mut || gathers.look_ahead().and_then(|()| reductions.release());
            (grads, sum) = passes.backward(gathered, of_unit, grads, &draws[number], number > 0, clear)?;
            reductions.push(&shard.layout.name, sum, self.config.precision.reduce);
        }
        reductions.release()
    }

    /// The images of each micro-batch, by slice.
    fn slices(&self, n_images: usize) -> Vec<SlicedImages> {
        self.config.share(self.topology()).slices(&self.workers, n_images)
    }

    fn passes<'p>(&'p self, sets: &'p StatSets) -> Passes<'p> {
        let compute = self.config.precision.compute.dtype();
        let n_stat_groups = self.config.n_stat_groups;
        Passes { comm: &self.comm, workers: &self.workers, sets, n_stat_groups, compute }
    }

    /// Heads compute in f32.
    fn head_passes<'p>(&'p self, sets: &'p StatSets) -> Passes<'p> {
        Passes { compute: DType::F32, ..self.passes(sets) }
    }

    /// How this rank's shares of batches get to its device.
    pub fn uplink(&self) -> Uplink {
        let groups = self.state.method.views().groups();
        Uplink {
            sizes_px: groups.iter().map(|group| group.size_px as usize).collect(),
            input: self.config.input,
            n_micro_batches: self.config.share(self.topology()).n_micro_batches,
            device: self.device.clone(),
        }
    }

    /// Drop-path factors of every unit, for the sizes of views that the student sees.
    fn draw(&self, n_images: usize, sees: &[usize]) -> Vec<UnitDraws> {
        let groups = self.state.method.views().groups();
        let drawing = Drawing {
            seed: self.config.seed,
            step: self.state.step,
            n_views: sees.iter().map(|size| groups[*size].n_views).collect(),
        };
        let (slices, share) = (self.slices(n_images), self.config.share(self.topology()));
        let of_unit = |(number, p): (usize, f32)| {
            let of_slice = |images: &Vec<usize>| {
                drawing.draw(number, p, images.iter().map(|image| share.position(*image)))
            };
            slices.iter().map(|slices| slices.iter().map(of_slice).collect()).collect()
        };
        self.net.backbone.iter().map(|unit| unit.drop_path()).enumerate().map(of_unit).collect()
    }

    /// Mean gradients by unit: they came heads first, then the backbone from its end.
    fn in_layout_order(&self, mut reduced: Vec<Tensor<1>>) -> Vec<Tensor<1>> {
        let mut backbone = reduced.split_off(reduced.len() - self.net.backbone.len());
        backbone.reverse();
        backbone.append(&mut reduced);
        let n_micro_batches = self.config.n_micro_batches;
        let factor = 1.0 / n_micro_batches as f32;
        let mean = |grad| if n_micro_batches > 1 { host::scale(grad, factor) } else { grad };
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
        let Gradients { shards: grads, scalars, observed, constrained, observations, embeddings, mut phases } =
            gradients;
        let waited = self.comm.waited();
        let mut clock = Clock::start(self.timed.clone());
        let (loss, gauges) = scalars.read()?;
        // Read before the optimizer is launched, which would be waited for.
        let observed = read_back(observed)?;
        let modules: Vec<usize> = self.net.units().map(|unit| unit.module).collect();
        self.write(constrained);
        let norms = self.optimizer.norms(&self.state.shards, &grads, &modules, knobs)?;
        let agreed = agree(&self.comm, &norms.squares(), loss, &gauges, votes)?;
        let norms = norms.agreed(&agreed.squares);
        let finite = agreed.is_finite();
        if finite {
            let next_step = knobs.step + 1;
            let decay = |f: &crate::method::Follower| (f.name, f.moves.decay(next_step, knobs.teacher_decay));
            let decays: Vec<_> = self.net.followers.iter().map(decay).collect();
            let (of_followers, of_student): (Vec<_>, Vec<_>) =
                observations.into_iter().partition(|observation| observation.of != STUDENT);
            self.write(of_student);
            self.optimizer.step(&mut self.state.shards, grads, &norms, knobs, &decays);
            // Running statistics of a follower are its own: they are not averaged.
            self.write(of_followers);
            self.state.method.after_step(&observed);
            self.state.bad_steps = 0;
        } else {
            self.state.bad_steps += 1;
        }
        self.state.step += 1;
        phases.update_ms = clock.lap_ms();
        phases.wait_ms += (self.comm.waited() - waited).as_secs_f64() * 1e3;
        let (loss, gauges, votes) = (agreed.loss, agreed.gauges, agreed.votes);
        Ok(StepReport { loss, grad_norm: norms.total(), finite, phases, gauges, embeddings, votes })
    }

    /// Writes what was observed into this rank's shards.
    fn write(&mut self, observations: Vec<Observation>) {
        for Observation { of, unit, param, values, before } in observations {
            let shard = &mut self.state.shards[unit];
            let found = shard.segments().find(|segment| segment.slot.spec.name == param);
            let Some((start, end, first)) =
                found.map(|s| (s.start, s.end, shard.start + s.start - s.slot.offset))
            else {
                continue;
            };
            let Precision { gather, head_gather, .. } = self.config.precision;
            let wire = if self.net.is_backbone(unit) { gather } else { head_gather };
            let here = |tensor: &Tensor<1>| {
                tensor.clone().slice(first..first + end - start).to_device(&self.state_device)
            };
            for (_, buffer) in shard.buffers_mut().filter(|(name, _)| *name == of) {
                // Masters keep the digits that did not travel.
                let values = match wire {
                    Wire::F32 => here(&values),
                    _ => buffer.clone().slice(start..end) + (here(&values) - here(&before)),
                };
                host::assign(buffer, start, &values);
            }
        }
    }
}
