//! Gram anchoring (DINOv3: Siméoni et al. 2025, section 4.2): similarities between the patches of a
//! view are kept close to those of an earlier network.
//!
//! ```text
//! loss = mean over views of mean_{ij} (x̂_i · x̂_j - ŷ_i · ŷ_j)²      x, y [N, D] the patches of both networks
//! ```

use burn_tensor::{Tensor, TensorData};
use kernels::ops::{NORM_EPSILON, matmul, unit_rows};
use networks::interpolation::{Resampling, matrix};

/// Returns the loss of the patches `x` `[B, N, D]`, with a graph, against `anchor` of the same
/// shape, `[1]`.
pub(crate) fn gram_loss(x: Tensor<3>, anchor: Tensor<3>) -> Tensor<1> {
    (similarities(x) - similarities(anchor).autodiff()).powi_scalar(2).mean()
}

/// Returns the cosines of the angles between the patches of each view, `[B, N, N]`.
fn similarities(x: Tensor<3>) -> Tensor<3> {
    let [b, n, d] = x.dims();
    let unit = unit_rows(x.reshape([b * n, d]), NORM_EPSILON).reshape([b, n, d]);
    matmul(unit.clone(), unit.swap_dims(1, 2))
}

/// Resamples patches `x` `[B, N, D]` bicubically from a grid of `from` × `from` cells to one of
/// `to` × `to`.
pub(crate) fn resample_bicubic(x: Tensor<3>, from: usize, to: usize) -> Tensor<3> {
    if from == to {
        return x;
    }
    let [b, _, _] = x.dims();
    let n = from * from;
    let m = to * to;
    let weights = matrix(from, [to; 2], Resampling { offset: 0.0, antialias: false });
    let matrix = Tensor::<3>::from_data(TensorData::new(weights, [1, m, n]), &x.device());
    matmul(matrix.expand([b, m, n]), x)
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Device, Distribution};

    use super::*;

    /// Returns the patches of view `view` of `t` `[B, N, D]`, scaled to length one.
    fn unit_patches(t: &Tensor<3>, view: usize) -> Vec<Vec<f64>> {
        let [_, n, d] = t.dims();
        let values = t.clone().into_data().try_to_vec::<f32>().expect("f32");
        let mut patches = Vec::with_capacity(n);
        for patch in values[view * n * d..(view + 1) * n * d].chunks(d) {
            let length = patch.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
            patches.push(patch.iter().map(|v| f64::from(*v) / length).collect());
        }
        patches
    }

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    #[test]
    fn loss_equals_the_double_loop_over_pairs_of_patches() {
        let device = Device::flex();
        device.seed(4);
        let b = 2;
        let n = 5;
        let d = 3;
        let x = Tensor::<3>::random([b, n, d], Distribution::Normal(0.0, 1.0), &device);
        let y = Tensor::<3>::random([b, n, d], Distribution::Normal(0.0, 1.0), &device);
        let mut expected = 0.0;
        for view in 0..b {
            let x = unit_patches(&x, view);
            let y = unit_patches(&y, view);
            for i in 0..n {
                for j in 0..n {
                    expected += (dot(&x[i], &x[j]) - dot(&y[i], &y[j])).powi(2) / (b * n * n) as f64;
                }
            }
        }
        let loss = gram_loss(x.clone().autodiff(), y).into_scalar::<f32>();
        assert!((f64::from(loss) - expected).abs() < 1e-6, "{loss} {expected}");
        assert_eq!(gram_loss(x.clone().autodiff(), x).into_scalar::<f32>(), 0.0);
    }
}
