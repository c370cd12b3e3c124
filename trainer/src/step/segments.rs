//! Segments of units that keep no graph: all units of a segment run again, from the input of the
//! first one.
//!
//! ```text
//! forwards    x₀ → u₀ → u₁ → u₂ → x₃          only x₀ is kept
//! backwards   x₀ → u₀ → x₁ → u₁ → x₂          then u₂, u₁ and u₀, each from its input
//! ```
//!
//! The only unit of a segment runs once forwards and once for its gradients; all but the last unit
//! of a longer segment run twice forwards.

use std::ops::Range;

/// Segments of the first units of a backbone, which keep no graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segments {
    /// Number of these units.
    pub(crate) n_units: usize,
    /// Number of units in a segment; the last one may have fewer.
    pub(crate) len: usize,
}

impl Segments {
    /// Divides the `n_backbone` units of a backbone into segments of `len` units, except the last
    /// `n_kept` units, which keep their graphs.
    pub(crate) fn new(n_backbone: usize, n_kept: usize, len: usize) -> Self {
        Self { n_units: n_backbone.saturating_sub(n_kept), len: len.max(1) }
    }

    /// Returns the units of each segment, from the first one.
    pub(crate) fn ranges(self) -> impl DoubleEndedIterator<Item = Range<usize>> {
        (0..self.n_units.div_ceil(self.len))
            .map(move |index| index * self.len..((index + 1) * self.len).min(self.n_units))
    }

    /// Returns whether unit `index` keeps its input.
    pub(crate) fn keeps_input(self, index: usize) -> bool {
        index >= self.n_units || index.is_multiple_of(self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_cover_the_units_without_graph() {
        let segments = Segments::new(9, 2, 3);
        assert_eq!(segments.ranges().collect::<Vec<_>>(), [0..3, 3..6, 6..7]);
        let kept: Vec<usize> = (0..9).filter(|index| segments.keeps_input(*index)).collect();
        assert_eq!(kept, [0, 3, 6, 7, 8]);
        assert_eq!(Segments::new(3, 9, 2).ranges().count(), 0);
    }
}
