//! Means over the whole batch: of the teacher's logits, which its center follows (Caron et al.
//! 2021, equation 4), and of targets, which say how many prototypes are used.
//!
//! ```text
//! P = softmax((T - c) / τ)         c ← m · c + (1 - m) · mean_{B,v} T
//! p = mean_{B,v} P                 exp(-Σ p ln p) prototypes in use, of K
//! ```

use burn_tensor::Tensor;
use kernels::ops::{column_sums, total};
use ranks::EngineError;
use ranks::peers::Peers;

use super::rows::Rows;
use crate::method::Collective;

/// Computes means over all rows of the batch, `[K]` each. One sum over ranks serves all of them;
/// all have the same number of rows.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn batch_means<const N: usize>(
    what: &str,
    rows: [&Rows; N],
    peers: Peers<'_>,
) -> Result<[Tensor<1>; N], EngineError> {
    let k = rows[0].n_prototypes();
    let n = rows[0].n().max(1);
    let sums = rows.map(|rows| rows.reduced(k, 0.0, column_sums));
    let joined = |number: usize| Tensor::cat(sums.iter().map(|sums| sums[number].clone()).collect(), 0);
    let joined: Vec<Tensor<1>> = (0..sums[0].len()).map(joined).collect();
    let means = peers.sum(what, &joined)? / n as f64;
    Ok(std::array::from_fn(|i| means.clone().slice(i * k..(i + 1) * k)))
}

/// Returns the collective of [`batch_means`] of `n` kinds of rows over `n_prototypes`.
pub(crate) fn collective(n: usize, n_prototypes: usize) -> Collective {
    Collective::ColumnSum(n * n_prototypes)
}

/// Effective number of prototypes, from 1 to K, given the mean `[K]` of targets: the exponential of
/// its entropy, `[1]`.
pub(crate) fn in_use(mean: Tensor<1>) -> Tensor<1> {
    total(mean.clone() * mean.clamp_min(1e-30).log()).neg().exp()
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;

    use super::*;

    #[test]
    fn what_a_batch_uses_is_counted() {
        for (mean, expected) in
            [([0.25f32; 4], 4.0), ([0.5, 0.5, 0.0, 0.0], 2.0), ([0.0, 0.0, 1.0, 0.0], 1.0)]
        {
            let found: f32 = in_use(Tensor::from_floats(mean, &Device::flex())).into_scalar();
            assert!((found - expected).abs() < 1e-5, "{found}");
        }
    }
}
