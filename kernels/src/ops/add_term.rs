//! The sum of terms that come one after another, which begins with the first: without zeros to begin
//! with, the graph has no operation more than the sum.

use burn_tensor::Tensor;

/// Returns `sum + term`, or `term` if there is no sum yet.
pub fn add_term<const D: usize>(sum: Option<Tensor<D>>, term: Tensor<D>) -> Tensor<D> {
    match sum {
        Some(sum) => sum + term,
        None => term,
    }
}
