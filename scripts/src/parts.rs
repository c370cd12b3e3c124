//! Jobs in parts, on any machines: `--part K/N` does a share of the work, and `--join N` puts the
//! results of all shares together.
//!
//! The result is that of the same command without either flag. Each part writes its result to a
//! file of its own, atomically: a part that was stopped is started again.

use std::fmt;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, bail};
use pipeline::identity::FileStamp;
use pipeline::shard::sidecar;
use pipeline::url::ShardUrl;
use pipeline::{Shard, Source, file};
use prep::open::Inputs;
use rayon::prelude::*;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::console::say;
use ranks::launch::Launch;

/// Flags of a verb that can be run in parts.
#[derive(clap::Args, Clone, Copy)]
pub(crate) struct PartFlags {
    /// Do part K of N of the work, such as 3/16. Run the same command with each K from 1 to N, on
    /// any machines, then with --join N.
    #[arg(long, value_name = "K/N", conflicts_with = "join", help_heading = "In parts")]
    part: Option<Part>,
    /// Put the results of all N parts together.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MOST_PARTS as i64), help_heading = "In parts")]
    join: Option<u32>,
}

/// Most parts of a job: each has a file of its own.
const MOST_PARTS: usize = 1_000_000;

/// Part of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    /// Number of the part, from 1.
    number: usize,
    /// Number of all parts.
    n_parts: usize,
}

/// Share of a job that a command does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// All of it.
    Whole,
    /// A part.
    Part(Part),
    /// Putting the results of so many parts together.
    Join(usize),
}

/// Results of the parts of a job, a file each in one folder.
pub(crate) struct PartResults {
    folder: PathBuf,
    verb: &'static str,
    /// Everything that affects the results.
    job: Value,
}

/// Text of the file of a part's result, which is sealed ([`file::seal`]).
#[derive(Serialize, Deserialize)]
struct Saved<T> {
    job: Value,
    /// The part, as K/N: its file may have been renamed.
    part: String,
    result: T,
}

impl PartFlags {
    /// Returns the share of the work that the flags ask for.
    pub(crate) fn work(self) -> Work {
        match (self.part, self.join) {
            (Some(part), _) => Work::Part(part),
            (None, Some(n_parts)) => Work::Join(n_parts as usize),
            (None, None) => Work::Whole,
        }
    }

    /// Returns the share of the work that the flags ask for, or an error if a launcher has started
    /// this process together with others.
    pub(crate) fn work_alone(self, launch: &Launch) -> anyhow::Result<Work> {
        match self.work() {
            Work::Part(_) | Work::Join(_) if launch.world_size > 1 => {
                bail!(
                    "--part and --join are for processes that are started one by one: run each without {}",
                    launch.launcher
                )
            }
            work => Ok(work),
        }
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers =
            text.split_once('/').and_then(|(number, n)| Some((number.parse().ok()?, n.parse().ok()?)));
        let Some((number, n_parts)) = numbers else { return Err("expected K/N, such as 3/16".into()) };
        if n_parts > MOST_PARTS {
            return Err(format!("{n_parts} parts are too many: at most {MOST_PARTS} are taken"));
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
    pub(crate) fn all(n_parts: usize) -> impl Iterator<Item = Self> {
        (1..=n_parts).map(move |number| Self { number, n_parts })
    }

    /// Returns the number of the part, from 0, and the number of all parts.
    pub(crate) fn rank(self) -> (usize, usize) {
        (self.number - 1, self.n_parts)
    }

    /// Returns the range of this part of `n` items: parts are contiguous, and their lengths differ
    /// by at most one.
    pub(crate) fn range(self, n: usize) -> Range<usize> {
        let (rank, n_parts) = self.rank();
        let [start, end] = [rank, rank + 1].map(|rank| (rank as u128 * n as u128 / n_parts as u128) as usize);
        start..end
    }
}

impl Work {
    /// Returns the range of `n` items that this command works on; all of them if it joins.
    pub(crate) fn range(self, n: usize) -> Range<usize> {
        match self {
            Self::Part(part) => part.range(n),
            Self::Whole | Self::Join(_) => 0..n,
        }
    }

    /// Returns an error for `--overwrite` in a job in parts, which would delete the results of
    /// parts.
    pub(crate) fn check_overwrite(self, overwrites: bool) -> anyhow::Result<()> {
        match self {
            Self::Part(_) | Self::Join(_) if overwrites => {
                bail!("--overwrite would delete the results of parts: to start over, remove the folder")
            }
            _ => Ok(()),
        }
    }

    /// Returns an error that names the parts to run before they can be joined: those of the items
    /// `missing` among `n`.
    pub(crate) fn check_done(self, n: usize, missing: &[usize]) -> anyhow::Result<()> {
        let Self::Join(n_parts) = self else { return Ok(()) };
        let missing_parts: Vec<Part> = Part::all(n_parts)
            .filter(|part| missing.iter().any(|number| part.range(n).contains(number)))
            .collect();
        check_none_missing(&missing_parts)
    }

    /// Returns the number of parts of the job, 1 for a whole one.
    pub(crate) fn n_parts(self) -> usize {
        match self {
            Self::Whole => 1,
            Self::Part(part) => part.n_parts,
            Self::Join(n_parts) => n_parts,
        }
    }
}

impl PartResults {
    /// Describes the results of `verb` in `folder`. `job` holds everything that affects them.
    pub(crate) fn new(folder: &Path, verb: &'static str, job: Value) -> Self {
        Self { folder: folder.to_path_buf(), verb, job }
    }

    /// Returns the results that this command continues with: that of `compute` for all `n` items,
    /// or those of all parts. A part computes and saves its own, and returns `None`.
    pub(crate) fn compute<T: Serialize + DeserializeOwned>(
        &self,
        work: Work,
        n: usize,
        compute: impl FnOnce(Range<usize>) -> anyhow::Result<T>,
    ) -> anyhow::Result<Option<Vec<T>>> {
        let part = match work {
            Work::Whole => return Ok(Some(vec![compute(0..n)?])),
            Work::Join(n_parts) => return self.load(n_parts).map(Some),
            Work::Part(part) => part,
        };
        let path = self.path(part);
        fs::create_dir_all(&self.folder)
            .with_context(|| format!("cannot create {}", self.folder.display()))?;
        if path.exists() {
            self.read::<T>(part)?;
            say(format!("part {part} is done: {}; remove the file to do it again", path.display()));
            return Ok(None);
        }
        let saved = Saved { job: self.job.clone(), part: part.to_string(), result: compute(part.range(n))? };
        let text = file::seal(serde_json::to_vec(&saved)?);
        file::replace(&path, &text).with_context(|| format!("cannot write {}", path.display()))?;
        out!("part {part}: {}", path.display());
        Ok(None)
    }

    /// Returns an error that names the missing parts, if `work` joins parts and some are missing.
    pub(crate) fn check_complete(&self, work: Work) -> anyhow::Result<()> {
        let Work::Join(n_parts) = work else { return Ok(()) };
        let missing: Vec<Part> = Part::all(n_parts).filter(|part| !self.path(*part).exists()).collect();
        check_none_missing(&missing)
    }

    /// Returns the error for a result that cannot be that of `part`, although its file says so.
    pub(crate) fn damaged(&self, part: Part) -> anyhow::Error {
        anyhow::anyhow!(
            "{} is damaged, or of an earlier release: remove it, and do part {part} again",
            self.path(part).display()
        )
    }

    fn load<T: DeserializeOwned>(&self, n_parts: usize) -> anyhow::Result<Vec<T>> {
        self.check_complete(Work::Join(n_parts))?;
        Part::all(n_parts).map(|part| self.read(part)).collect()
    }

    fn read<T: DeserializeOwned>(&self, part: Part) -> anyhow::Result<T> {
        let path = self.path(part);
        let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let text = file::unseal(&text).ok_or_else(|| self.damaged(part))?;
        let saved: Saved<T> =
            serde_json::from_slice(text).with_context(|| format!("cannot read {}", path.display()))?;
        if saved.job != self.job || saved.part != part.to_string() {
            bail!(
                "{} is of another job or part, or its inputs have changed since: remove it and do the part again, or give the same inputs \
                 and flags",
                path.display()
            );
        }
        Ok(saved.result)
    }

    fn path(&self, part: Part) -> PathBuf {
        let Part { number, n_parts } = part;
        self.folder.join(format!("{}.part-{number:05}-of-{n_parts:05}.json", self.verb))
    }
}

/// Identifies shards for the parts of a job: see [`file_identity`]. Empty for a whole job, which
/// saves no results.
pub(crate) fn identities(sources: &[Source], work: Work) -> Vec<Value> {
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
pub(crate) fn file_identity(path: &Path) -> Value {
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
/// If a job in parts has a folder of images.
pub(crate) fn open_folders(inputs: &Inputs, work: Work) -> anyhow::Result<Vec<Shard>> {
    if let (Some(folder), Work::Part(_) | Work::Join(_)) = (inputs.folders.first(), work) {
        bail!("{folder} is a folder of images, which is not divided into parts: pack it, or do it whole");
    }
    Ok(inputs.open_folders()?)
}

/// Returns the folder of parts' results, which a job in parts needs.
///
/// # Errors
/// If a job in parts has none, or a whole job has one.
pub(crate) fn folder(out: Option<&Path>, work: Work) -> anyhow::Result<&Path> {
    match (out, work) {
        (None, Work::Part(_) | Work::Join(_)) => {
            bail!("--part and --join need --out, the folder that receives the results of parts")
        }
        (Some(_), Work::Whole) => {
            bail!("--out receives the results of parts: give --part K/N or --join N, too")
        }
        (out, _) => Ok(out.unwrap_or(Path::new(""))),
    }
}

/// Returns an error that names the parts that are missing, if there are any.
pub(crate) fn check_none_missing(missing: &[Part]) -> anyhow::Result<()> {
    /// Number of parts that are named.
    const NAMED: usize = 8;
    let named: Vec<String> = missing.iter().take(NAMED).map(|part| format!("--part {part}")).collect();
    let rest = if missing.len() > NAMED { ", …" } else { "" };
    if missing.is_empty() {
        Ok(())
    } else {
        bail!("{} part(s) are missing: run {}{rest} first", missing.len(), named.join(", "))
    }
}

/// Deletes the files of parts of `verb` in `folder`: results, and the lock and temporary files of
/// parts that were killed.
pub(crate) fn remove_parts(folder: &Path, verb: &str) -> anyhow::Result<()> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry.with_context(|| format!("cannot read {}", folder.display()))?.path();
        if is_part_file(&path, verb) {
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// Returns whether a file has the name of a result of a part of `verb`, or that of its lock or
/// temporary file.
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
