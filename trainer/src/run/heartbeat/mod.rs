//! Liveness and progress of ranks: the heartbeat file of each rank, and the processes of this
//! machine.

mod beat;
mod process;
mod state;
mod watch;
mod writer;

pub(super) use beat::{Heartbeat, heartbeat_folder, read_heartbeats};
pub use process::host_name;
pub(super) use state::{RankState, rank_state};
pub(super) use watch::RankWatch;
pub(super) use writer::HeartbeatWriter;
