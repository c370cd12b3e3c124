//! Check that backbone, constants and views of a recipe are for the same channels.

use augment::{Depth, ViewMix};

use super::Recipe;
use crate::method::network::NetworkSpec;

/// Checks that constants and backbones of `recipe` are for the channels of its data, and that
/// images of its format support all operations of `views`.
///
/// # Errors
/// A message with the key and the reason.
pub(super) fn check_channels(
    recipe: &Recipe,
    views: &ViewMix,
    networks: &[NetworkSpec],
) -> Result<(), String> {
    let data = &recipe.data;
    let format = recipe.data.format();
    let n_channels = format.n_channels;
    let n_constants = data.normalization.n_channels();
    if n_constants != n_channels {
        return Err(format!(
            "data.normalization has {n_constants} channels, but data.channels is {n_channels}: measure \
             your images with `ocelli shards stats --channels {n_channels} --bits {}`",
            format.depth.bits()
        ));
    }
    let n_model_channels = recipe.model.n_channels();
    if n_model_channels != n_channels {
        return Err(format!(
            "model.channels (from [model] or the weights) is {n_model_channels}, but data.channels is \
             {n_channels}: set data.channels to {n_model_channels}, or set init.first_layer to convert the \
             weights"
        ));
    }
    if data.background.is_some() && !format.is_rgb8() {
        return Err(format!("data.background applies to 8-bit RGB only, not to {format}"));
    }
    if data.no_data.is_some() && format.is_rgb8() {
        return Err(format!("data.no_data does not apply to {format}"));
    }
    if let Some(bits) = data.bits_used {
        if !(1..16).contains(&bits) {
            return Err(format!("data.bits_used is {bits} but must lie in 1..=15"));
        }
        if format.depth == Depth::Float {
            return Err(
                "data.bits_used applies to 16-bit images; with data.bits = 32, values are used as they are"
                    .into(),
            );
        }
    }
    if let Some(no_data) = &data.no_data {
        for number in [no_data.value, no_data.fill.number()].into_iter().flatten() {
            if !number.is_finite() {
                return Err(format!(
                    "data.no_data: {number} is not a finite number; NaN always means no data"
                ));
            }
        }
    }
    let other = networks.iter().find(|network| network.model(&recipe.model).n_channels() != n_channels);
    if let Some(network) = other {
        return Err(format!(
            "the network {} takes images of {} channels, but data.channels is {n_channels}: both networks \
             see the same views",
            network.name,
            network.model(&recipe.model).n_channels()
        ));
    }
    views
        .first()
        .check_format(format)
        .map_err(|error| format!("views.{error}; --set views.channels={{}} turns such operations off"))
}

#[cfg(test)]
mod tests {
    use augment::{Fill, NoData};

    use super::*;
    use crate::resolve;

    const RECIPE: &str = "name = 'r'\n[model]\narch = 'vit'\nimage_px = 16\npatch_px = 4\nwidth = 8\ndepth = 1\nheads = 2\n[method]\nname = 'toy'\n\
         scores = 5\n[views]\npreset = 'dino'\nglobal_px = 16\nlocal_px = 8\nn_local = 2\n[optim]\nbatch_size = 4\n\
         length = { steps = 2 }\nlr = 0.1\nwarmup = { steps = 0 }\n";

    fn resolved(overrides: &[&str]) -> Result<crate::Plan, String> {
        let overrides: Vec<String> = overrides.iter().map(|entry| entry.to_string()).collect();
        let recipe = Recipe::parse(RECIPE, "r", &overrides).map_err(|error| error.to_string())?;
        resolve(recipe, 8).map_err(|error| error.to_string())
    }

    fn resolve_error(overrides: &[&str]) -> String {
        resolved(overrides).expect_err("refused")
    }

    const CONSTANTS: &str =
        "data.normalization={ mean = [0.1, 0.2, 0.3, 0.4, 0.5], std = [0.1, 0.1, 0.1, 0.1, 0.1] }";

    #[test]
    fn the_model_takes_the_channels_of_the_data() {
        let overrides = ["data.channels=5", "data.bits=16", CONSTANTS, "views.channels={ rotate_p = 0.5 }"];
        let plan = resolved(&overrides).expect("a plan");
        assert_eq!(plan.recipe.model.n_channels(), 5);
        assert_eq!(plan.multicrop().crops[2].rotate_p, 0.5);
        assert_eq!(plan.recipe.data.rules().format, plan.pixel_input().pixels.format());
        // The plan of a run is a recipe.
        let again = Recipe::parse(&plan.to_toml(), "plan", &[]).expect("a recipe");
        assert_eq!(again, plan.recipe);
        let rgb = resolved(&[]).expect("a plan");
        assert!(
            !rgb.to_toml().contains("channels") && !rgb.to_toml().contains("bits"),
            "older plans are the same"
        );
    }

    #[test]
    fn bits_used_and_no_data_are_accepted_or_refused_by_format() {
        let float = ["data.bits=32", "data.no_data={ value = -9999, fill = 0.5 }", "views.channels={}"];
        let rules = resolved(&float).expect("a plan").recipe.data.rules();
        let no_data = NoData { value: Some(-9999.0), fill: Fill::Number(0.5) };
        assert_eq!(rules.no_data, Some(no_data));
        let narrow = resolved(&["data.bits_used=12"]).expect("16 bits of which 8 are kept");
        assert_eq!(narrow.recipe.data.rules().bits_used, Some(12));
        let again = Recipe::parse(&narrow.to_toml(), "plan", &[]).expect("a recipe");
        assert_eq!(again, narrow.recipe);
        assert!(resolve_error(&["data.no_data={ value = 0 }"]).contains("data.no_data does not apply to"));
        assert!(resolve_error(&["data.bits_used=16"]).contains("1..=15"));
        assert!(
            resolve_error(&["data.bits_used=12", "data.bits=32", "views.channels={}"])
                .contains("data.bits_used applies to 16-bit images")
        );
        assert!(
            resolve_error(&["data.bits=32", "data.no_data={ value = nan }", "views.channels={}"])
                .contains("NaN")
        );
        assert!(resolve_error(&["data.bits=32", "data.no_data={ fill = 'x' }"]).contains("no_data"));
    }

    #[test]
    fn errors_name_the_key_that_does_not_fit() {
        assert!(resolve_error(&["data.channels=5"]).contains("ocelli shards stats --channels 5 --bits 8"));
        assert!(resolve_error(&["data.channels=0"]).contains("data.channels: 0 channels"));
        assert!(resolve_error(&["data.bits=12"]).contains("12 bits per channel: 8, 16 or 32"));
        assert!(
            resolve_error(&["data.channels=5", CONSTANTS])
                .contains("views.crops[0].jitter.saturation: is only supported for 8-bit RGB")
        );
        assert!(
            resolve_error(&["data.bits=16"]).contains("views.channels={}"),
            "RGB of 16 bits has other views, too"
        );
        let both = resolve_error(&["data.channels=5", CONSTANTS, "model.channels=4", "views.channels={}"]);
        assert!(both.contains("is 4, but data.channels is 5"), "{both}");
        let background = ["data.bits=16", "views.channels={}", "data.background=[1, 2, 3]"];
        assert!(resolve_error(&background).contains("data.background"));
        let uneven = "data.normalization={ mean = [0.1, 0.2], std = [0.1] }";
        let error = resolve_error(&[uneven]);
        assert!(error.contains("2 means") && error.contains("1 standard"), "{error}");
        assert!(resolve_error(&["views.channels={ drop_p = 2.0 }"]).contains("*_p"));
    }
}
