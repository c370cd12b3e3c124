//! Check that backbone, constants and views of a recipe are for the same channels, and the settings
//! that it lacks for images of a format.

use augment::{Depth, PixelFormat};
use networks::patches::Normalization;

use super::Recipe;
use crate::method::network::NetworkSpec;

/// Setting that a recipe lacks for its images.
#[derive(Debug, Clone, PartialEq)]
pub struct MissingSetting {
    /// Reason why it is needed.
    pub reason: String,
    /// Flag that sets it.
    pub flag: String,
}

/// Facts about images and weights, by which [`Recipe::missing_settings`] finds what a recipe lacks.
#[derive(Debug, Clone, Copy)]
pub struct PixelFacts<'a> {
    /// Format of the images.
    pub format: PixelFormat,
    /// Number of channels that the initial weights take, if there are any.
    pub n_initial_channels: Option<usize>,
    /// Constants of the images, if they have been measured.
    pub constants: Option<&'a Normalization>,
}

/// Describes the `missing` settings: the reasons, and the flags in lines that can be typed.
pub fn describe_missing(missing: &[MissingSetting]) -> String {
    let reasons: Vec<&str> = missing.iter().map(|setting| setting.reason.as_str()).collect();
    let flags: Vec<&str> = missing.iter().map(|setting| setting.flag.as_str()).collect();
    format!("{}; add\n  {}", reasons.join("; "), flags.join(" \\\n  "))
}

impl Recipe {
    /// Returns the settings that the recipe lacks to read the images and to start from the weights
    /// of `facts`, all at once.
    pub fn missing_settings(&self, facts: &PixelFacts<'_>) -> Vec<MissingSetting> {
        let data = &self.data;
        let PixelFacts { format, n_initial_channels, constants } = *facts;
        let n_channels = format.n_channels;
        let bits = format.depth.bits();
        let mut missing = Vec::new();
        if data.channels != n_channels {
            missing.push(MissingSetting {
                reason: format!(
                    "data.channels is {}, but the images have {n_channels} channels",
                    data.channels
                ),
                flag: format!("--set data.channels={n_channels}"),
            });
        }
        if data.depth != format.depth {
            missing.push(MissingSetting {
                reason: format!("data.bits is {}, but the images have {bits} bits", data.depth.bits()),
                flag: format!("--set data.bits={bits}"),
            });
        }
        let n_constants = data.normalization.n_channels();
        if n_constants != n_channels {
            let values = match constants {
                Some(constants) => format!("mean={},std={}", list(&constants.mean), list(&constants.std)),
                None => "mean=[…],std=[…]".into(),
            };
            missing.push(MissingSetting {
                reason: format!(
                    "data.normalization has {n_constants} channels, and `ocelli shards stats SHARDS \
                     --channels {n_channels} --bits {bits}` measures those of {n_channels}"
                ),
                flag: format!("--set 'data.normalization={{{values}}}'"),
            });
        }
        if let Ok(views) = self.views.view_mix()
            && let Err(error) = views.first().check_format(format)
        {
            missing.push(MissingSetting {
                reason: format!("views.{error}"),
                flag: "--set 'views.channels={}'".into(),
            });
        }
        let has_rule = self.init.as_ref().is_some_and(|init| init.first_layer.is_some());
        if let Some(n_initial) = n_initial_channels
            && n_initial != n_channels
            && !has_rule
        {
            missing.push(MissingSetting {
                reason: format!(
                    "the weights take images of {n_initial} channels: their first layer can be repeated, or \
                     its mean taken"
                ),
                flag: "--set init.first_layer=repeat".into(),
            });
        }
        missing
    }
}

/// Writes numbers as a list of TOML without spaces, which shells would separate.
fn list(values: &[f32]) -> String {
    let values: Vec<String> = values.iter().map(|value| with_four_digits(*value)).collect();
    format!("[{}]", values.join(","))
}

/// Writes a number with four digits, after the point unless it is small.
fn with_four_digits(value: f32) -> String {
    if value == 0.0 || value.abs() >= 0.01 { format!("{value:.4}") } else { format!("{value:.3e}") }
}

/// Checks that constants and backbones of `recipe` are for the channels of its data, and that
/// images of its format support all operations of `views`.
///
/// # Errors
/// A message with the key and the reason.
pub(super) fn check_channels(recipe: &Recipe, networks: &[NetworkSpec]) -> Result<(), String> {
    let data = &recipe.data;
    let format = recipe.data.format();
    let n_channels = format.n_channels;
    let facts = PixelFacts { format, n_initial_channels: None, constants: None };
    let missing = recipe.missing_settings(&facts);
    if !missing.is_empty() {
        return Err(describe_missing(&missing));
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
    match other {
        Some(network) => Err(format!(
            "the network {} takes images of {} channels, but data.channels is {n_channels}: both networks \
             see the same views",
            network.name,
            network.model(&recipe.model).n_channels()
        )),
        None => Ok(()),
    }
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
    fn all_missing_settings_are_named_at_once() {
        let error = resolve_error(&["data.channels=4", "data.bits=16"]);
        for words in ["data.normalization has 3", "jitter.saturation", "--set 'views.channels={}'"] {
            assert!(error.contains(words), "{words} in {error}");
        }
        let recipe = Recipe::parse(RECIPE, "r", &[]).expect("a recipe");
        let format = PixelFormat { n_channels: 4, depth: Depth::Sixteen };
        let constants = Normalization { mean: vec![0.25; 4], std: vec![0.125; 4] };
        let facts = PixelFacts { format, n_initial_channels: Some(3), constants: Some(&constants) };
        let flags: Vec<String> =
            recipe.missing_settings(&facts).into_iter().map(|setting| setting.flag).collect();
        let expected = [
            "--set data.channels=4",
            "--set data.bits=16",
            "--set 'data.normalization={mean=[0.2500,0.2500,0.2500,0.2500],\
             std=[0.1250,0.1250,0.1250,0.1250]}'",
            "--set 'views.channels={}'",
            "--set init.first_layer=repeat",
        ];
        assert_eq!(flags, expected);
        // With these settings, nothing is missing.
        let overrides: Vec<String> = flags
            .iter()
            .map(|flag| flag.trim_start_matches("--set ").trim_matches('\'').to_string())
            .collect();
        let complete = Recipe::parse(RECIPE, "r", &overrides).expect("a recipe");
        assert!(complete.missing_settings(&facts).is_empty());
    }

    #[test]
    fn errors_name_the_key_that_does_not_fit() {
        assert!(
            resolve_error(&["data.channels=5"]).contains("ocelli shards stats SHARDS --channels 5 --bits 8")
        );
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
