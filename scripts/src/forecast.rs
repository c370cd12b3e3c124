//! Lower limit of a run's duration, before it starts.

use kernels::device::{DeviceKind, Opened};
use trainer::Plan;
use trainer::bench::step::matrix_peak;
use trainer::cost::model_cost;
use trainer::estimate::{Placement, step_flops};

use crate::progress::format_duration;

/// Describes the least time that the matrix products of `plan` take on `device`. Norms, attention
/// weights, the optimizer, data and waiting are not included.
pub(crate) fn at_least(plan: &Plan, device: &Opened) -> anyhow::Result<String> {
    let flops = step_flops(&model_cost(plan)?, &Placement::from_plan(plan)).with_recomputation;
    // Large enough to reach the rate of the device, small enough to be fast.
    let side = if device.kind == DeviceKind::Cpu { 768 } else { 4096 };
    let step_s = flops / matrix_peak(&device.device, side, plan.recipe.optim.precision.compute);
    let run_s = step_s * plan.total_steps as f64;
    Ok(format!(
        "{} steps of {} images: matrix products alone take {:.0} ms per step on this device, {} in total \
         (a lower bound)",
        plan.total_steps,
        plan.recipe.optim.batch_size,
        1e3 * step_s,
        format_duration(run_s),
    ))
}
