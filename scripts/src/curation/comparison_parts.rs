//! Comparisons of images with other images in parts, one after another or on several machines.

use std::ops::Range;

use anyhow::bail;
use curate::CurateError;
use curate::selection::{Retrieved, n_blocks};
use serde_json::{Value, json};

use super::input::{Input, InputFlags};
use super::output::OutputFlags;
use crate::cluster::launch::Launch;
use crate::parts::{PartFlags, PartResults, Work};

/// Returns the share of the work that `parts` asks for.
///
/// # Errors
/// If the other flags do not go with parts.
pub(crate) fn share_of_work(
    parts: PartFlags,
    input: &InputFlags,
    output: &OutputFlags,
    launch: &Launch,
) -> anyhow::Result<Work> {
    let work = parts.work_alone(launch)?;
    if work != Work::Whole && input.computes_features() {
        bail!("--part and --join need --features: `ocelli embed` computes them, in parts too");
    }
    work.check_overwrite(output.overwrites())?;
    Ok(work)
}

/// Describes the results of parts of `verb`, which compares `input` with `others`.
pub(crate) fn part_results(
    verb: &'static str,
    settings: &Value,
    input: &Input,
    others: &Input,
    output: &OutputFlags,
) -> PartResults {
    let of_input = |input: &Input| json!([input.identity, input.files]);
    let job = json!({ "settings": settings, "input": of_input(input), "like": of_input(others) });
    PartResults::new(&output.out, verb, job)
}

/// Returns what all parts have found in `n_rows` rows, one after another. A part saves what `compare` finds in its blocks of rows, and
/// returns `None`.
pub(crate) fn compared_in_parts(
    work: Work,
    results: &PartResults,
    n_rows: usize,
    compare: impl FnOnce(Range<usize>) -> Result<Vec<Retrieved>, CurateError>,
) -> anyhow::Result<Option<Vec<Retrieved>>> {
    // Numbers of 32 bits: a similarity in decimals could be read as its neighbor.
    let saved = |found: Vec<Retrieved>| -> Vec<[u32; 3]> { bytemuck::cast_vec(found) };
    let parts = results.of(work, n_blocks(n_rows), |blocks| Ok(saved(compare(blocks)?)))?;
    Ok(parts.map(|parts| bytemuck::cast_vec(parts.concat())))
}
