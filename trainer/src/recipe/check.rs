//! Checks of a plan as a whole.

use super::optim::LrSchedule;
use super::plan::Plan;
use super::values::check_values;
use crate::error::TrainError;
use crate::method;
use crate::method::network::{Moves, NetworkSpec};

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
    let stride_px = recipe.model.stride_px() as u32;
    if let Some(crop) = views
        .choices()
        .flat_map(|(_, views)| &views.crops)
        .find(|crop| !crop.size_px.is_multiple_of(stride_px))
    {
        return Err(bad(format!(
            "views: a view of {} px is not a multiple of the {stride_px} px that a token of the model covers",
            crop.size_px
        )));
    }
    let method = plan.method()?;
    method::check::check(&*method, &recipe.model)
        .map_err(|reason| bad(format!("method: {reason}; this is a bug in ocelli")))?;
    let networks = method.networks();
    method::check::check_has_tokens(&networks, &recipe.model).map_err(bad)?;
    let has_stages = |network: &NetworkSpec| {
        let backbone = network.units(&recipe.model);
        let mut units = backbone.iter().chain(network.heads.iter().flat_map(|head| &head.units));
        units.any(|unit| unit.n_stages() > 1)
    };
    let mut moving = networks.iter().filter(|network| network.moves != Moves::Frozen);
    let optim = &recipe.optim;
    if !optim.batch_size.is_multiple_of(optim.stat_images()) {
        return Err(bad(format!(
            "optim.stat_images {} does not divide optim.batch_size {}; 0 takes the whole batch",
            optim.stat_images, optim.batch_size
        )));
    }
    if optim.stat_images() < 2 && moving.any(has_stages) {
        return Err(bad(format!(
            "optim.batch_size {}, optim.stat_images {}: batch normalization needs statistics over two images or more",
            optim.batch_size, optim.stat_images
        )));
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
