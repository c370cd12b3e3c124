//! A recipe as a list of keys and values.

use super::Recipe;
use crate::schedule::{Duration, RunLength};

/// Every length of time in `recipe` but that of the run and what comes after it, by its key, in steps.
pub(super) fn lengths(recipe: &Recipe, length: RunLength) -> Vec<(String, u64)> {
    let Ok(table) = toml::Value::try_from(recipe) else { return Vec::new() };
    let mut values = Vec::new();
    flatten("", &table, &mut values);
    let in_steps = |(key, value): (String, toml::Value)| {
        let (parent, unit) = key.rsplit_once('.')?;
        let table = toml::Table::from_iter([(unit.to_string(), value)]);
        let duration: Duration = toml::Value::Table(table).try_into().ok()?;
        let steps = length.steps(parent, &duration).ok()?;
        (parent != "optim.length").then(|| (parent.to_string(), steps))
    };
    values.into_iter().filter_map(in_steps).collect()
}

pub(super) fn flatten(prefix: &str, value: &toml::Value, out: &mut Vec<(String, toml::Value)>) {
    match value {
        toml::Value::Table(table) => {
            for (key, value) in table {
                let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&key, value, out);
            }
        }
        other => out.push((prefix.into(), other.clone())),
    }
}
