//! Names of shards in the cache.

use std::fs;
use std::io;

use xxhash_rust::xxh3::xxh3_64;

use super::config::StorageConfig;
use crate::identity::FileStamp;
use crate::source::Source;
use crate::url::ShardUrl;
use crate::{PipelineError, secrets};

/// Version of the rules by which an index is built, which is part of every name: 2 since the end of
/// an archive is checked, 3 since the name of a local file depends on its state.
const VERSION: u32 = 3;

/// Version of the rules by which a Parquet file is converted into a tar: 2 since images are
/// recognized by their bytes, 3 since a list of classes becomes classes, 4 since the column that
/// the user names is the only one of classes, 5 since an empty list in another column states
/// nothing.
const PARQUET_VERSION: u32 = 5;

/// Parts of the names of options that select the endpoint or the account of a bucket.
const ACCOUNT_OPTIONS: [&str; 3] = ["ENDPOINT", "ACCOUNT_NAME", "BASE_URL"];

/// Returns the name of a shard in the cache, and of its index. It holds a hash of everything that
/// identifies the shard; `config` has the settings of object stores, and the columns of Parquet
/// files.
pub(super) fn cache_name(source: &Source, config: &StorageConfig) -> Result<String, PipelineError> {
    let mut identity = match &source.url {
        ShardUrl::File(path) => {
            let metadata = fs::metadata(path).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => PipelineError::MissingShard { path: path.clone() },
                _ => PipelineError::io("open", path, error),
            })?;
            FileStamp::from_metadata(&metadata).to_string()
        }
        // A bucket belongs to an endpoint and an account.
        ShardUrl::Remote(url) => {
            let mut account_options = Vec::new();
            if !matches!(url.scheme(), "http" | "https") {
                for (name, value) in &config.options {
                    let uppercase = name.to_ascii_uppercase();
                    if ACCOUNT_OPTIONS.iter().any(|part| uppercase.contains(part)) {
                        account_options.push(format!(" {name}={value}"));
                    }
                }
            }
            account_options.sort();
            format!("{}{}", secrets::identity(url), account_options.concat())
        }
        // A command depends on the working directory.
        ShardUrl::Pipe(command) => {
            format!("{} {command}", std::env::current_dir().unwrap_or_default().display())
        }
    };
    // An MD5 is checked when a shard is fetched: a copy that was fetched without the check has
    // another name.
    if let Some(md5) = source.md5.as_ref().filter(|_| !source.is_read_in_place()) {
        identity += &format!(" {md5}");
    }
    if source.url.is_parquet() {
        identity += &format!(" {PARQUET_VERSION} {:?}", config.columns);
    }
    // File systems limit names to 255 bytes; the hash alone distinguishes shards.
    let name = source.url.tar_name();
    let tail: String = name.chars().skip(name.chars().count().saturating_sub(60)).collect();
    Ok(format!("{:016x}-{tail}", xxh3_64(format!("{VERSION} {identity}").as_bytes())))
}
