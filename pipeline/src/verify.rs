//! Whether a shard is what its index and its list say, read from its first byte to its last.

use std::io::{self, Write};
use std::path::PathBuf;

use xxhash_rust::xxh3::Xxh3;

use crate::index::ShardIndex;
use crate::receive::receive;
use crate::remote::Sink;
use crate::remote::fetch::Failure;
use crate::storage::{Source, Storage};
use crate::url::ShardUrl;
use crate::{PipelineError, RetryPolicy, Shard};

/// Hashes what passes and keeps nothing.
#[derive(Default)]
struct Hash(Xxh3);

impl Storage {
    /// Checks the members of `shard`, which is `source` opened, against the headers of the tar, and its
    /// bytes against the checksums that its index and its list give. Samples are not looked at.
    ///
    /// # Errors
    /// [`PipelineError::BadIndex`] when the members are others, [`PipelineError::OtherShard`] when the
    /// bytes are, and those of [`Storage::open`].
    pub fn verify(&self, source: &Source, shard: &Shard) -> Result<(), PipelineError> {
        let path = self.path_of(source, shard)?;
        if !ShardIndex::build(&path)?.has_members_of(shard.index()) {
            let reason = "it does not describe what the tar holds".into();
            return Err(PipelineError::BadIndex { path: self.index_of(source)?, reason });
        }
        // A shard of the cache had the MD5 when it came.
        let md5 = source.md5.clone().filter(|_| source.is_read_in_place());
        let here = Source { url: ShardUrl::File(path), len_bytes: None, md5 };
        let mut hash = Hash::default();
        let no_client = || Err(Failure::Refused("a file needs no server".into()));
        receive(&here, no_client, &RetryPolicy::default(), &mut hash)?;
        match shard.index().checksum.is_some_and(|checksum| checksum != hash.0.digest()) {
            true => {
                let reason = "its checksum differs".into();
                Err(PipelineError::OtherShard { shard: shard.name(), reason })
            }
            false => Ok(()),
        }
    }

    /// The file that holds the index of `source`.
    fn index_of(&self, source: &Source) -> Result<PathBuf, PipelineError> {
        match &source.url {
            ShardUrl::File(path) if ShardIndex::sidecar_path(path).exists() => {
                Ok(ShardIndex::sidecar_path(path))
            }
            _ => self.kept_index_path(source),
        }
    }
}

impl Sink for Hash {
    fn restart(&mut self, _total_bytes: Option<u64>) -> io::Result<()> {
        self.0 = Xxh3::new();
        Ok(())
    }
}

impl Write for Hash {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
