//! The sum of all elements, without atomic operations.
//!
//! ```text
//! s = Σ_r (Σ_d x[r, d])       x [.., D], rows r of D elements       s [1]
//! ```
//!
//! On an NVIDIA GPU, Burn's own sum of all elements adds with atomic operations, whose order
//! differs between runs, and with it the last bits of the sum. On Mesa's llvmpipe, where a launch
//! has at most 65,535 cubes in a dimension, one of the kernels that it chooses from by their times
//! summed 16,777,475 ones to 131,070.

use burn_tensor::Tensor;

/// Returns the sum of all elements of `x`, `[1]`, with a gradient.
pub fn total<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    #[cfg(feature = "cube")]
    if super::cube::is_cube(&x) && x.shape().num_elements() > 0 {
        return sum_by_rows(x);
    }
    x.sum()
}

/// Sums the elements of each row, then the sums of the rows.
#[cfg(any(feature = "cube", test))]
fn sum_by_rows<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let rows = x.sum_dim(D - 1);
    let n_rows = rows.dims().iter().product::<usize>();
    rows.reshape([1, n_rows]).sum_dim(1).reshape([1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, devices, leaves};

    #[test]
    fn both_orders_match_burns_sum() {
        for device in devices() {
            let x = leaves(&device, &[[3, 5, 67]], 7).remove(0);
            let weight = Tensor::<3>::full([3, 5, 67], 0.5, &device);
            for function in [total::<3>, sum_by_rows::<3>] {
                let sum = function(x.clone() * weight.clone().autodiff());
                assert_close("sum", sum.clone().inner(), (x.clone().inner() * weight.clone()).sum(), 1e-4);
                assert_close("gradient", x.grad(&sum.backward()).expect("a leaf"), weight.clone(), 1e-6);
            }
        }
    }
}
