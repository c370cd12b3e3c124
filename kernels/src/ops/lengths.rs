//! Lengths of sequences that follow one another in one tensor.

use std::ops::Range;
use std::sync::Arc;

/// Sequences of the same length that follow one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Number of sequences.
    pub n_sequences: usize,
    /// Number of tokens of each sequence.
    pub length: usize,
}

impl Run {
    /// Returns the number of tokens of all sequences.
    pub fn n_tokens(&self) -> usize {
        self.n_sequences * self.length
    }
}

/// The lengths of sequences that follow one another in a tensor `[T, D]`, where T is the number of
/// tokens of all sequences: runs of sequences of the same length. A clone shares them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lengths {
    /// Neighbors differ in length; each has sequences and tokens.
    runs: Arc<[Run]>,
}

impl Lengths {
    /// Returns the lengths of the sequences of `runs`. Neighbors of the same length become one run;
    /// runs without sequences or without tokens are left out.
    pub fn new(runs: impl IntoIterator<Item = Run>) -> Self {
        let mut merged: Vec<Run> = Vec::new();
        for run in runs {
            if run.n_tokens() == 0 {
                continue;
            }
            match merged.last_mut() {
                Some(last) if last.length == run.length => last.n_sequences += run.n_sequences,
                _ => merged.push(run),
            }
        }
        Self { runs: merged.into() }
    }

    /// Returns the lengths of `n_sequences` sequences of `length` tokens.
    pub fn equal(n_sequences: usize, length: usize) -> Self {
        Self::new([Run { n_sequences, length }])
    }

    /// Returns the runs; neighbors differ in length.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Returns the number of sequences.
    pub fn n_sequences(&self) -> usize {
        self.runs.iter().map(|run| run.n_sequences).sum()
    }

    /// Returns the number of tokens of all sequences.
    pub fn n_tokens(&self) -> usize {
        self.runs.iter().map(Run::n_tokens).sum()
    }

    /// Returns the tokens of each sequence, in order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let lengths = self.runs.iter().flat_map(|run| std::iter::repeat_n(run.length, run.n_sequences));
        lengths.scan(0, |start, length| {
            let range = *start..*start + length;
            *start = range.end;
            Some(range)
        })
    }

    /// Returns the lengths of the sequences with the indices `kept`, which increase.
    ///
    /// # Panics
    /// If there is no sequence with one of the indices.
    pub fn select(&self, kept: &[usize]) -> Self {
        let mut rest = kept;
        let mut end = 0;
        let mut runs = Vec::with_capacity(self.runs.len());
        for run in self.runs.iter() {
            end += run.n_sequences;
            let n_kept = rest.partition_point(|index| *index < end);
            runs.push(Run { n_sequences: n_kept, length: run.length });
            rest = &rest[n_kept..];
        }
        assert!(rest.is_empty(), "there are {end} sequences, and none with the indices {rest:?}");
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
    fn neighbors_of_the_same_length_are_one_run() {
        let runs = [run(2, 5), run(0, 7), run(1, 5), run(3, 0), run(1, 4), run(2, 5)];
        let lengths = Lengths::new(runs);
        assert_eq!(lengths.runs(), [run(3, 5), run(1, 4), run(2, 5)]);
        assert_eq!(lengths.n_sequences(), 6);
        assert_eq!(lengths.n_tokens(), 29);
        assert_eq!(Lengths::equal(4, 3), Lengths::new([run(1, 3), run(3, 3)]));
        assert!(Lengths::equal(0, 3).runs().is_empty());
        assert_eq!(Lengths::equal(3, 0).n_sequences(), 0);
    }

    #[test]
    fn ranges_follow_one_another() {
        let lengths = Lengths::new([run(2, 3), run(1, 1), run(1, 4)]);
        let ranges: Vec<Range<usize>> = lengths.ranges().collect();
        assert_eq!(ranges, [0..3, 3..6, 6..7, 7..11]);
    }

    #[test]
    fn selected_sequences_keep_their_lengths() {
        let lengths = Lengths::new([run(3, 5), run(1, 4), run(2, 5)]);
        assert_eq!(lengths.select(&[0, 1, 2, 3, 4, 5]), lengths);
        assert_eq!(lengths.select(&[1, 3]), Lengths::new([run(1, 5), run(1, 4)]));
        assert_eq!(lengths.select(&[2, 4, 5]), Lengths::equal(3, 5));
        assert!(lengths.select(&[]).runs().is_empty());
    }

    #[test]
    #[should_panic(expected = "none with the indices [6, 9]")]
    fn indices_beyond_the_last_sequence_panic() {
        Lengths::new([run(3, 5), run(3, 4)]).select(&[0, 6, 9]);
    }
}
