//! A column of a list of images, by the names of the images.

use std::collections::HashMap;
use std::path::Path;

use anyhow::bail;
use serde_json::Value;

use super::list;

/// Values of a column.
pub(crate) struct Column {
    by_key: HashMap<String, String>,
    by_shard: HashMap<(String, String), String>,
}

impl Column {
    /// Reads `column` of the list at `path`, whose column `key` names images, with a column `shard` or without.
    pub(crate) fn read(path: &Path, column: &str) -> anyhow::Result<Self> {
        let mut found = Self { by_key: HashMap::new(), by_shard: HashMap::new() };
        for row in list::read(path, "key")? {
            let text = |name: &str| match row.columns.get(name) {
                None | Some(Value::Null) => None,
                Some(Value::String(text)) => Some(text.clone()).filter(|text| !text.is_empty()),
                Some(other) => Some(other.to_string()),
            };
            let Some(value) = text(column) else { continue };
            if let Some(shard) = text("shard") {
                found.by_shard.insert((file_name(&shard), row.target.clone()), value.clone());
            }
            found.by_key.insert(row.target, value);
        }
        match found.by_key.is_empty() {
            true => bail!("{} has no value in a column {column}", path.display()),
            false => Ok(found),
        }
    }

    /// Returns the value of the image `key` in `shard`: that of its shard and key, or of its key alone where the list names no shard.
    pub(crate) fn of(&self, shard: Option<&str>, key: &str) -> Option<&str> {
        let found = match shard {
            Some(shard) if !self.by_shard.is_empty() => {
                self.by_shard.get(&(file_name(shard), key.to_string()))
            }
            _ => self.by_key.get(key),
        };
        found.map(String::as_str)
    }
}

/// Returns the name of a shard without its folder: shards may have been moved since the list was written.
fn file_name(shard: &str) -> String {
    let name = Path::new(shard).file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}
