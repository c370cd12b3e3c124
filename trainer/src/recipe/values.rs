//! Range checks for the values of a recipe.
//!
//! Values are checked before any unit is made from them.

use pipeline::source_name::is_source_name;

use super::Recipe;
use super::flat::flatten;
use super::optim::{Algorithm, OptimConfig, default_betas, default_momentum, default_trust};

/// Upper bound of rates, weights and temperatures.
const MAX_VALUE: f64 = 1e6;

/// Upper bound of sizes and counts, so that products of two of them do not overflow.
const MAX_COUNT: f64 = (1u64 << 24) as f64;

/// Largest share of images that is held out: of two images of a class, one is trained on.
const MAX_HELD_OUT: f64 = 0.5;

/// Upper bound of the rank of adapters: beyond it they have as many parameters as large weights.
const MAX_RANK: f64 = 4096.0;

/// Rejects values outside their ranges: a negative clip norm, for example, would silently reverse
/// every gradient.
pub(super) fn check_values(recipe: &Recipe) -> Result<(), String> {
    let optim = &recipe.optim;
    let run = &recipe.run;
    within("optim.batch_size", optim.batch_size as f64, 1.0, MAX_COUNT)?;
    within("optim.micro_batches", optim.micro_batches as f64, 0.0, MAX_COUNT)?;
    for (name, share) in &recipe.data.mix {
        if !is_source_name(name) {
            return Err(format!(
                "data.mix.{name}: the name of a source may have only letters, digits, _ and -"
            ));
        }
        within(&format!("data.mix.{name}"), *share, f64::MIN_POSITIVE, MAX_VALUE)?;
    }
    within("data.balance", recipe.data.balance, 0.0, 1.0)?;
    recipe.data.format().validate().map_err(|reason| format!("data.channels: {reason}"))?;
    if let Some(share) = recipe.data.validation {
        within("data.validation", share, 0.0, MAX_HELD_OUT)?;
        let method = &recipe.method;
        if share > 0.0 && method.classes().is_none() && method.pixel_classes().is_none() {
            return Err(format!(
                "data.validation is {share}, but {} learns without labels, and is not validated: remove it",
                method.title()
            ));
        }
    }
    within("data.window_shards", recipe.data.window_shards as f64, 1.0, MAX_COUNT)?;
    within("run.checkpoint_every_minutes (0 for none)", run.checkpoint_every_minutes, 0.0, MAX_VALUE)?;
    within("run.deadline_s", run.deadline_s as f64, 1.0, 1e9)?;
    check_method_values(recipe)?;
    if run.log_every_steps == 0 || run.checkpoint_every_steps == 0 {
        return Err("run.log_every_steps and run.checkpoint_every_steps must be at least 1".into());
    }
    within("optim.lr", optim.lr, 0.0, MAX_VALUE)?;
    within("optim.min_lr", optim.min_lr, 0.0, MAX_VALUE)?;
    within("optim.start_lr", optim.start_lr, 0.0, MAX_VALUE)?;
    if optim.start_lr > optim.lr {
        return Err(format!(
            "optim.start_lr {} is above optim.lr {}: both are for 256 images, and the warm-up rises from \
             start_lr to lr",
            optim.start_lr, optim.lr
        ));
    }
    within("optim.momentum", optim.momentum, 0.0, 1.0 - 1e-9)?;
    within("optim.layer_decay", optim.layer_decay, 0.0, 1.0)?;
    within("optim.patch_rate", optim.patch_rate, 0.0, MAX_VALUE)?;
    if let Some(adapter) = optim.adapter {
        within("optim.adapter.rank", adapter.rank as f64, 1.0, MAX_RANK)?;
        within("optim.adapter.alpha", adapter.alpha, f64::MIN_POSITIVE, MAX_VALUE)?;
    }
    within("optim.trust", optim.trust, 0.0, MAX_VALUE)?;
    within("optim.clip_norm (0 for none)", optim.clip_norm(), 0.0, MAX_VALUE)?;
    let is_layer_wise = matches!(optim.algorithm, Algorithm::Lars | Algorithm::Larc);
    if is_layer_wise && optim.clip_norm() > 0.0 {
        return Err(format!(
            "optim.clip_norm {} has no effect with lars or larc, whose steps do not depend on the \
             gradient's length: remove it",
            optim.clip_norm()
        ));
    }
    within("optim.stat_images (0 for the whole batch)", optim.stat_images as f64, 0.0, MAX_COUNT)?;
    within("data.max_bad_rate", recipe.data.max_bad_rate, 0.0, 1.0)?;
    within("run.workers (0 for one a core)", run.workers as f64, 0.0, 4096.0)?;
    within("run.data_threads (0 for one a core)", run.data_threads as f64, 0.0, 4096.0)?;
    if let Some(patience) = run.patience {
        within("run.patience", patience as f64, 1.0, MAX_COUNT)?;
    }
    if let Some(segment) = run.segment {
        within("run.segment", segment as f64, 1.0, MAX_COUNT)?;
    }
    if let Some(limit) = run.max_unit_parameters {
        within("run.max_unit_parameters", limit as f64, 1.0, 1e18)?;
    }
    recipe.data.normalization.validate().map_err(|reason| format!("data.normalization: {reason}"))?;
    for i in 0..2 {
        within("optim.betas", optim.betas[i], 0.0, 1.0 - 1e-9)?;
        within("optim.weight_decay", optim.weight_decay()[i], 0.0, MAX_VALUE)?;
    }
    Ok(())
}

/// Rejects patience with validations in a run of a method that is not validated.
pub(super) fn check_patience(recipe: &Recipe) -> Result<(), String> {
    let method = &recipe.method;
    let is_validated = method.classes().is_some() || method.pixel_classes().is_some();
    if recipe.run.patience.is_none() || is_validated {
        return Ok(());
    }
    Err(format!("run.patience: {} learns without labels, and is not validated: remove it", method.title()))
}

/// Rejects keys that the algorithm does not read, unless they have their defaults, which every plan
/// states.
pub(super) fn check_keys_of_algorithm(optim: &OptimConfig) -> Result<(), String> {
    let is_adamw = optim.algorithm == Algorithm::Adamw;
    let is_layer_wise = matches!(optim.algorithm, Algorithm::Lars | Algorithm::Larc);
    let keys = [
        ("betas", is_adamw, optim.betas == default_betas(), "adamw"),
        ("momentum", !is_adamw, optim.momentum == default_momentum(), "sgd, lars and larc"),
        ("nesterov", !is_adamw, !optim.nesterov, "sgd, lars and larc"),
        ("trust", is_layer_wise, optim.trust == default_trust(), "lars and larc"),
    ];
    match keys.iter().find(|(_, is_read, is_default, _)| !is_read && !is_default) {
        Some((key, _, _, readers)) => Err(format!(
            "optim.{key} is used only by {readers}, but optim.algorithm is {}: remove it",
            optim.algorithm.name()
        )),
        None => Ok(()),
    }
}

/// Checks that `value` is in `low..=high`.
fn within(key: &str, value: f64, low: f64, high: f64) -> Result<(), String> {
    if value >= low && value <= high {
        Ok(())
    } else {
        Err(format!("{key} is {value} but must lie in {low}..={high}"))
    }
}

/// Checks sizes and weights of any method; lengths of time are checked when they are converted to
/// steps.
fn check_method_values(recipe: &Recipe) -> Result<(), String> {
    let Ok(table) = toml::Value::try_from(&recipe.method) else { return Ok(()) };
    let mut values = Vec::new();
    flatten("method", &table, &mut values);
    for (key, value) in values.iter().filter(|(key, _)| !is_length_of_time(key)) {
        let numbers = match value {
            toml::Value::Array(values) => values.as_slice(),
            value => std::slice::from_ref(value),
        };
        for number in numbers {
            match number {
                toml::Value::Integer(value) => within(key, *value as f64, 0.0, MAX_COUNT)?,
                toml::Value::Float(value) => within(key, *value, -MAX_VALUE, MAX_VALUE)?,
                _ => {}
            }
        }
    }
    Ok(())
}

fn is_length_of_time(key: &str) -> bool {
    ["steps", "epochs", "samples", "percent"].iter().any(|unit| key.ends_with(unit))
}
