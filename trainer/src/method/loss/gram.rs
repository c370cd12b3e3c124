//! Gram anchoring (DINOv3: Siméoni et al. 2025, section 4.2): similarities between the patches of a
//! view are kept close to those of an earlier network.
//!
//! ```text
//! loss = mean over views of mean_{ij} (x̂_i · x̂_j - ŷ_i · ŷ_j)²      x, y [N, D] the patches of both networks
//! ```

use burn_tensor::{Tensor, TensorData};
use kernels::ops::{matmul, unit_rows};
use networks::interpolation::{Resampling, matrix};

/// Keeps norms away from zero.
const EPSILON: f64 = 1e-12;

/// Returns the loss of the patches `x` of `[B, N, D]`, with a graph, against `anchor` of the same
/// shape, `[1]`.
pub(crate) fn gram(x: Tensor<3>, anchor: Tensor<3>) -> Tensor<1> {
    let [b, n, d] = x.dims();
    let similarities = |x: Tensor<3>| {
        let unit = unit_rows(x.reshape([b * n, d]), EPSILON).reshape([b, n, d]);
        matmul(unit.clone(), unit.swap_dims(1, 2))
    };
    (similarities(x) - similarities(anchor).autodiff()).powi_scalar(2).mean()
}

/// Resamples patches `x` of `[B, N, D]` bicubically from a grid of `from` × `from` cells to one of
/// `to` × `to`.
pub(crate) fn on_grid(x: Tensor<3>, from: usize, to: usize) -> Tensor<3> {
    if from == to {
        return x;
    }
    let [b, _, _] = x.dims();
    let [n, m] = [from * from, to * to];
    let weights = matrix(from, [to; 2], Resampling { offset: 0.0, antialias: false });
    let matrix = Tensor::<3>::from_data(TensorData::new(weights, [1, m, n]), &x.device());
    matmul(matrix.expand([b, m, n]), x)
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Device, Distribution};

    use super::*;

    #[test]
    fn it_equals_the_double_loop() {
        let device = Device::flex();
        device.seed(4);
        let b = 2;
        let n = 5;
        let d = 3;
        let random = || Tensor::<3>::random([b, n, d], Distribution::Normal(0.0, 1.0), &device);
        let x = random();
        let y = random();
        let rows = |t: &Tensor<3>, i: usize| -> Vec<Vec<f64>> {
            let values = t.clone().into_data().try_to_vec::<f32>().expect("f32");
            values[i * n * d..(i + 1) * n * d]
                .chunks(d)
                .map(|row| {
                    let length = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
                    row.iter().map(|v| f64::from(*v) / length).collect()
                })
                .collect()
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let mut expected = 0.0;
        for image in 0..b {
            let x = rows(&x, image);
            let y = rows(&y, image);
            for i in 0..n {
                for j in 0..n {
                    expected += (dot(&x[i], &x[j]) - dot(&y[i], &y[j])).powi(2) / (b * n * n) as f64;
                }
            }
        }
        let found = gram(x.clone().autodiff(), y).into_scalar::<f32>();
        assert!((f64::from(found) - expected).abs() < 1e-6, "{found} {expected}");
        assert_eq!(gram(x.clone().autodiff(), x).into_scalar::<f32>(), 0.0);
    }
}
