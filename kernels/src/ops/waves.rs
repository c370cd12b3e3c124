//! Sums of waves: the empirical characteristic function at equally spaced points.
//!
//! ```text
//! C[k, m] = Σ_n cos(k δ p[n, m])      S[k, m] = Σ_n sin(k δ p[n, m])       p [N, M], k < T: both [T, M]
//! E = Σ_k,m a[k, m] · C[k, m] + b[k, m] · S[k, m]
//! gp[n, m] = δ Σ_k k (b[k, m] cos(k δ p[n, m]) - a[k, m] sin(k δ p[n, m]))
//! ```
//!
//! Waves follow a recurrence over k: cos (k+1)θ = 2 cos θ cos kθ - cos (k-1)θ, and likewise for the
//! sine.

use std::ops::Range;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::Tensor;
use multiversion::multiversion;
use rayon::prelude::*;

use super::bridge::{Kernel, PrimitiveBackend, run};
use super::cpu::{contiguous, dims, is_flex, slice, tensor};
use super::math::sin_cos;

/// Columns that a loop computes side by side, as vector lanes.
const LANES: usize = 16;

/// Columns whose waves a thread sums at once: the sums fit its cache.
const COLUMNS: usize = 64;

/// Returns C and S of `p` of `[N, M]`, concatenated, `[2 T M]`; without autodiff.
pub fn wave_sums(p: Tensor<2>, n_points: usize, spacing: f64) -> Tensor<1> {
    let [_, m] = p.dims();
    if !is_flex(&p) {
        let point = |k: usize, f: fn(Tensor<2>) -> Tensor<2>| f(p.clone() * (k as f64 * spacing)).sum_dim(0);
        let all = (0..n_points).map(|k| point(k, Tensor::cos));
        let all = all.chain((0..n_points).map(|k| point(k, Tensor::sin)));
        return Tensor::cat(all.map(|sums| sums.reshape([m])).collect(), 0);
    }
    // `is_flex` has just tried the same conversion.
    let p = contiguous(&p.try_into_primitive::<Flex>().expect("a tensor of Flex"));
    let starts = (0..m).into_par_iter().step_by(COLUMNS);
    let blocks: Vec<Vec<f32>> = starts
        .map(|start: usize| sums_of_columns(&p, start..m.min(start + COLUMNS), spacing as f32, n_points))
        .collect();
    let sums = (0..2 * n_points).flat_map(|wave| {
        blocks.iter().flat_map(move |block| {
            let n_columns = block.len() / (2 * n_points);
            &block[wave * n_columns..(wave + 1) * n_columns]
        })
    });
    Flex::from_primitive(tensor(sums.copied().collect(), [2 * n_points * m]))
}

/// Returns C and S of some columns of `p`, concatenated, summed over the rows in order.
fn sums_of_columns(p: &FlexTensor, columns: Range<usize>, spacing: f32, n_points: usize) -> Vec<f32> {
    let [_, m]: [usize; 2] = dims(p);
    let mut waves = vec![0.0f32; 2 * n_points * columns.len()];
    let mut totals = vec![0.0f64; waves.len()];
    for row in slice(p).chunks_exact(m) {
        waves_of_row(&row[columns.clone()], spacing, n_points, &mut waves);
        add_wide(&mut totals, &waves);
    }
    totals.into_iter().map(|total| total as f32).collect()
}

/// Returns E, `[1]`, of `p` of `[N, M]` for `weights` of `[2 T M]`: a, then b, without a gradient.
pub fn weighted_waves(p: Tensor<2>, weights: Tensor<1>, spacing: f64) -> Tensor<1> {
    if is_flex(&p) && is_flex(&weights) {
        return run(WeightedWaves { spacing: spacing as f32 }, [p.into(), weights.into()]);
    }
    plain(p, weights, spacing)
}

fn plain(p: Tensor<2>, weights: Tensor<1>, spacing: f64) -> Tensor<1> {
    let [_, m] = p.dims();
    let [len] = weights.dims();
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
        let p = contiguous(&p);
        let weights = contiguous(&weights);
        let [_, m]: [usize; 2] = dims(&p);
        let of_waves = slice(&weights);
        let rows: Vec<f32> =
            slice(&p).par_chunks_exact(m).map(|row| weighted_row(row, of_waves, self.spacing)).collect();
        let sum: f64 = rows.into_iter().map(f64::from).sum();
        (tensor(vec![sum as f32], [1]), (p, weights))
    }

    fn backward(&self, (p, weights): Self::Saved, grad: FlexTensor, _: [bool; 2]) -> [Option<FlexTensor>; 2] {
        let shape @ [_, m]: [usize; 2] = dims(&p);
        let scale = slice(&contiguous(&grad))[0];
        let mut gp = vec![0.0; slice(&p).len()];
        let weights = slice(&weights);
        slice(&p).par_chunks_exact(m).zip(gp.par_chunks_exact_mut(m)).for_each(|(row, gp)| {
            wave_gradient(row, weights, self.spacing, self.spacing * scale, gp);
        });
        [Some(tensor(gp, shape)), None]
    }
}

/// Writes the waves of one row, `[2 T M]`, to `waves`.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn waves_of_row(row: &[f32], spacing: f32, n_points: usize, waves: &mut [f32]) {
    let m = row.len();
    let (cosines, sines) = waves.split_at_mut(n_points * m);
    for start in (0..m).step_by(LANES) {
        let n = LANES.min(m - start);
        each_wave(&lanes(&row[start..start + n]), spacing, n_points, |k, cos, sin| {
            cosines[k * m + start..][..n].copy_from_slice(&cos[..n]);
            sines[k * m + start..][..n].copy_from_slice(&sin[..n]);
        });
    }
}

/// Returns E of one row.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn weighted_row(row: &[f32], weights: &[f32], spacing: f32) -> f32 {
    let m = row.len();
    let n_points = weights.len() / (2 * row.len());
    let mut sums = [0.0; LANES];
    for start in (0..m).step_by(LANES) {
        let columns = start..m.min(start + LANES);
        each_wave(&lanes(&row[columns.clone()]), spacing, n_points, |k, cos, sin| {
            let [a, b] = [k, n_points + k].map(|wave| lanes(&weights[wave * m..][columns.clone()]));
            for i in 0..LANES {
                sums[i] += a[i] * cos[i] + b[i] * sin[i];
            }
        });
    }
    sums.iter().sum()
}

/// Writes the gradient of E at one row, times `scale / δ`, to `gp`.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn wave_gradient(row: &[f32], weights: &[f32], spacing: f32, scale: f32, gp: &mut [f32]) {
    let m = row.len();
    let n_points = weights.len() / (2 * row.len());
    for start in (0..m).step_by(LANES) {
        let columns = start..m.min(start + LANES);
        let mut sums = [0.0; LANES];
        each_wave(&lanes(&row[columns.clone()]), spacing, n_points, |k, cos, sin| {
            let [a, b] = [k, n_points + k].map(|wave| lanes(&weights[wave * m..][columns.clone()]));
            for i in 0..LANES {
                sums[i] += k as f32 * (b[i] * cos[i] - a[i] * sin[i]);
            }
        });
        for (gp, sum) in gp[columns].iter_mut().zip(sums) {
            *gp = sum * scale;
        }
    }
}

/// Calls `f` with k, cos(k δ p) and sin(k δ p) for every point k. The recurrence over k does not
/// vectorize, so columns are the vector lanes.
#[inline(always)]
fn each_wave(
    p: &[f32; LANES],
    spacing: f32,
    n_points: usize,
    mut f: impl FnMut(usize, &[f32; LANES], &[f32; LANES]),
) {
    let mut cos_before = [1.0; LANES];
    let mut sin_before = [0.0; LANES];
    let mut cos = [0.0; LANES];
    let mut sin = [0.0; LANES];
    let mut twice = [0.0; LANES];
    for i in 0..LANES {
        [sin[i], cos[i]] = sin_cos(p[i] * spacing);
        twice[i] = 2.0 * cos[i];
    }
    for k in 0..n_points {
        f(k, &cos_before, &sin_before);
        for i in 0..LANES {
            let next = [twice[i] * cos[i] - cos_before[i], twice[i] * sin[i] - sin_before[i]];
            (cos_before[i], sin_before[i]) = (cos[i], sin[i]);
            [cos[i], sin[i]] = next;
        }
    }
}

/// Returns up to [`LANES`] values, padded with zeros.
#[inline(always)]
fn lanes(values: &[f32]) -> [f32; LANES] {
    values.try_into().unwrap_or_else(|_| std::array::from_fn(|i| values.get(i).copied().unwrap_or(0.0)))
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_wide(totals: &mut [f64], terms: &[f32]) {
    for (total, term) in totals.iter_mut().zip(terms) {
        *total += f64::from(*term);
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
            let e = weighted_waves(p.clone(), weights.clone(), SPACING);
            let twin = plain(p.clone(), weights, SPACING);
            assert_close("forward", e.clone().inner(), twin.clone().inner(), 2e-5);
            let gradient = |e: Tensor<1>| p.grad(&e.backward()).expect("leaf");
            assert_close("input", gradient(e), gradient(twin), 2e-5);
        }
    }
}
