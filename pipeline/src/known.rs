//! What the storage knows of a shard without reading it: its index, and the name under which the cache
//! keeps both.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use crate::PipelineError;
use crate::index::ShardIndex;
use crate::receive::failed;
use crate::remote::fetch::Failure;
use crate::storage::{Source, Storage};
use crate::url::ShardUrl;

impl Storage {
    /// The index of a tar on a disk: its sidecar, or one that an earlier start has kept, or a new one.
    pub(crate) fn local_index(&self, source: &Source, path: &Path) -> Result<ShardIndex, PipelineError> {
        if ShardIndex::sidecar_path(path).exists() {
            return ShardIndex::open(path);
        }
        let kept = self.inner.cache.path(&self.cache_name(source)?);
        if let Ok(Some(index)) = ShardIndex::load(&kept) {
            return Ok(index);
        }
        let index = ShardIndex::build(path)?;
        // Where nothing can be kept, the next start builds it again.
        let _ = self.inner.cache.create().and_then(|()| index.save(&kept));
        Ok(index)
    }

    /// The index of a shard that is read from the cache: the one that is kept there, the one beside the
    /// shard, or a new one, for which the shard is fetched.
    pub(crate) fn cached_index(&self, source: &Source, name: &str) -> Result<ShardIndex, PipelineError> {
        let path = self.inner.cache.path(name);
        if let Ok(Some(index)) = ShardIndex::load(&path) {
            return Ok(index);
        }
        let index = match self.index_beside(source)? {
            Some(index) => index,
            None => self.index_of_whole(source, name)?,
        };
        // Where nothing can be kept, the next start asks again.
        let _ = self.inner.cache.create().and_then(|()| index.save(&path));
        Ok(index)
    }

    /// The index that stands beside a shard, if one does.
    fn index_beside(&self, source: &Source) -> Result<Option<ShardIndex>, PipelineError> {
        let Some(beside) = source.url.with_suffix(".idx.json") else { return Ok(None) };
        let reason = match self.read_text(&beside) {
            Ok(text) => match ShardIndex::parse(&text) {
                Ok(index) => return Ok(Some(index)),
                // Some servers answer every name with a page.
                Err(reason) => reason,
            },
            // A store that does not show its list denies a name that it does not have.
            Err(Failure::NotFound | Failure::Denied(_)) => return Ok(None),
            Err(Failure::Answered(reason)) => reason,
            Err(failure) => return Err(failed(&source.url, failure)),
        };
        tracing::warn!("{beside} is no index ({reason}): the shard is read for one");
        Ok(None)
    }

    /// The index of a shard that has none: the shard is fetched, and kept only if it is a whole tar.
    fn index_of_whole(&self, source: &Source, name: &str) -> Result<ShardIndex, PipelineError> {
        tracing::info!("{} has no index beside it: it is read once as a whole", source.url);
        let file = self.file(source, name, None)?;
        let index = ShardIndex::of_file(&file, &PathBuf::from(source.url.to_string()));
        if index.is_err() {
            self.forget(source)?;
        }
        index
    }

    /// The name of a shard in the cache, and of its index. It holds what tells two shards apart.
    pub(crate) fn cache_name(&self, source: &Source) -> Result<String, PipelineError> {
        let mut identity = match &source.url {
            // A file that was written anew is another one.
            ShardUrl::File(path) => {
                let whole = path.canonicalize().and_then(|whole| Ok((fs::metadata(&whole)?, whole)));
                let (meta, whole) = whole.map_err(|error| match error.kind() {
                    io::ErrorKind::NotFound => PipelineError::MissingShard { path: path.clone() },
                    _ => PipelineError::io("open", path, error),
                })?;
                format!("{} {} {} {}", whole.display(), meta.len(), meta.mtime(), meta.mtime_nsec())
            }
            // A bucket belongs to an endpoint and an account.
            ShardUrl::Remote(url) => {
                let places = self.inner.config.options.iter().filter(|(name, _)| {
                    let name = name.to_ascii_uppercase();
                    ["ENDPOINT", "ACCOUNT_NAME", "BASE_URL"].iter().any(|part| name.contains(part))
                });
                let stored = !matches!(url.scheme(), "http" | "https");
                let mut places: Vec<String> =
                    places.filter(|_| stored).map(|(name, value)| format!(" {name}={value}")).collect();
                places.sort();
                format!("{url}{}", places.concat())
            }
            // A command depends on where it is run.
            ShardUrl::Pipe(command) => {
                format!("{} {command}", std::env::current_dir().unwrap_or_default().display())
            }
        };
        // A promise is checked when a shard comes: one that came without is another one.
        if let Some(md5) = source.md5.as_ref().filter(|_| !source.is_read_in_place()) {
            identity += &format!(" {md5}");
        }
        // A file system takes names of 255 bytes; the hash alone tells shards apart.
        let name = source.url.tar_name();
        let tail: String = name.chars().skip(name.chars().count().saturating_sub(60)).collect();
        Ok(format!("{:016x}-{tail}", xxh3_64(identity.as_bytes())))
    }
}
