//! Samples that a run could not use.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::jsonl;
use crate::ReportError;

/// A sample that could not be used.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct BadSample {
    /// Shard of the sample.
    pub shard: String,
    /// Key of the sample.
    pub key: String,
    /// Reason why it could not be used.
    pub reason: String,
}

/// Reads the bad samples of all ranks of the run in `workdir`, by shard and key.
pub(crate) fn read(workdir: &Path) -> Result<Vec<BadSample>, ReportError> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(workdir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("quarantine") && name.ends_with(".jsonl") {
            all.extend(jsonl::rows(&entry.path())?);
        }
    }
    all.sort();
    all.dedup();
    Ok(all)
}
