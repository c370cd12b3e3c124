//! Logarithms of distances between rows.
//!
//! ```text
//! d_p  = √(|x_i(p) - z_j(p)|² + D ε²)     y_p = log(d_p + ε)        x [M, D]  z [N, D]  P pairs (i, j)  y [P]
//! gx_i = Σ_{p: i(p) = i} g_p (x_i - z_j(p)) / (d_p (d_p + ε))
//! ```
//!
//! The slope of the square root is infinite at zero: ε keeps the distance of equal rows away from
//! it.

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{Int, Tensor, TensorData};
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, dims, is_flex, slice, tensor};
use super::math::lane_squared_distance;

/// Returns the logarithms, `[P]`, for `pairs` of a row of `x` and a row of `z`. `z` has no
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
    let indices = |side: usize| {
        let rows: Vec<i64> = pairs.iter().map(|pair| pair[side] as i64).collect();
        Tensor::<1, Int>::from_data(TensorData::new(rows, [pairs.len()]), &device)
    };
    let z = z.select(0, indices(1));
    let gaps = x.clone().select(0, indices(0)) - if x.is_autodiff() { z.autodiff() } else { z };
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
        pull(&mut gx, slice(&x), slice(&z), &self.pairs, &slopes, d);
        [Some(tensor(gx, [m, d])), None]
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn distances(x: &[f32], z: &[f32], pairs: &[[usize; 2]], d: usize, epsilon: f32) -> Vec<f32> {
    let floor = d as f32 * epsilon * epsilon;
    pairs
        .iter()
        .map(|[i, j]| (lane_squared_distance(&x[i * d..(i + 1) * d], &z[j * d..(j + 1) * d]) + floor).sqrt())
        .collect()
}

/// Adds each pair's gradient to its row.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn pull(gx: &mut [f32], x: &[f32], z: &[f32], pairs: &[[usize; 2]], slopes: &[f32], d: usize) {
    for ([i, j], slope) in pairs.iter().zip(slopes) {
        let rows = gx[i * d..(i + 1) * d].iter_mut().zip(&x[i * d..(i + 1) * d]).zip(&z[j * d..(j + 1) * d]);
        for ((gx, x), z) in rows {
            *gx += (x - z) * slope;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::twin::{assert_close, devices, leaves};

    #[test]
    fn it_equals_its_twin_forwards_and_backwards() {
        for device in devices() {
            let x = leaves(&device, &[[4, 19]], 1).remove(0);
            let z = leaves(&device, &[[6, 19]], 2).remove(0);
            let pairs = vec![[0, 5], [1, 1], [3, 0], [1, 4], [0, 5]];
            let run = |f: fn(Tensor<2>, Tensor<2>, Vec<[usize; 2]>, f64) -> Tensor<1>| {
                let y = f(x.clone(), z.clone().inner(), pairs.clone(), 1e-8);
                let grads = (y.clone() * y.clone().inner().autodiff().powi_scalar(3)).sum().backward();
                (y.inner(), x.grad(&grads).unwrap())
            };
            let a = run(log_distances);
            let b = run(plain);
            assert_close("logarithms", a.0, b.0, 1e-6);
            assert_close("x", a.1, b.1, 3e-6);
        }
    }
}
