//! Resolution of a recipe against a data set: every length in steps, every default filled in.

use kernels::device::workers::n_or_all_cores;

use super::Recipe;
use super::check::check;
use super::plan::Plan;
use super::values::{check_keys_of_algorithm, check_values};
use crate::error::TrainError;
use crate::schedule::RunLength;

/// A number of units that no network reaches.
const ALL_UNITS: usize = u32::MAX as usize;

/// Resolves and checks `recipe` for a data set of `n_samples`.
///
/// # Errors
/// [`TrainError::Recipe`] with the key and what is wrong with it.
pub fn resolve(mut recipe: Recipe, n_samples: u64) -> Result<Plan, TrainError> {
    let name = recipe.name.clone();
    let bad = |reason: String| TrainError::Recipe { recipe: name.clone(), reason };
    check_values(&recipe).map_err(bad)?;
    // Plans of older releases may have such keys: their runs stay readable.
    check_keys_of_algorithm(&recipe.optim).map_err(bad)?;
    recipe.optim.fill_defaults();
    let optim = &recipe.optim;
    let total_steps = optim
        .length
        .steps(n_samples, optim.batch_size, None)
        .map_err(|why| bad(format!("optim.length: {why}")))?;
    if total_steps == 0 {
        return Err(bad("optim.length is less than one step".into()));
    }
    let length = RunLength { n_samples, batch_size: optim.batch_size, total_steps };
    let plan = Plan {
        n_samples,
        data_fingerprint: String::new(),
        data_checksums: String::new(),
        data_images: String::new(),
        views_version: augment::VIEWS_VERSION,
        total_steps,
        warmup_steps: length.steps("optim.warmup", &optim.warmup).map_err(bad)?,
        cooldown_steps: length.steps("optim.cooldown", &optim.cooldown).map_err(bad)?,
        frozen_backbone_steps: length.steps("optim.freeze_backbone", &optim.freeze_backbone).map_err(bad)?,
        n_workers: n_or_all_cores(recipe.run.workers),
        n_data_threads: n_or_all_cores(recipe.run.data_threads),
        world_size: 1,
        keep: recipe.run.keep.unwrap_or(ALL_UNITS),
        segment: recipe.run.segment.unwrap_or(1),
        kernels: String::new(),
        recipe,
    };
    check(&plan)?;
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use crate::conformance::plans;

    /// A plan has every value, so a recipe that writes out a default resolves to the same plan.
    #[test]
    fn defaults_of_an_algorithm_are_written_out() {
        for (algorithm, weight_decay, clip_norm) in
            [("adamw", "[0.04, 0.4]", "3.0"), ("sgd", "[1e-4, 1e-4]", "0.0"), ("larc", "[1e-6, 1e-6]", "0.0")]
        {
            let algorithm = format!("optim.algorithm={algorithm}");
            let absent = plans(&[&algorithm]).remove(0);
            let decay = format!("optim.weight_decay={weight_decay}");
            let clip = format!("optim.clip_norm={clip_norm}");
            let written = plans(&[&algorithm, &decay, &clip]).remove(0);
            assert_eq!(crate::recipe::compare::difference(&absent, &written), None, "{algorithm}");
            assert!(absent.recipe.optim.weight_decay.is_some());
        }
    }
}
