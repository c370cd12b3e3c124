//! Waiting for other ranks: deadlines, and the errors past them.

use std::time::{Duration, Instant};

use crate::error::EngineError;
use crate::flight_recorder::RecordedCall;

/// Interval at which a waiting rank checks whether the others are alive.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Multiple of the deadline allowed for slow work: data, probes, a checkpoint's last bytes.
const SLOW_WORK_FACTOR: u32 = 6;

/// Interval between two checks of heartbeats, once the deadline has passed.
const HEARTBEAT_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// A lost rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// Index of the rank.
    pub rank: usize,
    /// Evidence of the loss, or the reason that the rank reported.
    pub how: String,
    /// True if the rank has stopped for a reason of its own, which `how` then holds.
    pub by_itself: bool,
}

/// Monitor of the other ranks.
pub trait PeerMonitor: Send + Sync {
    /// Returns a lost rank, if one is known.
    fn lost(&self) -> Option<Lost>;

    /// Describes the ranks that have not reached `call`; `None` if `allows_slow_work` and one of
    /// them is busy with slow work.
    fn suspects(&self, call: &RecordedCall, allows_slow_work: bool) -> Option<String>;
}

/// The collective that a rank waits for, and the start of the wait.
pub(super) struct Waiting {
    number: u64,
    pub(super) since: Instant,
    last_check: Instant,
}

impl Waiting {
    pub(super) fn new(number: u64) -> Self {
        let now = Instant::now();
        // The first check of heartbeats is due as soon as the deadline has passed.
        Self { number, since: now, last_check: now.checked_sub(HEARTBEAT_CHECK_INTERVAL).unwrap_or(now) }
    }

    /// Returns an error if a rank is lost, or if the running collective `call` is older than the
    /// deadline.
    pub(super) fn check(
        &mut self,
        call: RecordedCall,
        monitor: Option<&dyn PeerMonitor>,
        deadline: Duration,
    ) -> Result<(), EngineError> {
        if let Some(Lost { rank, how, by_itself }) = monitor.and_then(|monitor| monitor.lost()) {
            let RecordedCall { collective, unit, number, .. } = call;
            return Err(if by_itself {
                EngineError::PeerFailed { rank, reason: how }
            } else {
                EngineError::PeerLost { rank, how, collective, unit, number }
            });
        }
        if self.number != call.number {
            *self = Self::new(call.number);
        }
        let waited = self.since.elapsed();
        if waited < deadline || self.last_check.elapsed() < HEARTBEAT_CHECK_INTERVAL {
            return Ok(());
        }
        self.last_check = Instant::now();
        let suspects = match monitor {
            Some(monitor) => monitor.suspects(&call, waited < deadline * SLOW_WORK_FACTOR),
            None => Some("no rank's heartbeat can be seen".into()),
        };
        let Some(suspects) = suspects else { return Ok(()) };
        let RecordedCall { collective, unit, number, .. } = call;
        Err(EngineError::Deadline { collective, unit, number, seconds: waited.as_secs(), suspects })
    }
}
