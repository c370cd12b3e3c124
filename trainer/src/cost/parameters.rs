//! Sizes that follow from the parameters of a unit.

use kernels::ops::ProductLimits;
use networks::params::ParamSpec;
use networks::unit::GroupShape;

/// Returns the limits of the products of one image's `shapes` with the parameters of a unit.
pub(super) fn product_limits(params: &[ParamSpec], shapes: &[GroupShape]) -> ProductLimits {
    ProductLimits {
        n_rows: shapes.iter().map(GroupShape::n_rows).max().unwrap_or(0),
        widest: params
            .iter()
            .map(|spec| match spec.shape.as_slice() {
                [rows, _, ..] => (*rows).max(spec.numel() / (*rows).max(1)),
                _ => 0,
            })
            .max()
            .unwrap_or(0),
        n_weights: params.iter().map(ParamSpec::numel).max().unwrap_or(0),
    }
}

/// Returns the largest number of elements of the gradients of `params` while they are computed,
/// from the last parameter to the first: the gradients so far, and, for a kernel with several taps,
/// a copy of the newest in another order.
pub(super) fn gradients_at_once(params: &[ParamSpec]) -> usize {
    let mut n_so_far = 0;
    let mut peak = 0;
    for spec in params.iter().rev().filter(|spec| spec.role.is_trained()) {
        n_so_far += spec.numel();
        let n_copied = if has_taps(spec) { spec.numel() } else { 0 };
        peak = peak.max(n_so_far + n_copied);
    }
    peak
}

/// Returns whether a parameter is the kernel of a convolution with several taps.
fn has_taps(spec: &ParamSpec) -> bool {
    matches!(spec.shape.as_slice(), [_, _, rows, columns] if rows * columns > 1) && !spec.projects_patches
}

#[cfg(test)]
mod tests {
    use networks::params::Init;

    use super::*;

    fn spec(shape: &[usize]) -> ParamSpec {
        ParamSpec::weight("weight", shape.to_vec(), Init::Constant(0.0))
    }

    #[test]
    fn gradients_of_kernels_are_copied() {
        let first = spec(&[8, 4, 3, 3]);
        let second = spec(&[8, 8, 3, 3]);
        let pointwise = spec(&[8, 8, 1, 1]);
        assert_eq!(gradients_at_once(&[pointwise.clone(), pointwise.clone()]), 2 * 64);
        // Both, and a copy of the one that comes first.
        assert_eq!(gradients_at_once(&[second.clone(), first]), 288 + 2 * 576);
        assert_eq!(gradients_at_once(&[pointwise, second]), 2 * 576);
    }
}
