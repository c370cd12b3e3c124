//! Whether a shard is what its index and its list say, read from its first byte to its last.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use md5::{Digest, Md5};
use xxhash_rust::xxh3::Xxh3;

use crate::index::ShardIndex;
use crate::receive::hex;
use crate::storage::{Source, Storage};
use crate::url::ShardUrl;
use crate::{PipelineError, Shard};

impl Storage {
    /// Checks the members of `shard`, which is `source` opened, against the headers of the tar, and its
    /// bytes against the checksums that its index and its list give. Samples are not looked at.
    ///
    /// # Errors
    /// [`PipelineError::BadIndex`] when the members are others, [`PipelineError::OtherShard`] when the
    /// bytes are, and those of [`Storage::open`].
    pub fn verify(&self, source: &Source, shard: &Shard) -> Result<(), PipelineError> {
        let file = self.file_of(source, shard)?;
        let name = PathBuf::from(shard.name());
        if !ShardIndex::walk(&file, &name, false)?.has_members_of(shard.index()) {
            let reason = "it does not describe what the tar holds".into();
            return Err(PipelineError::BadIndex { path: self.index_of(source)?, reason });
        }
        let other = |reason| PipelineError::OtherShard { shard: shard.name(), reason };
        // The MD5 of a compressed shard is that of bytes that are gone.
        let md5 = source.md5.as_ref().filter(|_| !source.url.is_gzip());
        let (xxh3, found) = hash(&file, md5.is_some()).map_err(|e| PipelineError::io("read", &name, e))?;
        match (md5, found) {
            (Some(says), Some(found)) if !found.eq_ignore_ascii_case(says) => {
                return Err(other(format!("its list gives MD5 {says}, it has {found}")));
            }
            _ => {}
        }
        match shard.index().checksum.is_some_and(|checksum| checksum != xxh3) {
            true => Err(other("its checksum differs".into())),
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

/// XXH3-64 of a file, and its MD5 if that is wanted.
pub(crate) fn hash(file: &File, wants_md5: bool) -> io::Result<(u64, Option<String>)> {
    let (mut xxh3, mut md5) = (Xxh3::new(), wants_md5.then(Md5::new));
    let mut buffer = vec![0; 1 << 20];
    let mut at_bytes = 0;
    loop {
        let n = file.read_at(&mut buffer, at_bytes)?;
        if n == 0 {
            return Ok((xxh3.digest(), md5.map(hex)));
        }
        xxh3.update(&buffer[..n]);
        if let Some(md5) = &mut md5 {
            md5.update(&buffer[..n]);
        }
        at_bytes += n as u64;
    }
}
