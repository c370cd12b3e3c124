//! Estimates of a run before it is started: bytes per rank, traffic and time of a step, and the
//! share of a machine's time that failures leave.
//!
//! ```text
//! persistent   4·(weights + other networks + moments + gradients) · P / S     S: ranks of a shard group; AdamW has two
//!              moments, SGD one
//! gathered     one unit in transfer, and the heads or one unit in use, in buffers that live as long as the run; and units that
//!              are kept (K; all with `grad`)
//! traffic      full (2·P + P - kept) gathered, P reduced;  grad 2·P gathered, P reduced;  none 2·P reduced
//! time         the computation, and what it waits for: the units and their collectives on a timeline
//! ```

mod advice;
mod collectives;
mod divided;
mod fabric;
mod failure;
mod gpu;
mod gradients;
mod hardware;
mod heads;
mod machine_speed;
mod memory;
mod placed;
mod placement;
mod planner;
mod remedies;
mod retention;
mod time;
mod traffic;

pub use advice::Advice;
pub use divided::DividedModel;
pub use fabric::{Fabric, LONG_MESSAGE_BYTES, Latency};
pub use failure::{Goodput, goodput};
pub use gpu::{EFFICIENCY, GPUS, Gpu};
pub use hardware::{Hardware, Speed};
pub use machine_speed::MachineSpeed;
pub use memory::{Memory, memory};
pub use placement::Placement;
pub use planner::{Candidate, CandidateEstimate, Planner, PlannerSettings, plan_to_json};
pub use retention::{fit, least_memory, retention};
pub use time::{StepFlops, StepTime, step_flops, step_time};
pub use traffic::{Traffic, traffic};
