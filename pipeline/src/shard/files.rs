//! Images in single files, read in place as if they were in shards.
//!
//! A shard of files has the index of a tar: each member has an offset and a length, as if the files were joined on blocks of
//! 512 bytes. No byte is copied: what is read at an offset is read from its file.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Shard;
use super::index::{BLOCK_BYTES, IndexBuilder, Member};
use super::store::Store;
use crate::PipelineError;

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

/// Returns a shard of `files` in their order, called `name`. A file that cannot be read is a bad sample, not an error.
///
/// # Errors
/// [`PipelineError::BadMember`] for a file that the index cannot hold.
pub fn of_files(name: &str, files: Vec<ImageFile>) -> Result<Shard, PipelineError> {
    let mut builder = IndexBuilder::new();
    let mut store = Files { name: name.into(), members: Vec::with_capacity(files.len()) };
    let mut end_bytes = 0;
    let bad = |path: &Path, reason: String| PipelineError::BadMember {
        path: name.into(),
        member: path.display().to_string(),
        reason,
    };
    for file in files {
        let len_bytes = std::fs::metadata(&file.path).map_or(0, |metadata| metadata.len());
        let mut members = vec![(file.extension.as_str(), len_bytes, Content::File(file.path.clone()))];
        if let Some(class) = &file.class {
            members.push(("cls", class.len() as u64, Content::Text(class.clone())));
        }
        for (extension, len_bytes, content) in members {
            let member = Member { extension, offset_bytes: end_bytes, len_bytes, check: None };
            builder.push(&file.key, member).map_err(|reason| bad(&file.path, reason))?;
            store.members.push((end_bytes, content));
            end_bytes += len_bytes.div_ceil(BLOCK_BYTES).max(1) * BLOCK_BYTES;
        }
    }
    let index = builder.finish(end_bytes).map_err(|reason| bad(Path::new(""), reason))?;
    Ok(Shard::new(Arc::new(store), index))
}

/// Bytes of a shard of files.
struct Files {
    name: String,
    /// Members and their offsets in bytes, in ascending order.
    members: Vec<(u64, Content)>,
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
            Some(Content::File(path)) => read_whole(path, buffer).map_err(|reason| {
                let member = path.display().to_string();
                PipelineError::BadMember { path: self.name.clone().into(), member, reason }
            })?,
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
}

/// Fills `buffer` with the file at `path`, which must be as long.
fn read_whole(path: &Path, buffer: &mut [u8]) -> Result<(), String> {
    let mut file = File::open(path).map_err(|error| format!("it cannot be opened: {error}"))?;
    let len_bytes = file.metadata().map_err(|error| format!("it cannot be read: {error}"))?.len();
    if len_bytes != buffer.len() as u64 {
        return Err(format!("its length is no longer {} bytes", buffer.len()));
    }
    file.read_exact(buffer).map_err(|error| format!("it cannot be read: {error}"))
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
        let shard = of_files("photos", files).expect("indexed");
        assert_eq!((shard.len(), shard.key(2)), (3, "c"));
        assert_eq!(shard.image(0).expect("read"), [7; 700]);
        assert_eq!(shard.image(1).expect("read"), [0; 0]);
        assert_eq!(shard.image(2).expect("read"), [9; 512]);
        assert_eq!(shard.classes(0).expect("read"), ["cat"]);
        assert_eq!((shard.label(1).expect("read"), shard.label(2).expect("read")), (None, Some(3)));
        assert_eq!(shard.members(2).expect("read").len(), 2);
    }

    /// What happens to a file after the list was made concerns its sample only.
    #[test]
    fn files_that_change_or_vanish_are_bad_samples() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = vec![file(folder.path(), "a", &[7; 700], None), file(folder.path(), "b", &[8; 10], None)];
        let shard = of_files("photos", files).expect("indexed");
        std::fs::write(folder.path().join("a.jpg"), [7; 701]).expect("written");
        std::fs::remove_file(folder.path().join("b.jpg")).expect("removed");
        for (i, reason) in [(0, "700 bytes"), (1, "cannot be opened")] {
            let error = shard.image(i).expect_err("a bad sample");
            assert!(error.is_sample_error() && error.to_string().contains(reason), "{error}");
        }
    }
}
