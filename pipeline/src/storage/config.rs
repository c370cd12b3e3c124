//! Settings of a storage.

use std::path::PathBuf;

use crate::remote::RetryPolicy;

/// Names of the columns of lists and of Parquet files that hold images and classes; by default the
/// usual ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ColumnNames {
    /// Column of the images, or of their paths.
    pub image: Option<String>,
    /// Column of the classes.
    pub label: Option<String>,
}

/// Settings of the shard cache and of fetches.
#[derive(Debug, Clone)]
pub struct StorageConfig {
    /// Folder of the cache; created when it is needed.
    pub cache_folder: PathBuf,
    /// Maximum size of the shards in the cache, in bytes.
    pub cache_bytes: u64,
    /// Maximum number of shards that are fetched at a time.
    pub n_fetches: usize,
    /// Credentials of object stores, under the names of the usual environment variables.
    pub options: Vec<(String, String)>,
    /// Columns of lists and of Parquet files that the user has named.
    pub columns: ColumnNames,
    /// Policy for retries after failures.
    pub retry: RetryPolicy,
}

impl StorageConfig {
    /// Creates the default settings: a cache of 100 GB in `cache_folder`, four fetches at a time,
    /// no credentials.
    pub fn new(cache_folder: PathBuf) -> Self {
        Self {
            cache_folder,
            cache_bytes: 100_000_000_000,
            n_fetches: 4,
            options: Vec::new(),
            columns: ColumnNames::default(),
            retry: RetryPolicy::default(),
        }
    }
}
