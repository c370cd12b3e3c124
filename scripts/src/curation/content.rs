//! Contents of files as part of the identity of a job: with a changed file, it is another job.

use std::path::Path;

use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

/// Returns the path of a file with a hash of its bytes; null if there is none.
pub(crate) fn content_identity(path: Option<impl AsRef<Path>>) -> Value {
    let Some(path) = path else { return Value::Null };
    // A file that cannot be read is refused where it is used.
    let bytes = std::fs::read(path.as_ref()).unwrap_or_default();
    json!([path.as_ref().display().to_string(), format!("{:016x}", xxh3_64(&bytes))])
}
