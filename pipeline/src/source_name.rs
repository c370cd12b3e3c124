//! Names of the sources of a mix, before their shards: `NAME=SHARDS`.

/// Returns whether `name` is a valid name of a source of a mix: letters, digits, `_` and `-`.
pub fn is_source_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
}

/// Splits `NAME=SHARDS` into the name of a source and its shards; `None` if there is no name.
pub fn split_source(spec: &str) -> Option<(&str, &str)> {
    spec.split_once('=').filter(|(name, _)| is_source_name(name))
}
