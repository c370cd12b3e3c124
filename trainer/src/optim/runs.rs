//! Neighboring ranges of a shard that are treated alike.

use std::ops::Range;

use burn_tensor::Tensor;

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

/// Every range of `values` times its factor; the padding after the last stays.
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
