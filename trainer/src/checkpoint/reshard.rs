//! Ranges of files that make up a shard, as a function of lengths alone.

use std::ops::Range;

/// A range of elements in one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Index of the file.
    pub file: usize,
    /// Elements within that file's part of the unit.
    pub source: Range<usize>,
    /// Elements within the shard that is read.
    pub target: Range<usize>,
}

/// Divides the elements `range` of the buffer of a unit of `numel` elements into pieces, where each
/// file holds `file_len` elements of the buffer. Elements beyond `numel` are padding, which is zero
/// and in no piece.
pub fn pieces(range: Range<usize>, numel: usize, file_len: usize) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let end = range.end.min(numel);
    let mut piece_start = range.start;
    while piece_start < end {
        let file = piece_start / file_len;
        let piece_end = ((file + 1) * file_len).min(end);
        pieces.push(Piece {
            file,
            source: piece_start - file * file_len..piece_end - file * file_len,
            target: piece_start - range.start..piece_end - range.start,
        });
        piece_start = piece_end;
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
            let source_len = numel.next_multiple_of(ALIGNMENT * from) / from;
            let target_len = numel.next_multiple_of(ALIGNMENT * to) / to;
            let mut n_reads = vec![0; numel];
            for rank in 0..to {
                let range = rank * target_len..(rank + 1) * target_len;
                for piece in pieces(range.clone(), numel, source_len) {
                    prop_assert!(piece.file < from && piece.source.end <= source_len);
                    prop_assert_eq!(piece.source.len(), piece.target.len());
                    for (source, target) in piece.source.zip(piece.target) {
                        let element = range.start + target;
                        prop_assert_eq!(piece.file * source_len + source, element);
                        n_reads[element] += 1;
                    }
                }
            }
            prop_assert!(n_reads.iter().all(|n| *n == 1));
        }
    }
}
