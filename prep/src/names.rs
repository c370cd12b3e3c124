//! Names of shards.

use std::path::Path;

/// Names the shards of `prefix` by one pattern that other verbs accept.
pub fn shard_list(folder: &Path, prefix: &str, n_shards: usize) -> String {
    let range = match n_shards {
        0 | 1 => "000000".to_string(),
        n => format!("{{000000..{:06}}}", n - 1),
    };
    folder.join(format!("{prefix}-{range}.tar")).display().to_string()
}

/// Names the shards of `prefix` by a pattern that other verbs accept, where some numbers are left
/// out.
pub fn shard_pattern(folder: &Path, prefix: &str) -> String {
    folder.join(format!("{prefix}-*.tar")).display().to_string()
}
