//! Warnings about a plan that can be run.

use pipeline::words::{counted, thousands};

use super::lengths::lengths;
use super::plan::Plan;
use crate::schedule::RunLength;

/// Returns warnings about `plan`: lengths beyond the end of the run, batches larger than the data
/// set, rates near zero.
pub(crate) fn warnings(plan: &Plan) -> Vec<String> {
    let length = RunLength {
        n_samples: plan.n_samples,
        batch_size: plan.recipe.optim.batch_size,
        total_steps: plan.total_steps,
    };
    let mut warnings = Vec::new();
    for (key, steps) in lengths(&plan.recipe, length) {
        if steps > plan.total_steps {
            warnings.push(format!(
                "{key} never finishes: it is {} long, but the run has only {}",
                counted(steps, "step"),
                thousands(plan.total_steps)
            ));
        }
    }
    let optim = &plan.recipe.optim;
    if optim.batch_size as u64 > plan.n_samples {
        warnings.push(format!(
            "optim.batch_size is {} but the data set has only {}: images repeat within a batch",
            thousands(optim.batch_size as u64),
            counted(plan.n_samples, "image")
        ));
    }
    if optim.lr == 0.0 {
        warnings.push("optim.lr is 0: nothing is learned".into());
    }
    if (f64::MIN_POSITIVE..1e-6).contains(&optim.clip_norm()) {
        warnings.push(format!(
            "optim.clip_norm is {:e}: gradients are clipped to almost nothing",
            optim.clip_norm()
        ));
    }
    warnings
}
