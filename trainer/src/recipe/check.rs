//! Checks of a plan as a whole.

use augment::ViewMix;
use networks::backbone::ModelConfig;

use super::ViewsConfig;
use super::channels::check_channels;
use super::optim::LrSchedule;
use super::plan::Plan;
use super::values::check_values;
use crate::error::TrainError;
use crate::method;
use crate::method::network::{NetworkSpec, UpdateRule};
use crate::step::precision::Arithmetic;

/// Checks values of `plan` that depend on more than one section of its recipe.
///
/// # Errors
/// [`TrainError::Recipe`] with the key and what is wrong with it.
pub(crate) fn check(plan: &Plan) -> Result<(), TrainError> {
    let bad = |reason: String| plan.bad(reason);
    let recipe = &plan.recipe;
    check_values(recipe).map_err(bad)?;
    recipe.model.validate().map_err(bad)?;
    let views = recipe.views.view_mix().map_err(bad)?;
    let all: Vec<usize> = (0..views.first().groups().len()).collect();
    check_sizes(&views, &all, &recipe.model, "the model").map_err(bad)?;
    let method = plan.method()?;
    method::check::check(&*method, &recipe.model)
        .map_err(|reason| bad(format!("method: {reason}; this is a bug in ocelli")))?;
    let networks = method.networks();
    for network in &networks {
        let of = format!("the network {}", network.name);
        check_sizes(&views, &network.sizes(), network.model(&recipe.model), &of).map_err(bad)?;
    }
    check_channels(recipe, &views, &networks).map_err(bad)?;
    method::check::check_masks_fit(&networks, &recipe.model).map_err(bad)?;
    check_repeats(&recipe.views, &networks, all.len()).map_err(bad)?;
    let mut moving = networks.iter().filter(|network| network.update_rule != UpdateRule::Frozen);
    let optim = &recipe.optim;
    if !optim.batch_size.is_multiple_of(optim.stat_images()) {
        return Err(bad(format!(
            "optim.stat_images {} does not divide optim.batch_size {}; 0 takes the whole batch",
            optim.stat_images, optim.batch_size
        )));
    }
    if optim.stat_images() < 2
        && moving.any(|network| {
            let backbone = network.units(&recipe.model);
            let mut units = backbone.iter().chain(network.heads.iter().flat_map(|head| &head.units));
            units.any(|unit| unit.n_stages() > 1)
        })
    {
        return Err(bad(format!(
            "optim.batch_size {}, optim.stat_images {}: batch normalization needs statistics over two images or more",
            optim.batch_size, optim.stat_images
        )));
    }
    let precision = optim.precision;
    if precision.memory == Some(Arithmetic::Bf16) && precision.compute != Arithmetic::Bf16 {
        return Err(bad(
            "optim.precision.memory = \"bf16\" goes with optim.precision.compute = \"bf16\" alone".into(),
        ));
    }
    if plan.cooldown_steps > 0 && optim.schedule != LrSchedule::Constant {
        return Err(bad("optim.cooldown goes with optim.schedule = \"constant\" alone".into()));
    }
    if plan.warmup_steps + plan.cooldown_steps > plan.total_steps && plan.cooldown_steps > 0 {
        return Err(bad(format!(
            "optim.warmup and optim.cooldown take {} steps, more than the {} of the run",
            plan.warmup_steps + plan.cooldown_steps,
            plan.total_steps
        )));
    }
    Ok(())
}

/// Checks that the trained network does not see the repeats of `views.gram_px`, the last of
/// `n_sizes` sizes.
fn check_repeats(views: &ViewsConfig, networks: &[NetworkSpec], n_sizes: usize) -> Result<(), String> {
    let is_seen = networks
        .iter()
        .find(|network| network.update_rule == UpdateRule::Gradient)
        .is_some_and(|network| network.sizes().contains(&(n_sizes - 1)));
    match views.gram_px() {
        Some(_) if is_seen => Err(
            "views.gram_px: these repeats of the global views are for an earlier teacher that sees them, and the method has none: \
             method.gram adds one"
                .into(),
        ),
        _ => Ok(()),
    }
}

/// Checks that tokens of `model`, which `of` names, cover views of the sizes with these numbers in
/// every batch.
fn check_sizes(views: &ViewMix, sizes: &[usize], model: &ModelConfig, of: &str) -> Result<(), String> {
    let stride_px = model.stride_px() as u32;
    for (_, views) in views.choices() {
        let groups = views.groups();
        let mut sides = sizes.iter().map(|size| groups[*size].size_px);
        if let Some(side) = sides.find(|side| !side.is_multiple_of(stride_px)) {
            let [below, above] = [side / stride_px * stride_px, side.next_multiple_of(stride_px)];
            let near = if below == 0 { format!("{above} is") } else { format!("{below} and {above} are") };
            return Err(format!(
                "views: a view of {side} px is not a multiple of the {stride_px} px that a token of {of} covers; {near}"
            ));
        }
    }
    Ok(())
}
