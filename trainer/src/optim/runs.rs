//! Neighboring ranges of a shard with equal constants.

use std::ops::Range;

use burn_tensor::Tensor;

/// Joins neighboring ranges with equal values.
pub(super) fn joined<T: PartialEq>(
    ranges: impl Iterator<Item = (Range<usize>, T)>,
) -> Vec<(Range<usize>, T)> {
    let mut runs: Vec<(Range<usize>, T)> = Vec::new();
    for (range, value) in ranges {
        match runs.last_mut() {
            Some((last, last_value)) if last.end == range.start && *last_value == value => {
                last.end = range.end;
            }
            _ => runs.push((range, value)),
        }
    }
    runs
}

/// Returns the ranges of `update`, each with one of its constants.
pub(super) fn by_range<C>(
    update: &[(Range<usize>, C)],
    constant: fn(&C) -> f32,
) -> impl Iterator<Item = (Range<usize>, f32)> {
    update.iter().map(move |(range, constants)| (range.clone(), constant(constants)))
}

/// Multiplies every range of `values` by its factor; the padding after the last range is unchanged.
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
    let mut parts = Vec::with_capacity(runs.len());
    for (range, factor) in runs {
        parts.push(values.clone().slice([range]) * factor);
    }
    Tensor::cat(parts, 0)
}
