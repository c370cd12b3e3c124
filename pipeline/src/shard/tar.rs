//! Tar members and WebDataset's rule for grouping them into samples.
//!
//! The key of a member is its path up to the first dot of the base name; the rest is the
//! extension, in lower case. Consecutive members with equal keys form a sample.

use std::fs::File;
use std::io;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::PipelineError;
use crate::magic::{FileFormat, FileKind, START_BYTES, recognize};

/// Block size of a tar in bytes: headers and padded data are multiples of it.
const BLOCK_BYTES: u64 = 512;

/// Number of zero bytes that end an archive.
const END_BYTES: u64 = 2 * BLOCK_BYTES;

/// Largest number of zeros that GNU tar and Python leave at the end by default: a record of 20
/// blocks and one block.
const MAX_DEFAULT_ZEROS: u64 = 21 * BLOCK_BYTES;

/// Largest number of blocks in a record (`tar -b`), 4 MiB in total.
const MAX_RECORD_BLOCKS: u64 = 8192;

/// One regular file inside a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TarMember {
    /// Path inside the tar.
    pub name: String,
    /// Start of the data, in bytes from the start of the shard.
    pub offset_bytes: u64,
    /// Length of the data, in bytes.
    pub len_bytes: u64,
}

/// Splits a member's path into key and extension; `None` if WebDataset skips the member.
///
/// Names without a dot, names that start with a dot, and paths with a part of the form `__name__`
/// are skipped.
pub(crate) fn split_key(name: &str) -> Option<(&str, String)> {
    if name.split('/').any(|part| part.len() > 4 && part.starts_with("__") && part.ends_with("__")) {
        return None;
    }
    let base = name.rfind('/').map_or(0, |slash| slash + 1);
    let dot = name[base..].find('.')? + base;
    if dot == base {
        return None;
    }
    Some((&name[..dot], name[dot + 1..].to_lowercase()))
}

/// Returns a name of bytes as text, with a byte that is not UTF-8 written as `%E9`, and a control
/// character such as a line feed as `%0A`: such names remain distinct, and fit into the lines of
/// lists.
pub fn text_of_name(name: &[u8]) -> String {
    let mut text = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_ascii_control() {
                text.push_str(&format!("%{:02X}", u32::from(c)));
            } else {
                text.push(c);
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

/// Reads the headers of a shard and lists its regular files in order. The position of `file` is not
/// changed; `path` is for messages only.
///
/// Links, devices and folders are skipped. Long names in GNU and PAX form are supported.
///
/// # Errors
/// [`PipelineError::NotATar`] when a header is invalid, [`PipelineError::Truncated`] when a
/// member's data runs past the end of the file, [`PipelineError::MissingEnd`] when the archive has
/// no end, and [`PipelineError::TrailingData`] when anything but the zeros of an end follows the
/// last member.
pub(crate) fn list_members_in(file: &File, path: &Path) -> Result<Vec<TarMember>, PipelineError> {
    let actual_bytes = file.metadata().map_err(|source| PipelineError::io("read", path, source))?.len();
    let reader = PositionedReader { file, at_bytes: 0, len_bytes: actual_bytes };
    list_members_of(BufReader::with_capacity(64 << 10, reader), actual_bytes, path)
}

/// Reader with a position of its own in a file that is shared with other readers.
struct PositionedReader<'a> {
    file: &'a File,
    at_bytes: u64,
    len_bytes: u64,
}

impl Read for PositionedReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(buffer, self.at_bytes)?;
        self.at_bytes += n as u64;
        Ok(n)
    }
}

impl Seek for PositionedReader<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let target = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at_bytes.checked_add_signed(by),
            SeekFrom::End(by) => self.len_bytes.checked_add_signed(by),
        };
        self.at_bytes = target.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(self.at_bytes)
    }
}

/// Lists the members in any reader of known length, like [`list_members_in`].
///
/// # Errors
/// As [`list_members_in`].
pub(crate) fn list_members_of(
    reader: impl Read + Seek,
    actual_bytes: u64,
    path: &Path,
) -> Result<Vec<TarMember>, PipelineError> {
    let mut reader = reader;
    let mismatch = other_format(&mut reader).map_err(|source| PipelineError::io("read", path, source))?;
    if let Some(reason) = mismatch {
        return Err(not_a_tar(path, reason));
    }
    let mut archive = ::tar::Archive::new(reader);
    let mut members: Vec<TarMember> = Vec::new();
    let mut last: Option<TarMember> = None;
    let entries = archive.entries_with_seek().map_err(|error| not_a_tar(path, error.to_string()))?;
    for entry in entries {
        let mut entry = entry.map_err(|error| match &last {
            Some(last) => unreadable_header_error(path, last, actual_bytes, &error),
            None => not_a_tar(path, "its first block is not a tar header".into()),
        })?;
        let member = TarMember {
            name: text_of_name(&entry.path_bytes()),
            offset_bytes: entry.raw_file_position(),
            len_bytes: entry.size(),
        };
        if is_sparse(&mut entry) {
            return Err(PipelineError::BadMember {
                path: path.to_path_buf(),
                member: member.name,
                reason: "it is stored as a sparse file: write the tar again without --sparse (-S)".into(),
            });
        }
        let end = member.offset_bytes.saturating_add(member.len_bytes);
        if end > actual_bytes {
            return Err(PipelineError::Truncated {
                path: path.to_path_buf(),
                member: member.name,
                needed_bytes: end,
                actual_bytes,
            });
        }
        last = Some(member.clone());
        if entry.header().entry_type().is_file() {
            members.push(member);
        }
    }
    // A block of zeros ends an archive. Without one the file may have been cut between two members.
    let end =
        last.as_ref().map_or(0, |last| (last.offset_bytes + last.len_bytes).next_multiple_of(BLOCK_BYTES));
    let last_name = last.as_ref().map_or_else(|| "its beginning".into(), |last| last.name.clone());
    if last.is_some() && end + BLOCK_BYTES > actual_bytes {
        return Err(PipelineError::MissingEnd { path: path.to_path_buf(), last: last_name });
    }
    if members.is_empty() && actual_bytes < 512 {
        return Err(not_a_tar(path, format!("it has {actual_bytes} bytes, less than one header")));
    }
    check_end(archive.into_inner(), end, actual_bytes, path, last_name)?;
    Ok(members)
}

fn not_a_tar(path: &Path, reason: String) -> PipelineError {
    PipelineError::NotATar { path: path.to_path_buf(), reason }
}

/// Names the format of a file that begins like another format, and its remedy; `None` for a file
/// that may be a tar. The position of `reader` is at the beginning afterwards.
fn other_format(reader: &mut (impl Read + Seek)) -> io::Result<Option<String>> {
    let mut start = Vec::new();
    reader.by_ref().take(START_BYTES as u64).read_to_end(&mut start)?;
    reader.seek(SeekFrom::Start(0))?;
    // The beginning of a tar is a name: one of these formats may be a name of a member, too.
    if start.len() == START_BYTES && is_header(&start) {
        return Ok(None);
    }
    Ok(recognize(&start).map(describe_other_format))
}

/// Describes a file of another format than tar, and its remedy.
fn describe_other_format(format: FileFormat) -> String {
    let remedy: String = match format.kind {
        FileKind::Image => {
            "name the folder of the images, which is read in place or packed with `ocelli shards pack`".into()
        }
        FileKind::Array => {
            "if it is an image, name its folder; features are given with --features or --like-features".into()
        }
        FileKind::Gzip => {
            "give it a name that ends in .tar.gz, or turn off Content-Encoding on the server".into()
        }
        FileKind::Compressed(program) => {
            format!("unpack it first ({program} -d), or name it as a command: 'pipe:{program} -dc FILE'")
        }
        FileKind::Archive => {
            "unpack it into a folder, and use that or pack it with `ocelli shards pack`".into()
        }
        FileKind::Parquet => "rename it to end in .parquet".into(),
        FileKind::Page => "check the address".into(),
        FileKind::Pointer => "fetch the file with `git lfs pull`".into(),
        FileKind::Weights => "weights are given with --init or --checkpoint".into(),
        FileKind::Text => "a list of images is packed into shards with `ocelli shards pack`".into(),
        FileKind::Other => "check the path".into(),
    };
    format!("it is {}: {remedy}", format.name)
}

/// Describes a file that begins with `start`, whose name is that of a tar compressed with gzip;
/// `None` if it is compressed so.
pub(crate) fn mismatch_of_gzip(start: &[u8]) -> Option<String> {
    if start.starts_with(b"\x1f\x8b") {
        return None;
    }
    if is_header(start) {
        return Some("it is a tar that is not compressed: give it a name that ends in .tar".into());
    }
    Some(match recognize(start) {
        Some(format) => describe_other_format(format),
        None => "it is not compressed with gzip, although its name says so".into(),
    })
}

/// Returns whether a member is stored without its holes, in GNU's form or in those of PAX.
fn is_sparse<R: Read>(entry: &mut ::tar::Entry<'_, R>) -> bool {
    if entry.header().entry_type().is_gnu_sparse() {
        return true;
    }
    let Ok(Some(extensions)) = entry.pax_extensions() else { return false };
    for extension in extensions.flatten() {
        if extension.key().is_ok_and(|key| key.starts_with("GNU.sparse.")) {
            return true;
        }
    }
    false
}

/// Checks that only the zeros of an end follow an archive whose last member ends at `end_bytes`. A
/// header that was overwritten by zeros also looks like an end.
fn check_end(
    mut reader: impl Read + Seek,
    end_bytes: u64,
    actual_bytes: u64,
    path: &Path,
    last: String,
) -> Result<(), PipelineError> {
    reader.seek(SeekFrom::Start(end_bytes)).map_err(|source| PipelineError::io("read", path, source))?;
    // Writers pad to records of any length (`tar -b`).
    let mut piece = vec![0; 64 << 10];
    let mut at_bytes = end_bytes;
    while at_bytes < actual_bytes {
        let n = (actual_bytes - at_bytes).min(piece.len() as u64) as usize;
        reader.read_exact(&mut piece[..n]).map_err(|source| PipelineError::io("read", path, source))?;
        if let Some(offset) = piece[..n].iter().position(|byte| *byte != 0) {
            let block = offset / BLOCK_BYTES as usize * BLOCK_BYTES as usize;
            let is_header = is_header(&piece[block..n]);
            let what = if is_header { "another member or archive" } else { "something else" };
            let found = format!("{what} starts at byte {}", at_bytes + block as u64);
            return Err(PipelineError::TrailingData { path: path.to_path_buf(), last, end_bytes, found });
        }
        at_bytes += n as u64;
    }
    let n_zeros = actual_bytes.saturating_sub(end_bytes);
    if !is_padding(n_zeros, actual_bytes) {
        let found = format!("{n_zeros} zero bytes follow, more than tar writers leave");
        return Err(PipelineError::TrailingData { path: path.to_path_buf(), last, end_bytes, found });
    }
    if n_zeros > MAX_DEFAULT_ZEROS {
        tracing::warn!(
            "shard {}: the archive ends at byte {end_bytes}, after {last}; {n_zeros} zero bytes follow, left \
             by `tar -b` or by a disk that lost the rest",
            path.display()
        );
    }
    Ok(())
}

/// Returns whether a writer of tars leaves `n_zeros` at the end of a file of `len_bytes`: two
/// blocks, and as many as fill up a record of up to 20 blocks, or of the numbers of blocks that are
/// common for `tar -b`. A disk that has lost the end of a shard may leave any number.
fn is_padding(n_zeros: u64, len_bytes: u64) -> bool {
    if n_zeros <= END_BYTES {
        return true;
    }
    for blocks in 1..=MAX_RECORD_BLOCKS {
        let is_common = blocks <= 20 || blocks.is_power_of_two() || blocks.is_multiple_of(20);
        let record_bytes = blocks * BLOCK_BYTES;
        if is_common && len_bytes.is_multiple_of(record_bytes) && n_zeros < record_bytes + END_BYTES {
            return true;
        }
    }
    false
}

/// Returns whether `bytes` begin with the header of a member.
fn is_header(bytes: &[u8]) -> bool {
    let Some(block) = bytes.first_chunk::<512>() else { return false };
    let mut header = ::tar::Header::new_old();
    header.as_mut_bytes().copy_from_slice(block);
    let sum: u32 = block
        .iter()
        .enumerate()
        .map(|(i, byte)| if (148..156).contains(&i) { 32 } else { u32::from(*byte) })
        .sum();
    header.cksum().is_ok_and(|stored| stored == sum)
}

/// Returns the error for a header after `last` that could not be read: the file ends early, or the
/// header is damaged.
fn unreadable_header_error(
    path: &Path,
    last: &TarMember,
    actual_bytes: u64,
    error: &std::io::Error,
) -> PipelineError {
    let header_end = (last.offset_bytes + last.len_bytes).next_multiple_of(512) + 512;
    if header_end > actual_bytes {
        return PipelineError::Truncated {
            path: path.to_path_buf(),
            member: format!("after {}", last.name),
            needed_bytes: header_end,
            actual_bytes,
        };
    }
    not_a_tar(path, format!("the header after {} is damaged: {error}", last.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Cursor;

    #[test]
    fn keys_follow_webdataset() {
        assert_eq!(split_key("a/b/0001.seg.PNG"), Some(("a/b/0001", "seg.png".into())));
        assert_eq!(split_key("a.b/c.jpg"), Some(("a.b/c", "jpg".into())));
        assert_eq!(split_key("noext"), None);
        assert_eq!(split_key("dir/.hidden"), None);
        assert_eq!(split_key("./x.jpg"), Some(("./x", "jpg".into())));
        assert_eq!(split_key("__meta__/x.jpg"), None);
        assert_eq!(split_key("a/__meta__"), None);
        assert_eq!(split_key("____.jpg"), Some(("____", "jpg".into())));
    }

    fn tar_with_members(names: &[&str]) -> Vec<u8> {
        let mut builder = ::tar::Builder::new(Vec::new());
        for name in names {
            let mut header = ::tar::Header::new_gnu();
            header.set_size(name.len() as u64);
            header.set_mode(0o444);
            builder.append_data(&mut header, name, name.as_bytes()).expect("in memory");
        }
        builder.into_inner().expect("in memory")
    }

    #[test]
    fn long_names_and_offsets_are_right() {
        let long = format!("{}/x.jpg", "d".repeat(180));
        let bytes = tar_with_members(&["a.jpg", &long]);
        let members =
            list_members_of(Cursor::new(&bytes), bytes.len() as u64, Path::new("t")).expect("valid");
        assert_eq!(members.len(), 2);
        for member in members {
            let start = member.offset_bytes as usize;
            let data = &bytes[start..start + member.len_bytes as usize];
            assert_eq!(data, member.name.as_bytes());
        }
    }

    fn count_members(bytes: &[u8]) -> Result<usize, PipelineError> {
        list_members_of(Cursor::new(bytes), bytes.len() as u64, Path::new("t")).map(|members| members.len())
    }

    /// Appends `n_zeros` zeros and `trailing` to the members of an archive.
    fn with_end(members: &[u8], n_zeros: usize, trailing: &[u8]) -> Vec<u8> {
        [members, &vec![0; n_zeros], trailing].concat()
    }

    #[test]
    fn archives_end_with_zeros_only() {
        let archive = tar_with_members(&["a.jpg", "b.jpg", "c.jpg"]);
        let end = 6 * 512;
        let members = &archive[..end];
        // Two blocks, and records of 20, of 64 and of 7 blocks.
        for zeros in [512, 1024, 10_240 - end, 2 * 10_240 - end, 32_768 - end, 14 * 512 - end] {
            assert_eq!(count_members(&with_end(members, zeros, &[])).ok(), Some(3), "{zeros}");
        }
        // More zeros than any record could need.
        assert!(matches!(
            count_members(&with_end(members, 8 << 20, &[])),
            Err(PipelineError::TrailingData { .. })
        ));
        for (what, bytes) in [
            ("starts at byte 4096", with_end(members, 1024, b"junk")),
            ("another member or archive starts at byte 4096", [&archive[..], &archive].concat()),
            ("something else starts at byte 203776", with_end(members, 200_704, b"junk")),
        ] {
            let error = count_members(&bytes).expect_err(what);
            let PipelineError::TrailingData { last, end_bytes, found, .. } = &error else {
                panic!("{error}")
            };
            assert_eq!((last.as_str(), *end_bytes), ("c.jpg", 3072));
            assert!(found.contains(what), "{error}");
        }
        for member in 0..3 {
            let mut holed = archive.clone();
            holed[member * 1024..][..512].fill(0);
            assert!(matches!(count_members(&holed), Err(PipelineError::TrailingData { .. })), "{member}");
        }
        let mut tail = [members, &vec![7; 20_000][..]].concat();
        tail[1024..].fill(0);
        assert!(matches!(count_members(&tail), Err(PipelineError::TrailingData { .. })));
    }

    /// Links could point to local files, and devices and folders hold no bytes.
    #[test]
    fn only_regular_files_are_members() {
        use ::tar::EntryType;
        let mut builder = ::tar::Builder::new(Vec::new());
        for (name, kind) in [
            ("soft.jpg", EntryType::Symlink),
            ("hard.jpg", EntryType::Link),
            ("char.jpg", EntryType::Char),
            ("block.jpg", EntryType::Block),
            ("pipe.jpg", EntryType::Fifo),
            ("folder.jpg", EntryType::Directory),
            ("real.jpg", EntryType::Regular),
        ] {
            let mut header = ::tar::Header::new_gnu();
            header.set_entry_type(kind);
            header.set_size(0);
            header.set_mode(0o644);
            if matches!(kind, EntryType::Symlink | EntryType::Link) {
                header.set_link_name("/etc/passwd").expect("short");
            }
            builder.append_data(&mut header, name, &[][..]).expect("in memory");
        }
        let bytes = builder.into_inner().expect("in memory");
        let members =
            list_members_of(Cursor::new(&bytes), bytes.len() as u64, Path::new("t")).expect("valid");
        assert_eq!(members.iter().map(|member| member.name.as_str()).collect::<Vec<_>>(), ["real.jpg"]);
    }

    proptest! {
        /// With a block of zeros anywhere, all members are listed or an error is returned. (Member
        /// data has its own checks.)
        #[test]
        fn zeroed_blocks_never_hide_members(hole in 0usize..60) {
            let names: Vec<String> = (0..30).map(|i| format!("{i}.jpg")).collect();
            let mut bytes = tar_with_members(&names.iter().map(String::as_str).collect::<Vec<_>>());
            bytes[hole * 512..][..512].fill(0);
            if let Ok(n) = count_members(&bytes) { prop_assert_eq!(n, 30); }
        }

        #[test]
        fn damaged_bytes_never_panic(at in 0usize..2048, value: u8, len in 0usize..3000) {
            let mut bytes = tar_with_members(&["a.jpg", "b.jpg"]);
            if at < bytes.len() { bytes[at] = value; }
            bytes.truncate(len);
            let _ = list_members_of(Cursor::new(&bytes), bytes.len() as u64, Path::new("t"));
        }
    }
}
