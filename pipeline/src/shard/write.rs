//! Writing of shards: USTAR archives with fixed times and owners, so that the same samples produce
//! the same bytes, each with its index beside it.

use std::fs;
use std::fs::File;
use std::io;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::index::{IndexBuilder, Member, short_checksum};
use super::leads_out_of_folder;
use super::tar::split_key;
use crate::PipelineError;
use crate::file::temporary;
use crate::shard::sidecar;

/// Limits of a shard; it is full when either is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardLimits {
    /// Maximum number of samples in a shard.
    pub max_samples: u64,
    /// Maximum size of a shard in bytes, headers and padding included; `None` for any size.
    pub max_bytes: Option<u64>,
}

impl ShardLimits {
    /// Returns whether a shard of `n_samples` and `bytes` has no room for another sample of
    /// `sample_bytes`. One sample always fits.
    fn is_full(&self, n_samples: u64, bytes: u64, sample_bytes: u64) -> bool {
        let size_bytes = bytes.saturating_add(sample_bytes);
        let is_too_large = self.max_bytes.is_some_and(|max_bytes| size_bytes > max_bytes);
        n_samples > 0 && (n_samples >= self.max_samples || is_too_large)
    }
}

/// Writes `<folder>/<prefix>-000000.tar` and so on.
pub struct ShardWriter {
    folder: PathBuf,
    prefix: String,
    limits: ShardLimits,
    /// `true` if existing shards are kept; otherwise they are an error.
    resume: bool,
    current: Option<Current>,
    written: Vec<PathBuf>,
    n_samples: u64,
}

/// The shard that samples are added to.
struct Current {
    path: PathBuf,
    /// Open file; `None` for a shard that an earlier run has written.
    file: Option<ShardFile>,
    n_samples: u64,
    bytes: u64,
}

/// One shard that is being written. It has a temporary name until [`ShardFile::finish`],
/// so that a shard with its final name is complete.
pub struct ShardFile {
    path: PathBuf,
    temporary: PathBuf,
    builder: ::tar::Builder<HashingWriter>,
    index: IndexBuilder,
    last_key: Option<String>,
    bytes: u64,
}

/// A file that hashes what is written to it.
struct HashingWriter {
    file: BufWriter<File>,
    hash: Xxh3,
}

const BLOCK_BYTES: u64 = 512;

impl ShardWriter {
    /// Creates a writer, and the folder that it writes into.
    ///
    /// # Errors
    /// [`PipelineError::Io`].
    pub fn new(folder: &Path, prefix: &str, limits: ShardLimits) -> Result<Self, PipelineError> {
        fs::create_dir_all(folder).map_err(|e| PipelineError::io("create folder", folder, e))?;
        Ok(Self {
            folder: folder.to_path_buf(),
            prefix: prefix.to_string(),
            limits,
            resume: false,
            current: None,
            written: Vec::new(),
            n_samples: 0,
        })
    }

    /// Creates a writer that continues where an earlier one was stopped. It must receive the same
    /// samples in the same order: existing shards are counted and not written again.
    ///
    /// # Errors
    /// [`PipelineError::Io`].
    pub fn resume(folder: &Path, prefix: &str, limits: ShardLimits) -> Result<Self, PipelineError> {
        Ok(Self { resume: true, ..Self::new(folder, prefix, limits)? })
    }

    /// Adds one sample: a key without dots, and its members as (extension, bytes).
    ///
    /// # Errors
    /// [`PipelineError::Exists`] when a shard of that name already exists,
    /// [`PipelineError::BadMember`], [`PipelineError::Io`].
    pub fn add(&mut self, key: &str, members: &[(&str, &[u8])]) -> Result<(), PipelineError> {
        let sample_bytes =
            sample_bytes(key, members.iter().map(|(extension, data)| (*extension, data.len() as u64)));
        let is_full = match &self.current {
            Some(shard) => self.limits.is_full(shard.n_samples, shard.bytes, sample_bytes),
            None => false,
        };
        if is_full {
            self.close_shard()?;
        }
        let mut shard = match self.current.take() {
            Some(shard) => shard,
            None => self.open_shard()?,
        };
        if let Some(file) = &mut shard.file {
            file.add(key, members)?;
        }
        shard.n_samples += 1;
        shard.bytes += sample_bytes;
        self.n_samples += 1;
        self.current = Some(shard);
        Ok(())
    }

    /// Returns the number of samples added so far.
    pub fn n_samples(&self) -> u64 {
        self.n_samples
    }

    /// Closes the last shard and returns the paths of all.
    ///
    /// # Errors
    /// [`PipelineError::Io`].
    pub fn finish(mut self) -> Result<Vec<PathBuf>, PipelineError> {
        self.close_shard()?;
        Ok(self.written)
    }

    fn open_shard(&self) -> Result<Current, PipelineError> {
        let path = self.folder.join(format!("{}-{:06}.tar", self.prefix, self.written.len()));
        let is_written = self.resume && path.exists();
        let file = if is_written { None } else { Some(ShardFile::create(&path)?) };
        Ok(Current { path, file, n_samples: 0, bytes: 2 * BLOCK_BYTES })
    }

    fn close_shard(&mut self) -> Result<(), PipelineError> {
        if let Some(shard) = self.current.take() {
            if let Some(file) = shard.file {
                file.finish()?;
            }
            self.written.push(shard.path);
        }
        Ok(())
    }
}

impl ShardFile {
    /// Creates a shard whose final path is `path`.
    ///
    /// # Errors
    /// [`PipelineError::Exists`] when `path` exists, [`PipelineError::Io`].
    pub fn create(path: &Path) -> Result<Self, PipelineError> {
        if path.exists() {
            return Err(PipelineError::Exists { path: path.to_path_buf() });
        }
        let temporary = temporary(path);
        let file = File::create(&temporary).map_err(|e| PipelineError::io("create", &temporary, e))?;
        Ok(Self {
            path: path.to_path_buf(),
            temporary,
            builder: ::tar::Builder::new(HashingWriter {
                file: BufWriter::with_capacity(1 << 20, file),
                hash: Xxh3::new(),
            }),
            index: IndexBuilder::new(),
            last_key: None,
            bytes: 2 * BLOCK_BYTES,
        })
    }

    /// Adds one sample: a key without dots, and its members as (extension, bytes).
    ///
    /// # Errors
    /// [`PipelineError::BadMember`], [`PipelineError::Io`].
    pub fn add(&mut self, key: &str, members: &[(&str, &[u8])]) -> Result<(), PipelineError> {
        if self.last_key.as_deref() == Some(key) {
            let path = self.path.clone();
            let member = key.to_string();
            let reason = "the previous sample has the same key: both would be read as one".into();
            return Err(PipelineError::BadMember { path, member, reason });
        }
        for (extension, data) in members {
            self.append(key, extension, data)?;
        }
        self.last_key = Some(key.to_string());
        Ok(())
    }

    /// Ends the tar, writes its index, and renames it to its final name. The index is written
    /// first: a shard with its final name has one.
    ///
    /// # Errors
    /// [`PipelineError::Io`].
    pub fn finish(self) -> Result<PathBuf, PipelineError> {
        let (len_bytes, hash) = self
            .builder
            .into_inner()
            .and_then(HashingWriter::finish)
            .map_err(|error| PipelineError::io("write", &self.temporary, error))?;
        let mut index = self
            .index
            .finish(len_bytes)
            .map_err(|reason| PipelineError::NotATar { path: self.path.clone(), reason })?;
        index.checksum = Some(hash);
        sidecar::save(&index, &self.path)?;
        fs::rename(&self.temporary, &self.path)
            .map_err(|error| PipelineError::io("rename", &self.path, error))?;
        sidecar::touch(&self.path);
        Ok(self.path)
    }

    fn append(&mut self, key: &str, extension: &str, data: &[u8]) -> Result<(), PipelineError> {
        let name = member_name(key, extension);
        let key = split_key(&name).map_or(key, |(key, _)| key);
        if leads_out_of_folder(&name) {
            let reason = "its name points outside the folder; rename it with --renumber".into();
            return Err(PipelineError::BadMember { path: self.path.clone(), member: name, reason });
        }
        self.append_data(&name, data).map_err(|error| PipelineError::io("write", &self.temporary, error))?;
        let len_bytes = data.len() as u64;
        // `bytes` counts the two blocks that end a tar.
        let end_bytes = self.bytes - 2 * BLOCK_BYTES + member_bytes(&name, len_bytes);
        let offset_bytes = end_bytes - len_bytes.next_multiple_of(BLOCK_BYTES);
        let check = Some(short_checksum(data));
        self.index.push(key, Member { extension, offset_bytes, len_bytes, check }).map_err(|reason| {
            PipelineError::BadMember { path: self.path.clone(), member: name.clone(), reason }
        })?;
        self.bytes += member_bytes(&name, len_bytes);
        Ok(())
    }

    /// Appends the headers and the data of a member to the tar.
    fn append_data(&mut self, name: &str, data: &[u8]) -> io::Result<()> {
        let mut header = if is_long(name) { ::tar::Header::new_gnu() } else { ::tar::Header::new_ustar() };
        header.set_size(data.len() as u64);
        header.set_mode(0o444);
        header.set_mtime(0);
        header.set_username("bigdata")?;
        header.set_groupname("bigdata")?;
        self.builder.append_data(&mut header, name, data)
    }
}

impl HashingWriter {
    /// Writes all bytes to the disk. Returns the length of the file and its hash.
    fn finish(mut self) -> io::Result<(u64, u64)> {
        self.file.flush()?;
        let file = self.file.get_ref();
        file.sync_all()?;
        Ok((file.metadata()?.len(), self.hash.digest()))
    }
}

impl Write for HashingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_all(bytes)?;
        self.hash.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Returns the normalized name of a member. Some tools write `./a.jpg`, which is `a.jpg`.
fn member_name(key: &str, extension: &str) -> String {
    let key = key.split('/').filter(|part| !part.is_empty() && *part != ".").collect::<Vec<_>>().join("/");
    format!("{key}.{extension}")
}

/// Returns whether a name does not fit a USTAR header and needs an additional GNU header.
fn is_long(name: &str) -> bool {
    ::tar::Header::new_ustar().set_path(name).is_err()
}

/// Returns the number of bytes of a member whose data has `len_bytes`: headers, data and padding.
fn member_bytes(name: &str, len_bytes: u64) -> u64 {
    let mut bytes = BLOCK_BYTES + len_bytes.next_multiple_of(BLOCK_BYTES);
    if is_long(name) {
        // The GNU header and the name, which ends with a zero.
        bytes += BLOCK_BYTES + (name.len() as u64 + 1).next_multiple_of(BLOCK_BYTES);
    }
    bytes
}

/// Returns the range of samples of each shard that [`ShardWriter`] would write, given the sizes of
/// the samples ([`sample_bytes`]).
pub fn plan_shards(sizes_bytes: &[u64], limits: ShardLimits) -> Vec<Range<usize>> {
    let mut shards = Vec::new();
    let mut start = 0;
    let mut bytes = 2 * BLOCK_BYTES;
    for (sample, sample_bytes) in sizes_bytes.iter().enumerate() {
        if limits.is_full((sample - start) as u64, bytes, *sample_bytes) {
            shards.push(start..sample);
            start = sample;
            bytes = 2 * BLOCK_BYTES;
        }
        bytes += sample_bytes;
    }
    if start < sizes_bytes.len() {
        shards.push(start..sizes_bytes.len());
    }
    shards
}

/// Returns the number of bytes that a sample takes in a shard: `members` are extensions and
/// lengths.
pub fn sample_bytes<'a>(key: &str, members: impl IntoIterator<Item = (&'a str, u64)>) -> u64 {
    members
        .into_iter()
        .map(|(extension, len_bytes)| member_bytes(&member_name(key, extension), len_bytes))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, limits: ShardLimits) -> Vec<PathBuf> {
        let mut writer = ShardWriter::new(folder, "t", limits).expect("folder");
        for i in 0..10u32 {
            let image = vec![i as u8; 300 + 100 * i as usize];
            writer
                .add(&format!("{i:04}"), &[("jpg", &image), ("cls", i.to_string().as_bytes())])
                .expect("added");
        }
        writer.finish().expect("finished")
    }

    #[test]
    fn the_sidecar_equals_a_walk_over_the_headers() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let limits = ShardLimits { max_samples: 4, max_bytes: None };
        let paths = write(folder.path(), limits);
        assert_eq!(paths.len(), 3);
        for path in paths {
            assert_eq!(sidecar::open(&path).expect("sidecar"), sidecar::build_checked(&path).expect("walk"));
        }
    }

    /// Names that other tools write: with `./`, and longer than USTAR allows.
    #[test]
    fn unusual_names_are_read_back() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("s.tar");
        let mut file = ShardFile::create(&path).expect("created");
        let long = format!("{}/{}", "d".repeat(60), "k".repeat(180));
        for key in ["./a", long.as_str(), "b"] {
            file.add(key, &[("jpg", b"x"), ("cls", b"1")]).expect("added");
        }
        assert!(file.add("b", &[("png", b"x")]).is_err(), "two samples would become one");
        file.finish().expect("finished");
        let index = sidecar::open(&path).expect("sidecar");
        assert_eq!(index, sidecar::build_checked(&path).expect("walk"));
        assert_eq!((index.key(0), index.key(1)), ("a", long.as_str()));
    }

    #[test]
    fn equal_samples_give_equal_shards_within_the_limits() {
        let limits = ShardLimits { max_samples: u64::MAX, max_bytes: Some(8 << 10) };
        let a = tempfile::tempdir().expect("a");
        let b = tempfile::tempdir().expect("b");
        let paths_a = write(a.path(), limits);
        let paths_b = write(b.path(), limits);
        assert!(paths_a.len() > 1);
        for (a, b) in paths_a.iter().zip(&paths_b) {
            let bytes = fs::read(a).expect("a");
            assert!(bytes.len() <= 8 << 10, "{} bytes", bytes.len());
            assert_eq!(bytes, fs::read(b).expect("b"));
        }
    }

    #[test]
    fn resumed_writer_writes_missing_shards() {
        let complete = tempfile::tempdir().expect("a");
        let resumed = tempfile::tempdir().expect("b");
        let limits = ShardLimits { max_samples: 4, max_bytes: None };
        write(complete.path(), limits);
        write(resumed.path(), limits);
        fs::remove_file(resumed.path().join("t-000001.tar")).expect("removed");
        let mut writer = ShardWriter::resume(resumed.path(), "t", limits).expect("folder");
        for i in 0..10u32 {
            let image = vec![i as u8; 300 + 100 * i as usize];
            let label = i.to_string();
            writer.add(&format!("{i:04}"), &[("jpg", &image), ("cls", label.as_bytes())]).expect("added");
        }
        assert_eq!(writer.finish().expect("finished").len(), 3);
        for name in ["t-000000.tar", "t-000001.tar", "t-000002.tar"] {
            let expected = fs::read(complete.path().join(name)).expect(name);
            let bytes = fs::read(resumed.path().join(name)).expect(name);
            assert_eq!(bytes, expected, "{name}");
        }
    }

    #[test]
    fn planned_shards_are_those_that_are_written() {
        for limits in [
            ShardLimits { max_samples: 4, max_bytes: None },
            ShardLimits { max_samples: u64::MAX, max_bytes: Some(8 << 10) },
            ShardLimits { max_samples: 3, max_bytes: Some(4 << 10) },
        ] {
            let folder = tempfile::tempdir().expect("temporary folder");
            let sizes: Vec<u64> = (0..10)
                .map(|i: u64| sample_bytes(&format!("{i:04}"), [("jpg", 300 + 100 * i), ("cls", 1)]))
                .collect();
            let written: Vec<usize> = write(folder.path(), limits)
                .iter()
                .map(|path| sidecar::open(path).expect("sidecar").len())
                .collect();
            let planned: Vec<usize> =
                plan_shards(&sizes, limits).iter().map(ExactSizeIterator::len).collect();
            assert_eq!(planned, written);
        }
        assert!(plan_shards(&[], ShardLimits { max_samples: 1, max_bytes: Some(1) }).is_empty());
    }

    /// The file of a killed writer is not a shard, and does not block the next writer.
    #[test]
    fn unfinished_shard_has_no_final_name() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("t-000000.tar");
        let mut file = ShardFile::create(&path).expect("created");
        file.add("0", &[("jpg", b"x")]).expect("added");
        drop(file);
        assert!(!path.exists());
        write(folder.path(), ShardLimits { max_samples: 100, max_bytes: None });
        assert_eq!(sidecar::open(&path).expect("sidecar").len(), 10);
    }

    #[test]
    fn existing_shards_are_not_overwritten() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let limits = ShardLimits { max_samples: 100, max_bytes: None };
        write(folder.path(), limits);
        let mut writer = ShardWriter::new(folder.path(), "t", limits).expect("folder");
        let error = writer.add("0", &[("jpg", b"x")]).expect_err("exists");
        assert!(
            matches!(&error, PipelineError::Exists { path } if path.ends_with("t-000000.tar")),
            "{error}"
        );
    }
}
