//! Flags and environment of the storage: the cache of remote shards, and credentials.

use std::path::PathBuf;
use std::time::SystemTime;

use pipeline::remote::RetryPolicy;
use pipeline::{ColumnNames, Storage, StorageConfig};

/// Prefixes of environment variables that hold credentials and settings of object stores.
const STORE_VARIABLES: [&str; 3] = ["AWS_", "GOOGLE_", "AZURE_"];

/// Variables of Azure's tools, with the names that the library uses.
const OTHER_NAMES: [(&str, &str); 3] = [
    ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME"),
    ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY"),
    ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"),
];

/// Flags about the cache, which every verb has.
#[derive(clap::Args)]
pub(crate) struct StorageFlags {
    /// Cache folder for remote shards, indices, and compiled and tuned GPU kernels [default:
    /// ~/.cache/ocelli].
    #[arg(
        long,
        env = "OCELLI_CACHE",
        global = true,
        value_name = "FOLDER",
        help_heading = "Cache",
        hide = true
    )]
    cache: Option<PathBuf>,
    /// Maximum size of the shard cache, in GB.
    #[arg(
        long,
        env = "OCELLI_CACHE_GB",
        global = true,
        value_name = "GB",
        default_value_t = 100.0,
        help_heading = "Cache",
        hide = true
    )]
    cache_gb: f64,
    /// Column of a list or Parquet file that holds the images or their paths [default: detected by
    /// content or common names].
    #[arg(long, global = true, value_name = "NAME", help_heading = "Columns", hide = true)]
    image_column: Option<String>,
    /// Column of a list or Parquet file that holds the classes [default: label or another common
    /// name].
    #[arg(long, global = true, value_name = "NAME", help_heading = "Columns", hide = true)]
    label_column: Option<String>,
}

impl StorageFlags {
    /// Returns the folder of the cache.
    pub(crate) fn folder(&self) -> PathBuf {
        self.cache.clone().unwrap_or_else(default_folder)
    }

    /// Opens the storage that the flags and the environment describe.
    pub(crate) fn open(&self) -> Storage {
        let folder = self.folder();
        Storage::new(StorageConfig {
            cache_bytes: (self.cache_gb * 1e9) as u64,
            options: read_options(),
            columns: ColumnNames { image: self.image_column.clone(), label: self.label_column.clone() },
            retry: RetryPolicy { jitter_seed: jitter_seed(), ..RetryPolicy::default() },
            ..StorageConfig::new(folder)
        })
    }
}

/// Returns the options of object stores in the environment.
fn read_options() -> Vec<(String, String)> {
    let mut options = Vec::new();
    for (name, value) in std::env::vars_os() {
        let (Ok(name), Ok(value)) = (name.into_string(), value.into_string()) else { continue };
        if !STORE_VARIABLES.iter().any(|prefix| name.starts_with(prefix)) {
            continue;
        }
        match OTHER_NAMES.iter().find(|(other, _)| *other == name) {
            Some((_, library_name)) => options.push((library_name.to_string(), value)),
            None => options.push((name, value)),
        }
    }
    options
}

fn default_folder() -> PathBuf {
    std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("ocelli")
}

/// Returns a seed that differs between processes and machines. Only the time to wait after a
/// failure depends on it.
pub(crate) fn jitter_seed() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::from(std::process::id()) << 32 ^ now.as_nanos() as u64
}
