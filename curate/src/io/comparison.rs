//! Comparison of images with others, as a whole or in parts that are joined (`--part`, `--join`).

use std::ops::Range;
use std::path::Path;

use kernels::rows::Rows;
use prep::parts::{Part, PartResults, Share, Work};
use ranks::communicator::Communicator;
use serde_json::json;

use super::agreement::all_succeed;
use super::input::Input;
use super::job::Job;
use crate::CurateError;
use crate::selection::{BLOCK_ROWS, Retrieved, n_blocks, rows_of_blocks};

/// Comparison of the images `input` with the images `like`.
pub struct Comparison<'a> {
    pub(super) input: &'a Input,
    pub(super) like: &'a Input,
    pub(super) work: Work,
    results: PartResults,
}

impl<'a> Comparison<'a> {
    /// Creates the comparison of `job`, with the results of parts in `folder`. All of them exist if
    /// the job joins them.
    ///
    /// # Errors
    /// [`CurateError::Prep`] if the job joins parts and some are missing.
    pub fn new(job: &Job, input: &'a Input, like: &'a Input, folder: &Path) -> Result<Self, CurateError> {
        let identity = json!({
            "settings": job.settings,
            "input": [input.identity, input.files],
            "like": [like.identity, like.files],
            "block_rows": BLOCK_ROWS,
        });
        let results = PartResults::new(folder, job.verb, identity);
        results.check_complete(job.work)?;
        Ok(Self { input, like, work: job.work, results })
    }

    /// Checks that all rows of `like` are finite, and all rows of `input` unless each part checks
    /// its own rows. All ranks call it.
    ///
    /// # Errors
    /// [`CurateError::NotFinite`], or [`CurateError::PeersFailed`] on other ranks.
    pub(super) fn check_rows(&self, ranks: &Communicator) -> Result<(), CurateError> {
        let rows = &self.input.rows;
        let others = &self.like.rows;
        let n_checked = if self.work == Work::Whole { rows.len() } else { 0 };
        let checked = rows.largest(0..n_checked).and_then(|_| others.largest(0..others.len()));
        all_succeed(ranks, checked.map(drop))
    }

    /// Compares a part of `input`, a range of blocks of rows, and saves the result of `compare`; to
    /// join parts, returns the results of all of them, in the order of the parts. `n_results`
    /// returns the number of results for a number of rows.
    ///
    /// # Errors
    /// [`CurateError::NotFinite`] if a row of the part is not finite; [`CurateError::Prep`] if the
    /// result cannot be written, or if one to be joined is of another job or damaged.
    pub(super) fn compare_in_parts(
        &self,
        n_results: impl Fn(usize) -> usize,
        compare: impl FnOnce(Range<usize>) -> Result<Vec<Retrieved>, CurateError>,
    ) -> Result<Share<Vec<Retrieved>>, CurateError> {
        let n_rows = self.input.rows.len();
        let share = self.results.compute(self.work, n_blocks(n_rows), |blocks| {
            self.input.rows.largest(rows_of_blocks(n_rows, blocks.clone()))?;
            // Numbers are saved as their bits.
            Ok::<_, CurateError>(bytemuck::cast_vec::<Retrieved, [u32; 3]>(compare(blocks)?))
        })?;
        let parts = match share {
            Share::All(parts) => parts,
            Share::Saved { part, path } => return Ok(Share::Saved { part, path }),
            Share::Existing { part, path } => return Ok(Share::Existing { part, path }),
        };
        let n_like = self.like.rows.len();
        let mut joined: Vec<Retrieved> = Vec::new();
        for (part, part_results) in Part::all(parts.len()).zip(parts) {
            let rows = rows_of_blocks(n_rows, part.range(n_blocks(n_rows)));
            let mut is_valid = part_results.len() == n_results(rows.len());
            for [row, like, _] in &part_results {
                is_valid &= rows.contains(&(*row as usize)) && (*like as usize) < n_like;
            }
            if !is_valid {
                return Err(self.results.damaged(part).into());
            }
            joined.extend(bytemuck::cast_vec::<[u32; 3], Retrieved>(part_results));
        }
        Ok(Share::All(joined))
    }
}
