//! Advice on `method.prototype_group`: where ranks that divide prototypes among them save time or
//! memory.

use trainer::cost::ModelCost;
use trainer::estimate::{Placement, memory};

use super::hardware::{GB, Hardware};
use super::rows::{LARGEST_GROUP, PlanRow};

/// Share of a step's time that must be saved.
const LEAST_SAVING: f64 = 0.02;

/// Time and memory of a step with groups of a size.
struct Estimate {
    n_parts: usize,
    step_s: f64,
    peak_bytes: f64,
    fits: bool,
}

impl Estimate {
    fn new(model: &ModelCost, n_parts: usize, placement: &Placement, hardware: &Hardware) -> Self {
        let memory = memory(model, placement);
        Self {
            n_parts,
            step_s: hardware.step(model, placement).step_s,
            peak_bytes: memory.peak_bytes(),
            fits: memory.needed_bytes() <= hardware.memory_bytes,
        }
    }
}

/// Returns a line about the group that saves most of `row`'s step, or makes it fit; `None` if no
/// group does, or prototypes are divided already.
pub(super) fn advice(model: &ModelCost, row: &PlanRow, hardware: &Hardware) -> Option<String> {
    let placement = &row.placement;
    if model.n_parts() > 1 {
        return None;
    }
    let undivided = Estimate::new(model, 1, placement, hardware);
    let mut estimates = Vec::new();
    for size in (2..=LARGEST_GROUP.min(placement.group_size)).filter(|size| size.is_power_of_two()) {
        if let Some(divided) = model.divided(size, placement.group_size) {
            estimates.push(Estimate::new(&divided, size, placement, hardware));
        }
    }
    let best = estimates.iter().min_by(|a, b| b.fits.cmp(&a.fits).then(a.step_s.total_cmp(&b.step_s)))?;
    let is_worthwhile =
        (best.fits && !undivided.fits) || best.step_s < (1.0 - LEAST_SAVING) * undivided.step_s;
    is_worthwhile.then(|| describe(best, &undivided, row.mode, placement))
}

fn describe(best: &Estimate, undivided: &Estimate, mode: &str, placement: &Placement) -> String {
    format!(
        "{} ranks, {mode}: method.prototype_group = {} would take {:.3} s per step instead of {:.3}, and \
         {:.2} GB instead of {:.2}{}",
        placement.world_size,
        best.n_parts,
        best.step_s,
        undivided.step_s,
        best.peak_bytes / GB,
        undivided.peak_bytes / GB,
        if best.fits && !undivided.fits { ", which fits" } else { "" }
    )
}
