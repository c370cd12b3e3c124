//! Jobs in parts, on any machines: a part does a share of the work, and a join puts the results of
//! all shares together.
//!
//! The result is the same as if the job were done as a whole. Each part writes its result to a file
//! of its own, atomically: a part that was stopped is started again.

use std::fmt;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use augment::DecodeRules;
use pipeline::identity::FileStamp;
use pipeline::shard::sidecar;
use pipeline::url::ShardUrl;
use pipeline::{Shard, Source, file};
use rayon::prelude::*;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::PrepError;
use crate::job::Job;
use crate::open::Inputs;

/// Most parts of a job: each has a file of its own.
pub const MOST_PARTS: usize = 1_000_000;

/// Part of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Number of the part, from 1.
    number: usize,
    /// Number of all parts.
    n_parts: usize,
}

/// Share of a job that a command does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// All of it.
    Whole,
    /// A part.
    Part(Part),
    /// Putting the results of so many parts together.
    Join(usize),
}

/// Results of the parts of a job, a file each in one folder.
pub struct PartResults {
    folder: PathBuf,
    verb: &'static str,
    job: Job,
}

/// Images that a job reads, and its share of them.
pub struct ReadJob<'a> {
    /// Shards, and folders of images.
    pub specs: &'a [String],
    /// Rules for decoding the images.
    pub rules: &'a DecodeRules,
    /// Share of the job.
    pub work: Work,
    /// Folder for the results of parts.
    pub out: Option<&'a Path>,
}

/// What a command has of a job after it has done its share.
pub enum Share<T> {
    /// The result of the whole job, or of all parts.
    All(T),
    /// The result of a part was computed, and saved.
    Saved {
        /// The part.
        part: Part,
        /// File of the result.
        path: PathBuf,
    },
    /// The result of a part existed.
    Existing {
        /// The part.
        part: Part,
        /// File of the result.
        path: PathBuf,
    },
}

/// Text of the file of a part's result, which is sealed ([`file::seal`]).
#[derive(Serialize, Deserialize)]
struct Saved<T> {
    job: Job,
    /// The part, as K/N: its file may have been renamed.
    part: String,
    result: T,
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers =
            text.split_once('/').and_then(|(number, n)| Some((number.parse().ok()?, n.parse().ok()?)));
        let Some((number, n_parts)) = numbers else { return Err("expected K/N, such as 3/16".into()) };
        if n_parts > MOST_PARTS {
            return Err(format!("{n_parts} parts are too many: at most {MOST_PARTS} are allowed"));
        }
        if (1..=n_parts).contains(&number) {
            Ok(Self { number, n_parts })
        } else {
            Err(format!("there is no part {number} of {n_parts}: parts are numbered from 1 to N"))
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.n_parts)
    }
}

impl Part {
    /// Returns all parts of a job of `n_parts`.
    pub fn all(n_parts: usize) -> impl Iterator<Item = Self> {
        (1..=n_parts).map(move |number| Self { number, n_parts })
    }

    /// Returns the index of the part and the number of all parts.
    pub fn rank(self) -> (usize, usize) {
        (self.number - 1, self.n_parts)
    }

    /// Returns the range of this part of `n` items, by [`part_range`].
    pub fn range(self, n: usize) -> Range<usize> {
        let (index, n_parts) = self.rank();
        part_range(n, index, n_parts)
    }
}

/// Returns the range of part `index`, counted from 0, of `n` items in `n_parts`: parts are
/// contiguous, and their lengths differ by at most one.
pub fn part_range(n: usize, index: usize, n_parts: usize) -> Range<usize> {
    part_start(n, index, n_parts)..part_start(n, index + 1, n_parts)
}

/// Returns the first item of part `index`.
fn part_start(n: usize, index: usize, n_parts: usize) -> usize {
    // In 128 bits: the product may not fit into 64.
    (index as u128 * n as u128 / n_parts as u128) as usize
}

impl Work {
    /// Returns the range of `n` items that this command works on; all of them if it joins.
    pub fn range(self, n: usize) -> Range<usize> {
        match self {
            Self::Part(part) => part.range(n),
            Self::Whole | Self::Join(_) => 0..n,
        }
    }

    /// Returns an error for `--overwrite` in a job in parts, which would delete the results of
    /// parts.
    ///
    /// # Errors
    /// [`PrepError::OverwrittenParts`].
    pub fn check_overwrite(self, overwrites: bool) -> Result<(), PrepError> {
        match self {
            Self::Part(_) | Self::Join(_) if overwrites => Err(PrepError::OverwrittenParts),
            _ => Ok(()),
        }
    }

    /// Returns an error that names the parts to run before they can be joined: those of the items
    /// `missing` among `n`.
    ///
    /// # Errors
    /// [`PrepError::MissingParts`].
    pub fn check_done(self, n: usize, missing: &[usize]) -> Result<(), PrepError> {
        let Self::Join(n_parts) = self else { return Ok(()) };
        let missing_parts: Vec<Part> = Part::all(n_parts)
            .filter(|part| missing.iter().any(|index| part.range(n).contains(index)))
            .collect();
        check_none_missing(&missing_parts)
    }

    /// Returns the number of parts of the job, 1 for a whole one.
    pub fn n_parts(self) -> usize {
        match self {
            Self::Whole => 1,
            Self::Part(part) => part.n_parts,
            Self::Join(n_parts) => n_parts,
        }
    }
}

impl<T> Share<T> {
    /// Applies `f` to the result of the whole job, if there is one.
    ///
    /// # Errors
    /// That of `f`.
    pub fn try_map<U, E>(self, f: impl FnOnce(T) -> Result<U, E>) -> Result<Share<U>, E> {
        match self {
            Self::All(result) => Ok(Share::All(f(result)?)),
            Self::Saved { part, path } => Ok(Share::Saved { part, path }),
            Self::Existing { part, path } => Ok(Share::Existing { part, path }),
        }
    }
}

impl PartResults {
    /// Describes the results of `verb` in `folder`. `job` holds everything that affects them.
    pub fn new(folder: &Path, verb: &'static str, job: Value) -> Self {
        Self { folder: folder.to_path_buf(), verb, job: Job(job) }
    }

    /// Computes all `n` items by `compute`, or reads the results of all parts, in their order. A
    /// part computes and saves its own items, unless its result exists.
    ///
    /// # Errors
    /// That of `compute`, or [`PrepError`] when a result cannot be read or written, or is of
    /// another job.
    pub fn compute<T, E>(
        &self,
        work: Work,
        n: usize,
        compute: impl FnOnce(Range<usize>) -> Result<T, E>,
    ) -> Result<Share<Vec<T>>, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<PrepError>,
    {
        let part = match work {
            Work::Whole => return Ok(Share::All(vec![compute(0..n)?])),
            Work::Join(n_parts) => return Ok(Share::All(self.load(n_parts)?)),
            Work::Part(part) => part,
        };
        let path = self.path(part);
        fs::create_dir_all(&self.folder).map_err(|error| PrepError::io("create", &self.folder, error))?;
        if path.exists() {
            self.read::<T>(part)?;
            return Ok(Share::Existing { part, path });
        }
        let saved = Saved { job: self.job.clone(), part: part.to_string(), result: compute(part.range(n))? };
        let text = file::seal(serde_json::to_vec(&saved).map_err(PrepError::Unserializable)?);
        file::replace(&path, &text).map_err(|error| PrepError::io("write", &path, error))?;
        Ok(Share::Saved { part, path })
    }

    /// Returns an error that names the missing parts, if `work` joins parts and some are missing.
    ///
    /// # Errors
    /// [`PrepError::MissingParts`].
    pub fn check_complete(&self, work: Work) -> Result<(), PrepError> {
        let Work::Join(n_parts) = work else { return Ok(()) };
        let missing: Vec<Part> = Part::all(n_parts).filter(|part| !self.path(*part).exists()).collect();
        check_none_missing(&missing)
    }

    /// Returns the error for a result that cannot be that of `part`, although its file says so.
    pub fn damaged(&self, part: Part) -> PrepError {
        PrepError::DamagedPart { path: self.path(part), part: part.to_string() }
    }

    fn load<T: DeserializeOwned>(&self, n_parts: usize) -> Result<Vec<T>, PrepError> {
        self.check_complete(Work::Join(n_parts))?;
        Part::all(n_parts).map(|part| self.read(part)).collect()
    }

    fn read<T: DeserializeOwned>(&self, part: Part) -> Result<T, PrepError> {
        let path = self.path(part);
        let text = fs::read(&path).map_err(|error| PrepError::io("read", &path, error))?;
        let text = file::unseal(&text).ok_or_else(|| self.damaged(part))?;
        let saved: Saved<T> = serde_json::from_slice(text).map_err(|error| PrepError::json(&path, error))?;
        if saved.job != self.job || saved.part != part.to_string() {
            return Err(PrepError::OtherPart { path });
        }
        Ok(saved.result)
    }

    fn path(&self, part: Part) -> PathBuf {
        let Part { number, n_parts } = part;
        self.folder.join(format!("{}.part-{number:05}-of-{n_parts:05}.json", self.verb))
    }
}

/// Returns `out`, the folder of parts' results, which a job in parts needs.
///
/// # Errors
/// [`PrepError::NoResultFolder`] if a job in parts has none, or [`PrepError::ResultFolder`] if a
/// whole job has one.
pub(crate) fn result_folder(out: Option<&Path>, work: Work) -> Result<&Path, PrepError> {
    match (out, work) {
        (None, Work::Part(_) | Work::Join(_)) => Err(PrepError::NoResultFolder),
        (Some(_), Work::Whole) => Err(PrepError::ResultFolder),
        (out, _) => Ok(out.unwrap_or(Path::new(""))),
    }
}

/// Identifies shards for the parts of a job: see [`file_identity`]. Empty for a whole job, which
/// saves no results.
pub fn identities(sources: &[Source], work: Work) -> Vec<Value> {
    if work == Work::Whole {
        return Vec::new();
    }
    sources
        .par_iter()
        .map(|source| match &source.url {
            ShardUrl::File(path) => file_identity(path),
            url => json!(url.to_string()),
        })
        .collect()
}

/// Identifies a local file for the parts of a job, which may run on machines that see it in other
/// folders: by its name and its bytes where its index states their hash, else by its name and
/// state.
pub fn file_identity(path: &Path) -> Value {
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    if let Some(checksum) = sidecar::current_checksum(path) {
        return json!([name, format!("{checksum:016x}")]);
    }
    let stamp = fs::metadata(path).ok().map(|metadata| FileStamp::from_metadata(&metadata).to_string());
    json!([name, stamp])
}

/// Opens the images of the folders among `inputs`. Only shards can be divided into parts.
///
/// # Errors
/// [`PrepError::UndividedFolder`] if a job in parts has a folder of images, or [`PrepError`] when
/// a folder cannot be opened.
pub fn open_folders(inputs: &Inputs, work: Work) -> Result<Vec<Shard>, PrepError> {
    if let (Some(folder), Work::Part(_) | Work::Join(_)) = (inputs.folders.first(), work) {
        return Err(PrepError::UndividedFolder { folder: folder.clone() });
    }
    inputs.open_folders()
}

/// Returns an error that names the parts that are missing, if there are any.
///
/// # Errors
/// [`PrepError::MissingParts`].
pub fn check_none_missing(missing: &[Part]) -> Result<(), PrepError> {
    /// Number of parts that are named.
    const NAMED: usize = 8;
    if missing.is_empty() {
        return Ok(());
    }
    let named: Vec<String> = missing.iter().take(NAMED).map(|part| format!("--part {part}")).collect();
    let rest = if missing.len() > NAMED { ", …" } else { "" };
    Err(PrepError::MissingParts { n_missing: missing.len(), named: format!("{}{rest}", named.join(", ")) })
}

/// Deletes the files of parts of `verb` in `folder`: results, and the lock and temporary files of
/// parts that were killed.
///
/// # Errors
/// [`PrepError::Io`].
pub(crate) fn remove_parts(folder: &Path, verb: &str) -> Result<(), PrepError> {
    let entries = fs::read_dir(folder).map_err(|error| PrepError::io("read", folder, error))?;
    for entry in entries {
        let path = entry.map_err(|error| PrepError::io("read", folder, error))?.path();
        if is_part_file(&path, verb) {
            fs::remove_file(&path).map_err(|error| PrepError::io("remove", &path, error))?;
        }
    }
    Ok(())
}

/// Returns whether a file has the name of a result of a part of `verb`, or of its lock or temporary
/// file.
fn is_part_file(path: &Path, verb: &str) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let Some(rest) = name.strip_prefix(verb).and_then(|rest| rest.strip_prefix(".part-")) else {
        return false;
    };
    let Some((number, rest)) = rest.split_once("-of-") else { return false };
    let Some((n_parts, extension)) = rest.split_once('.') else { return false };
    let is_temporary = extension.starts_with("json.") && extension.ends_with(".tmp");
    has_five_digits(number)
        && has_five_digits(n_parts)
        && (matches!(extension, "json" | "lock") || is_temporary)
}

/// Returns whether `text` consists of digits, at least five.
fn has_five_digits(text: &str) -> bool {
    text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_once() {
        for (n, n_parts) in [(0, 3), (2, 5), (10, 3), (16, 16), (1_000_003, 7)] {
            let ranges: Vec<Range<usize>> = Part::all(n_parts).map(|part| part.range(n)).collect();
            assert_eq!((ranges[0].start, ranges[n_parts - 1].end), (0, n));
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            let lengths: Vec<usize> = ranges.iter().map(ExactSizeIterator::len).collect();
            let shortest = lengths.iter().min().copied().unwrap();
            assert!(lengths.iter().all(|length| *length <= shortest + 1));
        }
    }

    #[test]
    fn part_files_are_recognized_by_their_names() {
        let results = PartResults::new(Path::new("out"), "remove", Value::Null);
        for part in [Part { number: 2, n_parts: 3 }, Part { number: 9, n_parts: 123_456 }] {
            let path = results.path(part);
            for path in [&path, &path.with_extension("lock"), &file::temporary(&path)] {
                assert!(is_part_file(path, "remove") && !is_part_file(path, "move"), "{}", path.display());
            }
        }
        for other in ["remove.part-1-of-3.json", "remove.part-00001-of-00003.tar", "remove.job.json"] {
            assert!(!is_part_file(Path::new(other), "remove"), "{other}");
        }
    }

    #[test]
    fn parts_are_numbered_from_one() {
        assert_eq!("3/16".parse::<Part>(), Ok(Part { number: 3, n_parts: 16 }));
        for bad in ["", "3", "0/4", "5/4", "1/0", "-1/4", "1/4/2", "a/b"] {
            assert!(bad.parse::<Part>().is_err(), "{bad}");
        }
    }
}
