//! `ocelli shards dedup`: finds exact and near copies, within a set and against another one, such as
//! the test set of a benchmark.

use std::path::Path;
use std::process::ExitCode;

use pipeline::Storage;
use pipeline::words::{counted, thousands};
use prep::dedup::{Copies, CopyRules, MOST_DISTANCE, check_removal, find_copies};
use report::picture::sheets::{GroupedImage, image_groups};
use serde_json::json;

use super::rewrite::{RewriteFlags, print_totals};
use crate::parts::{PartFlags, result_of_all};
use crate::progress::StageBar;

/// Largest number of groups of copies that are drawn.
const MAX_SHOWN_GROUPS: usize = 24;

/// Largest number of copies that are drawn of a group.
const MAX_SHOWN_COPIES: usize = 7;

/// Flags of `shards dedup`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli shards dedup data/ --out checked/\n  ocelli shards dedup data/ \
        --against test/ --remove --out unique/\n  ocelli shards dedup photos/ --prefer photos/originals/ \
        --out checked/\n  ocelli shards dedup data/ --out checked/ --part 3/16\n  ocelli shards dedup data/ \
        --out checked/ --join 16")]
pub(crate) struct Args {
    #[command(flatten)]
    flags: RewriteFlags,
    /// Shards or folders of images to compare against, such as test sets that must stay unseen.
    /// Samples near one of theirs also count as copies.
    #[arg(long, num_args = 1..)]
    against: Vec<String>,
    /// Folders or shards of the set from which to keep exact copies, the most preferred first. Of
    /// near copies, the one with the most pixels is kept.
    #[arg(long, num_args = 1.., value_name = "FOLDER|SHARD")]
    prefer: Vec<String>,
    /// Maximum number of bits, out of 64, in which the hashes of near copies differ; 0 finds only
    /// exact copies.
    #[arg(long, default_value_t = 3,
        value_parser = clap::value_parser!(u32).range(0..=i64::from(MOST_DISTANCE)))]
    max_distance: u32,
    /// Also write the shards without the copies, under the same names. A folder of images has to be
    /// packed first.
    #[arg(long)]
    remove: bool,
    #[command(flatten)]
    parts: PartFlags,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    let job = args.flags.job();
    if args.remove {
        check_removal(job.shards)?;
    }
    let rules =
        CopyRules { against: &args.against, max_distance: args.max_distance, preferred: &args.prefer };
    let share = find_copies(&job, &rules, args.parts.work(), storage, &StageBar::new())?;
    let Some(copies) = result_of_all(share) else { return Ok(ExitCode::SUCCESS) };
    let n_samples = copies.n_samples();
    let n_exact = copies.n_exact();
    let n_near = copies.n_near();
    let samples = counted(n_samples as u64, "sample");
    let exact = thousands(n_exact as u64);
    out!("{samples}: {exact} exact and {} near copies", thousands(n_near as u64));
    out!("copies: {}", copies.list_path().display());
    out!("samples to keep: {}", copies.kept_path().display());
    let picture = args.flags.out.join("copies.png");
    if draw_groups(&picture, &copies)? {
        out!("groups: {} (the kept image is framed in green)", picture.display());
    }
    if args.remove {
        let totals = copies.remove(&StageBar::new())?;
        print_totals(&totals, false);
    }
    if args.flags.json {
        out!("{}", json!({ "samples": n_samples, "exact": n_exact, "near": n_near }));
    }
    Ok(ExitCode::SUCCESS)
}

/// Draws the first groups of copies, a row each: the kept image, then the copies. Returns `true` if
/// there are any.
fn draw_groups(path: &Path, copies: &Copies) -> anyhow::Result<bool> {
    let groups = copies.groups();
    let mut rows: Vec<Vec<GroupedImage>> = Vec::new();
    for group in groups.iter().take(MAX_SHOWN_GROUPS) {
        let mut row = Vec::new();
        for index in group.iter().take(1 + MAX_SHOWN_COPIES) {
            if let Some((key, image)) = copies.keyed_image(*index) {
                row.push(GroupedImage { image, key, role: copies.role(*index) });
            }
        }
        if row.len() > 1 {
            rows.push(row);
        }
    }
    if rows.is_empty() {
        return Ok(false);
    }
    let legend = format!("{} of {} groups of copies; green frame: kept", rows.len(), groups.len());
    image_groups(path, &rows, &legend)?;
    Ok(true)
}
