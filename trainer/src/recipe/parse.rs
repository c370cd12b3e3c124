//! Parsing of TOML into any type, with `--set` overrides and messages that name the nearest known key.

use serde::de::DeserializeOwned;

/// Parses `text` and applies `overrides` of the form `optim.lr=1e-3`.
///
/// # Errors
/// A message in words; for an unknown key it names the nearest known one.
pub(super) fn from_toml<T: DeserializeOwned>(text: &str, overrides: &[String]) -> Result<T, String> {
    if overrides.is_empty() {
        // The text itself is parsed, so that messages have line numbers.
        return toml::from_str(text).map_err(|error| add_hint(&error.to_string()));
    }
    let table = overridden(text, overrides)?;
    T::deserialize(table).map_err(|error| add_hint(&error.to_string()))
}

/// Value of `model.arch`, or of `model`, for the backbone of the weights that a run starts with.
const FROM_INIT: &str = "from_init";

/// Parses as [`from_toml`]. Where the recipe takes its backbone from the weights that it starts with, `model_of` is called
/// with `init.weights` and returns that backbone; other keys of the recipe's `[model]` replace its keys.
///
/// # Errors
/// A message in words as [`from_toml`], or that of `model_of`.
pub(super) fn from_toml_with_model<T: DeserializeOwned>(
    text: &str,
    overrides: &[String],
    model_of: &mut dyn FnMut(Option<&str>) -> Result<toml::Table, String>,
) -> Result<T, String> {
    let Ok(mut table) = overridden(text, overrides) else { return from_toml(text, overrides) };
    let own = match table.get("model") {
        Some(toml::Value::String(name)) if name == FROM_INIT => toml::Table::new(),
        Some(toml::Value::Table(model))
            if model.get("arch").and_then(|arch| arch.as_str()) == Some(FROM_INIT) =>
        {
            let keys = model.iter().filter(|(key, _)| *key != "arch");
            keys.map(|(key, value)| (key.clone(), value.clone())).collect()
        }
        _ => return from_toml(text, overrides),
    };
    let weights = table.get("init").and_then(|init| init.get("weights")).and_then(|path| path.as_str());
    let mut model = model_of(weights)?;
    model.extend(own);
    table.insert("model".into(), model.into());
    T::deserialize(table).map_err(|error| add_hint(&error.to_string()))
}

/// Parses `text` as a table, and applies `overrides`.
fn overridden(text: &str, overrides: &[String]) -> Result<toml::Table, String> {
    let mut table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    overrides.iter().try_for_each(|entry| set(&mut table, entry))?;
    Ok(table)
}

/// Units of a length of time, which has exactly one of them.
const UNITS: [&str; 4] = ["steps", "epochs", "samples", "percent"];

/// Sets one dotted key.
fn set(table: &mut toml::Table, entry: &str) -> Result<(), String> {
    let (path, value) = entry.split_once('=').ok_or(format!("--set {entry}: expected key=value"))?;
    if value.contains(['\n', '\r']) {
        return Err(format!("--set {path}: a value is one line"));
    }
    let parsed: toml::Table = format!("v = {value}")
        .parse()
        .or_else(|_| format!("v = {value:?}").parse())
        .map_err(|error: toml::de::Error| format!("--set {entry}: {error}"))?;
    let mut keys: Vec<&str> = path.trim().split('.').collect();
    let last = keys.pop().unwrap_or_default();
    let mut at = table;
    for key in keys {
        at = at
            .entry(key)
            .or_insert_with(|| toml::Table::new().into())
            .as_table_mut()
            .ok_or(format!("--set {entry}: {key} is not a section"))?;
    }
    // A length has one unit: a new unit replaces the old one.
    if UNITS.contains(&last) && at.keys().all(|key| UNITS.contains(&key.as_str())) {
        at.clear();
    }
    if let Some(value) = parsed.get("v") {
        at.insert(last.into(), value.clone());
    }
    Ok(())
}

/// Keys that were moved, each with a key that its section still has, and a message.
const MOVED: [(&str, &str, &str); 3] = [
    (
        "stat_groups",
        "stat_images",
        "optim.stat_groups is optim.stat_images now, in images: optim.batch_size divided by the groups",
    ),
    ("freeze_last_layer", "stat_images", "optim.freeze_last_layer is method.freeze_last_layer now"),
    ("teacher", "method", "the section [teacher] is gone: teacher.decay is method.teacher_decay now"),
];

/// Adds to serde's message on an unknown key its new place, or the nearest known key.
fn add_hint(message: &str) -> String {
    let message = message.trim_end();
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let Some(list) = message.find("unknown field").or_else(|| message.find("unknown variant")) else {
        return message.into();
    };
    let unknown = message[list..].split('`').nth(1).unwrap_or_default();
    let is_moved = |(key, neighbor, _): &&(&str, &str, &str)| *key == unknown && quoted.contains(neighbor);
    if let Some((_, _, now)) = MOVED.iter().find(is_moved) {
        return format!("{message}\n{now}");
    }
    let nearest = quoted
        .iter()
        .filter(|known| **known != unknown && strsim::jaro_winkler(known, unknown) > 0.7)
        .max_by(|a, b| strsim::jaro_winkler(a, unknown).total_cmp(&strsim::jaro_winkler(b, unknown)));
    match nearest {
        Some(nearest) => format!("{message}\n`{unknown}` is not known: did you mean `{nearest}`?"),
        None => message.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelled_key_names_the_nearest() {
        let message = add_hint("unknown field `warmpu`, expected one of `lr`, `warmup`, `betas`");
        assert!(message.contains("did you mean `warmup`"), "{message}");
    }

    #[test]
    fn a_key_that_has_moved_says_where_to() {
        let message = add_hint("unknown field `teacher`, expected one of `name`, `method`");
        assert!(message.contains("method.teacher_decay"), "{message}");
        let message = add_hint("unknown field `teacher`, expected one of `workers`, `shard`");
        assert!(!message.contains("method.teacher_decay"), "another section: {message}");
    }
}
