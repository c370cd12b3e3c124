//! Fetching of one object from its first byte to its last, across broken connections.

use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::StreamExt;
use tokio::time::{Instant, sleep, timeout};

use super::body::{Body, Failure, Sink};
use super::http::HttpObject;
use super::object::StoredObject;
use super::retry::RetryPolicy;

/// An object that can be read from any byte on.
pub(crate) enum Origin {
    Http(HttpObject),
    Stored(StoredObject),
}

impl Origin {
    async fn open(&self, from: u64, version: Option<&str>) -> Result<Body, Failure> {
        match self {
            Self::Http(object) => object.open(from, version).await,
            Self::Stored(object) => object.open(from, version).await,
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Http(object) => object.name(),
            Self::Stored(object) => object.name(),
        }
    }
}

/// Progress of a fetch.
#[derive(Default)]
struct Progress {
    done_bytes: u64,
    /// Number of bytes of the furthest attempt. Only bytes beyond it count as progress, so that a
    /// server that always fails at the same byte cannot hold a fetch forever.
    furthest_bytes: u64,
    total_bytes: Option<u64>,
    version: Option<String>,
}

impl Progress {
    fn received(&self) -> String {
        match self.total_bytes {
            Some(total) => format!("{} of {total} bytes", self.done_bytes),
            None => format!("{} bytes", self.done_bytes),
        }
    }
}

/// Fetches all of `origin` into `sink`. `answered` says whether any server has ever responded,
/// which selects the limit of failures, and is set when this one does.
pub(crate) async fn fetch(
    origin: &Origin,
    policy: &RetryPolicy,
    answered: &AtomicBool,
    sink: &mut dyn Sink,
) -> Result<(), Failure> {
    let mut progress = Progress::default();
    let mut failures = 0;
    loop {
        let start = Instant::now();
        let (reason, not_before) = match attempt(origin, policy, &mut progress, sink).await {
            Ok(()) => {
                answered.store(true, Ordering::Relaxed);
                return Ok(());
            }
            Err(Failure::Temporary(reason)) => (reason, None),
            Err(Failure::Busy(reason, not_before)) => {
                answered.store(true, Ordering::Relaxed);
                (reason, not_before)
            }
            Err(Failure::Changed) => {
                progress = Progress { furthest_bytes: progress.furthest_bytes, ..Progress::default() };
                ("it changed during the download".to_string(), None)
            }
            Err(failure) => return Err(failure),
        };
        let new_bytes = progress.done_bytes.saturating_sub(progress.furthest_bytes);
        progress.furthest_bytes += new_bytes;
        // A trickle does not count as progress, or a server could hold a fetch for years.
        if new_bytes > 0 && !policy.is_too_slow(new_bytes, start.elapsed()) {
            failures = 0;
        }
        if progress.furthest_bytes > 0 {
            answered.store(true, Ordering::Relaxed);
        }
        failures += 1;
        let reached = answered.load(Ordering::Relaxed);
        let limit = if reached { policy.max_failures } else { policy.max_first_failures };
        if failures > limit {
            return Err(Failure::Permanent(format!("{reason} (tried {failures} times)")));
        }
        let wait = policy.wait(failures).max(not_before.unwrap_or_default().min(policy.max_wait));
        if policy.warns {
            let name = origin.name();
            let done_bytes = progress.done_bytes;
            let wait_s = wait.as_secs_f64();
            match done_bytes {
                0 => tracing::warn!("{name}: {reason}; retrying in {wait_s:.1} s"),
                _ if progress.version.is_none() => {
                    tracing::warn!(
                        "{name}: {reason}; starting over in {wait_s:.1} s, because the server states no \
                         version"
                    );
                }
                _ => tracing::warn!("{name}: {reason}; resuming at byte {done_bytes} in {wait_s:.1} s"),
            }
        }
        sleep(wait).await;
    }
}

/// Number of bytes received since a point in time, which shows whether a server is too slow.
struct Window {
    start: Instant,
    bytes: u64,
}

impl Window {
    /// Counts received bytes; fails once a whole window has brought too few.
    fn check(&mut self, n_bytes: u64, policy: &RetryPolicy) -> Result<(), Failure> {
        self.bytes += n_bytes;
        let time = self.start.elapsed();
        if time < policy.stall {
            return Ok(());
        }
        if policy.is_too_slow(self.bytes, time) {
            let reason = format!("received only {} bytes in {:.1} s", self.bytes, time.as_secs_f64());
            return Err(Failure::Temporary(reason));
        }
        *self = Self { start: Instant::now(), bytes: 0 };
        Ok(())
    }
}

/// Returns whether both are known and differ.
fn differ<T: PartialEq>(a: &Option<T>, b: &Option<T>) -> bool {
    matches!((a, b), (Some(a), Some(b)) if a != b)
}

fn stalled(policy: &RetryPolicy) -> Failure {
    Failure::Temporary(format!("received nothing for {:?}", policy.stall))
}

async fn attempt(
    origin: &Origin,
    policy: &RetryPolicy,
    progress: &mut Progress,
    sink: &mut dyn Sink,
) -> Result<(), Failure> {
    // Without an identifier of the version, the rest might be that of another version.
    let from = if progress.version.is_some() { progress.done_bytes } else { 0 };
    let response = origin.open(from, progress.version.as_deref());
    let mut body = timeout(policy.stall, response).await.map_err(|_| stalled(policy))??;
    if body.start == 0 {
        sink.restart(body.total_bytes).map_err(Failure::Sink)?;
        progress.done_bytes = 0;
        progress.total_bytes = body.total_bytes;
        progress.version = body.version;
    } else if body.start != from {
        let reason = format!("asked for byte {from}, but the server sent byte {}", body.start);
        return Err(Failure::Temporary(reason));
    } else if differ(&body.total_bytes, &progress.total_bytes) || differ(&body.version, &progress.version) {
        return Err(Failure::Changed);
    } else {
        progress.total_bytes = body.total_bytes.or(progress.total_bytes);
    }
    let mut window = Window { start: Instant::now(), bytes: 0 };
    while let Some(chunk) = timeout(policy.stall, body.chunks.next()).await.map_err(|_| stalled(policy))? {
        let chunk = chunk.map_err(|reason| {
            let reason = format!("the connection failed after {}: {reason}", progress.received());
            Failure::Temporary(reason)
        })?;
        sink.write_all(&chunk).map_err(Failure::Sink)?;
        progress.done_bytes += chunk.len() as u64;
        window.check(chunk.len() as u64, policy)?;
    }
    match progress.total_bytes {
        Some(total) if progress.done_bytes < total => {
            Err(Failure::Temporary(format!("the connection ended after {}", progress.received())))
        }
        _ => Ok(()),
    }
}
