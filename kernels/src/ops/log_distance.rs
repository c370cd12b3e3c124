//! Logarithms of distances between rows.
//!
//! ```text
//! d_p  = √(|x_i(p) - z_j(p)|² + D ε²)     y_p = log(d_p + ε)
//! gx_i = Σ_{p: i(p) = i} g_p (x_i - z_j(p)) / (d_p (d_p + ε))
//! ```
//!
//! x `[M, D]`, z `[N, D]`, P pairs (i, j), y `[P]`. The slope of the square root is infinite at
//! zero: with ε, the distance between equal rows is not zero.

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{Int, Tensor, TensorData};
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, dims, is_flex, slice, tensor};
use super::math::lane_squared_distance;

/// Returns the logarithms, `[P]`, for `pairs` of a row of `x` and a row of `z`. `z` gets no
/// gradient.
pub fn log_distances(x: Tensor<2>, z: Tensor<2>, pairs: Vec<[usize; 2]>, epsilon: f64) -> Tensor<1> {
    if is_flex(&x) {
        run(LogDistances { pairs, epsilon: epsilon as f32 }, [x.into(), z.into()])
    } else {
        plain(x, z, pairs, epsilon)
    }
}

fn plain(x: Tensor<2>, z: Tensor<2>, pairs: Vec<[usize; 2]>, epsilon: f64) -> Tensor<1> {
    let [_, d] = x.dims();
    let device = z.device();
    let [x_indices, z_indices] = [0, 1].map(|side: usize| {
        let rows: Vec<i64> = pairs.iter().map(|pair| pair[side] as i64).collect();
        Tensor::<1, Int>::from_data(TensorData::new(rows, [pairs.len()]), &device)
    });
    let z = z.select(0, z_indices);
    let z = if x.is_autodiff() { z.autodiff() } else { z };
    let gaps = x.select(0, x_indices) - z;
    let distances = (gaps.powi_scalar(2).sum_dim(1) + d as f64 * epsilon * epsilon).sqrt();
    (distances + epsilon).log().reshape([pairs.len()])
}

#[derive(Debug, Clone)]
struct LogDistances {
    pairs: Vec<[usize; 2]>,
    epsilon: f32,
}

impl Kernel<Flex, 2> for LogDistances {
    /// x, z, and the distances.
    type Saved = [FlexTensor; 3];

    fn forward(&self, [x, z]: [FlexTensor; 2]) -> (FlexTensor, Self::Saved) {
        let [_, d]: [usize; 2] = dims(&x);
        let x = contiguous(&x);
        let z = contiguous(&z);
        let distances = distances(slice(&x), slice(&z), &self.pairs, d, self.epsilon);
        let logs = distances.iter().map(|distance| (distance + self.epsilon).ln()).collect();
        let n = self.pairs.len();
        (tensor(logs, [n]), [x, z, tensor(distances, [n])])
    }

    fn backward(
        &self,
        [x, z, distances]: Self::Saved,
        grad: FlexTensor,
        _: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let [m, d]: [usize; 2] = dims(&x);
        let grad = contiguous(&grad);
        let slopes: Vec<f32> = slice(&grad)
            .iter()
            .zip(slice(&distances))
            .map(|(g, distance)| g / (distance * (distance + self.epsilon)))
            .collect();
        let mut gx = vec![0.0; m * d];
        add_gradients(&mut gx, slice(&x), slice(&z), &self.pairs, &slopes, d);
        [Some(tensor(gx, [m, d])), None]
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn distances(x: &[f32], z: &[f32], pairs: &[[usize; 2]], d: usize, epsilon: f32) -> Vec<f32> {
    let floor = d as f32 * epsilon * epsilon;
    let mut distances = Vec::with_capacity(pairs.len());
    for [i, j] in pairs {
        let squared = lane_squared_distance(&x[i * d..(i + 1) * d], &z[j * d..(j + 1) * d]);
        distances.push((squared + floor).sqrt());
    }
    distances
}

/// Adds the gradient of each pair to its row of `gx`.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_gradients(gx: &mut [f32], x: &[f32], z: &[f32], pairs: &[[usize; 2]], slopes: &[f32], d: usize) {
    for ([i, j], slope) in pairs.iter().zip(slopes) {
        let rows = gx[i * d..(i + 1) * d].iter_mut().zip(&x[i * d..(i + 1) * d]).zip(&z[j * d..(j + 1) * d]);
        for ((gx, x), z) in rows {
            *gx += (x - z) * slope;
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::Gradients;

    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, devices, leaves};

    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            let x = leaves(&device, &[[4, 19]], 1).remove(0);
            let z = leaves(&device, &[[6, 19]], 2).remove(0);
            let pairs = vec![[0, 5], [1, 1], [3, 0], [1, 4], [0, 5]];
            let y = log_distances(x.clone(), z.clone().inner(), pairs.clone(), 1e-8);
            let expected = plain(x.clone(), z.clone().inner(), pairs, 1e-8);
            assert_close("logarithms", y.clone().inner(), expected.clone().inner(), 1e-6);
            assert_gradients_close("x", &x, &backward_cubed(y), &backward_cubed(expected), 3e-6);
        }
    }

    /// Runs the backward pass from `y`, whose gradient is `y³`.
    fn backward_cubed(y: Tensor<1>) -> Gradients {
        (y.clone() * y.inner().autodiff().powi_scalar(3)).sum().backward()
    }
}
