//! Neighbors that are treated alike.

use std::ops::Range;

/// Neighboring ranges with equal values as one.
pub(super) fn joined<T: PartialEq>(
    ranges: impl Iterator<Item = (Range<usize>, T)>,
) -> Vec<(Range<usize>, T)> {
    let mut runs: Vec<(Range<usize>, T)> = Vec::new();
    for (range, value) in ranges {
        match runs.last_mut() {
            Some((run, of_run)) if run.end == range.start && *of_run == value => run.end = range.end,
            _ => runs.push((range, value)),
        }
    }
    runs
}
