//! Images in single files, read in place as if they were in shards.
//!
//! A shard of files has the index of a tar: each member has an offset and a length, as if the files
//! were concatenated in blocks of 512 bytes. Nothing is copied: a read at an offset reads the file.

use std::fs::File;
use std::io;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::Shard;
use super::classes::UNKNOWN_CLASS;
use super::index::{BLOCK_BYTES, IndexBuilder, Member};
use super::store::Store;
use crate::PipelineError;
use crate::identity::FileStamp;

/// An image in a file of its own.
#[derive(Debug, Clone)]
pub struct ImageFile {
    /// Key of the sample, different from those of all other files.
    pub key: String,
    /// The file.
    pub path: PathBuf,
    /// Extension in lower case, without the leading dot.
    pub extension: String,
    /// Text of the class member of the sample: numbers or names of its classes, one a line.
    pub class: Option<String>,
    /// Mask of the image, if it has one.
    pub mask: Option<MaskFile>,
}

/// A mask in a file of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskFile {
    /// The file.
    pub path: PathBuf,
    /// Extension of the member, one of [`MASK_EXTENSIONS`](super::MASK_EXTENSIONS).
    pub extension: &'static str,
}

/// Creates a shard of `files` in their order, called `name`. A file that cannot be read is a bad
/// sample, not an error.
///
/// # Errors
/// [`PipelineError::BadMember`] for a file that the index cannot hold.
pub fn shard_from_files(name: &str, files: &[ImageFile]) -> Result<Shard, PipelineError> {
    let mut builder = IndexBuilder::new();
    let mut store = Files { name: name.into(), members: Vec::with_capacity(files.len()), stamps: 0 };
    let mut stamps = Xxh3::new();
    let mut end_bytes = 0;
    for file in files {
        let len_bytes = stamp_file(&file.path, &mut stamps);
        stamps.update(format!("{:?}\n", file.class).as_bytes());
        let mut members = vec![(file.extension.as_str(), len_bytes, Content::File(file.path.clone()))];
        let class = match &file.class {
            Some(class) => Some(class.as_str()),
            None if file.key.contains('/') => Some(UNKNOWN_CLASS),
            None => None,
        };
        if let Some(class) = class {
            members.push(("cls", class.len() as u64, Content::Text(class.to_string())));
        }
        if let Some(mask) = &file.mask {
            let len_bytes = stamp_file(&mask.path, &mut stamps);
            members.push((mask.extension, len_bytes, Content::File(mask.path.clone())));
        }
        for (extension, len_bytes, content) in members {
            let member = Member { extension, offset_bytes: end_bytes, len_bytes, check: None };
            builder.push(&file.key, member).map_err(|reason| bad_member(name, &file.path, reason))?;
            store.members.push((end_bytes, content));
            end_bytes += len_bytes.div_ceil(BLOCK_BYTES).max(1) * BLOCK_BYTES;
        }
    }
    store.stamps = stamps.digest();
    let index = builder.finish(end_bytes).map_err(|reason| bad_member(name, Path::new(""), reason))?;
    Ok(Shard::new(Arc::new(store), index))
}

/// Adds the state of the file at `path` to `stamps`, and returns its length in bytes.
fn stamp_file(path: &Path, stamps: &mut Xxh3) -> u64 {
    let metadata = std::fs::metadata(path).ok();
    match metadata.map(|metadata| FileStamp::from_metadata(&metadata)) {
        Some(stamp) => {
            stamps.update(format!("{stamp}\n").as_bytes());
            stamp.len_bytes()
        }
        None => {
            stamps.update(b"none\n");
            0
        }
    }
}

/// Creates the error for the file at `path` in the shard `name`.
fn bad_member(name: &str, path: &Path, reason: String) -> PipelineError {
    PipelineError::BadMember { path: name.into(), member: path.display().to_string(), reason }
}

/// Bytes of a shard of files.
struct Files {
    name: String,
    /// Members and their offsets in bytes, in ascending order.
    members: Vec<(u64, Content)>,
    /// Hash of the stamps of all files, and of their classes.
    stamps: u64,
}

/// Content of a member.
enum Content {
    File(PathBuf),
    Text(String),
}

impl Store for Files {
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), PipelineError> {
        match self.content_at(offset_bytes) {
            Some(Content::Text(text)) if text.len() == buffer.len() => {
                buffer.copy_from_slice(text.as_bytes())
            }
            Some(Content::File(path)) => self.read_file(path, buffer)?,
            _ => {
                let reason = format!("no member of {} bytes begins at byte {offset_bytes}", buffer.len());
                let member = String::new();
                return Err(PipelineError::BadMember { path: self.name.clone().into(), member, reason });
            }
        }
        Ok(())
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn content_hash(&self) -> Result<u64, PipelineError> {
        Ok(self.stamps)
    }

    fn single_file(&self, offset_bytes: u64) -> Option<&Path> {
        match self.content_at(offset_bytes)? {
            Content::File(path) => Some(path),
            Content::Text(_) => None,
        }
    }
}

impl Files {
    /// Returns the content of the member that holds the byte at `offset_bytes`.
    fn content_at(&self, offset_bytes: u64) -> Option<&Content> {
        let n_before = self.members.partition_point(|(start, _)| *start <= offset_bytes);
        let (_, content) = self.members.get(n_before.checked_sub(1)?)?;
        Some(content)
    }

    /// Fills `buffer` with the file at `path`, which must have the same length.
    ///
    /// # Errors
    /// [`PipelineError::BadMember`] for a file that no longer exists, may not be read or has
    /// another length; [`PipelineError::Io`] for a failure of the disk or the network, which does
    /// not mean that the file is bad.
    fn read_file(&self, path: &Path, buffer: &mut [u8]) -> Result<(), PipelineError> {
        let mut file = File::open(path).map_err(|error| self.read_error(path, error))?;
        let metadata = file.metadata().map_err(|error| self.read_error(path, error))?;
        if metadata.len() != buffer.len() as u64 {
            let reason = format!("its length is no longer {} bytes", buffer.len());
            return Err(bad_member(&self.name, path, reason));
        }
        file.read_exact(buffer).map_err(|error| self.read_error(path, error))
    }

    fn read_error(&self, path: &Path, error: io::Error) -> PipelineError {
        match error.kind() {
            ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::UnexpectedEof => {
                bad_member(&self.name, path, format!("it cannot be read: {error}"))
            }
            _ => PipelineError::io("read", path, error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(folder: &std::path::Path, key: &str, bytes: &[u8], class: Option<&str>) -> ImageFile {
        let path = folder.join(format!("{key}.jpg"));
        std::fs::write(&path, bytes).expect("written");
        let class = class.map(str::to_string);
        ImageFile { key: key.into(), path, extension: "jpg".into(), class, mask: None }
    }

    #[test]
    fn files_are_read_like_members() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = vec![
            file(folder.path(), "a", &[7; 700], Some("cat")),
            file(folder.path(), "b", &[], None),
            file(folder.path(), "c", &[9; 512], Some("3")),
        ];
        let shard = shard_from_files("photos", &files).expect("indexed");
        assert_eq!((shard.len(), shard.key(2)), (3, "c"));
        assert_eq!(shard.image(0).expect("read").bytes(), [7; 700]);
        assert_eq!(shard.image(1).expect("read").bytes(), [0; 0]);
        assert_eq!(shard.image(2).expect("read").bytes(), [9; 512]);
        assert_eq!(shard.classes(0).expect("read"), ["cat"]);
        assert_eq!((shard.label(1).expect("read"), shard.label(2).expect("read")), (None, Some(3)));
        assert_eq!(shard.members(2).expect("read").len(), 2);
        assert_eq!(shard.single_file(1), Some(folder.path().join("b.jpg").as_path()));
    }

    fn fingerprint(folder: &Path, class: Option<&str>) -> u64 {
        let path = folder.join("a.jpg");
        let class = class.map(str::to_string);
        let file = ImageFile { key: "a".into(), path, extension: "jpg".into(), class, mask: None };
        shard_from_files("photos", &[file]).expect("indexed").fingerprint().expect("stamps")
    }

    /// Files with equal names and lengths have different fingerprints, and so have files with
    /// different classes.
    #[test]
    fn fingerprints_depend_on_stamps_and_classes() {
        let folder = tempfile::tempdir().expect("a folder");
        let [one, two, moved] = ["one", "two", "moved"].map(|name| folder.path().join(name));
        for name in [&one, &two] {
            std::fs::create_dir(name).expect("created");
            file(name, "a", &[7; 700], None);
        }
        let first = fingerprint(&one, Some("cat"));
        assert_eq!(first, fingerprint(&one, Some("cat")));
        assert_ne!(first, fingerprint(&two, Some("cat")));
        assert_ne!(first, fingerprint(&one, Some("dog")));
        std::fs::rename(&one, &moved).expect("renamed");
        assert_eq!(first, fingerprint(&moved, Some("cat")));
        // Other bytes with the same modification time.
        let path = moved.join("a.jpg");
        let modified = std::fs::metadata(&path).expect("metadata").modified().expect("a time");
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::write(&path, [8; 700]).expect("written");
        let opened = File::options().append(true).open(&path).expect("opened");
        opened.set_modified(modified).expect("set");
        assert_ne!(first, fingerprint(&moved, Some("cat")));
    }

    /// A file that changes after the list was made makes only its sample unusable.
    #[test]
    fn changed_or_removed_files_are_bad_samples() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = vec![file(folder.path(), "a", &[7; 700], None), file(folder.path(), "b", &[8; 10], None)];
        let shard = shard_from_files("photos", &files).expect("indexed");
        std::fs::write(folder.path().join("a.jpg"), [7; 701]).expect("written");
        std::fs::remove_file(folder.path().join("b.jpg")).expect("removed");
        for (i, name, cause) in [(0, "a.jpg", "no longer 700 bytes"), (1, "b.jpg", "cannot be read")] {
            let error = shard.image(i).expect_err("a bad sample");
            assert!(error.is_sample_error(), "{error}");
            let PipelineError::BadMember { member, reason, .. } = &error else { panic!("{error}") };
            assert!(member.ends_with(name) && reason.contains(cause), "{error}");
        }
    }
}
