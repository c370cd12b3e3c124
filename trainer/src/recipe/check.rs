//! Checks of a plan that concern several sections of its recipe.

use augment::ViewMix;
use networks::adapter::takes_adapters;
use networks::backbone::ModelConfig;
use networks::mask::Masking;

use super::channels::check_channels;
use super::optim::LrSchedule;
use super::plan::Plan;
use super::values::check_values;
use super::{Recipe, ViewsConfig};
use crate::error::TrainError;
use crate::method;
use crate::method::network::{NetworkSpec, UpdateRule, find_trained};
use crate::step::precision::Arithmetic;

/// Checks values of `plan` that depend on more than one section of its recipe.
///
/// # Errors
/// [`TrainError::Recipe`] with the key and the reason.
pub(crate) fn check(plan: &Plan) -> Result<(), TrainError> {
    let recipe = &plan.recipe;
    check_values(recipe).map_err(|reason| recipe.error(reason))?;
    recipe.model.validate().map_err(|reason| recipe.error(reason))?;
    let views = recipe.views.view_mix().map_err(|reason| recipe.error(reason))?;
    let all_sizes: Vec<usize> = (0..views.first().groups().len()).collect();
    check_sizes(&recipe.views, &views, &all_sizes, &recipe.model, "the model")
        .map_err(|reason| recipe.error(reason))?;
    let method = plan.method()?;
    method::check::check(&*method, &recipe.model)
        .map_err(|reason| recipe.error(format!("method: {reason}; this is a bug in ocelli")))?;
    let networks = method.networks();
    for network in &networks {
        let owner = format!("the network {}", network.name);
        check_sizes(&recipe.views, &views, &network.sizes(), network.model(&recipe.model), &owner)
            .map_err(|reason| recipe.error(reason))?;
    }
    check_channels(recipe, &networks).map_err(|reason| recipe.error(reason))?;
    method::check::check_masks_fit(&networks, &recipe.model).map_err(|reason| recipe.error(reason))?;
    check_dropped(&recipe.views, &views, &networks, &recipe.model).map_err(|reason| recipe.error(reason))?;
    check_repeats(&recipe.views, &networks, all_sizes.len()).map_err(|reason| recipe.error(reason))?;
    check_trained_units(recipe, &networks).map_err(|reason| recipe.error(reason))?;
    check_balance(recipe).map_err(|reason| recipe.error(reason))?;
    check_adapter(recipe, &networks).map_err(|reason| recipe.error(reason))?;
    let optim = &recipe.optim;
    if !optim.batch_size.is_multiple_of(optim.stat_images()) {
        return Err(recipe.error(format!(
            "optim.stat_images {} does not divide optim.batch_size {}; use 0 for the whole batch",
            optim.stat_images, optim.batch_size
        )));
    }
    let needs_statistics = networks.iter().any(|network| needs_batch_statistics(network, &recipe.model));
    if optim.stat_images() < 2 && needs_statistics {
        return Err(recipe.error(format!(
            "optim.batch_size {}, optim.stat_images {}: batch normalization needs statistics over at least \
             two images",
            optim.batch_size, optim.stat_images
        )));
    }
    let precision = optim.precision;
    if precision.memory == Some(Arithmetic::Bf16) && precision.compute != Arithmetic::Bf16 {
        return Err(recipe
            .error("optim.precision.memory = \"bf16\" requires optim.precision.compute = \"bf16\"".into()));
    }
    if plan.cooldown_steps > 0 && optim.schedule != LrSchedule::Constant {
        return Err(recipe.error("optim.cooldown requires optim.schedule = \"constant\"".into()));
    }
    if plan.warmup_steps + plan.cooldown_steps > plan.total_steps && plan.cooldown_steps > 0 {
        return Err(recipe.error(format!(
            "optim.warmup and optim.cooldown take {} steps together, more than the run's {}",
            plan.warmup_steps + plan.cooldown_steps,
            plan.total_steps
        )));
    }
    Ok(())
}

/// Checks that the backbone of the trained network has the units that are to be trained, and that
/// something is trained.
fn check_trained_units(recipe: &Recipe, networks: &[NetworkSpec]) -> Result<(), String> {
    let Some(n_trained) = recipe.optim.trained_units else { return Ok(()) };
    let Some(network) = find_trained(networks) else { return Ok(()) };
    let n_units = network.units(&recipe.model).len();
    if n_trained > n_units {
        return Err(format!(
            "optim.trained_units {n_trained}: the backbone has {n_units} units; remove it to train all"
        ));
    }
    if n_trained == 0 && network.heads.is_empty() {
        return Err("optim.trained_units 0: without heads, nothing would be trained".into());
    }
    Ok(())
}

/// Checks that classes that are to be balanced are known, and that nothing else says how often
/// their images are shown.
fn check_balance(recipe: &Recipe) -> Result<(), String> {
    let balance = recipe.data.balance;
    if balance == 0.0 {
        return Ok(());
    }
    if recipe.method.pixel_classes().is_some() {
        return Err(format!(
            "data.balance {balance}: {} learns the classes of pixels, of which an image has several, so that \
             none can be balanced: remove it",
            recipe.method.title()
        ));
    }
    if recipe.method.classes().is_none() {
        return Err(format!(
            "data.balance {balance}: {} learns without labels, so there are no classes to balance: remove \
             it; `ocelli curate balance` weights images by their features",
            recipe.method.title()
        ));
    }
    if !recipe.data.mix.is_empty() {
        return Err(format!(
            "data.balance {balance}: the sources of data.mix have shares of their own: remove one of the two"
        ));
    }
    Ok(())
}

/// Checks that the backbone of the trained network has weights for adapters, and that some of these
/// are trained.
fn check_adapter(recipe: &Recipe, networks: &[NetworkSpec]) -> Result<(), String> {
    let trained = find_trained(networks);
    let Some(network) = trained.filter(|network| network.adapter(recipe.optim.adapter).is_some()) else {
        return Ok(());
    };
    let units = network.units(&recipe.model);
    let Some(last) = units.iter().rposition(|unit| takes_adapters(unit.as_ref())) else {
        return Err(format!(
            "optim.adapter: this backbone has no weights for adapters, which only those of model.arch = {} \
             have: remove it, or train the last units alone with optim.trained_units",
            ModelConfig::names_with_adapters().join(" or ")
        ));
    };
    match recipe.optim.trained_units {
        Some(n_trained) if last + n_trained < units.len() => Err(format!(
            "optim.adapter and optim.trained_units {n_trained}: the last {n_trained} units of the backbone \
             have no weights for adapters, and so nothing of it would be trained: remove one of the two keys"
        )),
        _ => Ok(()),
    }
}

/// Returns whether `network` has batch normalization and is not frozen.
fn needs_batch_statistics(network: &NetworkSpec, model: &ModelConfig) -> bool {
    if network.update_rule == UpdateRule::Frozen {
        return false;
    }
    let backbone = network.units(model);
    let mut units = backbone.iter().chain(network.heads.iter().flat_map(|head| &head.units));
    units.any(|unit| unit.n_stages() > 1)
}

/// Checks that the trained network does not see the repeated views of `views.gram_px`, the last of
/// `n_sizes` sizes.
fn check_repeats(views: &ViewsConfig, networks: &[NetworkSpec], n_sizes: usize) -> Result<(), String> {
    let trained = find_trained(networks);
    let is_seen = trained.is_some_and(|network| network.sizes().contains(&(n_sizes - 1)));
    if views.gram_px().is_some() && is_seen {
        return Err(
            "views.gram_px: repeats of the global views are for a Gram teacher, but the method has none: \
             add method.gram, or remove views.gram_px"
                .into(),
        );
    }
    Ok(())
}

/// Checks that views whose masked patches are dropped have a patch that is seen beside one that is
/// masked, in every batch. `model` is the recipe's backbone.
fn check_dropped(
    config: &ViewsConfig,
    views: &ViewMix,
    networks: &[NetworkSpec],
    model: &ModelConfig,
) -> Result<(), String> {
    for network in networks {
        let cell_px = network.model(model).cell_px() as u32;
        for seen in network.sees.iter().filter(|seen| seen.masking == Masking::Dropped) {
            for (_, views) in views.choices() {
                let side = views.groups()[seen.size].size_px;
                if side < 2 * cell_px {
                    return Err(format!(
                        "{}: views of {side} px are one patch of {cell_px} px, but the method shows some \
                         patches and predicts others: choose at least {} px",
                        config.size_key(side),
                        2 * cell_px
                    ));
                }
            }
        }
    }
    Ok(())
}

/// Checks that the sides of views of the sizes numbered `sizes` are multiples of the stride of
/// `model` in every batch. `owner` names the model in messages, and `config` the keys of the sizes.
fn check_sizes(
    config: &ViewsConfig,
    views: &ViewMix,
    sizes: &[usize],
    model: &ModelConfig,
    owner: &str,
) -> Result<(), String> {
    let stride_px = model.stride_px() as u32;
    for (_, views) in views.choices() {
        let groups = views.groups();
        let mut sides = sizes.iter().map(|size| groups[*size].size_px);
        if let Some(side) = sides.find(|side| !side.is_multiple_of(stride_px)) {
            let below = side / stride_px * stride_px;
            let above = side.next_multiple_of(stride_px);
            let nearest = if below == 0 { format!("{above} is") } else { format!("{below} and {above} are") };
            return Err(format!(
                "{}: {side} px is not a multiple of {stride_px} px, the token size of {owner}; {nearest}",
                config.size_key(side)
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use networks::head::{Head, Reads};

    use super::*;
    use crate::conformance::plans;
    use crate::method::network::SeenViews;

    /// Returns the specification of a trained network that sees views of one size.
    fn trained(masking: Masking, heads: Vec<Head>) -> NetworkSpec {
        let sees = vec![SeenViews { size: 0, masking }];
        NetworkSpec { sees, takes_masks: true, ..NetworkSpec::trained("student", heads, 1) }
    }

    /// Returns the check of a recipe that trains `n_trained` units of `network`.
    fn checked(n_trained: usize, network: NetworkSpec) -> Result<(), String> {
        let mut recipe = plans(&[]).remove(0).recipe;
        recipe.optim.trained_units = Some(n_trained);
        check_trained_units(&recipe, &[network])
    }

    fn heads() -> Vec<Head> {
        vec![Head::new("image", Reads::Pooled, Vec::new())]
    }

    #[test]
    fn the_last_units_are_trained_only_where_that_suffices() {
        let model = plans(&[]).remove(0).recipe.model;
        let n_units = trained(Masking::Shown, heads()).units(&model).len();
        let reason = checked(0, trained(Masking::Shown, Vec::new())).unwrap_err();
        assert!(reason.contains("nothing would be trained"), "{reason}");
        assert_eq!(checked(1, trained(Masking::Shown, Vec::new())), Ok(()));
        assert_eq!(checked(0, trained(Masking::Shown, heads())), Ok(()));
        let reason = checked(n_units + 1, trained(Masking::Shown, heads())).unwrap_err();
        assert!(reason.contains(&format!("has {n_units} units")), "{reason}");
        // The mask token stays as it is: a warning says so.
        assert_eq!(checked(n_units - 1, trained(Masking::Replaced, heads())), Ok(()));
    }

    /// Of a view that is one patch, none would be left to be seen.
    #[test]
    fn views_of_one_patch_are_refused_where_masked_patches_are_dropped() {
        let recipe = plans(&[]).remove(0).recipe;
        let cell_px = recipe.model.cell_px() as u32;
        for (side, masking, is_valid) in [
            (cell_px, Masking::Dropped, false),
            (2 * cell_px, Masking::Dropped, true),
            (cell_px, Masking::Replaced, true),
        ] {
            let views: ViewsConfig = augment::MultiCrop::single(side).into();
            let mix = views.view_mix().unwrap();
            let result = check_dropped(&views, &mix, &[trained(masking, heads())], &recipe.model);
            assert_eq!(result.is_ok(), is_valid, "{side} px, {masking:?}: {result:?}");
        }
    }
}
