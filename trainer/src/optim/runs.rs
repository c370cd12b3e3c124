//! Neighboring ranges of a shard that are treated alike.

use std::ops::Range;

use burn_tensor::Tensor;

/// Joins neighboring ranges with equal values.
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

/// Multiplies every range of `values` by its factor; the padding after the last range stays.
pub(super) fn scaled(values: Tensor<1>, factors: impl Iterator<Item = (Range<usize>, f32)>) -> Tensor<1> {
    let [len] = values.dims();
    let mut runs = joined(factors);
    let end = runs.last().map_or(0, |(range, _)| range.end);
    if end < len {
        runs.push((end..len, 1.0));
    }
    if let [(_, factor)] = runs[..] {
        return values * factor;
    }
    let part = |(range, factor): (Range<usize>, f32)| values.clone().slice([range]) * factor;
    Tensor::cat(runs.into_iter().map(part).collect(), 0)
}
