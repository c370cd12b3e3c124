//! Hardware that a run is planned for.

use super::{Fabric, Gpu, MachineSpeed, Placement, StepTime, step_flops, step_time};
use crate::cost::ModelCost;
use crate::step::precision::Precision;

/// Hardware of the ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hardware {
    /// Memory of a rank, in bytes.
    pub memory_bytes: f64,
    /// Rate of computation of a rank.
    pub speed: Speed,
    /// Types of numbers in computation, memory and transfers.
    pub precision: Precision,
    /// Whether the ranks compute on a GPU.
    pub is_gpu: bool,
    /// Interconnect of the ranks.
    pub fabric: Fabric,
}

/// Rate of computation of a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Speed {
    /// That of a GPU by its data sheet.
    DataSheet(Gpu),
    /// That of a machine, as measured.
    Measured(MachineSpeed),
    /// Operations per second that matrix products sustain.
    Sustained(f64),
}

impl Hardware {
    /// Estimates the time of a step.
    pub fn step(&self, model: &ModelCost, placement: &Placement) -> StepTime {
        let compute_s = match self.speed {
            Speed::DataSheet(gpu) => gpu.compute_s(model, placement),
            Speed::Measured(speed) => speed.compute_s(model, placement),
            Speed::Sustained(flops) => step_flops(model, placement).with_recomputation / flops,
        };
        step_time(model, placement, &self.fabric, compute_s)
    }
}
