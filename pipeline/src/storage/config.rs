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

impl ColumnNames {
    /// Returns whether the user has named a column.
    pub fn is_any_named(&self) -> bool {
        self.image.is_some() || self.label.is_some()
    }

    /// Warns that the columns that the user has named, if any, are not looked for in `images`:
    /// tars, or a folder.
    pub fn warn_unused(&self, images: &str) {
        for column in self.image.iter().chain(&self.label) {
            tracing::warn!(
                "{images}: the column {column} is not used, which is for lists and Parquet files: samples of \
                 tars and images of folders have the class in their .cls, under label or labels in their \
                 .json, or in the name of their folder"
            );
        }
    }
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
