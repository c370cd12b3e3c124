//! What methods share that regress the features of another network at masked patches.

use burn_tensor::Tensor;
use kernels::ops::{layer_norm, total};

/// Number that is added to the variance of a target's channels, PyTorch's default.
const EPSILON: f64 = 1e-5;

/// Normalizes each row of `x`, `[R, D]`, over its channels, without gain and bias.
pub(super) fn normalized(x: Tensor<2>) -> Tensor<2> {
    let [_, d] = x.dims();
    let gain = Tensor::ones([d], &x.device());
    let bias = Tensor::zeros([d], &x.device());
    layer_norm(x, gain, bias, EPSILON)
}

/// Returns the smooth L1 distance of `predicted`, with a graph, from `targets`: the mean over the
/// elements of `[R, D]`, `[1]`.
///
/// ```text
/// d² / 2β for |d| < β, |d| - β / 2 otherwise          d a prediction minus its target
/// ```
pub(super) fn smooth_l1(predicted: Tensor<2>, targets: &Tensor<2>, beta: f64) -> Tensor<1> {
    let [n_rows, d] = predicted.dims();
    let n = (n_rows * d) as f64;
    let detached = predicted.clone().inner();
    let difference = detached.clone() - targets.clone();
    // In both cases the slope is the difference over β, clamped.
    let slope = (difference.clone() / beta).clamp(-1.0, 1.0);
    let value = total(slope.clone() * (difference - slope.clone() * (0.5 * beta))) / n;
    // A linear function of the predictions with this slope, shifted to the value.
    let linear_value = total(detached * slope.clone()) / n;
    let linear = total(predicted * slope.autodiff()) / n;
    linear + (value - linear_value).autodiff()
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;
    use kernels::device::host::to_host;

    use super::*;

    /// Values and gradients of PyTorch's `smooth_l1_loss`.
    #[test]
    fn smooth_l1_equals_pytorch() {
        let device = Device::flex();
        let predicted: Tensor<2> =
            Tensor::<1>::from_floats([1.3f32, -1.0, 0.2, 2.0].as_slice(), &device).reshape([2, 2]);
        let targets: Tensor<2> =
            Tensor::<1>::from_floats([1.0f32, 1.0, -0.5, 2.0].as_slice(), &device).reshape([2, 2]);
        let cases: [(f64, f32, [f32; 4]); 2] =
            [(1.0, 0.4475, [0.075, -0.25, 0.175, 0.0]), (0.5, 0.5725, [0.15, -0.25, 0.25, 0.0])];
        for (beta, expected, expected_gradient) in cases {
            let leaf = predicted.clone().autodiff().require_grad();
            let loss = smooth_l1(leaf.clone(), &targets, beta);
            let value = loss.clone().into_scalar::<f32>();
            assert!((value - expected).abs() < 1e-6, "{beta}: {value}");
            let gradient = to_host(leaf.grad(&loss.backward()).unwrap().reshape([4]));
            for (value, expected) in gradient.iter().zip(expected_gradient) {
                assert!((value - expected).abs() < 1e-6, "{beta}: {gradient:?}");
            }
        }
    }
}
