//! Comparison of images with given ones, in parts (`--part`, `--join`).

use std::ops::Range;

use anyhow::bail;
use curate::CurateError;
use curate::selection::{BLOCK_ROWS, Retrieved, n_blocks, rows_of_blocks};
use kernels::rows::Rows;
use ranks::communicator::Communicator;
use serde_json::{Value, json};

use super::input::{Input, InputFlags};
use super::output::OutputFlags;
use super::ranks::all_succeed;
use crate::parts::{PartFlags, compute_share};
use prep::parts::{Part, PartResults, Work};
use ranks::launch::Launch;

/// Returns the share of the work that `parts` asks for.
///
/// # Errors
/// If a launcher has started several processes, or if parts do not go with the other flags.
pub(crate) fn share_of_work(
    parts: PartFlags,
    input: &InputFlags,
    output: &OutputFlags,
    launch: &Launch,
) -> anyhow::Result<Work> {
    let work = parts.work_alone(launch)?;
    if work != Work::Whole && input.computes_features() {
        bail!(
            "--part and --join need --features and --like-features: compute them with `ocelli embed`, \
             which can also run in parts"
        );
    }
    work.check_overwrite(output.overwrites())?;
    Ok(work)
}

/// Returns the results of parts of `verb`, which compares `input` with `like`. All of them exist if
/// `work` joins them.
///
/// # Errors
/// If `work` joins parts and some are missing.
pub(crate) fn part_results(
    work: Work,
    verb: &'static str,
    settings: &Value,
    input: &Input,
    like: &Input,
    output: &OutputFlags,
) -> anyhow::Result<PartResults> {
    let job = json!({
        "settings": settings,
        "input": [input.identity, input.files],
        "like": [like.identity, like.files],
        "block_rows": BLOCK_ROWS,
    });
    let results = PartResults::new(&output.out, verb, job);
    results.check_complete(work)?;
    Ok(results)
}

/// Checks that all rows of `like` are finite, and those of `input` unless each part checks its own
/// rows. All ranks call it.
///
/// # Errors
/// If a row is not finite, on any rank.
pub(crate) fn check_rows(
    work: Work,
    input: &Input,
    like: &Input,
    ranks: &Communicator,
) -> anyhow::Result<()> {
    let n_checked = if work == Work::Whole { input.rows.len() } else { 0 };
    let checked = input.rows.largest(0..n_checked).and_then(|_| like.rows.largest(0..like.rows.len()));
    all_succeed(ranks, checked.map(drop).map_err(anyhow::Error::from))
}

/// Compares a part of `input`, a range of blocks of rows, saves the result of `compare` and returns
/// `None`; to join parts, returns the results of all of them, in the order of the parts.
/// `n_results` returns the number of results for a number of rows.
///
/// # Errors
/// If a row of the part is not finite, if the result cannot be written, or if one to be joined is
/// of another job or damaged.
pub(crate) fn compare_in_parts(
    work: Work,
    results: &PartResults,
    input: &Input,
    like: &Input,
    n_results: impl Fn(usize) -> usize,
    compare: impl FnOnce(Range<usize>) -> Result<Vec<Retrieved>, CurateError>,
) -> anyhow::Result<Option<Vec<Retrieved>>> {
    let n_rows = input.rows.len();
    let n_like = like.rows.len();
    let parts = compute_share(results, work, n_blocks(n_rows), |blocks| {
        input.rows.largest(rows_of_blocks(n_rows, blocks.clone()))?;
        // Numbers are saved as their bits.
        Ok(bytemuck::cast_vec::<Retrieved, [u32; 3]>(compare(blocks)?))
    })?;
    let Some(parts) = parts else { return Ok(None) };
    let mut joined: Vec<Retrieved> = Vec::new();
    for (part, part_results) in Part::all(parts.len()).zip(parts) {
        let rows = rows_of_blocks(n_rows, part.range(n_blocks(n_rows)));
        let mut is_valid = part_results.len() == n_results(rows.len());
        for [row, like, _] in &part_results {
            is_valid &= rows.contains(&(*row as usize)) && (*like as usize) < n_like;
        }
        if !is_valid {
            return Err(results.damaged(part).into());
        }
        joined.extend(bytemuck::cast_vec::<[u32; 3], Retrieved>(part_results));
    }
    Ok(Some(joined))
}
