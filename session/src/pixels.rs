//! Check of the pixels of images against a recipe, before a run begins: everything that does not
//! fit is named at once, with the flags that mend it.

use augment::{DecodeRules, PixelFormat};
use networks::Normalization;
use pipeline::Dataset;
use pipeline::secrets::redact_list;
use pipeline::words::counted;
use prep::unusable::{Unusable, find_unusable, measure_constants};
use trainer::Recipe;
use trainer::recipe::PixelFacts;

use crate::error::SessionError;
use crate::initial::{Initial, weights_path};
use crate::network::model_of;

/// Checks that the images of `dataset` can be decoded as `recipe` says, and that the recipe has the
/// settings that their format needs, in a run that starts as `initial` says. A few images are
/// inspected if they are on a disk.
///
/// # Errors
/// [`SessionError::UnusableImages`] and [`SessionError::PixelSettings`].
pub(crate) fn check_pixels(
    recipe: &Recipe,
    initial: &Initial,
    dataset: &Dataset,
) -> Result<(), SessionError> {
    let rules = recipe.data.rules();
    // Images that are not in the list of weights are not shown.
    let unusable = if recipe.data.weights.is_none() { find_unusable(dataset, &rules) } else { None };
    let mut format = rules.format;
    if let Some(Unusable { n_images, format: found, reason }) = &unusable {
        let Some(found) = found else {
            return Err(SessionError::UnusableImages {
                n_images: *n_images,
                shards: recipe.data.shards.iter().map(|spec| redact_list(spec)).collect(),
                reason: reason.clone(),
            });
        };
        format = *found;
    }
    if unusable.is_none() && format == PixelFormat::RGB8 {
        return Ok(());
    }
    let n_initial_channels = initial_channels(recipe, initial);
    let mut facts = PixelFacts { format, n_initial_channels, constants: None };
    if recipe.missing_settings(&facts).is_empty() {
        return Ok(());
    }
    let measured = measure_constants(dataset, &DecodeRules { format, ..rules });
    let n_measured = measured.as_ref().map(|constants| constants.n_images);
    let constants = measured.map(|constants| Normalization { mean: constants.mean, std: constants.std });
    facts.constants = constants.as_ref();
    let missing = recipe.missing_settings(&facts);
    let reason = match &unusable {
        Some(Unusable { n_images, reason, .. }) => format!(
            "none of {} can be used: {reason}, but recipe {} reads {}",
            counted(*n_images as u64, "inspected image"),
            recipe.name,
            rules.format
        ),
        None => {
            let reasons: Vec<&str> = missing.iter().map(|setting| setting.reason.as_str()).collect();
            format!("recipe {}: {}", recipe.name, reasons.join("; "))
        }
    };
    let lacks_constants = recipe.data.normalization.n_channels() != format.n_channels;
    let settings = missing.into_iter().map(|setting| setting.flag).collect();
    Err(SessionError::PixelSettings { reason, settings, measured: n_measured.filter(|_| lacks_constants) })
}

/// Returns the number of channels that the initial weights of a run take; `None` without such
/// weights, and if they cannot be read, which is reported where they are used.
fn initial_channels(recipe: &Recipe, initial: &Initial) -> Option<usize> {
    let stated = recipe.init.as_ref().map(|init| init.weights.as_str());
    let path = weights_path(initial, stated)?;
    Some(model_of(path, &initial.hints).ok()?.n_channels())
}
