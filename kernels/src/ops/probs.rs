//! Probabilities over prototypes, computed from scores without autodiff.
//!
//! ```text
//! softmax_rows     p = softmax((x - c) / τ)                     x [.., K]  c [K]
//! column_sums      Σ over rows                                  [.., K] → [K]
//! balanced         q / columns, then rows scaled to sum to one  [.., K]  columns [K]
//! log_sum_exp      log Σ_k exp((x - c) / τ)                     [.., K] → [R], R the number of rows
//! scaled           q / columns / rows                           [.., K]  columns [K]  rows [R]
//! sharpness        mean entropy and mean largest probability of rows
//! ```
//!
//! `balanced` is a half step of Sinkhorn and Knopp's algorithm for each of its two scalings.

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{Tensor, activation};
use multiversion::multiversion;

use super::bridge::PrimitiveBackend;
use super::cpu::{add, contiguous, is_flex, slice, tensor};
use super::math::{exp, lane_max, lane_sum, over_rows};

/// Returns `softmax((x - center) / temperature)` over the last dimension of `x` `[B, V, K]`.
pub fn softmax_rows(x: Tensor<3>, center: Option<Tensor<1>>, temperature: f64) -> Tensor<3> {
    let dims = x.dims();
    let inverse = (1.0 / temperature) as f32;
    match (host(&x), center.as_ref().map(host)) {
        (Some(x), None) => softmax_on_host(x, None, inverse, dims),
        (Some(x), Some(Some(center))) => softmax_on_host(x, Some(center), inverse, dims),
        _ => {
            let x = match center {
                Some(center) => x - center.unsqueeze(),
                None => x,
            };
            activation::softmax(x / temperature, 2)
        }
    }
}

/// Returns the sums over all but the last dimension of `x` `[B, V, K]`, `[K]`.
pub fn column_sums(x: Tensor<3>) -> Tensor<1> {
    let [b, v, k] = x.dims();
    match host(&x) {
        Some(x) => {
            let mut sums = vec![0.0; k];
            slice(&x).chunks_exact(k).for_each(|row| add(&mut sums, row));
            Flex::from_primitive(tensor(sums, [k]))
        }
        None => x.reshape([b * v, k]).sum_dim(0).reshape([k]),
    }
}

/// Returns the largest element, `[1]`.
pub fn largest(x: Tensor<3>) -> Tensor<1> {
    match host(&x) {
        Some(x) => Flex::from_primitive(tensor(vec![row_max(slice(&x))], [1])),
        None => x.max(),
    }
}

/// Returns the largest element of every row of `x` `[B, V, K]`, `[B·V]`.
pub fn row_maxima(x: Tensor<3>) -> Tensor<1> {
    let [b, v, k] = x.dims();
    match host(&x) {
        Some(x) => {
            let maxima = slice(&x).chunks_exact(k).map(row_max).collect();
            Flex::from_primitive(tensor(maxima, [b * v]))
        }
        None => x.max_dim(2).reshape([b * v]),
    }
}

/// Returns `max(exp((x - max) / temperature), floor)` of every element of `x` `[B, V, K]`; `max` is
/// `[1]`.
pub fn exp_rows(x: Tensor<3>, max: Tensor<1>, temperature: f64, floor: f32) -> Tensor<3> {
    let dims = x.dims();
    match (host(&x), host(&max)) {
        (Some(x), Some(max)) => {
            let max = slice(&max)[0];
            let inverse = (1.0 / temperature) as f32;
            let mut out = slice(&x).to_vec();
            over_rows(&mut out, dims[2], |_, rows| exp_all(rows, max, inverse, floor));
            Flex::from_primitive(tensor(out, dims))
        }
        _ => ((x - max.unsqueeze()) / temperature).exp().clamp_min(floor),
    }
}

/// Divides column `k` of `q` `[B, V, K]` by `columns[k]`, and then scales the rows to sum to one.
pub fn balanced(q: Tensor<3>, columns: Tensor<1>) -> Tensor<3> {
    let dims = q.dims();
    match (host(&q), host(&columns)) {
        (Some(q), Some(columns)) => {
            let mut out = slice(&q).to_vec();
            over_rows(&mut out, dims[2], |_, rows| balance(rows, slice(&columns)));
            Flex::from_primitive(tensor(out, dims))
        }
        _ => {
            let scaled = q / columns.unsqueeze();
            let sums = scaled.clone().sum_dim(2);
            scaled / sums
        }
    }
}

/// Returns `log Σ exp((x - center) / temperature)` of every row of `x` `[B, V, K]`, `[B·V]`.
pub fn log_sum_exp(x: Tensor<3>, center: Option<Tensor<1>>, temperature: f64) -> Tensor<1> {
    let [b, v, k] = x.dims();
    let center = center.unwrap_or_else(|| Tensor::zeros([k], &x.device()));
    match (host(&x), host(&center)) {
        (Some(x), Some(center)) => {
            let mut out = vec![0.0; b * v];
            let x = slice(&x);
            let center = slice(&center);
            let inverse = (1.0 / temperature) as f32;
            over_rows(&mut out, 1, |first, out| log_sums(&x[first * k..], center, inverse, out));
            Flex::from_primitive(tensor(out, [b * v]))
        }
        _ => {
            let x = (x - center.unsqueeze()) / temperature;
            let max = x.clone().max_dim(2);
            ((x - max.clone()).exp().sum_dim(2).log() + max).reshape([b * v])
        }
    }
}

/// Returns the sums of the rows of `q` `[B, V, K]` after its column `k` is divided by `columns[k]`,
/// `[B·V]`.
pub fn scaled_row_sums(q: Tensor<3>, columns: Tensor<1>) -> Tensor<1> {
    let [b, v, k] = q.dims();
    match (host(&q), host(&columns)) {
        (Some(q), Some(columns)) => {
            let mut out = vec![0.0; b * v];
            let q = slice(&q);
            let columns = slice(&columns);
            over_rows(&mut out, 1, |first, out| quotient_sums(&q[first * k..], columns, out));
            Flex::from_primitive(tensor(out, [b * v]))
        }
        _ => (q / columns.unsqueeze()).sum_dim(2).reshape([b * v]),
    }
}

/// Divides column `k` of `q` `[B, V, K]` by `columns[k]`, and row `r` by `rows[r]`, `[B·V]`.
pub fn scaled(q: Tensor<3>, columns: Tensor<1>, rows: Tensor<1>) -> Tensor<3> {
    let [b, v, k] = q.dims();
    match (host(&q), host(&columns), host(&rows)) {
        (Some(q), Some(columns), Some(rows)) => {
            let mut out = slice(&q).to_vec();
            let columns = slice(&columns);
            let rows = slice(&rows);
            over_rows(&mut out, k, |first, out| divide(out, columns, &rows[first..]));
            Flex::from_primitive(tensor(out, [b, v, k]))
        }
        _ => q / columns.unsqueeze() / rows.reshape([b, v, 1]),
    }
}

/// Returns the mean entropy in nats and the mean largest probability of the rows of `probs` `[B, V,
/// K]`, `[1]` each.
pub fn sharpness(probs: &Tensor<3>) -> [Tensor<1>; 2] {
    let [b, v, k] = probs.dims();
    match host(probs) {
        Some(probs) => {
            let mut rows = vec![0.0; 2 * b * v];
            over_rows(&mut rows, 2, |first, rows| row_sharpness(&slice(&probs)[first * k..], k, rows));
            let mut totals = [0.0f64; 2];
            for row in rows.chunks_exact(2) {
                totals[0] += f64::from(row[0]);
                totals[1] += f64::from(row[1]);
            }
            totals.map(|total| Flex::from_primitive(tensor(vec![(total / (b * v) as f64) as f32], [1])))
        }
        None => {
            let logs = probs.clone().clamp_min(1e-30).log();
            [-(probs.clone() * logs).sum_dim(2).mean(), probs.clone().max_dim(2).mean()]
        }
    }
}

/// Returns the tensor with contiguous elements if it is on the CPU and not tracked by autodiff,
/// `None` otherwise.
fn host<const D: usize>(x: &Tensor<D>) -> Option<FlexTensor> {
    if x.is_autodiff() || !is_flex(x) {
        return None;
    }
    x.clone().try_into_primitive::<Flex>().ok().map(|x| contiguous(&x))
}

fn softmax_on_host(x: FlexTensor, center: Option<FlexTensor>, inverse: f32, dims: [usize; 3]) -> Tensor<3> {
    let k = dims[2];
    let mut out = slice(&x).to_vec();
    over_rows(&mut out, k, |_, rows| match &center {
        Some(center) => softmax(rows, slice(center), inverse),
        None => softmax(rows, &vec![0.0; k], inverse),
    });
    Flex::from_primitive(tensor(out, dims))
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn softmax(rows: &mut [f32], center: &[f32], inverse: f32) {
    for row in rows.chunks_exact_mut(center.len()) {
        for (value, center) in row.iter_mut().zip(center) {
            *value = (*value - center) * inverse;
        }
        let max = lane_max(row);
        for value in row.iter_mut() {
            *value = exp(*value - max);
        }
        let factor = 1.0 / lane_sum(row, |v| v);
        for value in row.iter_mut() {
            *value *= factor;
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn row_max(values: &[f32]) -> f32 {
    lane_max(values)
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn exp_all(values: &mut [f32], max: f32, inverse: f32, floor: f32) {
    for value in values {
        let power = exp((*value - max) * inverse);
        *value = if power > floor { power } else { floor };
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn balance(rows: &mut [f32], columns: &[f32]) {
    for row in rows.chunks_exact_mut(columns.len()) {
        for (value, column) in row.iter_mut().zip(columns) {
            *value /= column;
        }
        let factor = 1.0 / lane_sum(row, |v| v);
        for value in row.iter_mut() {
            *value *= factor;
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn log_sums(rows: &[f32], center: &[f32], inverse: f32, out: &mut [f32]) {
    let mut powers = vec![0.0; center.len()];
    for (row, out) in rows.chunks_exact(center.len()).zip(out) {
        for ((power, value), center) in powers.iter_mut().zip(row).zip(center) {
            *power = (*value - center) * inverse;
        }
        let max = lane_max(&powers);
        *out = lane_sum(&powers, |power| exp(power - max)).ln() + max;
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn quotient_sums(rows: &[f32], columns: &[f32], out: &mut [f32]) {
    let mut quotients = vec![0.0; columns.len()];
    for (row, out) in rows.chunks_exact(columns.len()).zip(out) {
        for ((quotient, value), column) in quotients.iter_mut().zip(row).zip(columns) {
            *quotient = *value / column;
        }
        *out = lane_sum(&quotients, |v| v);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn divide(rows: &mut [f32], columns: &[f32], sums: &[f32]) {
    for (row, sum) in rows.chunks_exact_mut(columns.len()).zip(sums) {
        let factor = 1.0 / sum;
        for (value, column) in row.iter_mut().zip(columns) {
            *value = *value / column * factor;
        }
    }
}

/// Writes the entropy and the largest probability of every row to `out`, `[R, 2]`.
fn row_sharpness(probs: &[f32], k: usize, out: &mut [f32]) {
    for (row, out) in probs.chunks_exact(k).zip(out.chunks_exact_mut(2)) {
        out[0] = -row.iter().map(|p| p * p.max(1e-30).ln()).sum::<f32>();
        out[1] = row_max(row);
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;

    use super::*;
    use crate::ops::testing::{assert_close, devices, leaves};

    /// Reference: compositions of Burn's operations.
    #[test]
    fn every_function_matches_its_composition() {
        for device in devices() {
            let x = leaves(&device, &[[3, 2, 37]], 1).remove(0).inner();
            let center = leaves(&device, &[[37]], 2).remove(0).inner();
            let probs = softmax_rows(x.clone(), Some(center.clone()), 0.07);
            let composed = activation::softmax((x.clone() - center.clone().unsqueeze()) / 0.07, 2);
            assert_close("softmax", probs.clone(), composed.clone(), 3e-6);
            let plain = softmax_rows(x.clone(), None, 0.5);
            assert_close("softmax", plain.clone(), activation::softmax(x.clone() / 0.5, 2), 3e-6);
            let sums = plain.clone().reshape([6, 37]).sum_dim(0).reshape([37]);
            assert_close("sums", column_sums(plain.clone()), sums.clone(), 1e-6);
            assert_close("maxima", row_maxima(x.clone()), x.clone().max_dim(2).reshape([6]), 0.0);
            assert_close("largest", largest(x.clone()), x.clone().max(), 0.0);
            let powers = ((x.clone() - x.clone().max().unsqueeze()) / 0.1).exp().clamp_min(1e-30);
            assert_close("exp", exp_rows(x.clone(), x.clone().max(), 0.1, 1e-30), powers, 3e-6);
            let scaled = plain.clone() / sums.clone().unsqueeze();
            let rows = scaled.clone() / scaled.sum_dim(2);
            assert_close("balanced", balanced(plain.clone(), sums.clone()), rows.clone(), 3e-6);
            let row_sums = scaled_row_sums(plain.clone(), sums.clone());
            let balanced_by_parts = super::scaled(plain.clone(), sums.clone(), row_sums);
            assert_close("scaled", balanced_by_parts, rows.clone(), 3e-6);
            let shifted = (x.clone() - center.clone().unsqueeze()) / 0.07;
            let log_sums = shifted.clone().exp().sum_dim(2).log().reshape([6]);
            assert_close("log_sum_exp", log_sum_exp(x.clone(), Some(center), 0.07), log_sums, 3e-6);
            let logs = plain.clone().clamp_min(1e-30).log();
            let [entropy, max] = sharpness(&plain);
            assert_close("entropy", entropy, -(plain.clone() * logs).sum_dim(2).mean(), 3e-6);
            assert_close("max", max, plain.max_dim(2).mean(), 3e-6);
        }
    }

    /// Differences of thousands of nats give zeros and not NaN.
    #[test]
    fn extreme_scores_stay_finite() {
        let x = Tensor::<3>::from_floats([[[1e4, -1e4, 0.0]]], &Device::flex());
        let probs = softmax_rows(x, None, 0.04).into_data().try_to_vec::<f32>().unwrap();
        assert_eq!(probs, [1.0, 0.0, 0.0]);
    }
}
