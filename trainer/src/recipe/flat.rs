//! TOML tables as flat lists of keys and values.

/// Adds the values in `value` to `out`, by their keys below `prefix`: `optim.lr`.
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
