//! Convolution of narrow groups of channels, number by number without fused multiply-adds: all of it in f32, and the input's gradient of
//! strided convolutions in bf16.

use burn_tensor::DType;
use multiversion::multiversion;

use super::plane::{LANES, Place, Plane, Steps, copy_cell};
use crate::ops::conv::channels::Channels;
use crate::ops::conv::geometry::Geometry;
use crate::ops::number::Number;

/// Returns the convolution of `x` with `packed` weights of `[G, T·C, O]`, `[M, G·O]`.
pub(super) fn forward(x: &[f32], packed: &[f32], channels: Channels, geometry: &Geometry) -> Vec<f32> {
    let [c, o] = channels.each();
    let mut y = vec![0.0; geometry.n_windows() * channels.output];
    let (n_in, n_out) = (x.len() / geometry.n_images, y.len() / geometry.n_images);
    let mut plane = Plane::new(geometry, c);
    let steps = plane.steps(geometry);
    for group in 0..channels.groups {
        let [from, to] = Place::each(channels, group);
        let weights = &packed[group * geometry.n_taps() * c * o..(group + 1) * geometry.n_taps() * c * o];
        for (image, y) in x.chunks_exact(n_in).zip(y.chunks_exact_mut(n_out)) {
            plane.fill(image, geometry, from);
            for (row, y) in y.chunks_exact_mut(geometry.output[1] * channels.output).enumerate() {
                let start = &plane.values[row * geometry.stride * steps.row..];
                windows_of_row(start, weights, steps, to, y);
            }
        }
    }
    y
}

/// Returns the input's gradient, `[N, G·C]`, given that of the output and weights `[G, T·O, C]`. Gradients in bf16 are
/// converted row by row.
pub(super) fn input_gradient<T: Number>(
    grad: &[T],
    weights: &[f32],
    channels: Channels,
    geometry: &Geometry,
) -> Vec<T> {
    let [c, o] = channels.each();
    let mut gx = vec![T::default(); geometry.n_cells() * channels.input];
    let mut scratch = Vec::new();
    let (n_in, n_out) = (gx.len() / geometry.n_images, grad.len() / geometry.n_images);
    let mut plane = Plane::new(geometry, c);
    let steps = plane.steps(geometry);
    for group in 0..channels.groups {
        let [to, from] = Place::each(channels, group);
        let weights = &weights[group * geometry.n_taps() * c * o..(group + 1) * geometry.n_taps() * c * o];
        for (grad, gx) in grad.chunks_exact(n_out).zip(gx.chunks_exact_mut(n_in)) {
            plane.values.fill(0.0);
            for (row, grad) in grad.chunks_exact(geometry.output[1] * channels.output).enumerate() {
                let start = &mut plane.values[row * geometry.stride * steps.row..];
                let (grad, from) = wide_row(grad, from, &mut scratch);
                spread_row(start, weights, steps, from, grad);
            }
            plane.read(gx, geometry, to);
        }
    }
    gx
}

/// Returns the gradient of packed weights, `[G, T·C, O]`, given that of the output.
pub(super) fn weight_gradient(x: &[f32], grad: &[f32], channels: Channels, geometry: &Geometry) -> Vec<f32> {
    let [c, o] = channels.each();
    let mut gw = vec![0.0; channels.groups * geometry.n_taps() * c * o];
    let (n_in, n_out) = (x.len() / geometry.n_images, grad.len() / geometry.n_images);
    let mut plane = Plane::new(geometry, c);
    let steps = plane.steps(geometry);
    for (group, gw) in gw.chunks_exact_mut(geometry.n_taps() * c * o).enumerate() {
        let [from, of_grad] = Place::each(channels, group);
        for (image, grad) in x.chunks_exact(n_in).zip(grad.chunks_exact(n_out)) {
            plane.fill(image, geometry, from);
            for (row, grad) in grad.chunks_exact(geometry.output[1] * channels.output).enumerate() {
                let start = &plane.values[row * geometry.stride * steps.row..];
                add_outer_products(start, grad, steps, of_grad, gw);
            }
        }
    }
    gw
}

/// Returns a row in f32 with the place of the group's channels there: the row as it is, or their values converted into `scratch`.
fn wide_row<'a, T: Number>(row: &'a [T], place: Place, scratch: &'a mut Vec<f32>) -> (&'a [f32], Place) {
    if T::DTYPE == DType::F32 {
        return (bytemuck::cast_slice(row), place);
    }
    scratch.resize(row.len() / place.all * place.len, 0.0);
    widen_channels(row, place, scratch);
    (scratch, Place { all: place.len, first: 0, ..place })
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn widen_channels<T: Number>(row: &[T], place: Place, out: &mut [f32]) {
    for (cell, out) in row.chunks_exact(place.all).zip(out.chunks_exact_mut(place.len)) {
        copy_cell(&cell[place.first..place.first + place.len], out);
    }
}

/// Computes one row of the output, of the group's channels at `place`. `x` starts at the first row of its windows in the plane.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn windows_of_row(x: &[f32], weights: &[f32], steps: Steps, place: Place, y: &mut [f32]) {
    let o = place.len;
    let in_double_vectors = o / (2 * LANES) * (2 * LANES);
    for lane in (0..in_double_vectors).step_by(2 * LANES) {
        lanes_of_row::<{ 2 * LANES }, 6>(x, weights, steps, place, lane, y);
    }
    if in_double_vectors < o {
        lanes_of_row::<LANES, 8>(x, weights, steps, place, in_double_vectors, y);
    }
}

/// Computes `L` channels of one row of the output, from `lane` on, `N` windows at a time.
#[inline(always)]
fn lanes_of_row<const L: usize, const N: usize>(
    x: &[f32],
    weights: &[f32],
    steps: Steps,
    Place { all, first, len: o }: Place,
    lane: usize,
    y: &mut [f32],
) {
    let n = y.len() / all;
    let weights = &weights[lane..];
    let mut put = |window: usize, sums: &[f32; L]| {
        let to = window * all + first + lane;
        y[to..to + L].copy_from_slice(sums);
    };
    if n < N {
        for window in 0..n {
            let [sums] = block::<L, 1>(&x[window * steps.window..], weights, steps, o);
            put(window, &sums);
        }
        return;
    }
    for start in (0..n).step_by(N) {
        // The last block overlaps the one before it.
        let start = start.min(n - N);
        let sums = block::<L, N>(&x[start * steps.window..], weights, steps, o);
        sums.iter().enumerate().for_each(|(i, sums)| put(start + i, sums));
    }
}

/// Returns the sums of `N` consecutive windows.
#[inline(always)]
fn block<const L: usize, const N: usize>(
    x: &[f32],
    weights: &[f32],
    steps: Steps,
    o: usize,
) -> [[f32; L]; N] {
    let [kh, kw] = steps.kernel;
    let mut totals = [[0.0f32; L]; N];
    // A row of the kernel is one contiguous run of a plane's row.
    let len = kw * steps.width;
    for ky in 0..kh {
        let runs = std::array::from_fn(|i| &x[ky * steps.row + i * steps.window..][..len]);
        add_products(&mut totals, runs, len, &weights[ky * len * o..], o);
    }
    totals
}

/// Adds `Σ_k runs[i, k] · weights[k, l]` over `len` numbers of each run to `totals[i, l]`; rows of the weights are `stride` apart.
#[inline(always)]
fn add_products<const L: usize, const N: usize>(
    totals: &mut [[f32; L]; N],
    runs: [&[f32]; N],
    len: usize,
    weights: &[f32],
    stride: usize,
) {
    for k in 0..len {
        let weights = &weights[k * stride..][..L];
        for i in 0..N {
            let value = runs[i][k];
            for l in 0..L {
                totals[i][l] += value * weights[l];
            }
        }
    }
}

/// Spreads the gradients of one row of the output over their windows, and adds them to the plane.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn spread_row(plane: &mut [f32], weights: &[f32], steps: Steps, place: Place, grad: &[f32]) {
    let in_double_vectors = steps.width / (2 * LANES) * (2 * LANES);
    for lane in (0..in_double_vectors).step_by(2 * LANES) {
        spread_lanes::<{ 2 * LANES }, 6>(plane, weights, steps, place, lane, grad);
    }
    if in_double_vectors < steps.width {
        spread_lanes::<LANES, 8>(plane, weights, steps, place, in_double_vectors, grad);
    }
}

/// Adds to `L` channels of the plane, from `lane` on, tap by tap, the gradients of `N` windows at a time.
#[inline(always)]
fn spread_lanes<const L: usize, const N: usize>(
    plane: &mut [f32],
    weights: &[f32],
    steps: Steps,
    Place { all, first, len: o }: Place,
    lane: usize,
    grad: &[f32],
) {
    let ([_, kw], n) = (steps.kernel, grad.len() / all);
    for (tap, weights) in weights.chunks_exact(o * steps.width).enumerate() {
        let (cells, weights) = (tap / kw * steps.row + tap % kw * steps.width + lane, &weights[lane..]);
        let mut add = |window: usize, sums: &[f32; L]| {
            let cell = &mut plane[cells + window * steps.window..][..L];
            cell.iter_mut().zip(sums).for_each(|(cell, sum)| *cell += sum);
        };
        let in_blocks = n / N * N;
        for start in (0..in_blocks).step_by(N) {
            let sums = gradients::<L, N>(&grad[start * all + first..], all, weights, [o, steps.width]);
            sums.iter().enumerate().for_each(|(i, sums)| add(start + i, sums));
        }
        for window in in_blocks..n {
            let [sums] = gradients::<L, 1>(&grad[window * all + first..], all, weights, [o, steps.width]);
            add(window, &sums);
        }
    }
}

/// Returns the gradients of `N` consecutive windows at one tap; those of windows are `all` apart in `grad`.
#[inline(always)]
fn gradients<const L: usize, const N: usize>(
    grad: &[f32],
    all: usize,
    weights: &[f32],
    [o, width]: [usize; 2],
) -> [[f32; L]; N] {
    let mut totals = [[0.0f32; L]; N];
    let runs = std::array::from_fn(|i| &grad[i * all..][..o]);
    add_products(&mut totals, runs, o, weights, width);
    totals
}

/// Adds the outer products of windows and the gradients of one row of the output to `gw`.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_outer_products(x: &[f32], grad: &[f32], steps: Steps, place: Place, gw: &mut [f32]) {
    let Place { all, first, len: o } = place;
    let [kh, kw] = steps.kernel;
    let n = grad.len() / all;
    for ky in 0..kh {
        let len = kw * steps.width;
        let rows = &mut gw[ky * len * o..(ky + 1) * len * o];
        for (block, rows) in rows.chunks_exact_mut(LANES * o).enumerate() {
            for lanes in (0..o).step_by(LANES) {
                let mut totals = [[0.0f32; LANES]; LANES];
                for window in 0..n {
                    let from = ky * steps.row + window * steps.window + block * LANES;
                    let values: &[f32; LANES] = x[from..from + LANES].try_into().expect("lanes");
                    let from = window * all + first + lanes;
                    let grads: &[f32; LANES] = grad[from..from + LANES].try_into().expect("lanes");
                    for i in 0..LANES {
                        for l in 0..LANES {
                            totals[i][l] += values[i] * grads[l];
                        }
                    }
                }
                for (row, totals) in rows.chunks_exact_mut(o).zip(&totals) {
                    row[lanes..lanes + LANES].iter_mut().zip(totals).for_each(|(gw, total)| *gw += total);
                }
            }
        }
    }
}
