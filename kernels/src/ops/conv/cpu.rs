//! Convolution on the CPU by matrix products over blocks of windows, which are the rows of a matrix
//! (im2col). In bf16 the windows are read from the input without being copied.
//!
//! ```text
//! X [M, T·C]  windows of x      W [T·C, O]       y = X · W      gW = Xᵀ · g
//! gx = windows of g · W with reversed taps
//! ```
//!
//! for each group of channels; T taps, C and O channels of a group. With a stride, gx is computed
//! separately for each phase (`phases.rs`).

use std::ops::Range;

use burn_tensor::DType;
use half::bf16;

use super::channels::{Channels, transpose};
use super::geometry::Geometry;
use super::grouped::{self, Part};
use super::phases::Phase;
use crate::ops::cpu_product::{RunSizes, Start, product_into, product_of_runs};
use crate::ops::gemm::Mat;
use crate::ops::number::Number;

/// Elements of a block of windows, which fits the cache of a core.
const BLOCK: usize = 1 << 18;

/// Minimum number of windows of a block, because the weights are packed again for every block.
const MIN_WINDOWS: usize = 256;

/// Returns the convolution of `x` with `packed` weights, `[M, O]`.
pub(super) fn forward<T: Number, W: Number>(
    x: &[T],
    packed: &[W],
    channels: Channels,
    geometry: &Geometry,
) -> Vec<T> {
    if grouped::supports(channels) {
        let lattice = geometry.lattice(channels.output);
        let part = Part { packed: packed.into(), geometry: *geometry, lattice };
        return grouped::convolve(x, &[part], channels, geometry.n_windows());
    }
    let [c, o] = channels.per_group();
    let k = geometry.n_taps() * c;
    let mut y = vec![T::default(); geometry.n_windows() * channels.output];
    if T::DTYPE == DType::BF16 && c.is_multiple_of(2) {
        forward_in_runs(bytemuck::cast_slice(x), packed, channels, geometry, &mut y);
        return y;
    }
    for_each_block(x, channels, geometry, |group, windows, block| {
        let m = windows.len();
        let out = &mut y[windows.start * channels.output..windows.end * channels.output];
        let weights = Mat::rows(&packed[group * k * o..(group + 1) * k * o], o);
        let out = &mut out[group * o..];
        product_into([m, k, o], 1.0, block, weights, Start::Zero, out, channels.output);
    });
    y
}

/// Computes the convolution without copying windows: the channels of each cell of a window are a
/// run.
fn forward_in_runs<T: Number, W: Number>(
    x: &[bf16],
    packed: &[W],
    channels: Channels,
    geometry: &Geometry,
    y: &mut [T],
) {
    let [c, o] = channels.per_group();
    let n_runs = geometry.n_taps();
    let sizes = RunSizes { m: geometry.n_windows(), n_runs, len: c, n: o };
    let outside = vec![bf16::ZERO; c];
    for group in 0..channels.groups {
        let weights = Mat::rows(&packed[group * n_runs * c * o..(group + 1) * n_runs * c * o], o);
        let out = &mut y[group * o..];
        product_of_runs(
            sizes,
            |window: usize, put: &mut dyn FnMut(usize, _)| {
                geometry.for_each_row(window..window + 1, |_, tap, n| {
                    for i in 0..n {
                        put(tap.index + i, &x[(tap.cell + i) * channels.input + group * c..]);
                    }
                });
            },
            &outside,
            weights,
            Start::Zero,
            out,
            channels.output,
        );
    }
}

/// Returns the gradient of packed weights, `[G, T·C/G, O/G]`, given the gradient of the output,
/// `[M, O]`.
pub(super) fn weight_gradient<T: Number>(
    x: &[T],
    grad: &[T],
    channels: Channels,
    geometry: &Geometry,
) -> Vec<f32> {
    if grouped::supports(channels) {
        return grouped::weight_gradient(x, grad, channels, geometry);
    }
    let [c, o] = channels.per_group();
    let k = geometry.n_taps() * c;
    let mut gw = vec![0.0; k * channels.output];
    for_each_block(x, channels, geometry, |group, windows, block| {
        let m = windows.len();
        let grad = &grad[windows.start * channels.output..windows.end * channels.output];
        let grad = Mat::rows(&grad[group * o..], channels.output);
        let start = if windows.start == 0 { Start::Zero } else { Start::Output };
        let gw = &mut gw[group * k * o..(group + 1) * k * o];
        product_into([k, m, o], 1.0, block.t(), grad, start, gw, o);
    });
    gw
}

/// Returns the gradient of the input, `[N, C]`, given the gradient of the output and the weights as
/// PyTorch stores them.
pub(super) fn input_gradient<T: Number, W: Number>(
    grad: &[T],
    weight: &[W],
    channels: Channels,
    geometry: &Geometry,
) -> Vec<T> {
    let phases = Phase::all(geometry);
    let grad_channels = channels.transposed();
    if grouped::supports(grad_channels) {
        let mut parts = Vec::with_capacity(phases.len());
        for phase in &phases {
            parts.push(Part {
                packed: transpose(weight, channels, &phase.taps).into(),
                geometry: phase.geometry,
                lattice: phase.lattice(geometry, channels.input),
            });
        }
        return grouped::convolve(grad, &parts, grad_channels, geometry.n_cells());
    }
    if let [phase] = phases.as_slice()
        && phase.geometry.output == geometry.input
    {
        let packed = transpose(weight, channels, &phase.taps);
        return forward(grad, &packed, grad_channels, &phase.geometry);
    }
    let mut gx = vec![T::default(); geometry.n_cells() * channels.input];
    for phase in &phases {
        let packed = transpose(weight, channels, &phase.taps);
        let cells = forward(grad, &packed, grad_channels, &phase.geometry);
        phase.scatter(&cells, channels.input, geometry, &mut gx);
    }
    gx
}

/// Splits the windows, of `k` elements each, into ranges that fit a block.
fn blocks(geometry: &Geometry, k: usize) -> impl Iterator<Item = Range<usize>> {
    let len = (BLOCK / k).max(MIN_WINDOWS);
    let n = geometry.n_windows();
    (0..n).step_by(len).map(move |start| start..(start + len).min(n))
}

/// Calls `f` for each group of channels and each block of windows, with the group, the windows, and
/// the matrix of their elements.
fn for_each_block<T: Number>(
    x: &[T],
    channels: Channels,
    geometry: &Geometry,
    mut f: impl FnMut(usize, Range<usize>, Mat<'_, T>),
) {
    let [c, _] = channels.per_group();
    let k = geometry.n_taps() * c;
    if geometry.is_pointwise() {
        for group in 0..channels.groups {
            f(group, 0..geometry.n_windows(), Mat::rows(&x[group * c..], channels.input));
        }
        return;
    }
    let mut block = Vec::new();
    for windows in blocks(geometry, k) {
        for group in 0..channels.groups {
            block.resize(windows.len() * k, T::default());
            gather_windows(x, channels, geometry, group, windows.clone(), &mut block);
            f(group, windows.clone(), Mat::rows(&block, k));
        }
    }
}

/// Copies the `windows` of the channels of a group to the rows of `block`, with zeros outside the
/// input.
fn gather_windows<T: Number>(
    x: &[T],
    channels: Channels,
    geometry: &Geometry,
    group: usize,
    windows: Range<usize>,
    block: &mut [T],
) {
    let [c, _] = channels.per_group();
    let k = geometry.n_taps() * c;
    // Windows can extend beyond the end of the input even if there is no padding before it.
    if geometry.padded() != geometry.input {
        block.fill(T::default());
    }
    geometry.for_each_row(windows, |window, tap, n| {
        let to = window * k + tap.index * c;
        if channels.groups == 1 {
            block[to..to + n * c].copy_from_slice(&x[tap.cell * c..(tap.cell + n) * c]);
            return;
        }
        for i in 0..n {
            let from = (tap.cell + i) * channels.input + group * c;
            block[to + i * c..to + (i + 1) * c].copy_from_slice(&x[from..from + c]);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the gradient of the input, computed by its definition.
    fn gradient_by_definition(
        grad: &[f32],
        weight: &[f32],
        channels: Channels,
        geometry: &Geometry,
    ) -> Vec<f32> {
        let [c, o] = channels.per_group();
        let n_taps = geometry.n_taps();
        let mut gx = vec![0.0; geometry.n_cells() * channels.input];
        geometry.for_each_row(0..geometry.n_windows(), |window, tap, n| {
            for i in 0..n {
                for out in 0..channels.output {
                    let first = out / o * c;
                    let gx = &mut gx[(tap.cell + i) * channels.input + first..][..c];
                    for (input, gx) in gx.iter_mut().enumerate() {
                        let weight = weight[(out * c + input) * n_taps + tap.index + i];
                        *gx += grad[window * channels.output + out] * weight;
                    }
                }
            }
        });
        gx
    }

    /// Returns -1, 0 or 1.
    fn number(i: usize) -> f32 {
        (i.wrapping_mul(0x9e37_79b9) >> 13) as f32 % 3.0 - 1.0
    }

    fn to_bf16(values: &[f32]) -> Vec<bf16> {
        values.iter().map(|value| bf16::nearest(*value)).collect()
    }

    /// Compares the gradient with the definition, for numbers whose sums are exact in both types.
    fn check(channels: Channels, geometry: &Geometry) {
        let [c, _] = channels.per_group();
        let grad: Vec<f32> = (0..geometry.n_windows() * channels.output).map(number).collect();
        let weight: Vec<f32> =
            (0..channels.output * c * geometry.n_taps()).map(|i| number(i + 1_000_003)).collect();
        let expected = gradient_by_definition(&grad, &weight, channels, geometry);
        assert!(input_gradient(&grad, &weight, channels, geometry) == expected, "{channels:?} {geometry:?}");
        let grad = to_bf16(&grad);
        let gx = input_gradient(&grad, &weight, channels, geometry);
        assert!(gx == to_bf16(&expected), "bf16 {channels:?} {geometry:?}");
        assert!(input_gradient(&grad, &to_bf16(&weight), channels, geometry) == gx);
    }

    proptest! {
        /// Covers wide and narrow groups, windows that overlap or skip cells, and padding of any
        /// size.
        #[test]
        fn input_gradient_equals_its_definition(
            [h, w] in [1usize..8, 1usize..8], [kh, kw] in [1usize..5, 1usize..5],
            stride in 1usize..5, padding in 0usize..5, sizes in 0usize..6,
        ) {
            prop_assume!(h + 2 * padding >= kh && w + 2 * padding >= kw);
            let (input, output, groups) =
                [(3, 5, 1), (3, 6, 1), (4, 6, 2), (6, 4, 2), (16, 16, 2), (32, 16, 2)][sizes];
            check(Channels { input, output, groups }, &Geometry::new(2, [h, w], [kh, kw], stride, padding));
        }
    }

    /// Windows extend beyond the input in several blocks.
    #[test]
    fn input_gradient_does_not_depend_on_blocks() {
        let channels = Channels { input: 4, output: 128, groups: 1 };
        let geometry = Geometry::new(3, [56, 56], [3, 3], 2, 1);
        let phases = Phase::all(&geometry);
        let largest = phases.iter().max_by_key(|phase| phase.taps.n_to).expect("phases");
        let k = largest.taps.n_to * channels.output;
        assert!(blocks(&largest.geometry, k).count() > 1);
        check(channels, &geometry);
    }
}
