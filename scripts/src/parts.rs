//! Flags of jobs in parts, on any machines: `--part K/N` does a share of the work, and `--join N`
//! puts the results of all shares together.

use anyhow::bail;
use prep::parts::{MOST_PARTS, Part, Share, Work};
use ranks::launch::Launch;

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

/// Returns the result of the whole job or of all parts. For a part, prints where its result is, and
/// returns `None`.
pub(crate) fn result_of_all<T>(share: Share<T>) -> Option<T> {
    match share {
        Share::All(result) => Some(result),
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
