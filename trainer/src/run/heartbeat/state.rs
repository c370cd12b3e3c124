//! State of a rank, determined from its heartbeat on any machine.

use super::beat::{Heartbeat, LEAVING};
use super::process::{host_name, start_time};
use crate::run::clock::now_s;
use crate::run::duration::format_duration;

/// Age in seconds of a heartbeat above which its rank is considered gone or stuck.
pub(super) const STALE_S: f64 = 15.0;

/// Seconds without a heartbeat after which a process that is not found on this machine has ended.
const SILENT_S: f64 = 4.0;

/// State of a rank according to its heartbeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RankState {
    /// The heartbeat is fresh.
    Alive,
    /// The heartbeat is the last one of a rank that has left.
    Left,
    /// The rank is gone without notice, or stuck; contains the reason.
    Gone(String),
}

/// Returns the current state of the rank that wrote `beat`.
pub(crate) fn rank_state(beat: &Heartbeat) -> RankState {
    if beat.phase == LEAVING {
        return RankState::Left;
    }
    // Clocks of machines may differ in both directions.
    let age_s = (now_s() - beat.at_s).abs();
    // Containers may share a host's name without seeing one another's processes, so a fresh beat
    // counts more than a process that is not found.
    if age_s > SILENT_S && beat.host == host_name() && start_time(beat.pid).is_none() {
        return RankState::Gone(format!("process {} has ended", beat.pid));
    }
    if age_s < STALE_S {
        RankState::Alive
    } else {
        RankState::Gone(format!("the last heartbeat was {} ago", format_duration(age_s)))
    }
}
