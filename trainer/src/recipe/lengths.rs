//! Lengths of time in a recipe.

use super::Recipe;
use crate::schedule::{Duration, RunLength};

/// Returns every length of time in `recipe` except that of the run, with its key, in steps.
pub(super) fn lengths(recipe: &Recipe, length: RunLength) -> Vec<(String, u64)> {
    recipe
        .values()
        .into_iter()
        .filter_map(|(key, value)| {
            let (parent, unit) = key.rsplit_once('.')?;
            let table = toml::Table::from_iter([(unit.to_string(), value)]);
            let duration: Duration = toml::Value::Table(table).try_into().ok()?;
            let steps = length.steps(parent, &duration).ok()?;
            (parent != "optim.length").then(|| (parent.to_string(), steps))
        })
        .collect()
}
