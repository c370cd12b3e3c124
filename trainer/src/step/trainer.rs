//! The networks of a run on one rank, and the training step.
//!
//! On one rank with an NVIDIA GPU, the host reads loss, gauges and norms in one transfer, which is
//! queued before the update and waited for after it: the device computes the clip factors, and
//! skips an update that is not finite. Running statistics are written before the update, and
//! restored if it was skipped. On other devices and with several ranks, the host waits before the
//! update.

use std::collections::BTreeMap;

use augment::{Batch, SoftLabel, ViewMasks};
use burn_tensor::{DType, Device, Tensor};
use kernels::device::host::to_host;
use kernels::device::readback::read_back_while;
use kernels::device::workers::Workers;
use networks::NetworkError;
use networks::backbone::ModelConfig;
use networks::tensor::NamedTensor;
use networks::unit::{StatSets, Types};
use ranks::EngineError;
use ranks::collectives::{self, GatherRequest};
use ranks::column_group::ColumnGroup;
use ranks::communicator::Communicator;
use ranks::in_flight::{GatherQueue, ReductionQueue};
use ranks::peers::Peers;
use ranks::topology::{Extent, Topology};
use ranks::wire::Wire;

use super::agreement::{Votes, agree};
use super::batch::{MicroBatch, SlicedImages};
use super::columns::{ColumnPass, GroupBatch};
use super::config::StepConfig;
use super::draws::StepDraws;
use super::events::Schedule;
use super::execution::{Execution, RunningNetwork, StepInputs, StepResults};
use super::heads::HeadPass;
use super::loss::Scoring;
use super::net::{Division, Net, Nets, UnitBuffers};
use super::pass::Passes;
use super::phases::{Clock, Phases};
use super::report::{Gradients, StepReport};
use super::scalars::Scalars;
use super::segments::Segments;
use super::sharded::{Observation, Overwritten, ShardedNet};
use super::state::{NetworkState, TrainState};
use super::upload::{BatchUploader, DeviceBatch, view_masks};
use super::weights::gather_requests;
use crate::method::Method;
use crate::method::network::UpdateRule;
use crate::optim::state::UnitShard;
use crate::optim::{Clip, Decision, Optimizer, QueuedStepNorms};
use crate::schedule::ScheduledValues;

/// The networks of a run on one rank.
pub struct Trainer {
    /// State that changes during training.
    pub state: TrainState,
    /// Communicator with the other ranks.
    pub comm: Communicator,
    nets: Nets,
    workers: Workers,
    config: StepConfig,
    sets: StatSets,
    head_sets: StatSets,
    device: Device,
    state_device: Device,
    /// Device to wait for at the end of every phase, if phases are timed.
    timed: Option<Device>,
    optimizer: Optimizer,
}

/// Sets of view sizes that share batch statistics, among the view sizes that a network sees.
struct NetworkStatSets {
    backbone: StatSets,
    heads: StatSets,
}

impl Trainer {
    /// Creates the networks of `method`, where `model` is the recipe's backbone. All ranks call it.
    pub fn new(
        model: &ModelConfig,
        method: Box<dyn Method>,
        comm: Communicator,
        optimizer: Optimizer,
        config: StepConfig,
        device: Device,
    ) -> Self {
        let topology = comm.topology();
        let division = Division {
            max_numel: config.max_unit_numel,
            n_column_parts: topology.column_group_size,
            column: topology.column(),
        };
        let nets = Nets::new(method.networks(), model, config.input.clone(), division, config.adapter);
        let state_device = if config.offload { Device::flex() } else { device.clone() };
        let mut networks = Vec::with_capacity(nets.list.len());
        for net in &nets.list {
            let is_trained = net.update_rule == UpdateRule::Gradient;
            let mut shards: Vec<UnitShard> = Vec::new();
            let mut bases = BTreeMap::new();
            let buffers = net.buffers(topology.group_size);
            for (unit, UnitBuffers { layout, base }) in buffers.into_iter().enumerate() {
                let has_moments = is_trained && !net.is_fixed(unit);
                let moments = if has_moments { optimizer.moments() } else { &[] };
                shards.push(UnitShard::with_layout(layout, config.seed, topology, moments, &state_device));
                if let Some(layout) = base {
                    let base = UnitShard::with_layout(layout, config.seed, topology, &[], &state_device);
                    bases.insert(unit, base);
                }
            }
            let n_backbone = net.backbone.len();
            let is_rounded = config.precision.rounds_with_update(&comm);
            for (unit, shard) in shards[..n_backbone].iter_mut().enumerate() {
                // Products read the sums of adapters and their base.
                shard.is_rounded = is_rounded && !bases.contains_key(&unit);
            }
            if is_trained {
                config.rates.apply(&mut shards[..n_backbone], &net.undivided);
            }
            networks.push(NetworkState {
                name: net.name,
                is_frozen: net.update_rule == UpdateRule::Frozen,
                copies: net.update_rule.copied_network(),
                n_backbone,
                shards,
                bases,
            });
        }
        let workers = Workers::for_device(&device, config.n_workers);
        let sets = method.stat_sets();
        let head_sets = method.head_stat_sets();
        let state = TrainState { step: 0, skipped_batches: 0, bad_steps: 0, networks, method };
        Self {
            state,
            comm,
            nets,
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

    /// Starts the networks with the recipe's backbone that are not frozen from `weights`; with
    /// `has_heads`, their heads as well.
    ///
    /// # Errors
    /// [`NetworkError::Weights`] for a parameter that is neither among them nor optional, or has
    /// another shape.
    pub fn start_from(&mut self, weights: &[NamedTensor], has_heads: bool) -> Result<(), NetworkError> {
        for (net, network) in self.nets.list.iter().zip(&mut self.state.networks) {
            if !net.has_recipe_backbone || network.is_frozen {
                continue;
            }
            let n_units = if has_heads { network.shards.len() } else { network.n_backbone };
            for shard in network.shards[..n_units].iter_mut().chain(network.bases.values_mut()) {
                shard.start_from(weights)?;
            }
        }
        Ok(())
    }

    /// Fills the frozen network `name`, and its heads if it has any, with `weights`.
    ///
    /// # Errors
    /// [`NetworkError::Weights`] for a parameter that is neither among them nor optional, or has
    /// another shape.
    pub fn load_frozen(&mut self, name: &str, weights: &[NamedTensor]) -> Result<(), NetworkError> {
        for network in &mut self.state.networks {
            if network.name != name {
                continue;
            }
            for shard in &mut network.shards {
                shard.start_from(weights)?;
            }
        }
        Ok(())
    }

    /// If `is_timed`, makes every phase wait for the device, so that phase times include the
    /// device's work: for benchmarks.
    pub fn time_phases(&mut self, is_timed: bool) {
        self.timed = if is_timed { Some(self.device.clone()) } else { None };
    }

    /// Returns the device that holds weights and moments.
    pub fn state_device(&self) -> &Device {
        &self.state_device
    }

    /// Returns the device that computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the topology of this rank.
    pub fn topology(&self) -> Topology {
        self.comm.topology()
    }

    /// Returns the shards of the trained network on this rank.
    pub fn trained(&self) -> &[UnitShard] {
        &self.state.networks[self.nets.trained].shards
    }

    /// Gathers the flat buffer of `unit`, `[padded]`, from this rank's `shard` and those of its
    /// shard group. All ranks of the group call it.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn gather_unit(&self, unit: &str, shard: &Tensor<1>) -> Result<Tensor<1>, EngineError> {
        let shard = shard.clone().to_device(&self.device);
        let request = GatherRequest {
            unit,
            shard: &shard,
            wire: Wire::F32,
            dtype: DType::F32,
            is_kept: false,
            extent: Extent::Whole,
        };
        let pending = collectives::gather(&self.comm, &request)?;
        Ok(self.comm.wait(pending)?.to_device(&self.device))
    }

    /// Gathers the parameters of `shard` on rank 0; other ranks get none. All ranks call it.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn gather_parameters(&self, shard: &UnitShard) -> Result<Vec<NamedTensor>, EngineError> {
        let flat = self.gather_unit(&shard.layout.name, shard.weights.values())?;
        if self.topology().rank != 0 {
            return Ok(Vec::new());
        }
        Ok(shard.layout.tensors(&to_host(flat)))
    }

    /// Takes one step on this rank's share of a batch, without votes.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn step(
        &mut self,
        batch: &Batch,
        scheduled_values: &ScheduledValues,
    ) -> Result<StepReport, EngineError> {
        let gradients = self.gradients(batch, scheduled_values, &mut |_| {})?;
        self.update(gradients, Votes::default(), scheduled_values)
    }

    /// Runs the forward and backward passes up to the gradients. `entering` is called with the name
    /// of each phase.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn gradients(
        &self,
        batch: &Batch,
        scheduled_values: &ScheduledValues,
        entering: &mut dyn FnMut(&'static str),
    ) -> Result<Gradients, EngineError> {
        let n_images = batch.samples.len();
        let masks = view_masks(batch, self.state.method.reads_pixel_classes());
        self.compute_gradients(
            n_images,
            batch.labels.clone(),
            masks,
            || self.uploader().micro_batches_from_host(batch, &self.slices(n_images), &self.workers),
            scheduled_values,
            entering,
        )
    }

    /// Computes the same as [`Trainer::gradients`] for a batch that has been sent to the device.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn gradients_from_device_batch(
        &self,
        mut batch: DeviceBatch,
        scheduled_values: &ScheduledValues,
        entering: &mut dyn FnMut(&'static str),
    ) -> Result<Gradients, EngineError> {
        let n_images = batch.n_images;
        let labels = std::mem::take(&mut batch.labels);
        let masks = std::mem::take(&mut batch.masks);
        self.compute_gradients(
            n_images,
            labels,
            masks,
            || self.uploader().micro_batches_from_device(batch),
            scheduled_values,
            entering,
        )
    }

    /// Computes the gradients of the micro-batches that `batches` returns, by pixel input, of
    /// `n_images` images of this rank with these labels, and these classes of the views' pixels.
    fn compute_gradients(
        &self,
        n_images: usize,
        labels: Vec<SoftLabel>,
        masks: Vec<ViewMasks>,
        batches: impl FnOnce() -> Vec<Vec<MicroBatch>>,
        scheduled_values: &ScheduledValues,
        entering: &mut dyn FnMut(&'static str),
    ) -> Result<Gradients, EngineError> {
        let waited = self.comm.waited();
        let mut clock = Clock::start(self.timed.clone());
        let mut phases = Phases::default();
        let networks = self.nets.others_with_views().map(|index| self.sharded(index));
        let other_networks: Vec<ShardedNet<'_>> = networks.collect();
        let trained = self.sharded(self.nets.trained);
        let other_sets: Vec<NetworkStatSets> =
            other_networks.iter().map(|network| self.stat_sets(network.net)).collect();
        let trained_sets = self.stat_sets(trained.net);
        let mut others = Vec::with_capacity(other_networks.len());
        for (network, sets) in other_networks.into_iter().zip(&other_sets) {
            others.push(self.running_network(network, sets));
        }
        let running = self.running_network(trained, &trained_sets);
        let segments = self.segments();
        let schedule = self.schedule(segments);
        let requests = gather_requests(&schedule, &others, running, self.config.precision);
        let gathers = GatherQueue::new(&self.comm, requests, &self.device)?;
        let mut batches = batches();
        let step_draws = self.step_draws(n_images);
        step_draws.mask(&mut batches);
        let labels = self.config.share(self.topology()).split(labels);
        let masks = self.config.share(self.topology()).split(masks);
        let masked = step_draws.group_masks(&batches[trained.net.input], self.column_group());
        let group = GroupBatch {
            group: self.column_group(),
            n_images: n_images / self.config.share(self.topology()).n_micro_batches,
            masked: &masked,
        };
        let inputs = StepInputs {
            others,
            trained: running,
            draws: step_draws.unit_draws(trained.net, &trained.net.sizes()),
            n_fixed: segments.n_fixed,
            group,
            scoring: self.scoring(running, scheduled_values.step, group, &labels, &masks),
            wire: self.config.precision.reduce,
            gathered: self.config.precision.gathered(),
        };
        let mut execution = Execution::new(inputs, gathers, ReductionQueue::new(&self.comm), batches);
        phases.input_ms = clock.lap_ms();

        entering("targets");
        execution.run(&schedule.targets)?;
        phases.targets_ms = clock.lap_ms();
        entering("forward");
        execution.run(&schedule.forward)?;
        phases.forward_ms = clock.lap_ms();
        entering("head");
        execution.run(&schedule.head)?;
        phases.head_ms = clock.lap_ms();
        entering("backward");
        execution.run(&schedule.backward)?;
        let (shards, results) = execution.finish(self.config.n_micro_batches, &self.state_device)?;
        phases.backward_ms = clock.lap_ms();
        phases.wait_ms = (self.comm.waited() - waited).as_secs_f64() * 1e3;

        let StepResults { scalars, observed, constrained, observations, embeddings } = results;
        Ok(Gradients { shards, scalars, observed, constrained, observations, embeddings, phases })
    }

    /// Returns the segments of the trained backbone.
    fn segments(&self) -> Segments {
        let trained = self.nets.trained();
        let StepConfig { n_kept_graphs, segment_len, rates, .. } = self.config;
        let has_adapters = trained.adapter.is_some();
        let n_fixed = rates.n_fixed_at_start(&trained.backbone, &trained.undivided, has_adapters);
        Segments::new(trained.backbone.len(), n_kept_graphs, segment_len).after_fixed(n_fixed)
    }

    /// Returns the order of a step.
    fn schedule(&self, segments: Segments) -> Schedule {
        let others = self.nets.others_with_views().map(|index| self.nets.list[index].n_units());
        let trained = self.nets.trained();
        Schedule::new(&others.collect::<Vec<_>>(), trained.n_units(), segments, self.config.sharding)
            .without_gradients(&trained.fixed_units())
    }

    /// Returns the sets of view sizes that share batch statistics, among those that `net` sees.
    fn stat_sets(&self, net: &Net) -> NetworkStatSets {
        let sizes = net.sizes();
        NetworkStatSets { backbone: self.sets.select(&sizes), heads: self.head_sets.select(&sizes) }
    }

    /// Returns `network` with the passes through it.
    fn running_network<'s>(
        &'s self,
        network: ShardedNet<'s>,
        sets: &'s NetworkStatSets,
    ) -> RunningNetwork<'s> {
        let evaluates = network.net.update_rule == UpdateRule::Frozen;
        RunningNetwork {
            network,
            passes: Passes { evaluates, ..self.passes(&sets.backbone) },
            head_passes: Passes { evaluates, ..self.head_passes(&sets.heads) },
        }
    }

    /// Returns the inputs of the loss of step `step` on the micro-batches of `batch`, whose images
    /// have the labels `labels`, and pixels of the classes `masks`.
    fn scoring<'s>(
        &'s self,
        trained: RunningNetwork<'s>,
        step: u64,
        batch: GroupBatch<'s>,
        labels: &'s [Vec<SoftLabel>],
        masks: &'s [Vec<ViewMasks>],
    ) -> Scoring<'s> {
        let RunningNetwork { network, head_passes, .. } = trained;
        Scoring {
            network,
            method: self.state.method.as_ref(),
            peers: Peers::new(&self.comm, self.config.share(self.topology()).n_micro_batches),
            columns: ColumnPass { heads: HeadPass { network }, batch },
            passes: head_passes,
            labels,
            masks,
            step,
            wire: self.config.precision.head_reduce,
        }
    }

    /// Returns the micro-batches of this rank's column group.
    fn column_group(&self) -> ColumnGroup<'_> {
        ColumnGroup::new(&self.comm, self.config.share(self.topology()).n_micro_batches)
    }

    /// Returns network `index` with its shards.
    fn sharded(&self, index: usize) -> ShardedNet<'_> {
        let network = &self.state.networks[index];
        ShardedNet { net: &self.nets.list[index], shards: &network.shards, bases: &network.bases }
    }

    /// Returns the random numbers of this step for `n_images` images of this rank.
    fn step_draws(&self, n_images: usize) -> StepDraws<'_> {
        StepDraws {
            method: self.state.method.as_ref(),
            seed: self.config.seed,
            step: self.state.step,
            slices: self.slices(n_images),
            share: self.config.share(self.topology()),
            batch_size: n_images * self.topology().world_size,
        }
    }

    /// Returns the images of each micro-batch, by slice.
    fn slices(&self, n_images: usize) -> Vec<SlicedImages> {
        self.config.share(self.topology()).slices(&self.workers, n_images)
    }

    fn passes<'p>(&'p self, sets: &'p StatSets) -> Passes<'p> {
        let types = self.config.precision.types();
        let n_stat_groups = self.config.n_stat_groups;
        Passes { comm: &self.comm, workers: &self.workers, sets, n_stat_groups, types, evaluates: false }
    }

    /// Returns passes for heads, which compute in f32.
    fn head_passes<'p>(&'p self, sets: &'p StatSets) -> Passes<'p> {
        Passes { types: Types::F32, ..self.passes(sets) }
    }

    /// Returns the settings for the upload of this rank's shares of batches to its device.
    pub fn uploader(&self) -> BatchUploader {
        let groups = self.state.method.views().groups();
        BatchUploader {
            n_views: groups.iter().map(|group| group.n_views).collect(),
            inputs: self.nets.inputs.clone(),
            n_micro_batches: self.config.share(self.topology()).n_micro_batches,
            reads_masks: self.state.method.reads_pixel_classes(),
            device: self.device.clone(),
        }
    }

    /// Agrees with all ranks on loss, norms and finiteness, and updates the networks if loss and
    /// gradients are finite.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn update(
        &mut self,
        gradients: Gradients,
        votes: Votes,
        scheduled_values: &ScheduledValues,
    ) -> Result<StepReport, EngineError> {
        let Gradients { shards: grads, scalars, observed, constrained, observations, embeddings, mut phases } =
            gradients;
        let waited = self.comm.waited();
        let mut clock = Clock::start(self.timed.clone());
        let modules: Vec<usize> = self.nets.trained().units().map(|unit| unit.module).collect();
        self.write(constrained);
        let queued = self.optimizer.queue_norms(self.trained(), &grads, &modules, scheduled_values);
        let trained = self.nets.trained().name;
        let (trained_observations, other_observations): (Vec<_>, Vec<_>) =
            observations.into_iter().partition(|observation| observation.network == trained);
        let decision = self.decide(&queued, &scalars, scheduled_values);
        let mut tensors: Vec<Tensor<1>> = scalars.iter().flat_map(Scalars::tensors).cloned().collect();
        tensors.extend(observed.iter().map(|(_, values)| values.clone()));
        tensors.extend(queued.tensors());
        tensors.extend(decision.as_ref().and_then(Decision::tensor));
        let n_updates: Vec<Vec<u64>> = self.trained().iter().map(|shard| shard.n_updates.clone()).collect();
        // Running statistics of the trained network, which are written before its weights are
        // updated.
        let mut overwritten = Vec::new();
        // Copied before the optimizer is launched, because a later read would wait for it.
        let (values, deferred) = read_back_while(&tensors, || match &decision {
            Some(decision) => {
                overwritten = self.overwritten(&trained_observations);
                self.write(trained_observations);
                self.update_networks(grads, Clip::Device(decision), scheduled_values);
                None
            }
            None => Some((trained_observations, grads)),
        });
        let mut values = values?.into_iter();
        let (loss, gauges) = Scalars::sums_of_all(&scalars, &mut values);
        let observed: Vec<(&'static str, Vec<f32>)> =
            observed.into_iter().map(|(name, _)| name).zip(values.by_ref()).collect();
        let norms = queued.read(&mut values);
        let agreed = agree(&self.comm, &norms.squares(), loss, &gauges, votes)?;
        let norms = norms.with_squares(&agreed.squares);
        let finite = match values.next() {
            Some(factors) => Decision::is_finite(&factors),
            None => agreed.is_finite(),
        };
        if finite {
            if let Some((trained_observations, grads)) = deferred {
                self.write(trained_observations);
                self.update_networks(grads, Clip::Norms(&norms), scheduled_values);
            }
            // Written after the followers are updated: running statistics are not averaged.
            self.write(other_observations);
            self.state.method.after_step(&observed);
            self.state.bad_steps = 0;
        } else {
            for values in overwritten {
                values.restore(&mut self.state.networks);
            }
            // The update was counted, but the device has skipped it.
            let shards = &mut self.state.networks[self.nets.trained].shards;
            for (shard, n_updates) in shards.iter_mut().zip(n_updates) {
                shard.n_updates = n_updates;
            }
            self.state.bad_steps += 1;
        }
        self.state.step += 1;
        phases.update_ms = clock.lap_ms();
        phases.wait_ms += (self.comm.waited() - waited).as_secs_f64() * 1e3;
        let loss = agreed.loss;
        let gauges = agreed.gauges;
        let votes = agreed.votes;
        Ok(StepReport { loss, grad_norm: norms.total(), finite, phases, gauges, embeddings, votes })
    }

    /// Lets the device decide whether the update is made, so that the host does not wait before it.
    /// Returns `None` with several ranks, which have to agree on norms, and if the device cannot
    /// skip the whole update.
    fn decide(
        &self,
        queued: &QueuedStepNorms,
        scalars: &[Scalars],
        scheduled_values: &ScheduledValues,
    ) -> Option<Decision> {
        let is_single_rank = self.topology().world_size == 1;
        if !is_single_rank || !self.nets.can_skip_update(scheduled_values.step + 1) {
            return None;
        }
        self.optimizer.decide(queued, scalars.iter().flat_map(Scalars::losses).collect())
    }

    /// Updates the trained network and its followers.
    fn update_networks(&mut self, grads: Vec<Tensor<1>>, clip: Clip<'_>, scheduled_values: &ScheduledValues) {
        self.nets.update(&mut self.state.networks, &self.optimizer, grads, clip, scheduled_values);
    }

    /// Returns the values of this rank's shards that `observations` will overwrite.
    fn overwritten(&self, observations: &[Observation]) -> Vec<Overwritten> {
        let networks = &self.state.networks;
        observations.iter().filter_map(|observation| observation.overwritten(&self.nets, networks)).collect()
    }

    /// Writes `observations` into this rank's shards.
    fn write(&mut self, observations: Vec<Observation>) {
        let precision = self.config.precision;
        let device = &self.state_device;
        for observation in observations {
            observation.write(&self.nets, &mut self.state.networks, precision, device);
        }
    }
}
