//! The communication thread: it owns the engines and runs collectives in the order in which they
//! are submitted, which is the same on all ranks, while the trainer computes.
//!
//! At most one gather runs ahead of the one in use, and at most two reductions are in flight
//! ([`in_flight`](super::in_flight)). Gathered buffers come from a pool and return to it when the
//! last tensor that views them is dropped.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};

use crate::buffer_pool::BufferPool;
use crate::deadline::{POLL_INTERVAL, PeerMonitor, Waiting};
use crate::engine::{Engine, Reduction};
use crate::error::EngineError;
use crate::flight_recorder::FlightRecorder;
use crate::mesh::{Mesh, Traffic};
use crate::topology::Topology;

/// Time that ranks may take to start, even if the deadline of collectives is shorter.
pub const START_TIMEOUT: Duration = Duration::from_secs(120);

/// Time that an engine may take to abort a collective that is no longer waited for.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Settings of a [`Communicator`].
pub struct CommunicatorConfig {
    /// Topology as this rank sees it.
    pub topology: Topology,
    /// True if sums are taken in the order of [`ordered`](crate::ordered), not in the engine's.
    pub exact: bool,
    /// Deadline of a collective.
    pub deadline: Duration,
}

/// Function that makes an engine in the communication thread.
pub type EngineFactory = Box<dyn FnOnce() -> Result<Box<dyn Engine>, EngineError> + Send>;

/// Connection of a rank to the others, through the communication thread.
pub struct Communicator {
    topology: Topology,
    pub(super) exact: bool,
    /// True if the engine reads and writes tensors in place.
    pub(super) supports_device_tensors: bool,
    /// Queue of collectives; `None` for one rank, which has nothing to move.
    queue: Option<Sender<Queued>>,
    recorder: Arc<FlightRecorder>,
    monitor: Mutex<Option<Arc<dyn PeerMonitor>>>,
    deadline: Duration,
    pub(super) buffers: Arc<BufferPool>,
    waited_us: AtomicU64,
    /// Microseconds that the thread has waited for this rank's own device.
    device_wait_us: Arc<AtomicU64>,
    /// Set once this rank no longer waits for collectives.
    abort_flag: Arc<AtomicBool>,
    /// Closed once the thread has dropped its engines.
    ended: Option<Receiver<()>>,
}

type Job = Box<dyn FnOnce(&mut Mesh) + Send>;

struct Queued {
    collective: &'static str,
    unit: String,
    on_tensors: bool,
    job: Job,
}

/// The result of a collective that may still be running.
pub enum Pending<R> {
    /// Result of a collective that had nothing to move.
    Ready(R),
    /// Receiver of the result from the communication thread.
    Queued(Receiver<Result<R, EngineError>>),
}

impl Communicator {
    /// Creates the communicator of a single rank.
    pub fn solo() -> Self {
        Self {
            topology: Topology::SINGLE_RANK,
            exact: true,
            supports_device_tensors: false,
            queue: None,
            recorder: Arc::default(),
            monitor: Mutex::new(None),
            deadline: Duration::MAX,
            buffers: Arc::default(),
            waited_us: AtomicU64::new(0),
            device_wait_us: Arc::default(),
            abort_flag: Arc::default(),
            ended: None,
        }
    }

    /// Starts the communication thread, which makes the engine itself. All ranks call it.
    ///
    /// # Errors
    /// Errors of `engine`, and [`EngineError`] if the ranks do not meet.
    pub fn start(config: CommunicatorConfig, engine: EngineFactory) -> Result<Self, EngineError> {
        let CommunicatorConfig { topology, exact, deadline } = config;
        let (queue, jobs) = unbounded::<Queued>();
        let (ready, is_ready) = bounded(1);
        let (has_ended, ended) = bounded::<()>(0);
        let recorder = Arc::<FlightRecorder>::default();
        let thread_recorder = Arc::clone(&recorder);
        let device_wait_us = Arc::<AtomicU64>::default();
        let abort_flag = Arc::<AtomicBool>::default();
        let thread_wait_us = Arc::clone(&device_wait_us);
        let thread_abort_flag = Arc::clone(&abort_flag);
        let thread = std::thread::Builder::new().name("comm".into()).spawn(move || {
            let mesh = engine().and_then(|mut world| {
                world.watch(thread_abort_flag);
                Mesh::new(world, topology, exact)
            });
            let mut mesh = match mesh {
                Ok(mesh) => mesh,
                Err(error) => return drop(ready.send(Err(error))),
            };
            // The send fails only if the thread that starts this one has given up.
            let _ = ready.send(Ok(mesh.world().supports_device_tensors()));
            for (number, Queued { collective, unit, on_tensors, job }) in (0..).zip(jobs) {
                if on_tensors {
                    // Runs before the collective is recorded: a rank whose device hangs then has a
                    // lower number than the others, which identifies it. The collective itself
                    // reports any error of the device.
                    let start = Instant::now();
                    let _ = mesh.world().wait_for_device();
                    thread_wait_us.fetch_add(start.elapsed().as_micros() as u64, Ordering::Relaxed);
                }
                thread_recorder.begin(number, collective, &unit);
                job(&mut mesh);
                thread_recorder.end();
            }
            drop(mesh);
            drop(has_ended);
        });
        thread.map_err(|error| EngineError::Unavailable {
            engine: "communication thread",
            reason: error.to_string(),
        })?;
        let supports_device_tensors = is_ready
            .recv_timeout(deadline.max(START_TIMEOUT))
            .map_err(|error| not_started(error, deadline))??;
        Ok(Self {
            topology,
            exact,
            supports_device_tensors,
            // One rank has nothing to move, but an engine on device memory may be tested with it.
            queue: (topology.world_size > 1 || supports_device_tensors).then_some(queue),
            recorder,
            deadline,
            device_wait_us,
            abort_flag,
            ended: Some(ended),
            ..Self::solo()
        })
    }

    /// Returns the topology as this rank sees it.
    pub fn topology(&self) -> Topology {
        self.topology
    }

    /// Returns true if the engine reads and writes tensors in place.
    pub fn supports_device_tensors(&self) -> bool {
        self.supports_device_tensors
    }

    /// Returns the flight recorder of the communication thread.
    pub fn recorder(&self) -> Arc<FlightRecorder> {
        Arc::clone(&self.recorder)
    }

    /// Sets the monitor that names the missing ranks when a collective does not end.
    pub fn set_watch(&self, monitor: Arc<dyn PeerMonitor>) {
        *self.monitor.lock().unwrap_or_else(PoisonError::into_inner) = Some(monitor);
    }

    /// Returns the total time that the trainer has waited for other ranks.
    pub fn waited(&self) -> Duration {
        Duration::from_micros(self.waited_us.load(Ordering::Relaxed))
    }

    /// Queues `run` behind the collectives already queued.
    pub(super) fn submit<R: Send + 'static>(
        &self,
        collective: &'static str,
        unit: &str,
        run: impl FnOnce(&mut Mesh) -> Result<R, EngineError> + Send + 'static,
    ) -> Pending<R> {
        let (sender, result) = bounded(1);
        if let Some(queue) = &self.queue {
            // The send fails only if this rank, after an error, no longer waits for the result.
            let job: Job = Box::new(move |mesh| drop(sender.send(run(mesh))));
            // A thread that has ended drops the job and its sender with it: the wait then returns
            // an error.
            let on_tensors = self.supports_device_tensors;
            let _ = queue.send(Queued { collective, unit: unit.to_string(), on_tensors, job });
        }
        Pending::Queued(result)
    }

    /// Waits for a collective and returns its result.
    ///
    /// # Errors
    /// [`EngineError`] of the collective, for a lost rank, or past the deadline.
    pub fn wait<R>(&self, pending: Pending<R>) -> Result<R, EngineError> {
        let result = match pending {
            Pending::Ready(value) => return Ok(value),
            Pending::Queued(result) => result,
        };
        let mut waiting = Waiting::new(self.recorder.newest().map_or(0, |entry| entry.number));
        let start = waiting.since;
        let device_wait_us = self.device_wait_us.load(Ordering::Relaxed);
        let outcome = loop {
            match result.recv_timeout(POLL_INTERVAL) {
                Ok(outcome) => break outcome,
                Err(RecvTimeoutError::Disconnected) => break Err(EngineError::Ended),
                Err(RecvTimeoutError::Timeout) => {
                    if let Err(error) = self.check_peers(&mut waiting) {
                        self.abort_flag.store(true, Ordering::Relaxed);
                        // Gives such an engine time to abort, so that the device is free when the
                        // process ends.
                        if self.supports_device_tensors {
                            let _ = result.recv_timeout(LEAVE_TIMEOUT);
                        }
                        return Err(error);
                    }
                }
            }
        };
        let device_us = self.device_wait_us.load(Ordering::Relaxed) - device_wait_us;
        let waited_us = (start.elapsed().as_micros() as u64).saturating_sub(device_us);
        self.waited_us.fetch_add(waited_us, Ordering::Relaxed);
        outcome
    }

    fn check_peers(&self, waiting: &mut Waiting) -> Result<(), EngineError> {
        let monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match self.recorder.newest() {
            Some(call) => waiting.check(call, monitor.as_deref(), self.deadline),
            None if waiting.since.elapsed() < self.deadline.max(START_TIMEOUT) => Ok(()),
            // Not even the first collective has begun: this rank's own device hangs.
            None => Err(EngineError::Deadline {
                collective: "start",
                unit: "this rank's device".into(),
                number: 0,
                seconds: self.deadline.max(START_TIMEOUT).as_secs(),
                suspects: "it has not finished its work before the first collective".into(),
            }),
        }
    }

    /// Returns the sum of `values` over ranks, in the order of their data ranks.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn sum(&self, subject: &str, values: Vec<f32>) -> Result<Vec<f32>, EngineError> {
        if self.queue.is_none() {
            return Ok(values);
        }
        self.wait(self.submit("sum", subject, move |mesh| mesh.sum(&values)))
    }

    /// Gathers every rank's `values`, in the order of their data ranks.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn gather_parts(&self, subject: &str, values: Vec<f32>) -> Result<Vec<Vec<f32>>, EngineError> {
        if self.queue.is_none() {
            return Ok(vec![values]);
        }
        self.wait(self.submit("gather", subject, move |mesh| mesh.gather_parts(&values)))
    }

    /// Reduces a few numbers over ranks; all ranks get the same bits.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn all_reduce(
        &self,
        subject: &str,
        mut values: Vec<f64>,
        reduction: Reduction,
    ) -> Result<Vec<f64>, EngineError> {
        if self.queue.is_none() {
            return Ok(values);
        }
        self.wait(self.submit("all_reduce", subject, move |mesh| {
            mesh.count_other(8 * values.len());
            mesh.world().all_reduce(&mut values, reduction)?;
            Ok(values)
        }))
    }

    /// Returns the number of ranks whose `flag` is set. All ranks call it.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn count(&self, subject: &str, flag: bool) -> Result<usize, EngineError> {
        let vote = if flag { 1.0 } else { 0.0 };
        let sums = self.all_reduce(subject, vec![vote], Reduction::Sum)?;
        Ok(sums[0] as usize)
    }

    /// Broadcasts the bytes of rank 0 to all ranks.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn broadcast(&self, subject: &str, bytes: Vec<u8>) -> Result<Vec<u8>, EngineError> {
        if self.queue.is_none() {
            return Ok(bytes);
        }
        self.wait(self.submit("broadcast", subject, move |mesh| {
            let mut len = (bytes.len() as u64).to_ne_bytes();
            mesh.world().broadcast(&mut len, 0)?;
            let mut bytes = bytes;
            bytes.resize(u64::from_ne_bytes(len) as usize, 0);
            mesh.world().broadcast(&mut bytes, 0)?;
            Ok(bytes)
        }))
    }

    /// Gathers every rank's bytes, in the order of the ranks.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn gather_bytes(&self, subject: &str, mut bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, EngineError> {
        if self.queue.is_none() {
            return Ok(vec![bytes]);
        }
        self.wait(self.submit("gather", subject, move |mesh| {
            let world = mesh.world();
            let mut lengths = vec![0u64; world.world_size()];
            world.all_gather(&(bytes.len() as u64).to_ne_bytes(), bytemuck::cast_slice_mut(&mut lengths))?;
            let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
            bytes.resize(longest, 0);
            let mut all = vec![0; longest * lengths.len()];
            world.all_gather(&bytes, &mut all)?;
            let padded = lengths.iter().enumerate();
            Ok(padded.map(|(rank, len)| all[rank * longest..][..*len as usize].to_vec()).collect())
        }))
    }

    /// Frees the pooled buffers that are kept for later gathers.
    pub fn release_buffers(&self) {
        self.buffers.clear();
    }

    /// Regroups the ranks and resets the traffic counters. All ranks call it, with no collective in
    /// flight.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn regroup(&mut self, topology: Topology, exact: bool) -> Result<(), EngineError> {
        if self.queue.is_some() {
            self.wait(self.submit("regroup", "the ranks", move |mesh| mesh.regroup(topology, exact)))?;
            self.topology = topology;
            self.exact = exact;
            self.buffers.clear();
        }
        Ok(())
    }

    /// Returns the traffic since the start, or since the ranks were last regrouped.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn traffic(&self) -> Result<Traffic, EngineError> {
        if self.queue.is_none() {
            return Ok(Traffic::default());
        }
        self.wait(self.submit("read", "traffic", |mesh| Ok(mesh.traffic)))
    }

    /// Waits for all ranks and drops the engines. Without this call, as after an error, the thread
    /// is left running: it may never return from its collective.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn finish(mut self) -> Result<(), EngineError> {
        self.all_reduce("finish", vec![0.0], Reduction::Sum)?;
        self.queue = None;
        // Dropping MPI waits for all ranks once more.
        match self.ended.take().map(|ended| ended.recv_timeout(self.deadline)) {
            Some(Err(RecvTimeoutError::Timeout)) => Err(EngineError::Deadline {
                collective: "end",
                unit: "the engine".into(),
                number: self.recorder.newest().map_or(0, |entry| entry.number),
                seconds: self.deadline.as_secs(),
                suspects: "not all ranks have arrived".into(),
            }),
            _ => Ok(()),
        }
    }
}

/// Returns the error of an engine that has not started.
fn not_started(error: RecvTimeoutError, deadline: Duration) -> EngineError {
    match error {
        RecvTimeoutError::Disconnected => EngineError::Ended,
        RecvTimeoutError::Timeout => EngineError::Deadline {
            collective: "start",
            unit: "the engine".into(),
            number: 0,
            seconds: deadline.max(START_TIMEOUT).as_secs(),
            suspects: "not all ranks have arrived".into(),
        },
    }
}
