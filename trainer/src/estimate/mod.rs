//! What a run will need before it is started: bytes a rank, traffic and time of a step, and how much of a
//! machine's time failures leave.
//!
//! ```text
//! persistent   4·(student + teacher + m + v + gradient) = 20 · P / S        S ranks of a shard group
//! gathered     two units on their way, the head, and what is kept (graphs of K units; all with `grad`)
//! traffic      full (2·P + P - kept) gathered, P reduced;  grad 2·P gathered, P reduced;  none 2·P reduced
//! time         max(compute, communication) where the two overlap
//! ```

mod failure;
mod memory;
mod model;
mod presets;
mod simulate;
mod time;

pub use failure::{Goodput, goodput};
pub use memory::{Memory, keep_that_fits, memory};
pub use model::{ModelCost, UnitCost, of_plan};
pub use presets::{PRESETS, preset};
pub use simulate::{Simulation, simulate};
pub use time::{Fabric, StepTime, Traffic, step_flops, step_time, traffic};

use crate::comm::topology::Sharding;
use crate::step::precision::Precision;

/// How a model is spread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// Ranks, W.
    pub world_size: usize,
    /// Ranks of a shard group, S.
    pub group_size: usize,
    /// What is cut.
    pub sharding: Sharding,
    /// Backbone units that keep their graph, from the last on.
    pub keep: usize,
    /// Images of a step on one rank.
    pub rank_batch: usize,
    /// Parts that these go in.
    pub rank_parts: usize,
    /// Worker threads of a rank; 1 where a device works on the whole.
    pub workers: usize,
    /// How weights and gradients travel.
    pub precision: Precision,
    /// Whether weights, moments and teacher lie in the host's memory, and units come to a GPU.
    pub offload: bool,
}

impl Spread {
    /// Whether weights are gathered at all.
    fn gathers(&self) -> bool {
        self.group_size > 1 || self.offload
    }
}
