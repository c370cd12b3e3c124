//! One training step, unit by unit.
//!
//! ```text
//! targets           networks without gradients, for each unit: gather → forward the views that they see → drop
//! forward           the trained network, for each unit: gather → forward its views → keep input (or graph) → drop
//! head              heads and loss, ordinary autodiff, a micro-batch at a time → gradient at the backbone's output
//! backward          the trained network, for each unit from the last: gather → vector-Jacobian product → reduce
//! one small reduce  squared norms by clip group, loss, gauges, votes
//! update            local: clip, optimizer on the flat shards, then the followers
//! ```
//!
//! A rank's share of a batch may be split into micro-batches, which go through a unit one after
//! another while it is gathered: a unit that is recomputed in the backward pass holds the graph of
//! one micro-batch at a time, and weights and gradients are sent once per step, whatever the number
//! of micro-batches. Units that keep their graph keep those of all micro-batches. All gathers of a
//! step are in one list, in order ([`GatherQueue`](ranks::in_flight::GatherQueue)), so that the
//! next unit is gathered while one computes.

mod agreement;
pub(crate) mod backbone;
mod batch;
mod columns;
mod config;
mod draws;
pub(crate) mod events;
mod execution;
mod heads;
mod inferred;
mod loss;
mod net;
mod pass;
mod phases;
pub mod precision;
mod report;
mod scalars;
pub(crate) mod segments;
mod sharded;
mod state;
mod tape;
mod trainer;
pub mod upload;
mod weights;

pub use agreement::Votes;
pub(crate) use agreement::vote;
pub use config::StepConfig;
pub use phases::Phases;
pub use report::{Gradients, StepReport};
pub use state::{NetworkState, TrainState};
pub use trainer::Trainer;
