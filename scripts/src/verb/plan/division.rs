//! Advice on `run.max_unit_parameters`: where smaller units save memory or time.

use trainer::cost::ModelCost;
use trainer::estimate::memory;

use super::hardware::{GB, Hardware};
use super::rows::{DividedModel, PlanRow};

/// Share of a step's time, or of a rank's peak with as many kept graphs, that must be saved.
const LEAST_SAVING: f64 = 0.02;

/// Returns a line about the memory and the time of a step with `divided` units, in the row
/// `divided_row`, in place of `row`; `None` if that saves nothing, or does not fit.
pub(super) fn advice(
    model: &ModelCost,
    row: &PlanRow,
    divided: &DividedModel,
    divided_row: &PlanRow,
    hardware: &Hardware,
) -> Option<String> {
    let peak_gb = memory(model, &row.placement).peak_bytes() / GB;
    let step_s = hardware.step(model, &row.placement).step_s;
    let divided_peak_gb = memory(&divided.model, &divided_row.placement).peak_bytes() / GB;
    let divided_step_s = hardware.step(&divided.model, &divided_row.placement).step_s;
    let saves_time = divided_step_s < (1.0 - LEAST_SAVING) * step_s;
    let saves_memory = row.placement.keep == 0
        && divided_row.placement.keep == 0
        && divided_peak_gb < (1.0 - LEAST_SAVING) * peak_gb;
    let is_worthwhile = divided_row.fits && (!row.fits || saves_time || saves_memory);
    if !is_worthwhile {
        return None;
    }
    Some(format!(
        "{} ranks, {}: run.max_unit_parameters = {} would take {divided_peak_gb:.2} GB instead of \
         {peak_gb:.2}, and {divided_step_s:.3} s per step instead of {step_s:.3}{}",
        row.placement.world_size,
        row.mode,
        divided.max_unit_parameters,
        if row.fits { "" } else { ", which fits" }
    ))
}
