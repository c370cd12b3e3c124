//! Recipes by name or by file.

use anyhow::{Context, bail};
use trainer::Recipe;

/// The recipes that ship with the program.
const BUILT_IN: [(&str, &str); 5] = [
    ("quickstart", include_str!("../recipes/quickstart.toml")),
    ("dino_cifar", include_str!("../recipes/dino_cifar.toml")),
    ("dino_vits16", include_str!("../recipes/dino_vits16.toml")),
    ("dino_vits16_boosted", include_str!("../recipes/dino_vits16_boosted.toml")),
    ("dino_vits16_released", include_str!("../recipes/dino_vits16_released.toml")),
];

/// The recipe called `name`, or in the file `name`, with `--set` entries applied.
pub(crate) fn load(name: &str, overrides: &[String]) -> anyhow::Result<Recipe> {
    if let Some((_, text)) = BUILT_IN.iter().find(|(built_in, _)| *built_in == name) {
        return Ok(Recipe::parse(text, name, overrides)?);
    }
    if !std::path::Path::new(name).exists() {
        let names: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
        bail!("there is no recipe {name}: neither a file nor one of {}", names.join(", "));
    }
    let text = std::fs::read_to_string(name).with_context(|| format!("cannot read recipe {name}"))?;
    Ok(Recipe::parse(&text, name, overrides)?)
}

/// The same for a benchmark: with `batch` images a step, or as `overrides` say, or `usual`.
pub(crate) fn load_for_bench(
    name: &str,
    overrides: &[String],
    batch: Option<usize>,
    usual: usize,
) -> anyhow::Result<Recipe> {
    let mut recipe = load(name, overrides)?;
    let is_set = overrides.iter().any(|entry| entry.starts_with("optim.batch_size"));
    if let Some(batch) = batch.or((!is_set).then_some(usual)) {
        recipe.optim.batch_size = batch;
    }
    Ok(recipe)
}
