//! Convolution of narrow groups of f32 channels, number by number without fused multiply-adds.

use multiversion::multiversion;

use super::part::Part;
use super::plane::{LANES, Place, Plane, Steps};
use crate::ops::conv::channels::Channels;
use crate::ops::conv::geometry::Geometry;
use crate::ops::number::{Number, wide};

/// Convolves `x` with the weights of all `parts`, each of which writes to some of the cells of `y`.
pub(super) fn convolve<W: Number>(x: &[f32], parts: &[Part<'_, W>], channels: Channels, y: &mut [f32]) {
    let Some(n_images) = parts.first().map(|part| part.geometry.n_images) else { return };
    let [c, o] = channels.per_group();
    let n_in = x.len() / n_images;
    let n_out = y.len() / n_images;
    let mut plane = Plane::new(parts.iter().map(|part| &part.geometry), c);
    let weights: Vec<_> = parts.iter().map(|part| wide(&part.packed)).collect();
    for group in 0..channels.groups {
        let from = Place::input(channels, group);
        let to = Place::output(channels, group);
        for (image, y) in x.chunks_exact(n_in).zip(y.chunks_exact_mut(n_out)) {
            plane.fill(image, from);
            for (part, weights) in parts.iter().zip(&weights) {
                let steps = plane.steps(&part.geometry);
                let n = part.geometry.n_taps() * c * o;
                for (row, (place, y)) in part.rows(to, y).enumerate() {
                    let weights = &weights[group * n..(group + 1) * n];
                    windows_of_row(plane.row_start(row, &part.geometry), weights, steps, place, y);
                }
            }
        }
    }
}

/// Returns the gradient of packed weights, `[G, T·C, O]`, given the gradient of the output.
pub(super) fn weight_gradient(x: &[f32], grad: &[f32], channels: Channels, geometry: &Geometry) -> Vec<f32> {
    let [c, o] = channels.per_group();
    let mut gw = vec![0.0; channels.groups * geometry.n_taps() * c * o];
    let n_in = x.len() / geometry.n_images;
    let n_out = grad.len() / geometry.n_images;
    let mut plane = Plane::new([geometry].into_iter(), c);
    let steps = plane.steps(geometry);
    for (group, gw) in gw.chunks_exact_mut(geometry.n_taps() * c * o).enumerate() {
        let from = Place::input(channels, group);
        let to = Place::output(channels, group);
        for (image, grad) in x.chunks_exact(n_in).zip(grad.chunks_exact(n_out)) {
            plane.fill(image, from);
            for (row, grad) in grad.chunks_exact(geometry.output[1] * channels.output).enumerate() {
                add_outer_products(plane.row_start(row, geometry), grad, steps, to, gw);
            }
        }
    }
    gw
}

/// Computes one row of the output, the group's channels at `place`. `x` starts at the first row of
/// its windows in the plane.
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

/// Computes `L` channels of one row of the output, beginning with `lane`, `N` windows at a time.
#[inline(always)]
fn lanes_of_row<const L: usize, const N: usize>(
    x: &[f32],
    weights: &[f32],
    steps: Steps,
    place: Place,
    lane: usize,
    y: &mut [f32],
) {
    let o = place.len;
    let n = place.n_cells(y.len());
    let weights = &weights[lane..];
    if n < N {
        for window in 0..n {
            let [sums] = block::<L, 1>(&x[window * steps.window..], weights, steps, o);
            store(&sums, window, place.first + lane, place.all, y);
        }
        return;
    }
    for start in (0..n).step_by(N) {
        // The last block overlaps the one before it.
        let start = start.min(n - N);
        let sums = block::<L, N>(&x[start * steps.window..], weights, steps, o);
        for (i, sums) in sums.iter().enumerate() {
            store(sums, start + i, place.first + lane, place.all, y);
        }
    }
}

/// Writes the sums of a window to the channels of its cell from `channel` on; cells are `stride`
/// apart.
#[inline(always)]
fn store<const L: usize>(sums: &[f32; L], window: usize, channel: usize, stride: usize, y: &mut [f32]) {
    let to = window * stride + channel;
    y[to..to + L].copy_from_slice(sums);
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
        // `array::from_fn` was not inlined here.
        let mut runs: [&[f32]; N] = [&[]; N];
        for (i, run) in runs.iter_mut().enumerate() {
            *run = &x[ky * steps.row + i * steps.window..][..len];
        }
        add_products(&mut totals, runs, len, &weights[ky * len * o..], o);
    }
    totals
}

/// Adds `Σ_k runs[i, k] · weights[k, l]` over `len` numbers of each run to `totals[i, l]`; rows of
/// the weights are `stride` apart.
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
