//! Advice on `run.max_unit_parameters`: where smaller units save memory or time.

use trainer::estimate::{ModelCost, memory};

use super::hardware::{GB, Hardware};
use super::rows::{DividedModel, PlanRow};

/// Share of a step's time, or of a rank's peak with as many kept graphs, that must be saved.
const LEAST_SAVING: f64 = 0.02;

/// Returns a line that says what a step would take in place of `whole` if units were `divided`,
/// which `parts` is; `None` where that saves nothing, or does not fit.
pub(super) fn advice(
    model: &ModelCost,
    whole: &PlanRow,
    divided: &DividedModel,
    parts: &PlanRow,
    hardware: &Hardware,
) -> Option<String> {
    let of = |model: &ModelCost, row: &PlanRow| {
        let peak_gb = memory(model, &row.placement).peak_bytes() / GB;
        (peak_gb, hardware.step(model, &row.placement).step_s)
    };
    let (peak_gb, step_s) = of(model, whole);
    let (peak_of_parts_gb, step_of_parts_s) = of(&divided.model, parts);
    let saves_time = step_of_parts_s < (1.0 - LEAST_SAVING) * step_s;
    let saves_memory = whole.placement.keep == 0
        && parts.placement.keep == 0
        && peak_of_parts_gb < (1.0 - LEAST_SAVING) * peak_gb;
    let is_worth_it = parts.fits && (!whole.fits || saves_time || saves_memory);
    is_worth_it.then(|| {
        format!(
            "{} ranks, {}: run.max_unit_parameters = {} would take {peak_of_parts_gb:.2} GB in place of {peak_gb:.2}, and {step_of_parts_s:.3} s a \
             step in place of {step_s:.3}{}",
            whole.placement.world_size,
            whole.mode,
            divided.max_unit_parameters,
            if whole.fits { "" } else { ", which fits" }
        )
    })
}
