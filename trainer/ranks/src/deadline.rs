//! How long a rank waits for others, and what it says when it waits no longer.

use std::time::{Duration, Instant};

use crate::error::EngineError;
use crate::flight_recorder::Entry;

/// How often a rank that waits looks whether the others live.
pub(super) const POLL: Duration = Duration::from_millis(100);

/// Deadlines that ranks have for what may take long: data, probes, a checkpoint's last bytes.
const PATIENCE: u32 = 6;

/// Between two looks at heartbeats, once the deadline has passed.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// A rank that is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// Which.
    pub rank: usize,
    /// How that is known, or what it said.
    pub how: String,
    /// Whether it has left for a reason of its own.
    pub by_itself: bool,
}

/// Knows how the other ranks are.
pub trait Watch: Send + Sync {
    /// A rank that is known to be gone.
    fn lost(&self) -> Option<Lost>;

    /// Describes the ranks that have not come to `here`; `None` if all are merely busy with what may take long, and `is_patient`.
    fn suspects(&self, here: &Entry, is_patient: bool) -> Option<String>;
}

/// For what, and since when, a rank waits.
pub(super) struct Waiting {
    number: u64,
    pub(super) since: Instant,
    looked: Instant,
}

impl Waiting {
    pub(super) fn new(number: u64) -> Self {
        let now = Instant::now();
        // The first look is due as soon as the deadline has passed.
        Self { number, since: now, looked: now.checked_sub(LOOK_AGAIN).unwrap_or(now) }
    }
    /// Whether somebody is gone, or the collective `here` that runs is older than the deadline.
    pub(super) fn look(
        &mut self,
        here: Entry,
        watch: Option<&dyn Watch>,
        deadline: Duration,
    ) -> Result<(), EngineError> {
        if let Some(Lost { rank, how, by_itself }) = watch.and_then(|watch| watch.lost()) {
            let Entry { collective, unit, number, .. } = here;
            return Err(match by_itself {
                true => EngineError::PeerFailed { rank, reason: how },
                false => EngineError::PeerLost { rank, how, collective, unit, number },
            });
        }
        if self.number != here.number {
            *self = Self::new(here.number);
        }
        let waited = self.since.elapsed();
        if waited < deadline || self.looked.elapsed() < LOOK_AGAIN {
            return Ok(());
        }
        self.looked = Instant::now();
        let suspects = match watch {
            Some(watch) => watch.suspects(&here, waited < deadline * PATIENCE),
            None => Some("no rank's heartbeat can be seen".into()),
        };
        let Some(suspects) = suspects else { return Ok(()) };
        let Entry { collective, unit, number, .. } = here;
        Err(EngineError::Deadline { collective, unit, number, seconds: waited.as_secs(), suspects })
    }
}
