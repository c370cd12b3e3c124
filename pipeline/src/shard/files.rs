//! Images in single files, read in place as if they were in shards.
//!
//! A shard of files has the index of a tar: each member has an offset and a length, as if the files
//! were joined on blocks of 512 bytes. No byte is copied: what is read at an offset is read from
//! its file.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::index::{BLOCK_BYTES, IndexBuilder, Member};
use super::store::Store;
use super::{NO_CLASS, Shard};
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
    /// Class of the image, a number or a name.
    pub class: Option<String>,
}

/// Returns a shard of `files` in their order, called `name`. A file that cannot be read is a bad
/// sample, not an error.
///
/// # Errors
/// [`PipelineError::BadMember`] for a file that the index cannot hold.
pub fn of_files(name: &str, files: &[ImageFile]) -> Result<Shard, PipelineError> {
    let mut builder = IndexBuilder::new();
    let mut store = Files { name: name.into(), members: Vec::with_capacity(files.len()), stamps: 0 };
    let mut stamps = Xxh3::new();
    let mut end_bytes = 0;
    let bad = |path: &Path, reason: String| PipelineError::BadMember {
        path: name.into(),
        member: path.display().to_string(),
        reason,
    };
    for file in files {
        let stamp = std::fs::metadata(&file.path).ok().map(|about| FileStamp::of(&about));
        let len_bytes = stamp.map_or(0, |stamp| stamp.len_bytes());
        match stamp {
            Some(stamp) => stamps.update(format!("{stamp}\n").as_bytes()),
            None => stamps.update(b"none\n"),
        }
        stamps.update(format!("{:?}\n", file.class).as_bytes());
        let mut members = vec![(file.extension.as_str(), len_bytes, Content::File(file.path.clone()))];
        let class = match &file.class {
            Some(class) => Some(class.as_str()),
            None if file.key.contains('/') => Some(NO_CLASS),
            None => None,
        };
        if let Some(class) = class {
            members.push(("cls", class.len() as u64, Content::Text(class.to_string())));
        }
        for (extension, len_bytes, content) in members {
            let member = Member { extension, offset_bytes: end_bytes, len_bytes, check: None };
            builder.push(&file.key, member).map_err(|reason| bad(&file.path, reason))?;
            store.members.push((end_bytes, content));
            end_bytes += len_bytes.div_ceil(BLOCK_BYTES).max(1) * BLOCK_BYTES;
        }
    }
    store.stamps = stamps.digest();
    let index = builder.finish(end_bytes).map_err(|reason| bad(Path::new(""), reason))?;
    Ok(Shard::new(Arc::new(store), index))
}

/// Bytes of a shard of files.
struct Files {
    name: String,
    /// Members and their offsets in bytes, in ascending order.
    members: Vec<(u64, Content)>,
    /// Hash of the states of all files, and of their classes.
    stamps: u64,
}

/// Content of a member.
enum Content {
    File(PathBuf),
    Text(String),
}

impl Store for Files {
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<(), PipelineError> {
        let at = self.members.partition_point(|(start, _)| *start <= offset_bytes);
        match at.checked_sub(1).map(|at| &self.members[at].1) {
            Some(Content::Text(text)) if text.len() == buffer.len() => {
                buffer.copy_from_slice(text.as_bytes())
            }
            Some(Content::File(path)) => self.read_file(path, buffer)?,
            _ => {
                let reason = format!("nothing of {} bytes begins at byte {offset_bytes}", buffer.len());
                let member = String::new();
                return Err(PipelineError::BadMember { path: self.name.clone().into(), member, reason });
            }
        }
        Ok(())
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn contents(&self) -> Result<u64, PipelineError> {
        Ok(self.stamps)
    }
}

impl Files {
    /// Fills `buffer` with the file at `path`, which must be as long.
    ///
    /// # Errors
    /// [`PipelineError::BadMember`] for a file that is gone, may not be read or has another length;
    /// [`PipelineError::Io`] for a failure of the disk or the network, which says nothing about the
    /// file.
    fn read_file(&self, path: &Path, buffer: &mut [u8]) -> Result<(), PipelineError> {
        let bad = |reason: String| PipelineError::BadMember {
            path: self.name.clone().into(),
            member: path.display().to_string(),
            reason,
        };
        let failed = |error: std::io::Error| match error.kind() {
            ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::UnexpectedEof => {
                bad(format!("it cannot be read: {error}"))
            }
            _ => PipelineError::io("read", path, error),
        };
        let mut file = File::open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.len() != buffer.len() as u64 {
            return Err(bad(format!("its length is no longer {} bytes", buffer.len())));
        }
        file.read_exact(buffer).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(folder: &std::path::Path, key: &str, bytes: &[u8], class: Option<&str>) -> ImageFile {
        let path = folder.join(format!("{key}.jpg"));
        std::fs::write(&path, bytes).expect("written");
        ImageFile { key: key.into(), path, extension: "jpg".into(), class: class.map(str::to_string) }
    }

    #[test]
    fn files_are_read_like_members() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = vec![
            file(folder.path(), "a", &[7; 700], Some("cat")),
            file(folder.path(), "b", &[], None),
            file(folder.path(), "c", &[9; 512], Some("3")),
        ];
        let shard = of_files("photos", &files).expect("indexed");
        assert_eq!((shard.len(), shard.key(2)), (3, "c"));
        assert_eq!(shard.image(0).expect("read").bytes(), [7; 700]);
        assert_eq!(shard.image(1).expect("read").bytes(), [0; 0]);
        assert_eq!(shard.image(2).expect("read").bytes(), [9; 512]);
        assert_eq!(shard.classes(0).expect("read"), ["cat"]);
        assert_eq!((shard.label(1).expect("read"), shard.label(2).expect("read")), (None, Some(3)));
        assert_eq!(shard.members(2).expect("read").len(), 2);
    }

    fn fingerprint(folder: &Path, class: Option<&str>) -> u64 {
        let path = folder.join("a.jpg");
        let class = class.map(str::to_string);
        let file = ImageFile { key: "a".into(), path, extension: "jpg".into(), class };
        of_files("photos", &[file]).expect("indexed").fingerprint().expect("stamps")
    }

    /// Equal names and lengths do not make images the same: the files must be, and unchanged. A
    /// class of the same length is another one, too.
    #[test]
    fn files_are_the_same_where_the_file_system_says_so() {
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
        // Other bytes, and the time of before.
        let path = moved.join("a.jpg");
        let before = std::fs::metadata(&path).expect("there").modified().expect("a time");
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::write(&path, [8; 700]).expect("written");
        let opened = File::options().append(true).open(&path).expect("opened");
        opened.set_modified(before).expect("set");
        assert_ne!(first, fingerprint(&moved, Some("cat")));
    }

    /// What happens to a file after the list was made concerns its sample only.
    #[test]
    fn files_that_change_or_vanish_are_bad_samples() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = vec![file(folder.path(), "a", &[7; 700], None), file(folder.path(), "b", &[8; 10], None)];
        let shard = of_files("photos", &files).expect("indexed");
        std::fs::write(folder.path().join("a.jpg"), [7; 701]).expect("written");
        std::fs::remove_file(folder.path().join("b.jpg")).expect("removed");
        for (i, reason) in [(0, "700 bytes"), (1, "cannot be read")] {
            let error = shard.image(i).expect_err("a bad sample");
            assert!(error.is_sample_error() && error.to_string().contains(reason), "{error}");
        }
    }
}
