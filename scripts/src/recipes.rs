//! Recipes by name or by file.

use std::io::Read;

use anyhow::{Context, bail};
use networks::ModelConfig;
use pipeline::url::contains_command;
use session::{Initial, initial_model, open_frozen};
use trainer::Recipe;

use crate::console::say;

/// Recipes that ship with the program, by name.
pub(crate) const BUILT_IN: [(&str, &str); 39] = [
    ("quickstart", include_str!("../recipes/quickstart.toml")),
    ("dino_cifar", include_str!("../recipes/dino_cifar.toml")),
    ("dino_resnet50", include_str!("../recipes/dino_resnet50.toml")),
    ("dino_shapes", include_str!("../recipes/dino_shapes.toml")),
    ("dino_vits16", include_str!("../recipes/dino_vits16.toml")),
    ("dino_vits16_boosted", include_str!("../recipes/dino_vits16_boosted.toml")),
    ("dino_vits16_released", include_str!("../recipes/dino_vits16_released.toml")),
    ("dinov2_cifar", include_str!("../recipes/dinov2_cifar.toml")),
    ("dinov2_continue", include_str!("../recipes/dinov2_continue.toml")),
    ("dinov2_vitg14", include_str!("../recipes/dinov2_vitg14.toml")),
    ("dinov2_vitl14", include_str!("../recipes/dinov2_vitl14.toml")),
    ("dinov2_vitl16", include_str!("../recipes/dinov2_vitl16.toml")),
    ("dinov2_vits14", include_str!("../recipes/dinov2_vits14.toml")),
    ("dinov3_cifar", include_str!("../recipes/dinov3_cifar.toml")),
    ("dinov3_continue", include_str!("../recipes/dinov3_continue.toml")),
    ("dinov3_vit7b16", include_str!("../recipes/dinov3_vit7b16.toml")),
    ("dinov3_vit7b16_gram", include_str!("../recipes/dinov3_vit7b16_gram.toml")),
    ("dinov3_vit7b16_highres", include_str!("../recipes/dinov3_vit7b16_highres.toml")),
    ("dinov3_vitl16_distilled", include_str!("../recipes/dinov3_vitl16_distilled.toml")),
    ("dinov3_vitl16_im1k", include_str!("../recipes/dinov3_vitl16_im1k.toml")),
    ("distill_convnext_t", include_str!("../recipes/distill_convnext_t.toml")),
    ("distill_vits16", include_str!("../recipes/distill_vits16.toml")),
    ("ibot_vits16", include_str!("../recipes/ibot_vits16.toml")),
    ("lejepa_cifar", include_str!("../recipes/lejepa_cifar.toml")),
    ("lejepa_vits16", include_str!("../recipes/lejepa_vits16.toml")),
    ("lejepa_vits8_imagenette", include_str!("../recipes/lejepa_vits8_imagenette.toml")),
    ("moco_cifar", include_str!("../recipes/moco_cifar.toml")),
    ("moco_v3_resnet50", include_str!("../recipes/moco_v3_resnet50.toml")),
    ("moco_v3_vits16", include_str!("../recipes/moco_v3_vits16.toml")),
    ("seer_regnety_10b", include_str!("../recipes/seer_regnety_10b.toml")),
    ("seer_regnety_128gf", include_str!("../recipes/seer_regnety_128gf.toml")),
    ("seer_regnety_256gf", include_str!("../recipes/seer_regnety_256gf.toml")),
    ("seer_regnety_32gf", include_str!("../recipes/seer_regnety_32gf.toml")),
    ("seer_regnety_64gf", include_str!("../recipes/seer_regnety_64gf.toml")),
    ("simclr_cifar", include_str!("../recipes/simclr_cifar.toml")),
    ("simclr_resnet50", include_str!("../recipes/simclr_resnet50.toml")),
    ("swav_cifar", include_str!("../recipes/swav_cifar.toml")),
    ("swav_resnet50", include_str!("../recipes/swav_resnet50.toml")),
    ("swav_resnet50_bs256", include_str!("../recipes/swav_resnet50_bs256.toml")),
];

/// Upper limit of a recipe's length.
const MAX_BYTES: u64 = 1 << 20;

/// Loads the recipe called `name`, or the file `name`, and applies the `--set` entries.
pub(crate) fn load(name: &str, overrides: &[String]) -> anyhow::Result<Recipe> {
    load_with_model(name, overrides, |weights| {
        initial_model(&Initial::default(), None, weights).map_err(|error| error.to_string())
    })
}

/// Loads a recipe as [`load`]. `model` returns the backbone of the weights that a run starts with,
/// for a recipe that takes it from them; it is called with the recipe's `init.weights`.
pub(crate) fn load_with_model(
    name: &str,
    overrides: &[String],
    model: impl Fn(Option<&str>) -> Result<ModelConfig, String>,
) -> anyhow::Result<Recipe> {
    let text = read_text(name)?;
    Ok(Recipe::parse_with_model(&text, name, overrides, model)?)
}

/// Reads the text of the recipe called `name`, or of the file `name`.
pub(crate) fn read_text(name: &str) -> anyhow::Result<String> {
    if let Some((_, text)) = BUILT_IN.iter().find(|(built_in, _)| *built_in == name) {
        return Ok((*text).to_string());
    }
    if !std::path::Path::new(name).exists() {
        let names: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
        bail!("unknown recipe {name}: not a file, and not one of {}", names.join(", "));
    }
    let mut text = String::new();
    let file = std::fs::File::open(name).with_context(|| format!("cannot read recipe {name}"))?;
    let read = file.take(MAX_BYTES).read_to_string(&mut text);
    if read.with_context(|| format!("cannot read recipe {name}"))? as u64 == MAX_BYTES {
        bail!("{name} is not a recipe: it is larger than 1 MB");
    }
    Ok(text)
}

/// Rejects commands among the shards of a recipe: recipes are shared, and must not run commands
/// unexpectedly. Shards in `overrides` come from the command line and are allowed.
pub(crate) fn refuse_commands(recipe: &Recipe, overrides: &[String]) -> anyhow::Result<()> {
    let overrides_shards =
        overrides.iter().any(|entry| matches!(override_key(entry), "data.shards" | "data"));
    if !overrides_shards && contains_command(&recipe.data.shards) {
        bail!(
            "recipe {}: data.shards names a command (pipe:…), which recipes may not run: pass it with \
             --shards",
            recipe.name
        );
    }
    Ok(())
}

/// Returns the key of a `--set` entry.
pub(crate) fn override_key(entry: &str) -> &str {
    entry.split('=').next().unwrap_or_default().trim()
}

/// Loads a recipe for a benchmark, with `batch` images per step, else as many as `overrides` set,
/// else `usual`.
pub(crate) fn load_for_bench(
    name: &str,
    overrides: &[String],
    batch: Option<usize>,
    usual: usize,
) -> anyhow::Result<Recipe> {
    let mut recipe = load(name, overrides)?;
    if recipe.views.keep_first_choice() {
        say("note: each batch of this recipe has one of several view sizes (views.mix); only the first is \
             measured");
    }
    open_frozen(&mut recipe, None)?;
    let is_set = overrides.iter().any(|entry| entry.starts_with("optim.batch_size"));
    if let Some(batch) = batch.or((!is_set).then_some(usual)) {
        recipe.optim.batch_size = batch;
        // Groups of a batch of thousands do not divide a small one.
        if !batch.is_multiple_of(recipe.optim.stat_images()) {
            recipe.optim.stat_images = 0;
        }
        recipe.method.fit_batch(batch);
    }
    Ok(recipe)
}

#[cfg(test)]
mod tests {
    use session::SessionError;

    use super::*;

    /// Returns the backbone of the weights, for recipes that take it from them.
    fn small() -> ModelConfig {
        let text = r#"{"arch": "vit", "image_px": 448, "patch_px": 2, "width": 12, "depth": 2, "heads": 2}"#;
        serde_json::from_str(text).unwrap()
    }

    /// Each recipe has its file's name and can be run.
    #[test]
    fn every_recipe_resolves() {
        for (name, _) in BUILT_IN {
            let recipe = load_with_model(name, &[], |_| Ok(small())).unwrap();
            assert_eq!(recipe.name, name);
            let mut frozen = recipe.clone();
            if !frozen.method.frozen().is_empty() {
                let error = open_frozen(&mut frozen, None).err().unwrap();
                let is_unnamed =
                    matches!(&error, SessionError::FrozenUnnamed { key } if key == "method.teacher.weights");
                assert!(is_unnamed, "{name}: {error}");
                continue;
            }
            let plan = trainer::resolve(recipe, 1 << 20).unwrap();
            plan.method().unwrap();
        }
    }

    #[test]
    fn every_recipe_can_be_measured_with_a_small_batch() {
        for (name, text) in BUILT_IN {
            if text.contains("from_init") || text.contains("teacher = ") {
                // Such a recipe needs weights.
                continue;
            }
            let recipe = load_for_bench(name, &[], Some(8), 4).unwrap();
            trainer::resolve(recipe, 1 << 20).unwrap();
        }
    }
}
