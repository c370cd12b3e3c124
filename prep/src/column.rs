//! A column of a list of images, by the names of the images.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::PrepError;
use crate::list;

/// Values of a column.
pub struct Column {
    by_key: HashMap<String, String>,
    /// Values by the name of the shard in the list, and key.
    by_shard: HashMap<(String, String), String>,
    /// Values by the name of the shard's file, and key.
    by_file: HashMap<(String, String), FileValue>,
}

/// Value of an image in all shards of one file name.
#[derive(PartialEq)]
enum FileValue {
    /// The value, the same in all folders that have such a shard.
    One(String),
    /// Shards in several folders have different values.
    Several,
}

impl Column {
    /// Reads `column` of the list at `path`, whose column `key` names images, with a column `shard`
    /// or without.
    ///
    /// # Errors
    /// [`PrepError`] when the list cannot be read or has no value in the column.
    pub fn read(path: &Path, column: &str) -> Result<Self, PrepError> {
        let mut values = Self { by_key: HashMap::new(), by_shard: HashMap::new(), by_file: HashMap::new() };
        for row in list::read(path, list::Target::Key, &pipeline::ColumnNames::default())? {
            let Some(value) = cell(&row.columns, column) else { continue };
            if let Some(shard) = cell(&row.columns, "shard") {
                let only = FileValue::One(value.clone());
                match values.by_file.entry((file_name(&shard), row.target.clone())) {
                    Entry::Vacant(entry) => {
                        entry.insert(only);
                    }
                    Entry::Occupied(mut entry) => {
                        if *entry.get() != only {
                            entry.insert(FileValue::Several);
                        }
                    }
                }
                values.by_shard.insert((shard, row.target.clone()), value.clone());
            }
            values.by_key.insert(row.target, value);
        }
        if values.by_key.is_empty() {
            return Err(PrepError::EmptyColumn { path: path.to_path_buf(), column: column.to_string() });
        }
        Ok(values)
    }

    /// Returns the value of the image `key` in `shard`: the value for the shard as it is named,
    /// else for a shard with the same file name in another folder, or for the key alone where the
    /// list names no shards.
    ///
    /// # Errors
    /// [`PrepError::SeveralValues`].
    pub fn value(&self, shard: Option<&str>, key: &str) -> Result<Option<&str>, PrepError> {
        let Some(shard) = shard.filter(|_| !self.by_shard.is_empty()) else {
            return Ok(self.by_key.get(key).map(String::as_str));
        };
        if let Some(value) = self.by_shard.get(&(shard.to_string(), key.to_string())) {
            return Ok(Some(value));
        }
        match self.by_file.get(&(file_name(shard), key.to_string())) {
            None => Ok(None),
            Some(FileValue::One(value)) => Ok(Some(value)),
            Some(FileValue::Several) => {
                Err(PrepError::SeveralValues { key: key.to_string(), shard: file_name(shard) })
            }
        }
    }
}

/// Returns the text of the column `name` of a row; `None` if it is empty.
fn cell(columns: &Map<String, Value>, name: &str) -> Option<String> {
    match columns.get(name)? {
        Value::Null => None,
        Value::String(text) if text.is_empty() => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

/// Returns the name of a shard without its folder: shards may have been moved since the list was
/// written.
fn file_name(shard: &str) -> String {
    let name = Path::new(shard).file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(text: &str) -> Column {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list.csv");
        std::fs::write(&path, text).unwrap();
        Column::read(&path, "weight").unwrap()
    }

    /// Shards of the same name in two folders are distinguished; where that is impossible, an error
    /// is returned.
    #[test]
    fn shards_with_equal_names_in_two_folders_are_distinguished() {
        let list = column("shard,key,weight\na/x.tar,1,5\nb/x.tar,1,7\na/y.tar,1,2\n");
        assert_eq!(list.value(Some("a/x.tar"), "1").unwrap(), Some("5"));
        assert_eq!(list.value(Some("b/x.tar"), "1").unwrap(), Some("7"));
        assert_eq!(list.value(Some("moved/y.tar"), "1").unwrap(), Some("2"));
        let error = list.value(Some("moved/x.tar"), "1").unwrap_err();
        assert!(
            matches!(&error, PrepError::SeveralValues { key, shard } if key == "1" && shard == "x.tar"),
            "{error}"
        );
        assert_eq!(list.value(Some("moved/z.tar"), "1").unwrap(), None);
        assert_eq!(column("key,weight\n1,5\n").value(Some("a/x.tar"), "1").unwrap(), Some("5"));
    }
}
