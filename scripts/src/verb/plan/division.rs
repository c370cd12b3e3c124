//! Advice on `run.max_unit_parameters`: where smaller units save memory.

use trainer::estimate::{ModelCost, Placement, memory};

use super::hardware::{GB, Hardware};
use super::rows::{MAX_UNIT_PARAMETERS, PlanRow};

/// Share of a rank's peak that must be saved.
const LEAST_SAVING: f64 = 0.05;

/// Returns a line that says how much less memory `row` would need if `model` were `divided`; `None` where that is little.
pub(super) fn advice(
    model: &ModelCost,
    divided: &ModelCost,
    row: &PlanRow,
    hardware: &Hardware,
) -> Option<String> {
    let Placement { world_size, keep, .. } = row.placement;
    let n_units = [model, divided].map(|model| model.trained.backbone.len());
    if n_units[0] == n_units[1] {
        return None;
    }
    // As much of the network keeps its graph.
    let keep = (keep * n_units[1]).div_ceil(n_units[0]);
    let placements = [row.placement, Placement { keep, ..row.placement }];
    let [whole, parts] = [(model, &placements[0]), (divided, &placements[1])].map(|(model, placement)| {
        let memory = memory(model, placement);
        let fits = memory.needed_bytes() <= hardware.memory_bytes;
        (memory.peak_bytes(), hardware.step(model, placement).step_s, fits)
    });
    let is_worth_it = (parts.2 && !whole.2) || parts.0 < (1.0 - LEAST_SAVING) * whole.0;
    is_worth_it.then(|| {
        format!(
            "{world_size} ranks, {}: run.max_unit_parameters = {MAX_UNIT_PARAMETERS} would take {:.2} GB in place of {:.2}, and {:.3} s a step \
             in place of {:.3}{}",
            row.mode,
            parts.0 / GB,
            whole.0 / GB,
            parts.1,
            whole.1,
            if parts.2 && !whole.2 { ", which fits" } else { "" }
        )
    })
}
