//! Test of the communication between the ranks of a launch: the conformance suite of engines, then
//! the times of the most frequent operations of a step.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use kernels::device::{Device, Opened};
use ranks::EngineError;
use ranks::conformance::{self, CheckContext, ConformanceError, TimingBuffers};
use ranks::engine::{self, Engine, EngineChoice, Solo};
use ranks::launch::Launch;
use trainer::estimate::LONG_MESSAGE_BYTES;

use crate::connect;
use crate::error::SessionError;

/// Smallest length of the shortest buffer that is timed.
const SHORTEST_BYTES: usize = 4 << 10;

/// Smallest length of the middle buffer that is timed.
const MIDDLE_BYTES: usize = 256 << 10;

/// Number of measurements of an operation, whose median is the result.
const N_TIMES: usize = 9;

/// A test of the ranks of a launch.
pub struct FabricTest {
    /// Position of this process among the ranks.
    pub launch: Launch,
    /// Device of this rank.
    pub device: Opened,
    /// Engine that is requested.
    pub engine: EngineChoice,
    /// Time to wait for ranks that do not respond.
    pub deadline: Duration,
    /// Largest number of elements that a call may move; `None` for the engine's own limit.
    pub max_count: Option<usize>,
    /// Least length of the longest buffer that is timed.
    pub buffer_bytes: usize,
}

/// Times of operations between ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct FabricTimes {
    /// Times of buffers of several lengths, the shortest first.
    pub buffers: [BufferTimes; 3],
    /// Links that these times imply.
    pub links: Links,
}

/// Times of a buffer.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BufferTimes {
    /// Length of the buffer.
    pub bytes: usize,
    /// Bytes of the buffer that a rank receives from others.
    pub moved_bytes: f64,
    /// Median time of a gather.
    pub gather_ms: f64,
    /// Median time of an exchange.
    pub exchange_ms: f64,
}

/// Links between ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Links {
    /// Ranks of this node.
    pub n_local: usize,
    /// Whether all ranks are on this node.
    pub is_one_node: bool,
    /// Bandwidth of the links between ranks, or of those between nodes if there are several.
    pub bytes_per_s: f64,
    /// Latency of a long message, in microseconds.
    pub long_us: f64,
    /// Latency of a short message, in microseconds.
    pub short_us: f64,
}

/// Result of a part of the test.
#[derive(Debug, Clone, PartialEq)]
pub enum FabricResult {
    /// All operations of the engine with this name have passed.
    Passed(&'static str),
    /// Operations were timed, on several ranks.
    Timed(FabricTimes),
}

/// The last operation that passed, with its elements per rank.
type LastPassed = Mutex<Option<(&'static str, usize)>>;

impl FabricTest {
    /// Runs the test, and reports each result as soon as it is known. The test runs in a thread of
    /// its own, because it waits forever for ranks that do not arrive.
    ///
    /// # Errors
    /// [`SessionError::Ranks`], [`SessionError::Fabric`], [`SessionError::FabricWrong`],
    /// [`SessionError::FabricPanicked`].
    pub fn run(self, mut report: impl FnMut(FabricResult) + Send + 'static) -> Result<(), SessionError> {
        let (sender, receiver) = channel();
        let rank = self.launch.rank;
        let deadline = self.deadline;
        let last: Arc<LastPassed> = Arc::default();
        let last_passed = Arc::clone(&last);
        thread::spawn(move || {
            let mut engine = match self.start() {
                Ok(engine) => engine,
                Err(error) => return drop(sender.send(Err(error.into()))),
            };
            let result = self.test(engine.as_mut(), &mut report, &last_passed);
            // Dropping an engine may wait for other ranks, which may never arrive after a failure.
            if result.is_ok() {
                drop(engine);
                return drop(sender.send(result));
            }
            let _ = sender.send(result);
        });
        match receiver.recv_timeout(deadline) {
            Ok(result) => result,
            Err(RecvTimeoutError::Disconnected) => Err(SessionError::FabricPanicked),
            Err(RecvTimeoutError::Timeout) => Err(missing_ranks(rank, deadline, &last).into()),
        }
    }

    /// Starts the engine, in the thread that uses it.
    fn start(&self) -> Result<Box<dyn Engine>, EngineError> {
        match (self.launch.world_size, self.engine) {
            (1, EngineChoice::Auto) => Ok(Box::new(Solo)),
            _ => {
                let site = connect::site(&self.launch, &self.device, self.deadline, self.max_count);
                engine::start(&site, self.engine)
            }
        }
    }

    /// Tests `engine`, and records the `last` operation that has passed.
    fn test(
        &self,
        engine: &mut dyn Engine,
        report: &mut dyn FnMut(FabricResult),
        last: &LastPassed,
    ) -> Result<(), SessionError> {
        let rank = self.launch.rank;
        let world_size = self.launch.world_size;
        let mut context = CheckContext {
            device: &self.device.device,
            passed: &mut |operation, n| {
                *last.lock().unwrap_or_else(PoisonError::into_inner) = Some((operation, n));
            },
        };
        match conformance::check(engine, &mut context) {
            Ok(()) => {}
            Err(ConformanceError::Failed(source)) => return Err(SessionError::Fabric { rank, source }),
            Err(source @ ConformanceError::Wrong { .. }) => {
                return Err(SessionError::FabricWrong { rank, source });
            }
        }
        report(FabricResult::Passed(engine.name()));
        if world_size == 1 {
            return Ok(());
        }
        let lengths = timed_bytes(world_size, self.buffer_bytes);
        let mut buffers = [BufferTimes::default(); 3];
        // The longest buffer comes first, so that short ones are timed with a TCP window as wide as
        // in a run.
        for (times, bytes) in buffers.iter_mut().zip(lengths).rev() {
            *times = time(engine, &self.device.device, bytes)?;
        }
        report(FabricResult::Timed(FabricTimes { buffers, links: Links::new(&self.launch, &buffers) }));
        Ok(())
    }
}

/// Returns the error of ranks that did not respond.
fn missing_ranks(rank: usize, deadline: Duration, last: &LastPassed) -> EngineError {
    let suspects = match *last.lock().unwrap_or_else(PoisonError::into_inner) {
        None => format!("rank {rank} is waiting for other ranks that did not start or cannot be reached"),
        Some((operation, n)) => {
            format!("rank {rank} is waiting in the test after {operation} of {n} elements")
        }
    };
    EngineError::Deadline {
        collective: "the fabric test",
        unit: "the ranks".to_string(),
        number: 0,
        seconds: deadline.as_secs(),
        suspects,
    }
}

/// Returns the lengths of the timed buffers, in bytes; the longest has at least `buffer_bytes`. A
/// message carries one rank's part of a buffer, `1 / world_size`: messages are short for the
/// shortest buffer, and long for the others. Those of the shortest buffer are still short where a
/// gather sends half of the buffer at once.
fn timed_bytes(world_size: usize, buffer_bytes: usize) -> [usize; 3] {
    let middle = MIDDLE_BYTES.max(world_size * LONG_MESSAGE_BYTES as usize);
    [SHORTEST_BYTES.max(16 * world_size), middle, buffer_bytes.max(4 * middle)]
}

impl Links {
    /// Returns the links that the times of buffers imply. The bandwidth is the difference in bytes
    /// of the two longest buffers over the difference of their times; the latency of long messages
    /// is the rest of the time of the middle one, which is as long as the weights of a unit of a
    /// small network; that of short messages is the rest of the time of the shortest one.
    fn new(launch: &Launch, buffers: &[BufferTimes; 3]) -> Self {
        let n_local = launch.n_local.unwrap_or(1).clamp(1, launch.world_size);
        let is_one_node = n_local == launch.world_size;
        // Parts of the buffer that a link carries in an exchange: what a rank receives from all
        // others, or what a node's ranks receive from other nodes. In a gather all parts but one
        // pass a link.
        let exchanged = if is_one_node { n_local - 1 } else { n_local * (launch.world_size - n_local) };
        let n_parts = exchanged + launch.world_size - 1;
        let [shortest, middle, longest] =
            buffers.map(|times| times.bytes as f64 * n_parts as f64 / launch.world_size as f64);
        let both_s = buffers.map(|times| (times.gather_ms + times.exchange_ms) / 1e3);
        let bytes_per_s = (longest - middle) / (both_s[2] - both_s[1]).max(1e-9);
        // Counted as in a plan: the ranks or nodes that a gather passes, and one message of the
        // exchange.
        let n = if is_one_node { launch.world_size } else { launch.world_size.div_ceil(n_local) };
        let n_latencies = (n - 1).min((n as f64).log2().ceil() as usize) + 1;
        let short_us = 1e6 * (both_s[0] - shortest / bytes_per_s).max(0.0) / n_latencies as f64;
        let long_us = 1e6 * (both_s[1] - middle / bytes_per_s).max(0.0) / n_latencies as f64;
        Self { n_local, is_one_node, bytes_per_s, long_us: long_us.max(short_us), short_us }
    }
}

/// Returns the median times of a gather and an exchange of a buffer of `bytes` in the engine's
/// memory.
fn time(engine: &mut dyn Engine, device: &Device, bytes: usize) -> Result<BufferTimes, EngineError> {
    let mut buffers = TimingBuffers::new(engine, device, bytes)?;
    let mut gathers = Vec::new();
    let mut exchanges = Vec::new();
    for _ in 0..N_TIMES {
        let start = Instant::now();
        buffers.gather(engine)?;
        let between = Instant::now();
        buffers.exchange(engine)?;
        gathers.push((between - start).as_secs_f64() * 1e3);
        exchanges.push(between.elapsed().as_secs_f64() * 1e3);
    }
    gathers.sort_by(f64::total_cmp);
    exchanges.sort_by(f64::total_cmp);
    let world_size = engine.world_size() as f64;
    Ok(BufferTimes {
        bytes,
        moved_bytes: bytes as f64 * (world_size - 1.0) / world_size,
        gather_ms: gathers[N_TIMES / 2],
        exchange_ms: exchanges[N_TIMES / 2],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two nodes of two ranks, whose links carry 1 GB/s: all parts but one pass a link in a gather,
    /// and four of them in an exchange, each after one message.
    #[test]
    fn links_have_the_bandwidth_and_the_latencies_of_the_times() {
        let launch = Launch { world_size: 4, n_local: Some(2), ..Launch::ALONE };
        let lengths = timed_bytes(4, 16 << 20);
        let latencies_s = [4e-7, 0.003, 0.003];
        let buffers: [BufferTimes; 3] = std::array::from_fn(|i| {
            let both_s = 2.0 * latencies_s[i] + lengths[i] as f64 * (3.0 + 4.0) / 4.0 / 1e9;
            BufferTimes { bytes: lengths[i], gather_ms: 1e3 * both_s, ..BufferTimes::default() }
        });
        let links = Links::new(&launch, &buffers);
        assert_eq!((links.n_local, links.is_one_node), (2, false));
        assert!((links.bytes_per_s / 1e9 - 1.0).abs() < 1e-6, "{links:?}");
        assert!((links.long_us - 3000.0).abs() < 0.05, "{links:?}");
        assert!((links.short_us - 0.4).abs() < 0.05, "{links:?}");
    }

    /// On any number of ranks, parts of the shortest buffer are short messages that are not empty,
    /// and parts of the others are long ones.
    #[test]
    fn parts_of_timed_buffers_are_short_and_long_messages() {
        for world_size in [2, 4, 8, 64, 496, 2048] {
            for buffer_bytes in [1 << 20, 16 << 20] {
                let [shortest, middle, longest] = timed_bytes(world_size, buffer_bytes);
                assert!(shortest as f64 / world_size as f64 >= 4.0, "{world_size} ranks");
                assert!((shortest as f64) / 2.0 < LONG_MESSAGE_BYTES, "{world_size} ranks");
                assert!(middle as f64 / world_size as f64 >= LONG_MESSAGE_BYTES, "{world_size} ranks");
                assert!(longest >= 4 * middle && longest >= buffer_bytes);
            }
        }
    }
}
