//! Advice on `method.prototype_group`: where ranks that divide prototypes among them save time or
//! memory.

use trainer::estimate::{ModelCost, Placement, memory};

use super::hardware::{GB, Hardware};
use super::rows::{LARGEST_GROUP, PlanRow};

/// Share of a step's time that must be saved.
const LEAST_SAVING: f64 = 0.02;

/// Time and memory of a step with groups of a size.
struct Divided {
    n_parts: usize,
    step_s: f64,
    peak_bytes: f64,
    fits: bool,
}

/// Returns a line that says which group saves most of `row`'s step, or makes it fit; `None` if none
/// does, or prototypes are divided already.
pub(super) fn advice(model: &ModelCost, row: &PlanRow, hardware: &Hardware) -> Option<String> {
    let placement = &row.placement;
    if model.n_parts() > 1 {
        return None;
    }
    let estimated = |model: &ModelCost, n_parts: usize| {
        let memory = memory(model, placement);
        let fits = memory.needed_bytes() <= hardware.memory_bytes;
        Divided {
            n_parts,
            step_s: hardware.step(model, placement).step_s,
            peak_bytes: memory.peak_bytes(),
            fits,
        }
    };
    let whole = estimated(model, 1);
    let sizes = (2..=LARGEST_GROUP.min(placement.group_size)).filter(|size| size.is_power_of_two());
    let divided = sizes.filter_map(|size| {
        let model = model.divided(size, placement.group_size)?;
        Some(estimated(&model, size))
    });
    let best = divided.min_by(|a, b| b.fits.cmp(&a.fits).then(a.step_s.total_cmp(&b.step_s)))?;
    let is_worth_it = (best.fits && !whole.fits) || best.step_s < (1.0 - LEAST_SAVING) * whole.step_s;
    is_worth_it.then(|| described(&best, &whole, row.mode, placement))
}

fn described(best: &Divided, whole: &Divided, mode: &str, placement: &Placement) -> String {
    format!(
        "{} ranks, {mode}: method.prototype_group = {} would take {:.3} s a step in place of {:.3}, and {:.2} GB in place of {:.2}{}",
        placement.world_size,
        best.n_parts,
        best.step_s,
        whole.step_s,
        best.peak_bytes / GB,
        whole.peak_bytes / GB,
        if best.fits && !whole.fits { ", which fits" } else { "" }
    )
}
