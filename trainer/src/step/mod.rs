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
//! A rank's share of a batch may be cut into micro-batches, which go through a unit one after
//! another while it is gathered: a unit that is recomputed in the backward pass has the graph of
//! one micro-batch at a time, and weights and gradients are sent once a step whatever their number.
//! The order of all gathers of a step is one list ([`GatherQueue`](ranks::prefetch::GatherQueue)),
//! so that the next unit is on its way while one computes.

mod agreement;
mod backward;
mod batch;
mod columns;
mod config;
mod drawn;
mod forward;
mod heads;
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
pub(crate) mod whole;

pub use agreement::Votes;
pub use config::StepConfig;
pub use phases::Phases;
pub use report::{Gradients, StepReport};
pub use state::{NetworkState, TrainState};
pub use trainer::Trainer;
