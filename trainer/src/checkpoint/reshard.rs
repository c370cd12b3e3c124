//! Parts of files that make up a shard: a pure function of lengths.

use std::ops::Range;

/// A range of elements in one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Number of the file.
    pub file: usize,
    /// Elements within that file's part of the unit.
    pub source: Range<usize>,
    /// Elements within the shard that is read.
    pub target: Range<usize>,
}

/// Cuts the elements `wanted` of a unit's buffer into pieces, when files hold `file_len` elements
/// of it each and the unit has `numel` elements. Elements beyond `numel` are padding: zero, and in
/// no piece.
pub fn pieces(wanted: Range<usize>, numel: usize, file_len: usize) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let end = wanted.end.min(numel);
    let mut at = wanted.start;
    while at < end {
        let file = at / file_len;
        let until = ((file + 1) * file_len).min(end);
        pieces.push(Piece {
            file,
            source: at - file * file_len..until - file * file_len,
            target: at - wanted.start..until - wanted.start,
        });
        at = until;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use networks::layout::ALIGNMENT;
    use proptest::prelude::*;

    proptest! {
        /// Shards of W ranks, read by W' ranks: every element is read exactly once.
        #[test]
        fn every_element_is_read_once(numel in 1usize..5000, from in 1usize..9, to in 1usize..9) {
            let padded = |world: usize| numel.next_multiple_of(ALIGNMENT * world);
            let (source_len, target_len) = (padded(from) / from, padded(to) / to);
            let mut seen = vec![0; numel];
            for rank in 0..to {
                let wanted = rank * target_len..(rank + 1) * target_len;
                for piece in pieces(wanted.clone(), numel, source_len) {
                    prop_assert!(piece.file < from && piece.source.end <= source_len);
                    prop_assert_eq!(piece.source.len(), piece.target.len());
                    for (source, target) in piece.source.zip(piece.target) {
                        let element = wanted.start + target;
                        prop_assert_eq!(piece.file * source_len + source, element);
                        seen[element] += 1;
                    }
                }
            }
            prop_assert!(seen.iter().all(|n| *n == 1));
        }
    }
}
