//! Recipes by name or by file.

use std::io::Read;

use anyhow::{Context, bail};
use networks::ModelConfig;
use pipeline::url::contains_command;
use session::{Initial, initial_model, open_frozen};
use trainer::Recipe;
use trainer::recipe::override_key;

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
        recipe.fit_batch(batch);
    }
    Ok(recipe)
}
