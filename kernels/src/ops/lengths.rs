//! Lengths of sequences that follow one another in a tensor of tokens, `[T, D]`.

use std::ops::Range;
use std::sync::Arc;

/// Lengths of sequences that follow one another in a tensor of tokens, `[T, D]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lengths(Arc<[Run]>);

/// Consecutive sequences of one length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Number of sequences.
    pub n_sequences: usize,
    /// Number of tokens of each.
    pub length: usize,
}

impl Lengths {
    /// Creates the lengths of consecutive runs. Neighbors of equal length become one run; runs
    /// without tokens are left out.
    pub fn new(runs: impl IntoIterator<Item = Run>) -> Self {
        let mut merged: Vec<Run> = Vec::new();
        for run in runs {
            if run.n_sequences == 0 || run.length == 0 {
                continue;
            }
            match merged.last_mut() {
                Some(last) if last.length == run.length => last.n_sequences += run.n_sequences,
                _ => merged.push(run),
            }
        }
        Self(merged.into())
    }

    /// Creates the lengths of `n_sequences` sequences of `length` tokens each.
    pub fn equal(n_sequences: usize, length: usize) -> Self {
        Self::new([Run { n_sequences, length }])
    }

    /// Returns the runs of sequences of one length.
    pub fn runs(&self) -> &[Run] {
        &self.0
    }

    /// Returns the number of sequences.
    pub fn n_sequences(&self) -> usize {
        self.0.iter().map(|run| run.n_sequences).sum()
    }

    /// Returns the number of tokens of all sequences, T.
    pub fn n_tokens(&self) -> usize {
        self.0.iter().map(|run| run.n_sequences * run.length).sum()
    }

    /// Returns the tokens of each sequence.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let lengths = self.0.iter().flat_map(|run| std::iter::repeat_n(run.length, run.n_sequences));
        lengths.scan(0, |start, length| {
            let range = *start..*start + length;
            *start = range.end;
            Some(range)
        })
    }

    /// Returns the lengths of the sequences with the indices `kept`, which increase.
    pub fn select(&self, kept: &[usize]) -> Self {
        let mut runs = Vec::with_capacity(self.0.len());
        let mut first = 0;
        let mut rest = kept;
        for run in self.0.iter() {
            first += run.n_sequences;
            let n_sequences = rest.partition_point(|index| *index < first);
            runs.push(Run { n_sequences, length: run.length });
            rest = &rest[n_sequences..];
        }
        Self::new(runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(n_sequences: usize, length: usize) -> Run {
        Run { n_sequences, length }
    }

    #[test]
    fn neighbors_of_equal_length_are_one_run() {
        let lengths = Lengths::new([run(2, 5), run(0, 3), run(1, 5), run(4, 0), run(2, 3)]);
        assert_eq!(lengths.runs(), [run(3, 5), run(2, 3)]);
        assert_eq!((lengths.n_sequences(), lengths.n_tokens()), (5, 21));
        assert_eq!(lengths.ranges().collect::<Vec<_>>(), [0..5, 5..10, 10..15, 15..18, 18..21]);
        assert_eq!(Lengths::equal(3, 5), Lengths::new([run(1, 5), run(2, 5)]));
    }

    #[test]
    fn selected_sequences_keep_their_lengths() {
        let lengths = Lengths::new([run(2, 5), run(2, 3), run(1, 5)]);
        assert_eq!(lengths.select(&[1, 2, 4]).runs(), [run(1, 5), run(1, 3), run(1, 5)]);
        assert_eq!(lengths.select(&[0, 1, 4]).runs(), [run(3, 5)]);
        assert_eq!(lengths.select(&[]).n_sequences(), 0);
    }
}
