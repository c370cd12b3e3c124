//! Stages of a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use augment::Transform;
use eval::ImageSet;
use eval::image_sets::set_name;
use kernels::device::{DeviceChoice, DeviceKind, Opened};
use networks::probe::Probe;
use networks::{NamedTensor, Origin};
use pipeline::words::counted;
use pipeline::{Dataset, Storage};
use ranks::communicator::Communicator;
use ranks::engine::{EngineChoice, Reduction};
use ranks::launch::Launch;
use ranks::wire::Wire;
use trainer::estimate::fit;
use trainer::run::fault::Fault;
use trainer::run::{
    FrozenNetwork, Job, Labels, Observer, Outcome, RunTimes, format_time, measure_times, recorded_plan, run,
};
use trainer::{Length, Plan, Recipe, TrainError};

use crate::connect::{agree_on_groups, agree_on_kernels, agree_on_length, all_ready, connect, n_sharers};
use crate::data::open_sampled;
use crate::error::SessionError;
use crate::frozen;
use crate::initial::{self, Beginning, Initial};
use crate::labels;
use crate::machine;
use crate::masks;
use crate::pixels::check_pixels;
use crate::rehearsal::{ExtraWork, Rehearsal, rehearse};
use crate::retrieval::Search;
use crate::validation::{LabeledImage, Reading, labeled, shown, weights};

/// Plans steps of `recipe` by one rank on `device`, as [`plan_on_ranks`].
///
/// # Errors
/// As [`plan_on_ranks`].
pub fn plan_alone(recipe: Recipe, device: &Opened) -> Result<Plan, SessionError> {
    plan_on_ranks(recipe, device, &Launch::ALONE, 1)
}

/// Plans steps of `recipe` by the ranks of `launch`, of which `n_sharers` compute on `device`, with
/// as many kept graphs as fit. For measurements: only schedules depend on the size of the data set,
/// and a measurement has none.
///
/// # Errors
/// [`SessionError::Train`] for an invalid recipe, [`SessionError::DeviceType`].
pub fn plan_on_ranks(
    mut recipe: Recipe,
    device: &Opened,
    launch: &Launch,
    n_sharers: usize,
) -> Result<Plan, SessionError> {
    recipe.run.offload &= device.kind != DeviceKind::Cpu;
    let plan = trainer::resolve(recipe, 1 << 20)?;
    let room = machine::rank_resources(launch.n_local.unwrap_or(1), n_sharers, device);
    let plan = fit(plan.for_ranks(launch.world_size, room)?, room)?;
    check_types(&plan, device)?;
    Ok(plan)
}

/// A recipe with its work directory, ranks, device and initial state.
#[derive(Debug)]
pub struct Session {
    /// The recipe.
    pub recipe: Recipe,
    /// Folder that receives all output; a run in it is resumed.
    pub workdir: PathBuf,
    /// Position among the ranks.
    pub launch: Launch,
    /// Device of this rank.
    pub device: Opened,
    /// Engine between ranks.
    pub engine: EngineChoice,
    /// Initial state of the run.
    pub initial: Initial,
    /// Fault to inject.
    pub fault: Option<Fault>,
    /// Flag that asks the run to stop with a checkpoint; may be set from any thread.
    pub stop: Arc<AtomicBool>,
    /// Start of the time of a run that is given minutes: that of the program.
    pub started: Instant,
}

/// A session whose ranks are connected, with its weights and images.
pub struct Connected {
    session: Session,
    comm: Communicator,
    /// Number of ranks that compute on the device of this one.
    n_sharers: usize,
    initial: Option<Vec<NamedTensor>>,
    /// Weights that the run begins with.
    origins: Vec<Origin>,
    frozen: Vec<FrozenNetwork>,
    dataset: Arc<Dataset>,
    /// Labels of the images that are shown, if the method learns from them.
    labels: Option<Arc<Labels>>,
    /// Number of images that are shown, if the method learns from masks.
    n_masked: Option<u64>,
    /// Images that are held out of training, to validate on.
    held_out: Vec<LabeledImage>,
}

/// A session whose recipe is resolved against its data set.
pub struct Resolved {
    connected: Connected,
    plan: Plan,
}

/// A session whose plan is divided over the ranks and fits into their memory.
pub struct Fitted {
    connected: Connected,
    plan: Plan,
    /// Times of a run that is given minutes, once its steps are timed.
    timed: Option<Timed>,
}

/// Minutes of a run, and the times of its parts.
struct Timed {
    minutes: f64,
    times: RunTimes,
}

impl Session {
    /// Creates the session of a single process, on the best available device, whose run starts with
    /// random weights or as the recipe says.
    ///
    /// # Errors
    /// [`SessionError::Device`].
    pub fn new(recipe: Recipe, workdir: impl Into<PathBuf>) -> Result<Self, SessionError> {
        Ok(Self {
            recipe,
            workdir: workdir.into(),
            launch: Launch::ALONE,
            device: DeviceChoice::Auto.open(0)?,
            engine: EngineChoice::Auto,
            initial: Initial::default(),
            fault: None,
            stop: Arc::default(),
            started: Instant::now(),
        })
    }

    /// Connects the ranks, and opens initial weights, frozen networks and images.
    ///
    /// # Errors
    /// [`SessionError`] when one of them cannot be opened, on any rank.
    pub fn open(mut self, storage: &Storage) -> Result<Connected, SessionError> {
        if self.recipe.data.shards.is_empty() {
            return Err(SessionError::NoShards);
        }
        let comm = connect(&self.launch, &self.recipe.run, &self.device, self.engine)?;
        let n_sharers = n_sharers(&comm, &self.device)?;
        // Without a GPU everything is in the host's memory.
        self.recipe.run.offload &= self.device.kind != DeviceKind::Cpu;
        let inputs = all_ready(&comm, self.open_inputs(storage))?;
        Ok(Connected {
            session: self,
            comm,
            n_sharers,
            initial: inputs.beginning.weights,
            origins: inputs.beginning.origins,
            frozen: inputs.frozen,
            dataset: inputs.dataset,
            labels: inputs.labels,
            n_masked: inputs.n_masked,
            held_out: inputs.held_out,
        })
    }

    /// Opens the inputs of a rank, and records in the recipe the facts that files state.
    fn open_inputs(&mut self, storage: &Storage) -> Result<Inputs, SessionError> {
        let recipe = &mut self.recipe;
        // Before shards are opened: that takes long if there are many.
        initial::check_paths(recipe, &self.workdir, &self.initial)?;
        let dataset = open_sampled(&recipe.data, storage)?;
        let images = labels::open(recipe, dataset, &self.workdir, self.launch.rank, storage)?;
        let masked = masks::open(recipe, images.dataset, &self.workdir, self.launch.rank)?;
        let dataset = Arc::new(masked.dataset);
        if !Plan::path_in(&self.workdir).exists() {
            check_pixels(recipe, &self.initial, &dataset)?;
        }
        let beginning = initial::prepare(recipe, &self.workdir, &self.initial, self.launch.rank)?;
        let frozen = frozen::open(recipe, Some(&self.workdir))?;
        // A method learns from labels or from masks: one of the two holds out images.
        let mut held_out = images.held_out;
        held_out.extend(masked.held_out);
        let labels = images.labels;
        Ok(Inputs { beginning, frozen, dataset, labels, n_masked: masked.n_masked, held_out })
    }
}

/// Inputs that every rank opens.
struct Inputs {
    beginning: Beginning,
    frozen: Vec<FrozenNetwork>,
    dataset: Arc<Dataset>,
    labels: Option<Arc<Labels>>,
    n_masked: Option<u64>,
    held_out: Vec<LabeledImage>,
}

impl Connected {
    /// Returns the images.
    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.dataset
    }

    /// Returns the labels of the images, if the method learns from them; of those that are held out
    /// there are none.
    pub fn labels(&self) -> Option<&Labels> {
        self.labels.as_deref()
    }

    /// Resolves the recipe: every length in steps, every default filled in. Minutes that the run in
    /// the work directory began with have its steps; others have none before [`Fitted::timed`].
    ///
    /// # Errors
    /// [`SessionError::Train`] with the key and its fault; [`SessionError::Minutes`].
    pub fn resolve(self) -> Result<Resolved, SessionError> {
        let recorded = all_ready(&self.comm, self.recorded_steps())?;
        let minutes = self.session.recipe.optim.length.minutes();
        let n_recorded = agree_on_length(&self.comm, minutes, recorded)?;
        let plan = all_ready(&self.comm, self.plan(n_recorded))?;
        Ok(Resolved { connected: self, plan })
    }

    /// Returns the steps of the run in the work directory, if both its length and that of the
    /// recipe are the same number of minutes.
    fn recorded_steps(&self) -> Result<Option<u64>, SessionError> {
        let Session { recipe, workdir, initial, .. } = &self.session;
        let Some(minutes) = recipe.optim.length.minutes() else { return Ok(None) };
        let Some(plan) = recorded_plan(workdir, initial::forked_step(workdir))? else { return Ok(None) };
        if plan.minutes == Some(minutes) {
            return Ok(Some(plan.total_steps));
        }
        if initial.lengthen {
            return Ok(None);
        }
        let there = match plan.minutes {
            Some(minutes) => minutes_in_words(minutes),
            None => counted(plan.total_steps, "step"),
        };
        Err(SessionError::Train(TrainError::RecipeMismatch {
            workdir: workdir.clone(),
            key: "optim.length".into(),
            there,
            here: format!("{} (--lengthen continues it, if it becomes longer)", minutes_in_words(minutes)),
        }))
    }

    /// Returns the plan of the recipe, with `n_recorded` steps for its minutes if they are known.
    fn plan(&self, n_recorded: Option<u64>) -> Result<Plan, SessionError> {
        let dataset = &self.dataset;
        // An epoch of a method that learns from labels or masks is a pass over the images that have
        // one.
        let n_labeled = self.labels.as_ref().map(|labels| labels.n_labeled());
        let n_samples = n_labeled.or(self.n_masked).unwrap_or_else(|| dataset.n_samples());
        let mut plan = trainer::resolve(self.session.recipe.clone(), n_samples)?;
        if let Some(n_steps) = n_recorded {
            plan = trainer::with_steps(plan, n_steps)?;
        }
        plan.data_fingerprint = Some(hexadecimal(dataset.samples_fingerprint()));
        plan.data_checksums = dataset.stated_checksums().map(hexadecimal);
        plan.data_images = dataset.sampled_images()?.map(hexadecimal);
        plan.origins.clone_from(&self.origins);
        Ok(plan)
    }
}

fn hexadecimal(hash: u64) -> String {
    format!("{hash:016x}")
}

impl Resolved {
    /// Returns the plan for one rank.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Divides the plan over the ranks, chooses how many activations are kept so that each rank's
    /// memory suffices, and the kernels.
    ///
    /// # Errors
    /// [`SessionError`] when the batch does not divide, the memory does not suffice, the device
    /// lacks a type or a library, or ranks do not agree.
    pub fn fit(self) -> Result<Fitted, SessionError> {
        let Self { connected, plan } = self;
        let mut plan = all_ready(&connected.comm, connected.fit_plan(plan))?;
        let device = &connected.session.device;
        let result = plan.choose_kernels(&device.device).map_err(SessionError::from);
        all_ready(&connected.comm, result)?;
        agree_on_kernels(&connected.comm, &mut plan, device)?;
        Ok(Fitted { connected, plan, timed: None })
    }
}

impl Connected {
    /// Divides the ranks into the groups of `plan`. All ranks call it.
    fn regroup(&mut self, plan: &Plan) -> Result<(), SessionError> {
        let topology = plan
            .topology(self.session.launch.rank)
            .map_err(|reason| TrainError::Recipe { recipe: plan.recipe.name.clone(), reason })?;
        agree_on_groups(&self.comm, topology)?;
        Ok(self.comm.regroup(topology, plan.recipe.run.exact_sums)?)
    }

    /// Returns `plan` divided over the ranks, within the memory of this one.
    fn fit_plan(&self, plan: Plan) -> Result<Plan, SessionError> {
        let Session { launch, device, workdir, initial, .. } = &self.session;
        let resources = machine::rank_resources(launch.n_local.unwrap_or(1), self.n_sharers, device);
        let plan = fit(plan.for_ranks(launch.world_size, resources)?, resources)?;
        check_types(&plan, device)?;
        initial::check(&plan, workdir, initial, self.initial.as_deref())?;
        Ok(plan)
    }
}

/// Checks that `device` supports the types in which `plan` computes and communicates.
///
/// # Errors
/// [`SessionError::DeviceType`].
pub fn check_types(plan: &Plan, device: &Opened) -> Result<(), SessionError> {
    let precision = &plan.recipe.optim.precision;
    let wires = [precision.gather, precision.reduce, precision.head_gather, precision.head_reduce];
    let mut types = wires.map(Wire::dtype).to_vec();
    types.push(precision.compute.dtype());
    for dtype in types {
        if !device.device.supports_dtype(dtype) {
            return Err(SessionError::DeviceType { device: device.name.clone(), dtype: dtype.name() });
        }
    }
    Ok(())
}

impl Fitted {
    /// Returns the plan of the run.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the images.
    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.connected.dataset
    }

    /// Returns the images that are held out of training, with their classes if the method learns
    /// from labels; `None` if the recipe holds out none.
    pub fn held_out_images(&self) -> Option<ImageSet> {
        if self.connected.held_out.is_empty() {
            return None;
        }
        let name = format!("{} held-out", set_name(&self.plan.recipe.data.shard_lists()));
        Some(self.reading().set(name, &self.connected.held_out))
    }

    /// Returns the images that are trained on, with their classes if the method learns from labels,
    /// and without if it learns from masks; `None` if it learns from neither.
    pub fn training_images(&self) -> Option<ImageSet> {
        let Connected { dataset, labels, n_masked, .. } = &self.connected;
        let images = match labels {
            Some(labels) => labeled(labels, weights(dataset)),
            None if n_masked.is_some() => shown(dataset),
            None => return None,
        };
        let name = set_name(&self.plan.recipe.data.shard_lists());
        Some(self.reading().set(name, &images))
    }

    /// Returns how images of the run are read to be scored.
    fn reading(&self) -> Reading<'_> {
        let recipe = &self.plan.recipe;
        Reading {
            dataset: &self.connected.dataset,
            transform: Transform::new(recipe.evaluated_px() as u32),
            rules: recipe.data.rules(),
            classes: recipe.method.classes().unwrap_or_default(),
        }
    }

    /// Returns the device of this rank.
    pub fn device(&self) -> &Opened {
        &self.connected.session.device
    }

    /// Returns the work directory.
    pub fn workdir(&self) -> &Path {
        &self.connected.session.workdir
    }

    /// Returns whether [`Fitted::timed`] has steps to time.
    pub fn is_untimed(&self) -> bool {
        self.plan.recipe.optim.length.minutes().is_some()
    }

    /// Measures how many steps, with their checkpoints, fit into what is left of the minutes of a
    /// run that begins, and sets its length; does nothing for any other run. Returns `None` if the
    /// run was asked to stop meanwhile, before anything of it was saved. All ranks call it.
    ///
    /// # Errors
    /// [`SessionError::Train`] when the first steps fail, or if the run is too short for its
    /// recipe.
    pub fn timed(mut self) -> Result<Option<Self>, SessionError> {
        let Length::Minutes(minutes) = self.plan.recipe.optim.length else { return Ok(Some(self)) };
        self.connected.regroup(&self.plan)?;
        let Connected { session, comm, dataset, labels, .. } = &mut self.connected;
        let job = Job {
            plan: &self.plan,
            dataset: Arc::clone(dataset),
            labels: labels.clone(),
            workdir: &session.workdir,
            stop: &session.stop,
            device: session.device.device.clone(),
            fault: None,
            initial: None,
            frozen: &[],
            lengthen: false,
            forked_step: None,
        };
        let solo = std::mem::replace(comm, Communicator::solo());
        let (times, measured) = measure_times(&job, minutes, solo)?;
        let Some(times) = times else {
            measured.finish()?;
            return Ok(None);
        };
        *comm = measured;
        let timed = Timed { minutes, times };
        self.set_length(&timed, None)?;
        self.timed = Some(timed);
        Ok(Some(self))
    }

    /// Shortens a run of minutes that [`Fitted::timed`] has measured, so that its `probes`, the
    /// search of views that a [`RetrievalProbe`](crate::RetrievalProbe) of its final length makes,
    /// and the pictures of its report fit into the time, too; does nothing for any other run.
    /// `n_pictured` returns the number of images of which the report needs features, given the
    /// number of steps and of images in each. All ranks call it.
    ///
    /// # Errors
    /// [`SessionError::Train`] when a probe fails, or if the run is too short for its recipe.
    pub fn rehearsed(
        mut self,
        probes: &mut [Box<dyn Probe>],
        n_pictured: fn(u64, usize) -> u64,
    ) -> Result<Self, SessionError> {
        let Some(timed) = self.timed.take() else { return Ok(self) };
        let Connected { session, comm, dataset, .. } = &self.connected;
        let is_first = session.launch.rank == 0;
        let search = Search::new(&self.plan, dataset, &session.workdir);
        let rehearsal = if is_first {
            let is_searched = search.n_images(&self.plan) > 0;
            rehearse(&self.plan, dataset, &session.device.device, probes, is_searched)
        } else {
            Ok(Rehearsal::untimed(probes.len()))
        };
        let rehearsal = all_ready(comm, rehearsal)?;
        let slowest = comm.all_reduce("rehearsal", rehearsal.to_list(), Reduction::Max)?;
        let extra_work = ExtraWork {
            rehearsal: Rehearsal::from_list(&slowest),
            probes,
            search,
            n_samples: dataset.n_samples(),
            n_pictured,
        };
        let elapsed_s = self.set_length(&timed, Some(&extra_work))?;
        if is_first {
            self.report_length(&timed, &extra_work, elapsed_s);
        }
        self.timed = Some(timed);
        Ok(self)
    }

    /// Sets the length of a run of minutes by the times of its parts, and returns the seconds that
    /// have passed since it was started. All ranks call it.
    fn set_length(&mut self, timed: &Timed, extra_work: Option<&ExtraWork<'_>>) -> Result<f64, SessionError> {
        let Connected { session, comm, .. } = &self.connected;
        let elapsed_s = session.started.elapsed().as_secs_f64();
        let slowest_s = comm.all_reduce("time of the start", vec![elapsed_s], Reduction::Max)?[0];
        let left_s = 60.0 * timed.minutes - slowest_s;
        let first = self.first_step();
        let n_steps = timed.times.steps_within(left_s, &self.plan, first, &|plan: &Plan| {
            extra_work.map_or(0.0, |extra_work| extra_work.seconds(&timed.times, plan, first))
        });
        // What a rank does beside its steps may depend on the files that it sees.
        let fewest = comm.all_reduce("number of steps", vec![-(n_steps as f64)], Reduction::Max)?;
        let n_steps = -fewest[0] as u64;
        self.plan = trainer::with_steps(self.plan.clone(), first + n_steps)?;
        Ok(slowest_s)
    }

    /// Returns the step that a run begins with: a fork continues from that of its checkpoint.
    fn first_step(&self) -> u64 {
        initial::forked_step(&self.connected.session.workdir).unwrap_or_default()
    }

    /// Reports the length of a run of minutes, `elapsed_s` after it was started.
    fn report_length(&self, timed: &Timed, extra_work: &ExtraWork<'_>, elapsed_s: f64) {
        let Timed { minutes, times } = timed;
        let first = self.first_step();
        let n_steps = self.plan.total_steps - first;
        let run_s = times.run_s(&self.plan, first) + extra_work.seconds(times, &self.plan, first);
        tracing::info!(
            "optim.length: {} in {}, of {} each, as measured by {} on the first batches, which are not part \
             of the run; {} have passed, and checkpoints, scores and pictures take {}",
            counted(n_steps, "step"),
            minutes_in_words(*minutes),
            format_time(times.step_s),
            counted(times.n_timed as u64, "step"),
            format_time(elapsed_s),
            format_time(run_s - n_steps as f64 * times.step_s)
        );
        if n_steps == 1 && elapsed_s + run_s > 60.0 * minutes {
            tracing::warn!(
                "optim.length: {} are too short: with a single step, the run takes {}",
                minutes_in_words(*minutes),
                format_time(elapsed_s + run_s)
            );
        }
    }

    /// Returns the time of a step in seconds, if [`Fitted::timed`] has measured it.
    pub fn step_s(&self) -> Option<f64> {
        self.timed.as_ref().map(|timed| timed.times.step_s)
    }

    /// Returns `result` if no rank has failed to prepare its observers. All ranks call it.
    ///
    /// # Errors
    /// The error of this rank, or an error that reports the failure of others.
    pub fn all_ready<T, E: From<SessionError>>(&self, result: Result<T, E>) -> Result<T, E> {
        all_ready(&self.connected.comm, result)
    }

    /// Trains until the run is finished or asked to stop; resumes from the newest checkpoint if
    /// there is one.
    ///
    /// # Errors
    /// [`SessionError`]; checkpoints that were written are kept.
    pub fn train(
        self,
        probes: &mut [Box<dyn Probe>],
        observer: &mut dyn Observer,
    ) -> Result<Outcome, SessionError> {
        let Self { mut connected, plan, .. } = self;
        connected.regroup(&plan)?;
        let Connected { session, comm, initial, frozen, dataset, labels, .. } = connected;
        let job = Job {
            plan: &plan,
            dataset,
            labels,
            workdir: &session.workdir,
            stop: &session.stop,
            device: session.device.device,
            fault: session.fault,
            initial: initial.as_deref(),
            frozen: &frozen,
            lengthen: session.initial.lengthen,
            forked_step: initial::forked_step(&session.workdir),
        };
        Ok(run(&job, comm, probes, observer)?)
    }
}

/// Formats minutes with their noun: `1 minute`, `0.5 minutes`.
fn minutes_in_words(minutes: f64) -> String {
    if minutes == 1.0 { "1 minute".into() } else { format!("{minutes} minutes") }
}
