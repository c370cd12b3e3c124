//! Residual branches that are computed for some of the sequences only (stochastic depth).
//!
//! ```text
//! y[tokens of kept sequences] = f(h[tokens of kept sequences]), and 0 for all others      h, y [T, D]
//! ```

use std::sync::Arc;

use burn_tensor::Tensor;

use super::lengths::Lengths;
use super::rows::{scatter_rows, select_rows};

/// Smallest share of dropped tokens for which a branch skips their sequences: for a smaller share,
/// copying the other sequences takes as long as computing the dropped ones.
pub const MIN_SKIPPED_SHARE: f64 = 0.1;

/// A factor of each sequence of a stream of tokens.
#[derive(Debug, Clone, Copy)]
pub struct SequenceFactors<'a> {
    /// Factors, one for each sequence.
    pub factors: &'a [f32],
    /// Lengths of the sequences.
    pub lengths: &'a Lengths,
}

impl SequenceFactors<'_> {
    /// Returns the factor of each token, `[T]`.
    pub(super) fn by_token(&self) -> Vec<f32> {
        let mut by_token = Vec::with_capacity(self.lengths.n_tokens());
        for (factor, range) in self.factors.iter().zip(self.lengths.ranges()) {
            by_token.resize(range.end, *factor);
        }
        by_token
    }
}

/// Sequences for which a branch is computed.
#[derive(Debug, Clone)]
pub struct KeptSequences {
    /// Lengths of the kept sequences.
    pub lengths: Lengths,
    /// Index of each of their tokens among those of all sequences; absent if all are kept.
    pub tokens: Option<Arc<[u32]>>,
}

/// Computes `f` of the tokens of the sequences in `h` of `[T, D]` whose factor is not zero, and
/// returns zeros for the others. If few tokens are dropped, or there are no factors, `f` is
/// computed for all of them; if all are dropped, for the first sequence.
pub fn apply_to_kept(
    h: Tensor<2>,
    lengths: &Lengths,
    factors: Option<&[f32]>,
    f: impl FnOnce(Tensor<2>, &KeptSequences) -> Tensor<2>,
) -> Tensor<2> {
    let Some(kept) = factors.and_then(|factors| kept_sequences(factors, lengths)) else {
        return f(h, &KeptSequences { lengths: lengths.clone(), tokens: None });
    };
    let [n_tokens, _] = h.dims();
    let mut tokens = Vec::with_capacity(n_tokens);
    let mut next = kept.iter().copied().peekable();
    for (sequence, range) in lengths.ranges().enumerate() {
        if next.peek() == Some(&sequence) {
            next.next();
            tokens.extend(range.start as u32..range.end as u32);
        }
    }
    let tokens: Arc<[u32]> = tokens.into();
    let kept = KeptSequences { lengths: lengths.select(&kept), tokens: Some(Arc::clone(&tokens)) };
    scatter_rows(f(select_rows(h, &tokens), &kept), &tokens, n_tokens)
}

/// Returns the indices of the sequences whose factor is not zero; `None` if all are to be computed.
fn kept_sequences(factors: &[f32], lengths: &Lengths) -> Option<Vec<usize>> {
    let mut kept = Vec::with_capacity(factors.len());
    let mut n_dropped = 0;
    for (sequence, range) in lengths.ranges().enumerate() {
        if factors[sequence] == 0.0 {
            n_dropped += range.len();
        } else {
            kept.push(sequence);
        }
    }
    if n_dropped == 0 || (n_dropped as f64) < MIN_SKIPPED_SHARE * lengths.n_tokens() as f64 {
        return None;
    }
    if kept.is_empty() {
        // Operations expect at least one sequence; the factor of this one is zero.
        kept.push(0);
    }
    Some(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::lengths::Run;
    use crate::ops::testing::{devices, leaves};

    /// Returns the sums of the rows of `branch(h)`, where the branch adds one to each element, and
    /// the lengths that it was given.
    fn row_sums(h: &Tensor<2>, lengths: &Lengths, factors: Option<&[f32]>) -> (Vec<f32>, Lengths) {
        let mut seen = None;
        let y = apply_to_kept(h.clone(), lengths, factors, |h, kept| {
            assert_eq!(kept.tokens.as_ref().map_or(lengths.n_tokens(), |tokens| tokens.len()), h.dims()[0]);
            seen = Some(kept.lengths.clone());
            h.zeros_like() + 1.0
        });
        (y.sum_dim(1).into_data().try_to_vec().unwrap(), seen.unwrap())
    }

    #[test]
    fn dropped_sequences_are_zero() {
        let lengths = Lengths::new([Run { n_sequences: 2, length: 2 }, Run { n_sequences: 2, length: 1 }]);
        for device in devices() {
            let h = leaves(&device, &[[6, 3]], 1).remove(0).inner();
            let (sums, seen) = row_sums(&h, &lengths, None);
            assert_eq!((sums, seen), (vec![3.0; 6], lengths.clone()));
            let (sums, seen) = row_sums(&h, &lengths, Some(&[0.0, 2.0, 0.0, 2.0]));
            assert_eq!((sums, seen.n_tokens()), (vec![0.0, 0.0, 3.0, 3.0, 0.0, 3.0], 3));
            let (sums, seen) = row_sums(&h, &lengths, Some(&[0.0; 4]));
            assert_eq!((sums, seen.n_sequences()), (vec![3.0, 3.0, 0.0, 0.0, 0.0, 0.0], 1));
        }
    }

    #[test]
    fn few_dropped_tokens_are_computed() {
        let lengths = Lengths::new([Run { n_sequences: 10, length: 2 }, Run { n_sequences: 1, length: 1 }]);
        let h = leaves(&burn_tensor::Device::flex(), &[[21, 3]], 1).remove(0).inner();
        let mut factors = [1.0; 11];
        factors[10] = 0.0;
        assert_eq!(row_sums(&h, &lengths, Some(&factors)).1, lengths);
        factors[9] = 0.0;
        assert_eq!(row_sums(&h, &lengths, Some(&factors)).1.n_sequences(), 9);
    }
}
