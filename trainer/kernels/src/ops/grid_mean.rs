//! Means over the cells of a grid, and channel factors for all of its cells: the two ends of squeeze-and-excitation.
//!
//! ```text
//! m[b, c] = 1/N Σ_n x[b, n, c]         gx[b, n, c] = g[b, c] / N
//! y[b, n, c] = x[b, n, c] · s[b, c]    gx = g · s      gs[b, c] = Σ_n g[b, n, c] · x[b, n, c]
//! ```

use burn_flex::{Flex, FlexTensor};
use burn_tensor::Tensor;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{contiguous, dims, is_flex, slice, tensor};

/// Returns the mean of `x` of `[B, N, C]` over N, `[B, 1, C]`.
pub fn grid_mean(x: Tensor<3>) -> Tensor<3> {
    match is_flex(&x) {
        true => run(GridMean, [x.into()]),
        false => x.mean_dim(1),
    }
}

/// Multiplies `x` of `[B, N, C]` by `factors` of `[B, 1, C]`.
pub fn scale_channels(x: Tensor<3>, factors: Tensor<3>) -> Tensor<3> {
    match is_flex(&x) {
        true => run(ScaleChannels, [x.into(), factors.into()]),
        false => x * factors,
    }
}

#[derive(Debug, Clone)]
struct GridMean;

impl Kernel<Flex, 1> for GridMean {
    /// Shape of the input.
    type Saved = [usize; 3];

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, [usize; 3]) {
        let shape @ [b, n, c] = dims(&x);
        let mut mean = vec![0.0; b * c];
        add_rows(slice(&contiguous(&x)), &mut mean, n, c, 1.0 / n as f32);
        (tensor(mean, [b, 1, c]), shape)
    }

    fn backward(&self, [b, n, c]: [usize; 3], grad: FlexTensor, _: [bool; 1]) -> [Option<FlexTensor>; 1] {
        let grad = contiguous(&grad);
        let mut gx = vec![0.0; b * n * c];
        spread_rows(slice(&grad), &mut gx, n, c, 1.0 / n as f32);
        [Some(tensor(gx, [b, n, c]))]
    }
}

#[derive(Debug, Clone)]
struct ScaleChannels;

impl Kernel<Flex, 2> for ScaleChannels {
    type Saved = (FlexTensor, FlexTensor);

    fn forward(&self, [x, factors]: [FlexTensor; 2]) -> (FlexTensor, Self::Saved) {
        let shape @ [_, n, c] = dims(&x);
        let (x, factors) = (contiguous(&x), contiguous(&factors));
        let mut y = slice(&x).to_vec();
        multiply(&mut y, slice(&factors), n, c);
        (tensor(y, shape), (x, factors))
    }

    fn backward(
        &self,
        (x, factors): Self::Saved,
        grad: FlexTensor,
        wanted: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        let shape @ [b, n, c] = dims(&x);
        let grad = contiguous(&grad);
        let gs = wanted[1].then(|| {
            let mut gs = vec![0.0; b * c];
            add_products(slice(&grad), slice(&x), &mut gs, n, c);
            tensor(gs, [b, 1, c])
        });
        let gx = wanted[0].then(|| {
            let mut gx = slice(&grad).to_vec();
            multiply(&mut gx, slice(&factors), n, c);
            tensor(gx, shape)
        });
        [gx, gs]
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_rows(x: &[f32], sums: &mut [f32], n: usize, c: usize, factor: f32) {
    for (rows, sum) in x.chunks_exact(n * c).zip(sums.chunks_exact_mut(c)) {
        for row in rows.chunks_exact(c) {
            sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        sum.iter_mut().for_each(|sum| *sum *= factor);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn spread_rows(values: &[f32], rows: &mut [f32], n: usize, c: usize, factor: f32) {
    for (rows, values) in rows.chunks_exact_mut(n * c).zip(values.chunks_exact(c)) {
        for row in rows.chunks_exact_mut(c) {
            row.iter_mut().zip(values).for_each(|(out, value)| *out = value * factor);
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn multiply(rows: &mut [f32], factors: &[f32], n: usize, c: usize) {
    for (rows, factors) in rows.chunks_exact_mut(n * c).zip(factors.chunks_exact(c)) {
        for row in rows.chunks_exact_mut(c) {
            row.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_products(a: &[f32], b: &[f32], sums: &mut [f32], n: usize, c: usize) {
    for ((a, b), sum) in a.chunks_exact(n * c).zip(b.chunks_exact(n * c)).zip(sums.chunks_exact_mut(c)) {
        for (a, b) in a.chunks_exact(c).zip(b.chunks_exact(c)) {
            sum.iter_mut().zip(a).zip(b).for_each(|((sum, a), b)| *sum += a * b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::twin::{assert_close, devices, leaves};

    #[test]
    fn they_equal_their_twins_forwards_and_backwards() {
        for device in devices() {
            let x = leaves(&device, &[[3, 35, 19]], 1).remove(0);
            let factors = leaves(&device, &[[3, 1, 19]], 2).remove(0);
            let gradients = |y: Tensor<3>| {
                let grads = (y.clone() * y.inner().autodiff()).sum().backward();
                [&x, &factors].map(|leaf| leaf.grad(&grads))
            };
            let (mean, twin) = (grid_mean(x.clone()), x.clone().mean_dim(1));
            assert_close("mean", mean.clone().inner(), twin.clone().inner(), 1e-6);
            let ([a, _], [t, _]) = (gradients(mean), gradients(twin));
            assert_close("input of the mean", a.expect("leaf"), t.expect("leaf"), 2e-6);
            let (y, twin) = (scale_channels(x.clone(), factors.clone()), x.clone() * factors.clone());
            assert_close("product", y.clone().inner(), twin.clone().inner(), 1e-6);
            for (name, (a, t)) in
                ["input", "factors"].iter().zip(gradients(y).into_iter().zip(gradients(twin)))
            {
                assert_close(name, a.expect("leaf"), t.expect("leaf"), 2e-6);
            }
        }
    }
}
