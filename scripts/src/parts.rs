//! Flags of jobs in parts, on any machines: `--part K/N` does a share of the work, and `--join N`
//! puts the results of all shares together.

use std::ops::Range;
use std::path::Path;

use anyhow::bail;
use prep::parts::{MOST_PARTS, Part, PartResults, Share, Work};
use ranks::launch::Launch;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::console::say;

/// Flags of a verb that can be run in parts.
#[derive(clap::Args, Clone, Copy)]
pub(crate) struct PartFlags {
    /// Do part K of N of the work, such as 3/16. Run the same command for every K from 1 to N, on
    /// any machines, then run it with --join N.
    #[arg(long, value_name = "K/N", conflicts_with = "join", help_heading = "In parts")]
    part: Option<Part>,
    /// Join the results of all N parts.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MOST_PARTS as i64),
        help_heading = "In parts")]
    join: Option<u32>,
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
                    "--part and --join are for processes started one by one: run each without {}",
                    launch.launcher
                )
            }
            work => Ok(work),
        }
    }
}

/// Returns the results that this command continues with: that of `compute` for all `n` items, or
/// those of all parts. A part computes and saves its own, prints where, and returns `None`.
pub(crate) fn compute_share<T: Serialize + DeserializeOwned>(
    results: &PartResults,
    work: Work,
    n: usize,
    compute: impl FnOnce(Range<usize>) -> anyhow::Result<T>,
) -> anyhow::Result<Option<Vec<T>>> {
    Ok(all_results(results.compute(work, n, compute)?))
}

/// Returns the results of the whole job; `None` for those of a part, and prints where they are.
pub(crate) fn all_results<T>(share: Share<T>) -> Option<Vec<T>> {
    match share {
        Share::All(results) => Some(results),
        Share::Saved { part, path } => {
            out!("part {part}: {}", path.display());
            None
        }
        Share::Existing { part, path } => {
            say(format!("part {part} is already done: {}; remove the file to redo it", path.display()));
            None
        }
    }
}

/// Returns the folder of parts' results, which a job in parts needs.
///
/// # Errors
/// If a job in parts has none, or a whole job has one.
pub(crate) fn folder(out: Option<&Path>, work: Work) -> anyhow::Result<&Path> {
    match (out, work) {
        (None, Work::Part(_) | Work::Join(_)) => {
            bail!("--part and --join need --out, the folder for the results of parts")
        }
        (Some(_), Work::Whole) => {
            bail!("--out is for the results of parts: also pass --part K/N or --join N")
        }
        (out, _) => Ok(out.unwrap_or(Path::new(""))),
    }
}
