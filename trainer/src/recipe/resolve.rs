//! Resolution of a recipe against a data set: every length in steps, every default filled in.

use kernels::device::workers::n_or_all_cores;

use super::Recipe;
use super::check::check;
use super::plan::Plan;
use super::values::{check_keys_of_algorithm, check_patience, check_values};
use crate::error::TrainError;
use crate::schedule::{Length, RunLength};

/// A number of units that no network reaches.
const ALL_UNITS: usize = u32::MAX as usize;

/// Number of steps of a plan whose length is in minutes, until they are measured.
const UNMEASURED_STEPS: u64 = 1 << 20;

/// Resolves and checks `recipe` for a data set of `n_samples`. If its length is in minutes, the
/// plan has a large number of steps, and no run can begin with it before [`with_steps`].
///
/// # Errors
/// [`TrainError::Recipe`] with the key and the reason.
pub fn resolve(mut recipe: Recipe, n_samples: u64) -> Result<Plan, TrainError> {
    check_values(&recipe).map_err(|reason| recipe.error(reason))?;
    // Only here: plans of older releases may have such keys, and must remain readable.
    check_keys_of_algorithm(&recipe.optim).map_err(|reason| recipe.error(reason))?;
    check_patience(&recipe).map_err(|reason| recipe.error(reason))?;
    recipe.optim.fill_defaults();
    let optim = &recipe.optim;
    let total_steps = optim.length.steps(n_samples, optim.batch_size);
    let total_steps = total_steps.map_err(|reason| recipe.error(format!("optim.length: {reason}")))?;
    let total_steps = total_steps.unwrap_or(UNMEASURED_STEPS);
    if total_steps == 0 {
        return Err(recipe.error("optim.length is less than one step".into()));
    }
    let length = RunLength { n_samples, batch_size: optim.batch_size, total_steps };
    let warmup_steps = length.steps("optim.warmup", &optim.warmup);
    let cooldown_steps = length.steps("optim.cooldown", &optim.cooldown);
    let frozen_backbone_steps = length.steps("optim.freeze_backbone", &optim.freeze_backbone);
    let plan = Plan {
        n_samples,
        data_fingerprint: None,
        data_checksums: None,
        data_images: None,
        views_version: augment::VIEWS_VERSION,
        total_steps,
        warmup_steps: warmup_steps.map_err(|reason| recipe.error(reason))?,
        cooldown_steps: cooldown_steps.map_err(|reason| recipe.error(reason))?,
        frozen_backbone_steps: frozen_backbone_steps.map_err(|reason| recipe.error(reason))?,
        minutes: None,
        n_workers: n_or_all_cores(recipe.run.workers),
        n_data_threads: n_or_all_cores(recipe.run.data_threads),
        world_size: 1,
        keep: recipe.run.keep.unwrap_or(ALL_UNITS),
        segment: recipe.run.segment.unwrap_or(1),
        kernels: String::new(),
        origins: Vec::new(),
        recipe,
    };
    check(&plan)?;
    Ok(plan)
}

/// Returns `plan`, whose length is in minutes, with the `steps` that these were measured to be; or
/// with others, if it has some already.
///
/// # Errors
/// [`TrainError::Recipe`] with the key and the reason, if the run is too short for its settings.
pub fn with_steps(plan: Plan, steps: u64) -> Result<Plan, TrainError> {
    let minutes = plan.recipe.optim.length.minutes().or(plan.minutes);
    let mut recipe = plan.recipe.clone();
    recipe.optim.length = Length::Steps(steps);
    let resolved = resolve(recipe, plan.n_samples)?;
    Ok(Plan {
        total_steps: resolved.total_steps,
        warmup_steps: resolved.warmup_steps,
        cooldown_steps: resolved.cooldown_steps,
        frozen_backbone_steps: resolved.frozen_backbone_steps,
        minutes,
        recipe: resolved.recipe,
        ..plan
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::plans;

    /// Lengths of time that depend on that of the run follow the measured one.
    #[test]
    fn measured_minutes_become_steps() {
        let settings = ["optim.length.minutes=2.5", "optim.warmup={percent=10}"];
        let plan = plans(&settings).remove(0);
        assert_eq!(plan.total_steps, UNMEASURED_STEPS);
        assert!(plan.check_measured().is_err());
        let plan = with_steps(plan, 80).unwrap();
        assert_eq!((plan.total_steps, plan.warmup_steps, plan.minutes), (80, 8, Some(2.5)));
        assert_eq!(plan.recipe.optim.length, Length::Steps(80));
        assert!(plan.check_measured().is_ok());
        let shorter = with_steps(plan.clone(), 70).unwrap();
        assert_eq!((shorter.total_steps, shorter.warmup_steps, shorter.minutes), (70, 7, Some(2.5)));
        let read: Plan = toml::from_str(&plan.to_toml()).unwrap();
        assert_eq!((read.total_steps, read.minutes), (80, Some(2.5)));
    }

    /// A plan has every value: a recipe that states a default resolves to the same plan.
    #[test]
    fn a_plan_states_the_defaults_of_the_algorithm() {
        for (algorithm, weight_decay, clip_norm) in
            [("adamw", "[0.04, 0.4]", "3.0"), ("sgd", "[1e-4, 1e-4]", "0.0"), ("larc", "[1e-6, 1e-6]", "0.0")]
        {
            let algorithm = format!("optim.algorithm={algorithm}");
            let implicit = plans(&[&algorithm]).remove(0);
            let decay = format!("optim.weight_decay={weight_decay}");
            let clip = format!("optim.clip_norm={clip_norm}");
            let explicit = plans(&[&algorithm, &decay, &clip]).remove(0);
            assert_eq!(crate::recipe::compare::difference(&implicit, &explicit), None, "{algorithm}");
            assert!(implicit.recipe.optim.weight_decay.is_some());
        }
    }
}
