//! Means over the global batch: of the teacher's logits, for the moving average of its center
//! (Caron et al. 2021, equation 4), and of targets, for the number of prototypes in use.
//!
//! ```text
//! P = softmax((T - c) / τ)         c ← m · c + (1 - m) · mean_{B,v} T
//! p = mean_{B,v} P                 exp(-Σ p ln p) prototypes in use, of K
//! ```

use burn_tensor::Tensor;
use kernels::ops::total;
use ranks::EngineError;

use super::exchange::PrototypeExchange;
use super::rows::Rows;
use crate::method::Collective;

/// Computes the means of each kind of rows over the global batch, `[K]` each for all prototypes,
/// with one sum over ranks. All kinds have the same number of rows.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn batch_means<const N: usize>(
    subject: &str,
    rows: [&Rows; N],
    exchange: PrototypeExchange<'_>,
) -> Result<[Tensor<1>; N], EngineError> {
    let n = rows[0].n().max(1);
    let sums = rows.map(Rows::column_sums);
    let mut joined: Vec<Tensor<1>> = Vec::with_capacity(sums[0].len());
    for index in 0..sums[0].len() {
        joined.push(Tensor::cat(sums.iter().map(|sums| sums[index].clone()).collect(), 0));
    }
    let means = exchange.sum(subject, &joined)? / n as f64;
    exchange.all_columns(subject, means)
}

/// Returns the collective of [`batch_means`] of `n` kinds of rows over `n_prototypes`.
pub(crate) fn collective(n: usize, n_prototypes: usize) -> Collective {
    Collective::ColumnSum(n * n_prototypes)
}

/// Returns the effective number of prototypes in use, from 1 to K, given the mean `[K]` of targets:
/// the exponential of its entropy, `[1]`.
pub(crate) fn prototypes_in_use(mean: Tensor<1>) -> Tensor<1> {
    total(mean.clone() * mean.clamp_min(1e-30).log()).neg().exp()
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;

    use super::*;

    #[test]
    fn effective_number_of_prototypes_is_the_exponential_of_the_entropy() {
        for (mean, expected) in
            [([0.25f32; 4], 4.0), ([0.5, 0.5, 0.0, 0.0], 2.0), ([0.0, 0.0, 1.0, 0.0], 1.0)]
        {
            let number: f32 = prototypes_in_use(Tensor::from_floats(mean, &Device::flex())).into_scalar();
            assert!((number - expected).abs() < 1e-5, "{number}");
        }
    }
}
