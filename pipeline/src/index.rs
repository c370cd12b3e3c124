//! The index of a shard: for every sample its key and, for every member, extension, offset and
//! length. Written beside the shard as `<shard>.idx.json`, or built by walking the tar headers.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::tar::{list_members, split_key};
use crate::{PipelineError, file};

const VERSION: u32 = 1;

/// Data of a member starts on a multiple of this, by the tar format.
const BLOCK_BYTES: u64 = 512;

/// Where the samples of one shard lie. Keys sit in one arena and members in columns, so that a
/// sample of two members and a key of eight characters takes 36 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ShardIndex {
    /// Length of the shard file when it was indexed.
    pub shard_bytes: u64,
    keys: String,
    key_ends: Vec<u32>,
    member_ends: Vec<u32>,
    /// Start of each member in blocks, which reaches 2 TiB.
    member_blocks: Vec<u32>,
    member_lens: Vec<u32>,
    member_extensions: Vec<u16>,
    extensions: Vec<String>,
}

/// One member of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member<'a> {
    /// In lower case, without the leading dot: `jpg`, `cls`, `seg.png`.
    pub extension: &'a str,
    /// Start of its data in the shard.
    pub offset_bytes: u64,
    /// Length of its data.
    pub len_bytes: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sidecar {
    version: u32,
    shard_bytes: u64,
    samples: Vec<(String, Vec<SidecarMember>)>,
}

/// Extension, offset and length.
type SidecarMember = (String, u64, u32);

impl ShardIndex {
    /// Walks the headers of the shard at `path`.
    ///
    /// # Errors
    /// As [`list_members`]; [`PipelineError::BadMember`] when a sample has an extension twice.
    pub fn build(path: &Path) -> Result<Self, PipelineError> {
        let members = list_members(path)?;
        let shard_bytes = fs::metadata(path).map_err(|e| PipelineError::io("read", path, e))?.len();
        let mut index = IndexBuilder::new();
        for member in &members {
            let Some((key, extension)) = split_key(&member.name) else { continue };
            let bad = |reason| PipelineError::BadMember {
                path: path.to_path_buf(),
                member: member.name.clone(),
                reason,
            };
            index.push(key, &extension, member.offset_bytes, member.len_bytes).map_err(bad)?;
        }
        Ok(index.finish(shard_bytes))
    }

    /// The sidecar's name for the shard at `path`.
    pub fn sidecar_path(path: &Path) -> PathBuf {
        let mut name = path.as_os_str().to_owned();
        name.push(".idx.json");
        PathBuf::from(name)
    }

    /// Reads the sidecar of the shard at `path` if there is one and it fits the shard's length,
    /// else builds the index.
    ///
    /// # Errors
    /// [`PipelineError::BadIndex`] for a sidecar that cannot be parsed or points outside the
    /// shard; otherwise as [`ShardIndex::build`].
    pub fn open(path: &Path) -> Result<Self, PipelineError> {
        let sidecar = Self::sidecar_path(path);
        let text = match fs::read(&sidecar) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Self::build(path),
            Err(error) => return Err(PipelineError::io("read", &sidecar, error)),
        };
        let actual_bytes = match fs::metadata(path) {
            Ok(meta) => meta.len(),
            Err(_) => return Err(PipelineError::MissingShard { path: path.to_path_buf() }),
        };
        let index =
            Self::parse(&text).map_err(|reason| PipelineError::BadIndex { path: sidecar.clone(), reason })?;
        if index.shard_bytes != actual_bytes {
            // The sidecar describes another file: one that was cut off, or one that was rewritten.
            // Walking the headers names the member where it breaks.
            let found = Self::build(path)?;
            if actual_bytes < index.shard_bytes && found.len() < index.len() {
                // It was cut between two members, which no header tells.
                return Err(PipelineError::Truncated {
                    path: path.to_path_buf(),
                    member: index.key(found.len()).to_string(),
                    needed_bytes: index.shard_bytes,
                    actual_bytes,
                });
            }
            return Ok(found);
        }
        Ok(index)
    }

    /// Parses a sidecar. Never panics, whatever the bytes.
    ///
    /// # Errors
    /// The reason in words.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let sidecar: Sidecar = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        if sidecar.version != VERSION {
            return Err(format!("version {} is not {VERSION}", sidecar.version));
        }
        let mut index = IndexBuilder::new();
        for (key, members) in &sidecar.samples {
            for (extension, offset_bytes, len_bytes) in members {
                let end = offset_bytes.checked_add(u64::from(*len_bytes));
                if end.is_none_or(|end| end > sidecar.shard_bytes) {
                    return Err(format!("sample {key}, member {extension} lies outside the shard"));
                }
                index
                    .push(key, extension, *offset_bytes, u64::from(*len_bytes))
                    .map_err(|reason| format!("sample {key}, member {extension}: {reason}"))?;
            }
        }
        Ok(index.finish(sidecar.shard_bytes))
    }

    /// Writes the sidecar of the shard at `path`, through a temporary file.
    ///
    /// # Errors
    /// [`PipelineError::Io`].
    pub fn save(&self, path: &Path) -> Result<(), PipelineError> {
        let target = Self::sidecar_path(path);
        let samples = (0..self.len())
            .map(|i| {
                let members = self
                    .members(i)
                    .map(|m| (m.extension.to_string(), m.offset_bytes, m.len_bytes as u32))
                    .collect();
                (self.key(i).to_string(), members)
            })
            .collect();
        let sidecar = Sidecar { version: VERSION, shard_bytes: self.shard_bytes, samples };
        let write = || -> std::io::Result<()> {
            let mut text = serde_json::to_vec(&sidecar)?;
            text.push(b'\n');
            file::replace(&target, &text)
        };
        write().map_err(|error| PipelineError::io("write", &target, error))
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.key_ends.len()
    }

    /// Whether the shard holds no sample.
    pub fn is_empty(&self) -> bool {
        self.key_ends.is_empty()
    }

    /// Key of sample `i`.
    pub fn key(&self, i: usize) -> &str {
        let start = if i == 0 { 0 } else { self.key_ends[i - 1] as usize };
        &self.keys[start..self.key_ends[i] as usize]
    }

    /// Members of sample `i`, in the order of the tar.
    pub fn members(&self, i: usize) -> impl Iterator<Item = Member<'_>> {
        let start = if i == 0 { 0 } else { self.member_ends[i - 1] };
        (start as usize..self.member_ends[i] as usize).map(|at| Member {
            extension: &self.extensions[usize::from(self.member_extensions[at])],
            offset_bytes: u64::from(self.member_blocks[at]) * BLOCK_BYTES,
            len_bytes: u64::from(self.member_lens[at]),
        })
    }

    /// Bytes that this index holds in memory.
    pub fn memory_bytes(&self) -> usize {
        self.keys.capacity()
            + 4 * (self.key_ends.capacity() + self.member_ends.capacity())
            + 4 * (self.member_blocks.capacity() + self.member_lens.capacity())
            + 2 * self.member_extensions.capacity()
    }

    /// The member of sample `i` with the first of `extensions` that it has.
    pub fn member(&self, i: usize, extensions: &[&str]) -> Option<Member<'_>> {
        extensions.iter().find_map(|wanted| self.members(i).find(|m| m.extension == *wanted))
    }
}

/// Groups members into samples as they come.
#[derive(Debug, Default)]
pub struct IndexBuilder {
    index: ShardIndex,
    extension_ids: HashMap<String, u16>,
    open: bool,
}

impl IndexBuilder {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a member; one with the key of the member before it joins that sample.
    ///
    /// # Errors
    /// The reason in words: an extension twice in one sample, or a size the index cannot hold.
    pub fn push(
        &mut self,
        key: &str,
        extension: &str,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<(), String> {
        if !offset_bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(format!("offset {offset_bytes} is no multiple of {BLOCK_BYTES}"));
        }
        let block = u32::try_from(offset_bytes / BLOCK_BYTES).map_err(|_| "offset above 2 TiB")?;
        let len = u32::try_from(len_bytes).map_err(|_| "member above 4 GiB")?;
        let same = self.open && self.index.key(self.index.len() - 1) == key;
        if !same {
            self.index.keys.push_str(key);
            self.index.key_ends.push(u32::try_from(self.index.keys.len()).map_err(|_| "keys above 4 GiB")?);
            self.index.member_ends.push(self.index.member_lens.len() as u32);
            self.open = true;
        } else if self.index.members(self.index.len() - 1).any(|m| m.extension == extension) {
            return Err("the extension stands twice".into());
        }
        let extension = self.extension_id(extension)?;
        self.index.member_blocks.push(block);
        self.index.member_lens.push(len);
        self.index.member_extensions.push(extension);
        if let Some(end) = self.index.member_ends.last_mut() {
            *end += 1;
        }
        Ok(())
    }

    fn extension_id(&mut self, extension: &str) -> Result<u16, String> {
        if let Some(id) = self.extension_ids.get(extension) {
            return Ok(*id);
        }
        let id = u16::try_from(self.index.extensions.len()).map_err(|_| "more than 65,536 extensions")?;
        self.index.extensions.push(extension.to_string());
        self.extension_ids.insert(extension.to_string(), id);
        Ok(id)
    }

    /// The finished index of a shard of `shard_bytes`.
    pub fn finish(mut self, shard_bytes: u64) -> ShardIndex {
        self.index.shard_bytes = shard_bytes;
        self.index.keys.shrink_to_fit();
        self.index.key_ends.shrink_to_fit();
        self.index.member_ends.shrink_to_fit();
        self.index.member_blocks.shrink_to_fit();
        self.index.member_lens.shrink_to_fit();
        self.index.member_extensions.shrink_to_fit();
        self.index
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn consecutive_members_group_and_others_do_not() {
        let mut builder = IndexBuilder::new();
        for (key, ext) in [("a", "jpg"), ("a", "cls"), ("b", "jpg"), ("a", "jpg")] {
            builder.push(key, ext, 0, 1).expect("valid");
        }
        let index = builder.finish(10);
        assert_eq!(index.len(), 3);
        assert_eq!(index.member(0, &["png", "cls"]).map(|m| m.extension), Some("cls"));
        assert_eq!(index.key(2), "a");
    }

    #[test]
    fn an_extension_twice_in_a_sample_is_refused() {
        let mut builder = IndexBuilder::new();
        builder.push("a", "jpg", 0, 1).expect("first");
        assert!(builder.push("a", "jpg", 512, 1).is_err());
    }

    #[test]
    fn a_member_outside_the_shard_is_refused() {
        let text = br#"{"version":1,"shard_bytes":100,"samples":[["a",[["jpg",0,101]]]]}"#;
        assert!(ShardIndex::parse(text).expect_err("outside").contains("outside"));
    }

    /// A million samples of two members stay below 40 MB.
    #[test]
    fn a_large_index_is_small() {
        let mut builder = IndexBuilder::new();
        for i in 0..20_000u64 {
            for (member, extension) in ["jpg", "cls"].into_iter().enumerate() {
                let offset = 512 + (2 * i + member as u64) * 1024;
                builder.push(&format!("{i:08}"), extension, offset, 300).expect("valid");
            }
        }
        let index = builder.finish(1 << 40);
        assert_eq!(index.member(19_999, &["cls"]).map(|m| m.offset_bytes), Some(512 + 39_999 * 1024));
        assert!(index.memory_bytes() * 50 < 40_000_000, "{} bytes", index.memory_bytes());
    }

    #[test]
    fn a_member_off_its_block_is_refused() {
        assert!(IndexBuilder::new().push("a", "jpg", 5, 1).is_err());
    }

    proptest! {
        #[test]
        fn any_sidecar_bytes_are_answered_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = ShardIndex::parse(&bytes);
        }

        #[test]
        fn a_sidecar_survives_the_disk(lens in proptest::collection::vec(1u64..500, 1..20)) {
            let folder = tempfile::tempdir().expect("temporary folder");
            let shard = folder.path().join("s.tar");
            let mut builder = IndexBuilder::new();
            let mut at = 512;
            for (i, len) in lens.iter().enumerate() {
                builder.push(&format!("k{i}"), "jpg", at, *len).expect("valid");
                builder.push(&format!("k{i}"), "cls", at + 512, 1).expect("valid");
                at += 1024;
            }
            std::fs::write(&shard, vec![0; at as usize]).expect("written");
            let index = builder.finish(at);
            index.save(&shard).expect("saved");
            prop_assert_eq!(ShardIndex::open(&shard).expect("opened"), index);
        }
    }
}
