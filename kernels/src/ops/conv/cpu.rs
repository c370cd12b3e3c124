//! Convolution on the CPU by matrix products over blocks of windows, which are the rows of a matrix
//! (im2col). In bf16 they are read where they lie.
//!
//! ```text
//! X [M, T·C]  windows of x      W [T·C, O]       y = X · W      gW = Xᵀ · g
//! gx = windows of g · W with reversed taps      for each of the phases that a stride makes (`phases.rs`)
//! ```
//!
//! for each group of channels; T taps, C and O channels of a group.

use std::ops::Range;

use burn_tensor::DType;
use half::bf16;

use super::channels::{Channels, turned};
use super::geometry::Geometry;
use super::grouped::{self, Part};
use super::phases::Phase;
use crate::ops::gemm::Mat;
use crate::ops::number::Number;
use crate::ops::product::{RunSizes, Start, product_into, product_of_runs};

/// Elements of a block of windows, which stays in a core's cache.
const BLOCK: usize = 1 << 18;

/// Least number of windows of a block: the weights are packed again for every block.
const MIN_WINDOWS: usize = 256;

/// Returns the convolution of `x` with `packed` weights, `[M, O]`.
pub(super) fn forward<T: Number, W: Number>(
    x: &[T],
    packed: &[W],
    channels: Channels,
    geometry: &Geometry,
) -> Vec<T> {
    if grouped::suits(channels) {
        let lattice = geometry.lattice(channels.output);
        let part = Part { packed: packed.into(), geometry: *geometry, lattice };
        return grouped::convolve(x, &[part], channels, geometry.n_windows());
    }
    let [c, o] = channels.each();
    let k = geometry.n_taps() * c;
    let mut y = vec![T::default(); geometry.n_windows() * channels.output];
    if T::DTYPE == DType::BF16 && c.is_multiple_of(2) {
        in_runs(bytemuck::cast_slice(x), packed, channels, geometry, &mut y);
        return y;
    }
    in_blocks(x, channels, geometry, |group, windows, block| {
        let m = windows.len();
        let out = &mut y[windows.start * channels.output..windows.end * channels.output];
        let weights = Mat::rows(&packed[group * k * o..(group + 1) * k * o], o);
        let out = &mut out[group * o..];
        product_into([m, k, o], 1.0, block, weights, Start::Zero, out, channels.output);
    });
    y
}

/// Computes the convolution without a copy of its windows: the channels of each of their cells are
/// a run.
fn in_runs<T: Number, W: Number>(
    x: &[bf16],
    packed: &[W],
    channels: Channels,
    geometry: &Geometry,
    y: &mut [T],
) {
    let [c, o] = channels.each();
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
                        put(tap.number + i, &x[(tap.cell + i) * channels.input + group * c..]);
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

/// Returns the gradient of packed weights, `[G, T·C/G, O/G]`, given that of the output, `[M, O]`.
pub(super) fn weight_gradient<T: Number>(
    x: &[T],
    grad: &[T],
    channels: Channels,
    geometry: &Geometry,
) -> Vec<f32> {
    if grouped::suits(channels) {
        return grouped::weight_gradient(x, grad, channels, geometry);
    }
    let [c, o] = channels.each();
    let k = geometry.n_taps() * c;
    let mut gw = vec![0.0; k * channels.output];
    in_blocks(x, channels, geometry, |group, windows, block| {
        let m = windows.len();
        let grad = &grad[windows.start * channels.output..windows.end * channels.output];
        let grad = Mat::rows(&grad[group * o..], channels.output);
        let start = if windows.start == 0 { Start::Zero } else { Start::Output };
        let gw = &mut gw[group * k * o..(group + 1) * k * o];
        product_into([k, m, o], 1.0, block.t(), grad, start, gw, o);
    });
    gw
}

/// Returns the input's gradient, `[N, C]`, given that of the output and the weights as PyTorch
/// stores them.
pub(super) fn input_gradient<T: Number, W: Number>(
    grad: &[T],
    weight: &[W],
    channels: Channels,
    geometry: &Geometry,
) -> Vec<T> {
    let phases = Phase::all(geometry);
    let of_grad = channels.turned();
    let packed = |phase: &Phase| turned(weight, channels, &phase.taps);
    if grouped::suits(of_grad) {
        let parts: Vec<_> = phases
            .iter()
            .map(|phase| Part {
                packed: packed(phase).into(),
                geometry: phase.geometry,
                lattice: phase.lattice(geometry, channels.input),
            })
            .collect();
        return grouped::convolve(grad, &parts, of_grad, geometry.n_cells());
    }
    let of_phase = |phase: &Phase| forward(grad, &packed(phase), of_grad, &phase.geometry);
    match phases.as_slice() {
        [phase] if phase.geometry.output == geometry.input => of_phase(phase),
        phases => {
            let mut gx = vec![T::default(); geometry.n_cells() * channels.input];
            phases.iter().for_each(|phase| phase.put(&of_phase(phase), channels.input, geometry, &mut gx));
            gx
        }
    }
}

/// Returns ranges of windows, of `k` elements each, that fit a block.
fn blocks(geometry: &Geometry, k: usize) -> impl Iterator<Item = Range<usize>> {
    let len = (BLOCK / k).max(MIN_WINDOWS);
    let n = geometry.n_windows();
    (0..n).step_by(len).map(move |start| start..(start + len).min(n))
}

/// Calls `f` with each group of channels, each block of windows, and the matrix of these windows.
fn in_blocks<T: Number>(
    x: &[T],
    channels: Channels,
    geometry: &Geometry,
    mut f: impl FnMut(usize, Range<usize>, Mat<'_, T>),
) {
    let [c, _] = channels.each();
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
            gather(x, channels, geometry, group, windows.clone(), &mut block);
            f(group, windows.clone(), Mat::rows(&block, k));
        }
    }
}

/// Gathers the `windows` of a group's channels side by side, with zeros where they extend beyond
/// the input.
fn gather<T: Number>(
    x: &[T],
    channels: Channels,
    geometry: &Geometry,
    group: usize,
    windows: Range<usize>,
    block: &mut [T],
) {
    let [c, _] = channels.each();
    let k = geometry.n_taps() * c;
    // Windows may reach beyond the input behind it alone, without padding before it.
    if geometry.padded() != geometry.input {
        block.fill(T::default());
    }
    geometry.for_each_row(windows, |window, tap, n| {
        let to = window * k + tap.number * c;
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

    /// Returns the input's gradient by the definition.
    fn by_definition(grad: &[f32], weight: &[f32], channels: Channels, geometry: &Geometry) -> Vec<f32> {
        let [c, o] = channels.each();
        let n_taps = geometry.n_taps();
        let mut gx = vec![0.0; geometry.n_cells() * channels.input];
        geometry.for_each_row(0..geometry.n_windows(), |window, tap, n| {
            for (i, out) in (0..n).flat_map(|i| (0..channels.output).map(move |out| (i, out))) {
                let first = out / o * c;
                let gx = &mut gx[(tap.cell + i) * channels.input + first..][..c];
                for (input, gx) in gx.iter_mut().enumerate() {
                    let weight = weight[(out * c + input) * n_taps + tap.number + i];
                    *gx += grad[window * channels.output + out] * weight;
                }
            }
        });
        gx
    }

    /// Compares the gradient with the definition, for numbers whose sums are exact in both types.
    fn check(channels: Channels, geometry: &Geometry) {
        let number = |i: usize| (i.wrapping_mul(0x9e37_79b9) >> 13) as f32 % 3.0 - 1.0;
        let [c, _] = channels.each();
        let grad: Vec<f32> = (0..geometry.n_windows() * channels.output).map(number).collect();
        let weight: Vec<f32> =
            (0..channels.output * c * geometry.n_taps()).map(|i| number(i + 1_000_003)).collect();
        let expected = by_definition(&grad, &weight, channels, geometry);
        assert!(input_gradient(&grad, &weight, channels, geometry) == expected, "{channels:?} {geometry:?}");
        let narrow = |values: &[f32]| values.iter().map(|value| bf16::nearest(*value)).collect::<Vec<bf16>>();
        let grad = narrow(&grad);
        let of_wide = input_gradient(&grad, &weight, channels, geometry);
        assert!(of_wide == narrow(&expected), "bf16 {channels:?} {geometry:?}");
        assert!(input_gradient(&grad, &narrow(&weight), channels, geometry) == of_wide);
    }

    proptest! {
        /// Wide and narrow groups, windows that overlap or leave cells out, and padding of any
        /// size.
        #[test]
        fn the_inputs_gradient_is_that_of_the_definition(
            [h, w] in [1usize..8, 1usize..8], [kh, kw] in [1usize..5, 1usize..5],
            stride in 1usize..5, padding in 0usize..5, sizes in 0usize..6,
        ) {
            prop_assume!(h + 2 * padding >= kh && w + 2 * padding >= kw);
            let (input, output, groups) =
                [(3, 5, 1), (3, 6, 1), (4, 6, 2), (6, 4, 2), (16, 16, 2), (32, 16, 2)][sizes];
            check(Channels { input, output, groups }, &Geometry::new(2, [h, w], [kh, kw], stride, padding));
        }
    }

    /// Windows in several blocks reach beyond the input.
    #[test]
    fn blocks_of_windows_do_not_show_in_the_inputs_gradient() {
        let channels = Channels { input: 4, output: 128, groups: 1 };
        let geometry = Geometry::new(3, [56, 56], [3, 3], 2, 1);
        let of_most_taps =
            Phase::all(&geometry).into_iter().max_by_key(|phase| phase.taps.n_to).expect("phases");
        let k = of_most_taps.taps.n_to * channels.output;
        assert!(blocks(&of_most_taps.geometry, k).count() > 1);
        check(channels, &geometry);
    }
}
