//! Convolution of narrow groups of channels on the CPU. Matrix products this narrow leave most of a vector unit
//! idle; here a block of windows stays in registers during the loops over taps and channels.
//!
//! ```text
//! y[i, o]  = Σ_t,c x[i, t, c] · W[t, c, o]        windows i in blocks, o in lanes
//! gx[i, t, c] += Σ_o g[i, o] · W[t, o, c]         c in lanes
//! gW[t, c, o] = Σ_i x[i, t, c] · g[i, o]          c in rows, o in lanes
//! ```
//!
//! Each group is copied into a padded plane, so that windows need no bounds tests, in f32 if it is bf16. No fused multiply-add.

use burn_tensor::DType;
use multiversion::multiversion;

use super::channels::Channels;
use super::geometry::Geometry;
use crate::ops::number::Number;

/// Channels of a vector.
const LANES: usize = 8;

/// Returns whether this implementation is the one for groups of these sizes.
pub(super) fn suits(channels: Channels) -> bool {
    let [c, o] = channels.each();
    channels.groups > 1 && c.is_multiple_of(LANES) && o.is_multiple_of(LANES) && c.max(o) <= 32
}

/// A group's channels of one image with its padding, `[rows, columns, C]`.
struct Plane {
    rows: usize,
    columns: usize,
    values: Vec<f32>,
}

impl Plane {
    fn new(geometry: &Geometry, width: usize) -> Self {
        let [rows, columns] = [0, 1].map(|axis| geometry.input[axis] + 2 * geometry.padding[axis]);
        Self { rows, columns, values: vec![0.0; rows * columns * width] }
    }

    /// Calls `f` for every cell of the image with its offset in the plane and its offset in the image.
    fn each_cell(
        columns: usize,
        geometry: &Geometry,
        [width, all]: [usize; 2],
        mut f: impl FnMut(usize, usize),
    ) {
        let [top, left] = geometry.padding;
        for y in 0..geometry.input[0] {
            for x in 0..geometry.input[1] {
                f(((y + top) * columns + x + left) * width, (y * geometry.input[1] + x) * all);
            }
        }
    }

    /// Copies a group's channels of an image into the plane.
    fn fill<T: Number>(
        &mut self,
        image: &[T],
        geometry: &Geometry,
        width: usize,
        channels: usize,
        first: usize,
    ) {
        fill_plane(&mut self.values, self.columns, image, geometry, [width, channels, first]);
    }
}

/// Copies a group's channels of an image, `first..first + width` of every `channels`, into a plane.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn fill_plane<T: Number>(
    values: &mut [f32],
    columns: usize,
    image: &[T],
    geometry: &Geometry,
    [width, channels, first]: [usize; 3],
) {
    Plane::each_cell(columns, geometry, [width, channels], |to, from| {
        copy_cell(&image[from + first..from + first + width], &mut values[to..to + width]);
    });
}

/// Copies a group's channels of an image from a plane.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn read_plane<T: Number>(
    values: &[f32],
    columns: usize,
    image: &mut [T],
    geometry: &Geometry,
    [width, channels, first]: [usize; 3],
) {
    Plane::each_cell(columns, geometry, [width, channels], |from, to| {
        copy_cell(&values[from..from + width], &mut image[to + first..to + first + width]);
    });
}

/// Copies the channels of a cell. The branches for common widths have a constant length, so that none is a call.
#[inline(always)]
fn copy_cell<A: Number, B: Number>(from: &[A], to: &mut [B]) {
    #[inline(always)]
    fn copy<A: Number, B: Number>(from: &[A], to: &mut [B]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = B::nearest(from.wide()));
    }
    match to.len() {
        8 => copy(&from[..8], &mut to[..8]),
        16 => copy(&from[..16], &mut to[..16]),
        24 => copy(&from[..24], &mut to[..24]),
        _ => copy(from, to),
    }
}

/// Distances between taps and windows in a plane.
#[derive(Clone, Copy)]
struct Steps {
    /// Elements between windows of a row.
    window: usize,
    /// Elements between rows of the plane.
    row: usize,
    /// Channels of the plane.
    width: usize,
    /// Rows and columns of the kernel.
    kernel: [usize; 2],
}

/// Returns the convolution of `x` with `packed` weights of `[G, T·C, O]`, `[M, G·O]`.
pub(super) fn forward<T: Number>(x: &[T], packed: &[f32], channels: Channels, geometry: &Geometry) -> Vec<T> {
    let [c, o] = channels.each();
    let mut y = vec![T::default(); geometry.n_windows() * channels.output];
    let (n_in, n_out) = (x.len() / geometry.n_images, y.len() / geometry.n_images);
    let mut plane = Plane::new(geometry, c);
    let steps = steps(geometry, &plane, c);
    for group in 0..channels.groups {
        let weights = &packed[group * geometry.n_taps() * c * o..(group + 1) * geometry.n_taps() * c * o];
        for (image, y) in x.chunks_exact(n_in).zip(y.chunks_exact_mut(n_out)) {
            plane.fill(image, geometry, c, channels.input, group * c);
            for (row, y) in y.chunks_exact_mut(geometry.output[1] * channels.output).enumerate() {
                let start = &plane.values[row * geometry.stride * steps.row..];
                windows_of_row(start, weights, steps, [o, channels.output, group * o], y);
            }
        }
    }
    y
}

/// Returns the input's gradient, `[N, G·C]`, given that of the output and weights `[G, T·O, C]`.
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
    let steps = steps(geometry, &plane, c);
    for group in 0..channels.groups {
        let weights = &weights[group * geometry.n_taps() * c * o..(group + 1) * geometry.n_taps() * c * o];
        for (grad, gx) in grad.chunks_exact(n_out).zip(gx.chunks_exact_mut(n_in)) {
            plane.values.fill(0.0);
            for (row, grad) in grad.chunks_exact(geometry.output[1] * channels.output).enumerate() {
                let start = &mut plane.values[row * geometry.stride * steps.row..];
                let (grad, lanes) = wide_row(grad, [o, channels.output, group * o], &mut scratch);
                spread_row(start, weights, steps, lanes, grad);
            }
            read_plane(&plane.values, plane.columns, gx, geometry, [c, channels.input, group * c]);
        }
    }
    gx
}

/// Returns the gradient of packed weights, `[G, T·C, O]`, given that of the output.
pub(super) fn weight_gradient<T: Number>(
    x: &[T],
    grad: &[T],
    channels: Channels,
    geometry: &Geometry,
) -> Vec<f32> {
    let [c, o] = channels.each();
    let mut scratch = Vec::new();
    let mut gw = vec![0.0; channels.groups * geometry.n_taps() * c * o];
    let (n_in, n_out) = (x.len() / geometry.n_images, grad.len() / geometry.n_images);
    let mut plane = Plane::new(geometry, c);
    let steps = steps(geometry, &plane, c);
    for (group, gw) in gw.chunks_exact_mut(geometry.n_taps() * c * o).enumerate() {
        for (image, grad) in x.chunks_exact(n_in).zip(grad.chunks_exact(n_out)) {
            plane.fill(image, geometry, c, channels.input, group * c);
            for (row, grad) in grad.chunks_exact(geometry.output[1] * channels.output).enumerate() {
                let start = &plane.values[row * geometry.stride * steps.row..];
                let (grad, lanes) = wide_row(grad, [o, channels.output, group * o], &mut scratch);
                add_outer_products(start, grad, steps, lanes, gw);
            }
        }
    }
    gw
}

/// Returns the channels `first..first + o` of every `all` of a row in f32, with their place there: those of a row in f32 where they
/// lie, others converted into `scratch`.
fn wide_row<'a, T: Number>(
    row: &'a [T],
    [o, all, first]: [usize; 3],
    scratch: &'a mut Vec<f32>,
) -> (&'a [f32], [usize; 3]) {
    if T::DTYPE == DType::F32 {
        return (bytemuck::cast_slice(row), [o, all, first]);
    }
    scratch.resize(row.len() / all * o, 0.0);
    widen_channels(row, [o, all, first], scratch);
    (scratch, [o, o, 0])
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn widen_channels<T: Number>(row: &[T], [o, all, first]: [usize; 3], out: &mut [f32]) {
    for (cell, out) in row.chunks_exact(all).zip(out.chunks_exact_mut(o)) {
        copy_cell(&cell[first..first + o], out);
    }
}

fn steps(geometry: &Geometry, plane: &Plane, width: usize) -> Steps {
    debug_assert!(plane.rows >= geometry.kernel[0]);
    Steps { window: geometry.stride * width, row: plane.columns * width, width, kernel: geometry.kernel }
}

/// Computes all windows of one row of the output: channels `first..first + o` of every `all`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn windows_of_row<T: Number>(x: &[f32], weights: &[f32], steps: Steps, channels: [usize; 3], y: &mut [T]) {
    let [o, ..] = channels;
    let wide = o / (2 * LANES) * (2 * LANES);
    for lane in (0..wide).step_by(2 * LANES) {
        lanes_of_row::<T, { 2 * LANES }, 6>(x, weights, steps, channels, lane, y);
    }
    if wide < o {
        lanes_of_row::<T, LANES, 8>(x, weights, steps, channels, wide, y);
    }
}

/// Computes `L` channels of one row of the output, from `lane` on, `N` windows at a time.
#[inline(always)]
fn lanes_of_row<T: Number, const L: usize, const N: usize>(
    x: &[f32],
    weights: &[f32],
    steps: Steps,
    [o, all, first]: [usize; 3],
    lane: usize,
    y: &mut [T],
) {
    let n = y.len() / all;
    let weights = &weights[lane..];
    let mut put = |window: usize, sums: &[f32; L]| {
        let to = window * all + first + lane;
        y[to..to + L].iter_mut().zip(sums).for_each(|(y, sum)| *y = T::nearest(*sum));
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
fn spread_row(plane: &mut [f32], weights: &[f32], steps: Steps, channels: [usize; 3], grad: &[f32]) {
    let wide = steps.width / (2 * LANES) * (2 * LANES);
    for lane in (0..wide).step_by(2 * LANES) {
        spread_lanes::<{ 2 * LANES }, 6>(plane, weights, steps, channels, lane, grad);
    }
    if wide < steps.width {
        spread_lanes::<LANES, 8>(plane, weights, steps, channels, wide, grad);
    }
}

/// Adds to `L` channels of the plane, from `lane` on, tap by tap, the gradients of `N` windows at a time.
#[inline(always)]
fn spread_lanes<const L: usize, const N: usize>(
    plane: &mut [f32],
    weights: &[f32],
    steps: Steps,
    [o, all, first]: [usize; 3],
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
fn add_outer_products(x: &[f32], grad: &[f32], steps: Steps, [o, all, first]: [usize; 3], gw: &mut [f32]) {
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
