//! Jobs: what identifies a call of a verb. With other settings, or other contents of a file, it is
//! another job.

use std::path::Path;

use prep::parts::Work;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

/// A call of a verb.
#[derive(Debug, Clone)]
pub struct Job {
    /// Name of the verb.
    pub verb: &'static str,
    /// Settings that affect the results.
    pub settings: Value,
    /// Share of the work that this process does.
    pub work: Work,
}

/// Returns the path of a file with a hash of its bytes; null if there is none.
pub(super) fn content_identity(path: Option<&Path>) -> Value {
    let Some(path) = path else { return Value::Null };
    // A file that cannot be read is refused where it is used.
    let bytes = std::fs::read(path).unwrap_or_default();
    json!([path.display().to_string(), format!("{:016x}", xxh3_64(&bytes))])
}
