//! Sums of waves: the empirical characteristic function at equally spaced points.
//!
//! ```text
//! C[k, m] = Σ_n cos(k δ p[n, m])      S[k, m] = Σ_n sin(k δ p[n, m])       p [N, M], k < T: both [T, M]
//! E = Σ_k,m a[k, m] · C[k, m] + b[k, m] · S[k, m]
//! gp[n, m] = δ Σ_k k (b[k, m] cos(k δ p[n, m]) - a[k, m] sin(k δ p[n, m]))
//! ```
//!
//! Waves of higher k come from those before: cos (k+1)θ = 2 cos θ cos kθ - cos (k-1)θ, and so for the sine.

use burn_flex::{Flex, FlexTensor};
use burn_tensor::Tensor;
use multiversion::multiversion;

use super::bridge::{Home, Kernel, run};
use super::cpu::{contiguous, dims, is_flex, slice, tensor};
use super::math::sin_cos;

/// C and S of `p` of `[N, M]` without a graph, one after the other, `[2 T M]`.
pub(crate) fn wave_sums(p: Tensor<2>, n_points: usize, spacing: f64) -> Tensor<1> {
    let [_, m] = p.dims();
    if !is_flex(&p) {
        let point = |k: usize, f: fn(Tensor<2>) -> Tensor<2>| f(p.clone() * (k as f64 * spacing)).sum_dim(0);
        let all = (0..n_points).map(|k| point(k, Tensor::cos));
        let all = all.chain((0..n_points).map(|k| point(k, Tensor::sin)));
        return Tensor::cat(all.map(|sums| sums.reshape([m])).collect(), 0);
    }
    // It was an f32 tensor of Flex a line above.
    let p = contiguous(&p.try_into_primitive::<Flex>().expect("a tensor of Flex"));
    let mut totals = vec![0.0f64; 2 * n_points * m];
    for row in slice(&p).chunks_exact(m) {
        let mut waves = vec![0.0f32; 2 * n_points * m];
        waves_of_row(row, spacing as f32, n_points, &mut waves);
        totals.iter_mut().zip(waves).for_each(|(total, wave)| *total += f64::from(wave));
    }
    let sums = totals.into_iter().map(|total| total as f32).collect();
    Flex::give(tensor(sums, [2 * n_points * m]))
}

/// E of `p` of `[N, M]`, `[1]`, for `weights` of `[2 T M]` without a graph, a and then b.
pub(crate) fn weighted_waves(p: Tensor<2>, weights: Tensor<1>, spacing: f64) -> Tensor<1> {
    if is_flex(&p) && is_flex(&weights) {
        return run(WeightedWaves { spacing: spacing as f32 }, [p.into(), weights.into()]);
    }
    plain(p, weights, spacing)
}

fn plain(p: Tensor<2>, weights: Tensor<1>, spacing: f64) -> Tensor<1> {
    let ([_, m], [len]) = (p.dims(), weights.dims());
    let n_points = len / (2 * m);
    let weights = weights.reshape([2 * n_points, m]);
    let weights = if p.is_autodiff() { weights.autodiff() } else { weights };
    let term = |k: usize| {
        let angle = p.clone() * (k as f64 * spacing);
        let row = |i: usize| weights.clone().slice([i..i + 1, 0..m]);
        (angle.clone().cos() * row(k)).sum() + (angle.sin() * row(n_points + k)).sum()
    };
    (0..n_points).map(term).reduce(|sum, term| sum + term).unwrap_or_else(|| p.clone().sum() * 0.0)
}

#[derive(Debug, Clone)]
struct WeightedWaves {
    spacing: f32,
}

impl Kernel<Flex, 2> for WeightedWaves {
    type Saved = (FlexTensor, FlexTensor);

    fn forward(&self, [p, weights]: [FlexTensor; 2]) -> (FlexTensor, Self::Saved) {
        let (p, weights) = (contiguous(&p), contiguous(&weights));
        let [_, m]: [usize; 2] = dims(&p);
        let n_points = slice(&weights).len() / (2 * m);
        let mut waves = vec![0.0; 2 * n_points * m];
        let of_row = |row: &[f32]| {
            waves_of_row(row, self.spacing, n_points, &mut waves);
            waves.iter().zip(slice(&weights)).map(|(wave, weight)| f64::from(wave * weight)).sum::<f64>()
        };
        let sum: f64 = slice(&p).chunks_exact(m).map(of_row).sum();
        (tensor(vec![sum as f32], [1]), (p, weights))
    }

    fn backward(&self, (p, weights): Self::Saved, grad: FlexTensor, _: [bool; 2]) -> [Option<FlexTensor>; 2] {
        let shape @ [_, m]: [usize; 2] = dims(&p);
        let scale = slice(&contiguous(&grad))[0];
        let mut gp = vec![0.0; slice(&p).len()];
        for (row, gp) in slice(&p).chunks_exact(m).zip(gp.chunks_exact_mut(m)) {
            wave_gradient(row, slice(&weights), self.spacing, gp);
            gp.iter_mut().for_each(|gp| *gp *= scale);
        }
        [Some(tensor(gp, shape)), None]
    }
}

/// The waves of one row, `[2 T M]`.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn waves_of_row(row: &[f32], spacing: f32, n_points: usize, waves: &mut [f32]) {
    let m = row.len();
    let (cosines, sines) = waves.split_at_mut(n_points * m);
    for (i, p) in row.iter().enumerate() {
        let [sin, cos] = sin_cos(p * spacing);
        let (mut before, mut now) = ([0.0, 1.0], [sin, cos]);
        for k in 0..n_points {
            [sines[k * m + i], cosines[k * m + i]] = before;
            let next = [2.0 * cos * now[0] - before[0], 2.0 * cos * now[1] - before[1]];
            (before, now) = (now, next);
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn wave_gradient(row: &[f32], weights: &[f32], spacing: f32, gp: &mut [f32]) {
    let m = row.len();
    let (of_cosines, of_sines) = weights.split_at(weights.len() / 2);
    for (i, (p, gp)) in row.iter().zip(gp).enumerate() {
        let [sin, cos] = sin_cos(p * spacing);
        let (mut before, mut now) = ([0.0, 1.0], [sin, cos]);
        let mut sum = 0.0;
        for (k, (a, b)) in of_cosines.chunks_exact(m).zip(of_sines.chunks_exact(m)).enumerate() {
            sum += k as f32 * (b[i] * before[1] - a[i] * before[0]);
            let next = [2.0 * cos * now[0] - before[0], 2.0 * cos * now[1] - before[1]];
            (before, now) = (now, next);
        }
        *gp = sum * spacing;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::twin::{assert_close, devices, leaves};

    #[test]
    fn they_equal_their_twins_forwards_and_backwards() {
        const N_POINTS: usize = 17;
        const SPACING: f64 = 3.0 / 16.0;
        for device in devices() {
            let p = leaves(&device, &[[9, 21]], 1).remove(0).mul_scalar(3.0);
            let p = p.inner().autodiff().require_grad();
            let weights = leaves(&device, &[[2 * N_POINTS * 21]], 2).remove(0).inner();
            let sums = wave_sums(p.clone().inner(), N_POINTS, SPACING);
            for (k, t) in (0..N_POINTS).map(|k| (k, k as f64 * SPACING)) {
                let angle = p.clone().inner() * t;
                let cut = |start: usize| sums.clone().slice(start..start + 21);
                assert_close("cos", cut(k * 21), angle.clone().cos().sum_dim(0).reshape([21]), 2e-5);
                if k > 0 {
                    assert_close("sin", cut((N_POINTS + k) * 21), angle.sin().sum_dim(0).reshape([21]), 2e-5);
                }
            }
            let (e, twin) =
                (weighted_waves(p.clone(), weights.clone(), SPACING), plain(p.clone(), weights, SPACING));
            assert_close("forward", e.clone().inner(), twin.clone().inner(), 2e-5);
            let gradient = |e: Tensor<1>| p.grad(&e.backward()).expect("leaf");
            assert_close("input", gradient(e), gradient(twin), 2e-5);
        }
    }
}
