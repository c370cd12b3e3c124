//! Settings of a storage.

use std::path::PathBuf;

use crate::remote::RetryPolicy;

/// Where shards are kept and how they are fetched.
#[derive(Debug, Clone)]
pub struct StorageConfig {
    /// Folder of the cache; made when it is needed.
    pub cache_folder: PathBuf,
    /// Bytes of shards in the cache at the most.
    pub cache_bytes: u64,
    /// Shards that are fetched at a time.
    pub n_fetches: usize,
    /// Credentials of object stores, under the names of the usual environment variables.
    pub options: Vec<(String, String)>,
    /// What is done about failures.
    pub retry: RetryPolicy,
}

impl StorageConfig {
    /// A cache of 100 GB in `cache_folder`, four fetches at a time, no credentials.
    pub fn new(cache_folder: PathBuf) -> Self {
        Self {
            cache_folder,
            cache_bytes: 100_000_000_000,
            n_fetches: 4,
            options: Vec::new(),
            retry: RetryPolicy::default(),
        }
    }
}
