//! Index of a shard in memory: the key of each sample, and the extension, offset and length of each
//! member, with a check of its bytes if it is known. [`crate::shard::sidecar`] stores it on disk.

use std::collections::HashMap;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Block size of a tar in bytes: the data of a member starts on a multiple of it.
pub(super) const BLOCK_BYTES: u64 = 512;

/// Maximum number of members in a sample. Names with an early dot, such as `img.000001.jpg`, all
/// share one key.
pub(super) const MAX_MEMBERS: usize = 1000;

/// Locations of the samples of one shard. Keys are in one arena and members in columns, and samples
/// with the same list of extensions share it, so that a sample of two members and a key of eight
/// characters takes 38 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ShardIndex {
    /// Length of the shard file when it was indexed.
    pub shard_bytes: u64,
    /// XXH3-64 of the whole file, if it is known.
    pub checksum: Option<u64>,
    keys: String,
    key_ends: Vec<u32>,
    member_ends: Vec<u32>,
    /// Index into `layouts`, by sample.
    sample_layouts: Vec<u16>,
    /// Extensions of a sample's members, in the order of the tar.
    layouts: Vec<Vec<String>>,
    /// Offset of each member in blocks; 32 bits cover 2 TiB.
    member_blocks: Vec<u32>,
    member_lens: Vec<u32>,
    /// Check ([`short_checksum`]) of each member; empty if unknown.
    member_checks: Vec<u16>,
}

/// One member of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member<'a> {
    /// Extension in lower case, without the leading dot: `jpg`, `cls`, `seg.png`.
    pub extension: &'a str,
    /// Start of the data, in bytes from the start of the shard.
    pub offset_bytes: u64,
    /// Length of the data, in bytes.
    pub len_bytes: u64,
    /// Check ([`short_checksum`]) of the data, if known.
    pub check: Option<u16>,
}

/// Returns the low 16 bits of the XXH3-64 of a member's data, by which a changed shard is detected.
/// A change of `n` members is missed with probability 2^(-16 n).
pub(crate) fn short_checksum(data: &[u8]) -> u16 {
    xxh3_64(data) as u16
}

impl ShardIndex {
    /// Returns the number of samples.
    pub fn len(&self) -> usize {
        self.key_ends.len()
    }

    /// Returns whether the shard holds no sample.
    pub fn is_empty(&self) -> bool {
        self.key_ends.is_empty()
    }

    /// Returns the key of sample `i`.
    pub fn key(&self, i: usize) -> &str {
        let start = if i == 0 { 0 } else { self.key_ends[i - 1] as usize };
        &self.keys[start..self.key_ends[i] as usize]
    }

    /// Returns whether both hold the same samples at the same offsets in a shard of the same
    /// length. Checksums are not compared.
    pub fn has_same_members_as(&self, other: &Self) -> bool {
        self.without_checksums() == other.without_checksums()
    }

    fn without_checksums(&self) -> Self {
        Self { checksum: None, member_checks: Vec::new(), ..self.clone() }
    }

    /// Returns the members of sample `i`, in the order of the tar.
    pub fn members(&self, i: usize) -> impl Iterator<Item = Member<'_>> {
        let start = if i == 0 { 0 } else { self.member_ends[i - 1] as usize };
        let extensions = &self.layouts[usize::from(self.sample_layouts[i])];
        extensions.iter().zip(start..).map(|(extension, at)| Member {
            extension,
            offset_bytes: u64::from(self.member_blocks[at]) * BLOCK_BYTES,
            len_bytes: u64::from(self.member_lens[at]),
            check: self.member_checks.get(at).copied(),
        })
    }

    /// Returns a hash of the keys, extensions, offsets and lengths in the index, without checksums.
    pub fn listing_hash(&self) -> u64 {
        let mut hash = Xxh3::new();
        hash.update(&self.shard_bytes.to_le_bytes());
        for i in 0..self.len() {
            hash.update(self.key(i).as_bytes());
            hash.update(&[0]);
            for member in self.members(i) {
                hash.update(member.extension.as_bytes());
                hash.update(&[0]);
                hash.update(&member.offset_bytes.to_le_bytes());
                hash.update(&member.len_bytes.to_le_bytes());
            }
        }
        hash.digest()
    }

    /// Returns the number of bytes that the index takes in memory.
    pub fn memory_bytes(&self) -> usize {
        self.keys.capacity()
            + 4 * (self.key_ends.capacity() + self.member_ends.capacity())
            + 4 * (self.member_blocks.capacity() + self.member_lens.capacity())
            + 2 * (self.sample_layouts.capacity() + self.member_checks.capacity())
    }

    /// Returns the member of sample `i` with the first of `extensions` that the sample has.
    pub fn member(&self, i: usize, extensions: &[&str]) -> Option<Member<'_>> {
        extensions.iter().find_map(|wanted| self.members(i).find(|m| m.extension == *wanted))
    }
}

/// Groups members into samples, in the order of the tar.
#[derive(Debug, Default)]
pub(crate) struct IndexBuilder {
    index: ShardIndex,
    layout_ids: HashMap<Vec<String>, u16>,
    /// Key and extensions of the sample that further members may join.
    open: Option<(String, Vec<String>)>,
}

impl IndexBuilder {
    /// Creates an empty builder.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds a member to the current sample, or to a new one if its key differs. Either all members
    /// have a check or none.
    ///
    /// # Errors
    /// Returns the reason as text: an extension twice in one sample, or a size that the index
    /// cannot hold.
    pub(crate) fn push(&mut self, key: &str, member: Member<'_>) -> Result<(), String> {
        if !member.offset_bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(format!("offset {} is not a multiple of {BLOCK_BYTES}", member.offset_bytes));
        }
        let block = u32::try_from(member.offset_bytes / BLOCK_BYTES).map_err(|_| "offset above 2 TiB")?;
        let len = u32::try_from(member.len_bytes).map_err(|_| "member larger than 4 GiB")?;
        if self.open.as_ref().is_none_or(|(open, _)| open != key) {
            self.close_sample()?;
        }
        let (_, extensions) = self.open.get_or_insert_with(|| (key.to_string(), Vec::new()));
        if extensions.iter().any(|extension| extension == member.extension) {
            return Err("duplicate extension".into());
        }
        if extensions.len() == MAX_MEMBERS {
            return Err(format!("more than {MAX_MEMBERS} members have the key {key}"));
        }
        extensions.push(member.extension.to_string());
        let first = self.index.member_lens.is_empty();
        if !first && member.check.is_none() != self.index.member_checks.is_empty() {
            return Err("some members have a checksum and some do not".into());
        }
        self.index.member_blocks.push(block);
        self.index.member_lens.push(len);
        self.index.member_checks.extend(member.check);
        Ok(())
    }

    /// Ends the current sample: a further member starts another one, even with the same key.
    ///
    /// # Errors
    /// As [`IndexBuilder::push`].
    pub(crate) fn end_sample(&mut self) -> Result<(), String> {
        self.close_sample()
    }

    /// Returns the finished index of a shard of `shard_bytes`.
    ///
    /// # Errors
    /// As [`IndexBuilder::push`].
    pub(crate) fn finish(mut self, shard_bytes: u64) -> Result<ShardIndex, String> {
        self.close_sample()?;
        self.index.shard_bytes = shard_bytes;
        self.index.keys.shrink_to_fit();
        self.index.key_ends.shrink_to_fit();
        self.index.member_ends.shrink_to_fit();
        self.index.sample_layouts.shrink_to_fit();
        self.index.member_blocks.shrink_to_fit();
        self.index.member_lens.shrink_to_fit();
        self.index.member_checks.shrink_to_fit();
        Ok(self.index)
    }

    fn close_sample(&mut self) -> Result<(), String> {
        let Some((key, extensions)) = self.open.take() else { return Ok(()) };
        let layout = match self.layout_ids.get(&extensions) {
            Some(layout) => *layout,
            None => {
                let layout = u16::try_from(self.index.layouts.len())
                    .map_err(|_| "more than 65,536 different lists of extensions")?;
                self.index.layouts.push(extensions.clone());
                self.layout_ids.insert(extensions, layout);
                layout
            }
        };
        self.index.keys.push_str(&key);
        self.index
            .key_ends
            .push(u32::try_from(self.index.keys.len()).map_err(|_| "keys take more than 4 GiB")?);
        self.index.member_ends.push(self.index.member_lens.len() as u32);
        self.index.sample_layouts.push(layout);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(extension: &str, offset_bytes: u64) -> Member<'_> {
        Member { extension, offset_bytes, len_bytes: 300, check: None }
    }

    #[test]
    fn consecutive_members_with_equal_keys_form_a_sample() {
        let mut builder = IndexBuilder::new();
        for (key, ext) in [("a", "jpg"), ("a", "cls"), ("b", "jpg"), ("a", "jpg")] {
            builder.push(key, member(ext, 0)).expect("valid");
        }
        let index = builder.finish(10).expect("valid");
        assert_eq!(index.len(), 3);
        assert_eq!(index.member(0, &["png", "cls"]).map(|m| m.extension), Some("cls"));
        assert_eq!(index.members(1).count(), 1);
        assert_eq!(index.key(2), "a");
    }

    #[test]
    fn duplicate_extensions_are_refused() {
        let mut builder = IndexBuilder::new();
        builder.push("a", member("jpg", 0)).expect("first");
        assert!(builder.push("a", member("jpg", 512)).is_err());
    }

    /// A million samples of two members take less than 40 MB, including checks.
    #[test]
    fn index_takes_less_than_forty_bytes_per_sample() {
        let mut builder = IndexBuilder::new();
        for i in 0..20_000u64 {
            for (number, extension) in ["jpg", "cls"].into_iter().enumerate() {
                let offset = 512 + (2 * i + number as u64) * 1024;
                let member = Member { check: Some(7), ..member(extension, offset) };
                builder.push(&format!("{i:08}"), member).expect("valid");
            }
        }
        let index = builder.finish(1 << 40).expect("valid");
        let last = index.member(19_999, &["cls"]).expect("a class");
        assert_eq!((last.offset_bytes, last.check), (512 + 39_999 * 1024, Some(7)));
        assert!(index.memory_bytes() * 50 < 40_000_000, "{} bytes", index.memory_bytes());
    }

    #[test]
    fn unaligned_offsets_are_refused() {
        assert!(IndexBuilder::new().push("a", member("jpg", 5)).is_err());
    }
}
