//! Warnings about a plan that can be run.

use networks::mask::Masking;
use pipeline::words::{counted, thousands};

use super::lengths::lengths;
use super::plan::Plan;
use crate::method::check::idle_setting_of_masks;
use crate::method::network::find_trained;
use crate::schedule::Shape;

/// Returns warnings about `plan`: lengths beyond the end of the run, batches larger than the data
/// set, rates near zero, random weights, adapters or a mask token that are not trained, settings
/// without effect.
pub(crate) fn warnings(plan: &Plan) -> Vec<String> {
    let mut warnings = Vec::new();
    for (key, steps) in lengths(&plan.recipe, plan.length()) {
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
    if optim.adapter.is_some() {
        warnings.extend(adapter_warning(plan));
    }
    warnings.extend(rate_warning(plan));
    if optim.layer_decay == 0.0 {
        warnings.push(
            "optim.layer_decay is 0: the rate of all units of the backbone but the last is 0; 1 gives all \
             units the same rate"
                .into(),
        );
    }
    if (f64::MIN_POSITIVE..1e-6).contains(&optim.clip_norm()) {
        warnings.push(format!(
            "optim.clip_norm is {:e}: gradients are clipped to almost nothing",
            optim.clip_norm()
        ));
    }
    warnings.extend(untrained_weights(plan));
    warnings.extend(fixed_mask_token(plan));
    // A plan that can be run has a method.
    if let Ok(method) = plan.method() {
        warnings.extend(idle_setting_of_masks(&method.networks(), &plan.recipe.model));
    }
    warnings
}

/// Returns a warning about each length of time that was over after `step` steps of the run of
/// `before`, and is not in that of `now`, which is longer: lengths in percent have become longer,
/// too.
pub(crate) fn reopened_lengths(before: &Plan, now: &Plan, step: u64) -> Vec<String> {
    let earlier = lengths(&before.recipe, before.length());
    let mut warnings = Vec::new();
    for (key, n_now) in lengths(&now.recipe, now.length()) {
        let Some((_, n_before)) = earlier.iter().find(|(other, _)| *other == key) else { continue };
        if *n_before <= step && step < n_now {
            warnings.push(format!(
                "{key} was over after step {}, and lasts until step {} in the longer run: what it delays or \
                 switches off is so again until then; set it in steps to keep it as it was",
                thousands(*n_before),
                thousands(n_now)
            ));
        }
    }
    warnings
}

/// Returns a warning if the learning rate of `plan` is 0, or rises where it should decay.
fn rate_warning(plan: &Plan) -> Option<String> {
    let rate = plan.schedules().lr;
    let decays = !matches!(rate.shape, Shape::Constant { cooldown_steps: 0 });
    if decays && rate.end > rate.peak {
        return Some(format!(
            "optim.min_lr {:e} is above the rate after the warm-up, {:e} (optim.lr for this batch size): the \
             rate rises to it until the end of the run",
            rate.end, rate.peak
        ));
    }
    (rate.peak == 0.0).then(|| "optim.lr is 0: nothing is learned".into())
}

/// Returns a warning about a setting by which adapters of `plan` are never trained.
fn adapter_warning(plan: &Plan) -> Option<String> {
    if plan.frozen_backbone_steps >= plan.total_steps {
        return Some(
            "optim.freeze_backbone lasts for the whole run: the adapters of optim.adapter are never trained"
                .into(),
        );
    }
    let n_trained = plan.recipe.optim.trained_units?;
    Some(format!(
        "optim.adapter with optim.trained_units {n_trained}: only the adapters of the last {} are trained",
        counted(n_trained as u64, "unit")
    ))
}

/// Returns a warning if the run of `plan` begins with random weights, and some units of the
/// backbone keep them.
fn untrained_weights(plan: &Plan) -> Option<String> {
    if !plan.began_with().is_empty() {
        return None;
    }
    if plan.frozen_backbone_steps >= plan.total_steps {
        return Some(
            "optim.freeze_backbone lasts for the whole run, which begins with random weights: the backbone \
             keeps them; give trained ones with --init WEIGHTS (--checkpoint WEIGHTS to `ocelli finetune`), \
             or set a shorter optim.freeze_backbone"
                .into(),
        );
    }
    let n_trained = plan.recipe.optim.trained_units?;
    let networks = plan.method().ok()?.networks();
    let trained = find_trained(&networks)?;
    let n_units = trained.units(&plan.recipe.model).len();
    let n_fixed = n_units.saturating_sub(n_trained);
    if n_fixed == 0 {
        return None;
    }
    Some(format!(
        "optim.trained_units is {n_trained}, but the run begins with random weights: {n_fixed} of the \
         {n_units} units of the backbone keep them; give trained ones with --init WEIGHTS (--checkpoint \
         WEIGHTS to `ocelli finetune`), or remove optim.trained_units"
    ))
}

/// Returns a warning if the method of `plan` shows a mask token, which a setting keeps from being
/// trained.
fn fixed_mask_token(plan: &Plan) -> Option<String> {
    let networks = plan.method().ok()?.networks();
    let trained = find_trained(&networks)?;
    if trained.sees.iter().all(|views| views.masking != Masking::Replaced) {
        return None;
    }
    let optim = &plan.recipe.optim;
    let n_units = trained.units(&plan.recipe.model).len();
    let key = if optim.trained_units.is_some_and(|n_trained| n_trained < n_units) {
        "optim.trained_units"
    } else if trained.adapter(optim.adapter).is_some() {
        "optim.adapter"
    } else {
        return None;
    };
    Some(format!(
        "{key}: the method shows a mask token in place of patches, which is part of the first unit and is \
         not trained: it keeps the value of the weights that the run begins with, or zero if they lack it"
    ))
}

#[cfg(test)]
mod tests {
    use networks::Origin;

    use super::*;
    use crate::conformance::plans;

    /// Returns the warnings about untrained weights in a plan with these settings.
    fn warnings_of(overrides: &[&str]) -> Vec<String> {
        let plan = plans(overrides).remove(0);
        warnings(&plan).into_iter().filter(|warning| warning.contains("random weights")).collect()
    }

    /// A token that is shown and trained, or never shown, needs no warning.
    #[test]
    fn a_mask_token_that_is_not_trained_causes_a_warning() {
        for (setting, key) in
            [("optim.trained_units=1", "optim.trained_units"), ("optim.lr=0.5", ""), ("run.keep=0", "")]
        {
            let mut n_shown = 0;
            for plan in plans(&[setting]) {
                let networks = plan.method().unwrap().networks();
                let trained = find_trained(&networks);
                let seen = &trained.unwrap().sees;
                let is_shown = seen.iter().any(|views| views.masking == Masking::Replaced);
                n_shown += usize::from(is_shown);
                let warned = fixed_mask_token(&plan);
                assert_eq!(warned.is_some(), is_shown && !key.is_empty(), "{setting}: {warned:?}");
                assert!(warned.is_none_or(|warning| warning.starts_with(key)));
            }
            assert!(n_shown > 0, "no method shows a mask token");
        }
    }

    /// What was over in a run is not over in a longer one, if its length is in percent.
    #[test]
    fn lengths_that_begin_again_cause_a_warning() {
        let warmup = "optim.warmup={percent=20}";
        let short = plans(&["optim.length={steps=100}", warmup]).remove(0);
        let long = plans(&["optim.length={steps=1000}", warmup]).remove(0);
        let warnings = reopened_lengths(&short, &long, 100);
        assert!(warnings.iter().any(|warning| warning.starts_with("optim.warmup was over after step 20")));
        assert!(!reopened_lengths(&short, &long, 500).iter().any(|text| text.starts_with("optim.warmup")));
        assert_eq!(reopened_lengths(&short, &short, 100), [""; 0]);
    }

    #[test]
    fn rates_that_rise_or_are_zero_cause_a_warning() {
        for (overrides, expected) in [
            (["optim.lr=1e-2", "optim.min_lr=1e-4"], None),
            (["optim.lr=1e-3", "optim.min_lr=1"], Some("optim.min_lr")),
            (["optim.lr=0", "optim.min_lr=1e-6"], Some("optim.min_lr")),
            (["optim.lr=0", "optim.min_lr=0"], Some("nothing is learned")),
        ] {
            let plan = plans(&overrides).remove(0);
            let warning = rate_warning(&plan);
            assert_eq!(warning.is_some(), expected.is_some(), "{overrides:?}: {warning:?}");
            assert!(warning.is_none_or(|warning| warning.contains(expected.unwrap_or_default())));
        }
        let frozen = plans(&["optim.layer_decay=0"]).remove(0);
        assert!(warnings(&frozen).iter().any(|warning| warning.contains("optim.layer_decay is 0")));
    }

    /// With weights of another run, the same settings make sense.
    #[test]
    fn random_weights_that_are_never_trained_cause_a_warning() {
        assert_eq!(warnings_of(&[]), [""; 0]);
        assert_eq!(warnings_of(&["optim.freeze_backbone={percent=50}"]), [""; 0]);
        let all = "optim.freeze_backbone={percent=100}";
        assert!(warnings_of(&[all])[0].contains("optim.freeze_backbone"));
        let last = "optim.trained_units=1";
        let warning = warnings_of(&[last]).remove(0);
        assert!(warning.contains("optim.trained_units is 1") && warning.contains("--init"), "{warning}");
        let origin = Origin {
            name: "run".into(),
            step: Some(3),
            library: "ocelli".into(),
            fingerprint: "f".into(),
            license: None,
        };
        for setting in [all, last] {
            let mut plan = plans(&[setting]).remove(0);
            plan.origins = vec![origin.clone()];
            let warnings = warnings(&plan);
            assert!(warnings.iter().all(|warning| !warning.contains("random")), "{warnings:?}");
        }
    }
}
