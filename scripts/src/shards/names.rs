//! The names of shards.

use std::path::Path;

/// The shards as one list that other verbs understand.
pub(crate) fn shard_list(folder: &Path, prefix: &str, n_shards: usize) -> String {
    let range = match n_shards {
        0 | 1 => "000000".to_string(),
        n => format!("{{000000..{:06}}}", n - 1),
    };
    folder.join(format!("{prefix}-{range}.tar")).display().to_string()
}
