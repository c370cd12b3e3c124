//! Sums of waves: the empirical characteristic function at equally spaced points.
//!
//! ```text
//! C[k, m] = Σ_n cos(k δ p[n, m])      S[k, m] = Σ_n sin(k δ p[n, m])
//! E = Σ_k,m a[k, m] · C[k, m] + b[k, m] · S[k, m]
//! gp[n, m] = δ Σ_k k (b[k, m] cos(k δ p[n, m]) - a[k, m] sin(k δ p[n, m]))
//! ```
//!
//! p `[N, M]`, C and S `[T, M]` with k < T. Waves are computed by a recurrence over k:
//! cos (k+1)θ = 2 cos θ cos kθ - cos (k-1)θ, and likewise for the sine.

use std::ops::Range;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::Tensor;
use multiversion::multiversion;
use rayon::prelude::*;

use super::add_term::add_term;
use super::bridge::{Kernel, PrimitiveBackend, run};
use super::cpu::{contiguous, dims, is_flex, slice, tensor};
use super::math::sin_cos;

/// Columns that a loop computes at once, as vector lanes.
const LANES: usize = 16;

/// Columns whose waves a thread sums at once, so that the sums fit its cache.
const COLUMNS: usize = 64;

/// Returns C and S of `p` of `[N, M]`, concatenated, `[2 T M]`; without autodiff.
pub fn wave_sums(p: Tensor<2>, n_points: usize, spacing: f64) -> Tensor<1> {
    let [_, m] = p.dims();
    if !is_flex(&p) {
        let waves: [fn(Tensor<2>) -> Tensor<2>; 2] = [Tensor::cos, Tensor::sin];
        let mut sums = Vec::with_capacity(2 * n_points);
        for wave in waves {
            for k in 0..n_points {
                let angles = p.clone() * (k as f64 * spacing);
                sums.push(wave(angles).sum_dim(0).reshape([m]));
            }
        }
        return Tensor::cat(sums, 0);
    }
    // `is_flex` has just tried the same conversion.
    let p = contiguous(&p.try_into_primitive::<Flex>().expect("a tensor of Flex"));
    let starts = (0..m).into_par_iter().step_by(COLUMNS);
    let blocks: Vec<Vec<f32>> = starts
        .map(|start: usize| sums_of_columns(&p, start..m.min(start + COLUMNS), spacing as f32, n_points))
        .collect();
    let mut sums = Vec::with_capacity(2 * n_points * m);
    for wave in 0..2 * n_points {
        for block in &blocks {
            let n_columns = block.len() / (2 * n_points);
            sums.extend_from_slice(&block[wave * n_columns..(wave + 1) * n_columns]);
        }
    }
    Flex::from_primitive(tensor(sums, [2 * n_points * m]))
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

/// Returns E, `[1]`, of `p` of `[N, M]`. `weights` of `[2 T M]` are a, then b; they get no
/// gradient.
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
    let mut total = None;
    for k in 0..n_points {
        let angle = p.clone() * (k as f64 * spacing);
        let a = weights.clone().slice([k..k + 1, 0..m]);
        let b = weights.clone().slice([n_points + k..n_points + k + 1, 0..m]);
        let term = (angle.clone().cos() * a).sum() + (angle.sin() * b).sum();
        total = Some(add_term(total, term));
    }
    total.unwrap_or_else(|| p.sum() * 0.0)
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
        let a_and_b = slice(&weights);
        let rows: Vec<f32> =
            slice(&p).par_chunks_exact(m).map(|row| weighted_row(row, a_and_b, self.spacing)).collect();
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

/// Returns the part of E that comes from one row.
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
/// vectorize, so the vector lanes are columns.
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
            let next_cos = twice[i] * cos[i] - cos_before[i];
            let next_sin = twice[i] * sin[i] - sin_before[i];
            cos_before[i] = cos[i];
            sin_before[i] = sin[i];
            cos[i] = next_cos;
            sin[i] = next_sin;
        }
    }
}

/// Returns `values`, at most [`LANES`], padded with zeros.
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
    use crate::ops::testing::{assert_close, assert_gradients_close, devices, leaves};

    #[test]
    fn sums_and_weighted_waves_match_plain_forward_and_backward() {
        const N_POINTS: usize = 17;
        const SPACING: f64 = 3.0 / 16.0;
        for device in devices() {
            let p = leaves(&device, &[[9, 21]], 1).remove(0).mul_scalar(3.0);
            let p = p.inner().autodiff().require_grad();
            let weights = leaves(&device, &[[2 * N_POINTS * 21]], 2).remove(0).inner();
            let sums = wave_sums(p.clone().inner(), N_POINTS, SPACING);
            for k in 0..N_POINTS {
                let angle = p.clone().inner() * (k as f64 * SPACING);
                let cosines = sums.clone().slice(k * 21..(k + 1) * 21);
                assert_close("cos", cosines, angle.clone().cos().sum_dim(0).reshape([21]), 2e-5);
                if k > 0 {
                    let sines = sums.clone().slice((N_POINTS + k) * 21..(N_POINTS + k + 1) * 21);
                    assert_close("sin", sines, angle.sin().sum_dim(0).reshape([21]), 2e-5);
                }
            }
            let e = weighted_waves(p.clone(), weights.clone(), SPACING);
            let expected = plain(p.clone(), weights, SPACING);
            assert_close("forward", e.clone().inner(), expected.clone().inner(), 2e-5);
            assert_gradients_close("input", &p, &e.backward(), &expected.backward(), 2e-5);
        }
    }
}
