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
//!
//! Units at the beginning of a backbone that are never trained are in no segment: they keep
//! nothing, and have no backward pass.

use std::ops::Range;

/// Segments of the first trained units of a backbone, which keep no graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segments {
    /// Number of units before them, which are never trained.
    pub(crate) n_fixed: usize,
    /// Number of units that keep no graph, with those that are never trained.
    pub(crate) n_units: usize,
    /// Number of units in a segment; the last one may have fewer.
    pub(crate) len: usize,
}

impl Segments {
    /// Divides the `n_backbone` units of a backbone into segments of `len` units, except the last
    /// `n_kept` units, which keep their graphs.
    pub(crate) fn new(n_backbone: usize, n_kept: usize, len: usize) -> Self {
        Self { n_fixed: 0, n_units: n_backbone.saturating_sub(n_kept), len: len.max(1) }
    }

    /// Returns the segments of a backbone whose first `n_fixed` units are never trained.
    pub(crate) fn after_fixed(self, n_fixed: usize) -> Self {
        Self { n_fixed, n_units: self.n_units.max(n_fixed), ..self }
    }

    /// Returns the units of each segment, from the first one.
    pub(crate) fn ranges(self) -> impl DoubleEndedIterator<Item = Range<usize>> {
        let n_segments = (self.n_units - self.n_fixed).div_ceil(self.len);
        (0..n_segments).map(move |index| {
            let start = self.n_fixed + index * self.len;
            start..(start + self.len).min(self.n_units)
        })
    }

    /// Returns whether unit `index` is trained.
    pub(crate) fn is_trained(self, index: usize) -> bool {
        index >= self.n_fixed
    }

    /// Returns whether unit `index` keeps its input.
    pub(crate) fn keeps_input(self, index: usize) -> bool {
        let is_kept = index >= self.n_units;
        is_kept || (self.is_trained(index) && (index - self.n_fixed).is_multiple_of(self.len))
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

    #[test]
    fn segments_begin_after_the_units_that_are_never_trained() {
        let segments = Segments::new(9, 2, 3).after_fixed(2);
        assert_eq!(segments.ranges().collect::<Vec<_>>(), [2..5, 5..7]);
        let kept: Vec<usize> = (0..9).filter(|index| segments.keeps_input(*index)).collect();
        assert_eq!(kept, [2, 5, 7, 8]);
        let kept_graphs = Segments::new(9, 9, 1).after_fixed(4);
        assert_eq!((kept_graphs.n_units, kept_graphs.ranges().count()), (4, 0));
    }
}
