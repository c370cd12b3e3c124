//! Liveness and progress of ranks: a heartbeat file of each, and the processes of this machine.

mod beat;
mod process;
mod state;
mod watch;
mod writer;

pub(super) use beat::{Heartbeat, beats_of, folder_of};
pub use process::host_name;
pub(super) use state::{RankState, rank_state};
pub(super) use watch::RankWatch;
pub(super) use writer::HeartbeatWriter;
