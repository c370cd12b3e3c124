//! Groups of images by a column: classes, or a column of a list.

use std::collections::BTreeMap;
use std::path::Path;

use eval::features::file::ImageName;
use prep::column::Column;

use crate::CurateError;
use crate::clusters::Tree;

/// Name of the group of images that have no value in the column.
const NONE: &str = "(none)";

/// Returns the groups of images as a tree of one level, with the names of the groups: the classes
/// of `names`, or `column` of the list at `path`.
///
/// # Errors
/// [`CurateError::NoList`], [`CurateError::NoGroups`], and [`CurateError::Prep`] if the list cannot
/// be used.
pub(super) fn groups(
    names: &[ImageName],
    column: &str,
    path: Option<&Path>,
) -> Result<(Tree, Vec<String>), CurateError> {
    let values: Vec<String> = match path {
        None if column == "class" => {
            names.iter().map(|name| name.class.clone().unwrap_or_else(|| NONE.into())).collect()
        }
        None => return Err(CurateError::NoList { column: column.to_string() }),
        Some(path) => {
            let list = Column::read(path, column)?;
            let mut values = Vec::with_capacity(names.len());
            for name in names {
                let value = list.value(name.shard.as_deref(), &name.key)?;
                values.push(value.unwrap_or(NONE).to_string());
            }
            values
        }
    };
    if values.iter().all(|value| value == NONE) {
        return Err(CurateError::NoGroups { column: column.to_string() });
    }
    let mut indices: BTreeMap<&str, u32> = values.iter().map(|value| (value.as_str(), 0)).collect();
    for (index, value) in (0..).zip(indices.values_mut()) {
        *value = index;
    }
    let parents = values.iter().map(|value| indices[value.as_str()]).collect();
    let group_names: Vec<String> = indices.keys().map(|name| name.to_string()).collect();
    let n_groups = group_names.len();
    Ok((Tree::new(vec![parents], vec![n_groups]), group_names))
}
