//! Depthwise convolution over the grid of features, with channels last, as the start of a residual
//! branch.
//!
//! ```text
//! h[b, i, c]  = β[c] + Σ_t w[c, t] · x[b, i + t - p, c]
//! gx[b, j, c] = Σ_t w[c, t] · g[b, j - t + p, c] + gskip
//! gw[c, t]    = Σ_b,i g[b, i, c] · x[b, i + t - p, c]        gβ[c] = Σ_b,i g[b, i, c]
//! ```
//!
//! x, h `[B, H·W, C]` in f32, w `[C, 1, K, K]` as PyTorch stores it, β `[C]`; i and j are cells, t
//! the taps of a square of odd side K, p = (K - 1) / 2; x is zero outside its grid. gskip is the
//! gradient of the skip connection, which the end of the branch stores. On the CPU a few channels
//! of an image are copied into a padded plane, which stays in the cache; sums over taps stay in
//! registers.

use std::ops::Range;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::Tensor;
use burn_tensor::module::conv2d;
use burn_tensor::ops::ConvOptions;
use multiversion::multiversion;

use super::bridge::{Kernel, run};
use super::cpu::{add, contiguous, dims, is_flex, slice, tensor};
#[cfg(feature = "testing")]
use super::gemm::count;
use super::link::Link;
use super::math::over_rows;
use super::residual::Skip;

/// Channels of a plane: one vector of AVX-512, or two of AVX2.
const LANES: usize = 16;

/// Neighboring cells that are computed at a time, so that each weight is read once for all of them.
const CELLS: usize = 4;

/// Starts a branch: returns the convolution of `x` of `[B, H·W, C]` on `grid` with `weight` of `[C,
/// 1, K, K]`, K odd, and `bias` of `[C]`; and the skip connection.
pub fn depthwise_branch(
    x: Tensor<3>,
    grid: [usize; 2],
    weight: Tensor<4>,
    bias: Tensor<1>,
) -> (Tensor<3>, Skip<3>) {
    if !is_flex(&x) {
        return (plain(x.clone(), grid, weight, bias), Skip::new(x, None));
    }
    let link = Link::default();
    let skip = Skip::new(x.clone(), Some(link.clone()));
    (run(Depthwise { grid, link }, [x.into(), weight.into(), bias.into()]), skip)
}

/// Computes it with Burn's `conv2d`, which has its own kernels on GPUs.
fn plain(x: Tensor<3>, [h, w]: [usize; 2], weight: Tensor<4>, bias: Tensor<1>) -> Tensor<3> {
    let [b, n, c] = x.dims();
    let [_, _, k, _] = weight.dims();
    let maps = x.reshape([b, h, w, c]).permute([0, 3, 1, 2]);
    let options = ConvOptions::new([1, 1], [k / 2, k / 2], [1, 1], c);
    let dtype = maps.dtype();
    let y = conv2d(maps, weight.cast(dtype), Some(bias.cast(dtype)), options);
    y.permute([0, 2, 3, 1]).reshape([b, n, c])
}

#[derive(Debug, Clone)]
struct Depthwise {
    grid: [usize; 2],
    link: Link<FlexTensor>,
}

impl Depthwise {
    fn shape(&self, x: &FlexTensor, weight: &FlexTensor) -> Shape {
        let [_, _, channels]: [usize; 3] = dims(x);
        let [_, _, side, _]: [usize; 4] = dims(weight);
        Shape { grid: self.grid, channels, side }
    }
}

impl Kernel<Flex, 3> for Depthwise {
    /// The input and the weight.
    type Saved = [FlexTensor; 2];

    fn forward(&self, [x, weight, bias]: [FlexTensor; 3]) -> (FlexTensor, Self::Saved) {
        let x = contiguous(&x);
        let weight = contiguous(&weight);
        let bias = contiguous(&bias);
        let shape = self.shape(&x, &weight);
        #[cfg(feature = "testing")]
        count::add(2.0 * (slice(&x).len() * shape.n_taps()) as f64);
        let y = shape.convolve(slice(&x), &shape.weights_by_tap(slice(&weight), false), slice(&bias));
        (tensor(y, dims::<3>(&x)), [x, weight])
    }

    fn backward(
        &self,
        [x, weight]: Self::Saved,
        grad: FlexTensor,
        wanted: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let shape = self.shape(&x, &weight);
        let grad = contiguous(&grad);
        let skip = self.link.take().map(|skip| contiguous(&skip));
        let gx = wanted[0].then(|| {
            let reversed = shape.weights_by_tap(slice(&weight), true);
            let mut gx = shape.convolve(slice(&grad), &reversed, &vec![0.0; shape.channels]);
            if let Some(skip) = &skip {
                add::<f32>(&mut gx, slice(skip));
            }
            tensor(gx, dims::<3>(&x))
        });
        let [gw, g_bias] = if wanted[1] || wanted[2] {
            shape.parameter_gradients(slice(&x), slice(&grad))
        } else {
            [Vec::new(), Vec::new()]
        };
        let gw = wanted[1].then(|| tensor(gw, dims::<4>(&weight)));
        [gx, gw, wanted[2].then(|| tensor(g_bias, [shape.channels]))]
    }
}

/// Dimensions of a depthwise convolution.
#[derive(Debug, Clone, Copy)]
struct Shape {
    /// Rows and columns.
    grid: [usize; 2],
    channels: usize,
    /// Side of the kernel.
    side: usize,
}

impl Shape {
    fn n_cells(&self) -> usize {
        self.grid[0] * self.grid[1]
    }

    fn n_taps(&self) -> usize {
        self.side * self.side
    }

    /// Returns the numbers of rows and columns of a plane: a grid with half a kernel of zeros
    /// around it, whose rows are long enough for whole groups of [`CELLS`].
    fn plane_sides(&self) -> [usize; 2] {
        let [h, w] = self.grid;
        [h + self.side - 1, w.next_multiple_of(CELLS) + self.side - 1]
    }

    fn plane(&self) -> Vec<f32> {
        let [h, w] = self.plane_sides();
        vec![0.0; h * w * LANES]
    }

    /// Splits the channels into ranges of at most [`LANES`].
    fn groups(&self) -> impl Iterator<Item = Range<usize>> {
        let channels = self.channels;
        (0..channels).step_by(LANES).map(move |first| first..channels.min(first + LANES))
    }

    /// Reorders weights `[C, T]` into `[C / LANES, T, LANES]`, with zeros for channels beyond the
    /// last; `reversed` reverses the taps.
    fn weights_by_tap(&self, weight: &[f32], reversed: bool) -> Vec<f32> {
        let n_taps = self.n_taps();
        let mut by_tap = vec![0.0; self.channels.div_ceil(LANES) * n_taps * LANES];
        for (channel, taps) in weight.chunks_exact(n_taps).enumerate() {
            for (tap, value) in taps.iter().enumerate() {
                let tap = if reversed { n_taps - 1 - tap } else { tap };
                by_tap[(channel / LANES * n_taps + tap) * LANES + channel % LANES] = *value;
            }
        }
        by_tap
    }

    /// Copies some channels of an image into a plane, inside its padding.
    fn fill(&self, plane: &mut [f32], image: &[f32], channels: Range<usize>) {
        let [h, w] = self.grid;
        let [_, columns] = self.plane_sides();
        let p = self.side / 2;
        let n = channels.len();
        for y in 0..h {
            let row = &mut plane[((y + p) * columns + p) * LANES..][..w * LANES];
            let cells = image[y * w * self.channels..].chunks_exact(self.channels);
            for (to, from) in row.chunks_exact_mut(LANES).zip(cells) {
                to[..n].copy_from_slice(&from[channels.clone()]);
                to[n..].fill(0.0);
            }
        }
    }

    /// Returns the convolution of `x` of `[B, N, C]` with weights of `[C / LANES, T, LANES]`.
    fn convolve(&self, x: &[f32], weights: &[f32], bias: &[f32]) -> Vec<f32> {
        let image_len = self.n_cells() * self.channels;
        let mut y = vec![0.0; x.len()];
        over_rows(&mut y, image_len, |first, images| {
            let mut plane = self.plane();
            for (i, out) in images.chunks_exact_mut(image_len).enumerate() {
                let image = &x[(first + i) * image_len..][..image_len];
                for (index, channels) in self.groups().enumerate() {
                    self.fill(&mut plane, image, channels.clone());
                    let weights = &weights[index * self.n_taps() * LANES..][..self.n_taps() * LANES];
                    let mut start = [0.0; LANES];
                    start[..channels.len()].copy_from_slice(&bias[channels.clone()]);
                    convolve_plane(self, &plane, weights, &start, out, channels);
                }
            }
        });
        y
    }

    /// Returns the gradients of the weight, `[C, T]`, and of the bias.
    fn parameter_gradients(&self, x: &[f32], grad: &[f32]) -> [Vec<f32>; 2] {
        let n_taps = self.n_taps();
        let image_len = self.n_cells() * self.channels;
        let mut gw = vec![0.0; self.channels * n_taps];
        let mut g_bias = vec![0.0; self.channels];
        let mut plane = self.plane();
        for channels in self.groups() {
            let mut taps = vec![0.0; n_taps * LANES];
            let mut sum = [0.0; LANES];
            for (image, grad) in x.chunks_exact(image_len).zip(grad.chunks_exact(image_len)) {
                self.fill(&mut plane, image, channels.clone());
                add_tap_sums(self, &plane, grad, channels.clone(), &mut taps, &mut sum);
            }
            g_bias[channels.clone()].copy_from_slice(&sum[..channels.len()]);
            for (lane, channel) in channels.enumerate() {
                for (tap, gw) in gw[channel * n_taps..(channel + 1) * n_taps].iter_mut().enumerate() {
                    *gw = taps[tap * LANES + lane];
                }
            }
        }
        [gw, g_bias]
    }
}

/// Writes the convolution of a plane to its `channels` in `out`, `[N, C]`; sums begin with `start`.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn convolve_plane(
    shape: &Shape,
    plane: &[f32],
    weights: &[f32],
    start: &[f32; LANES],
    out: &mut [f32],
    channels: Range<usize>,
) {
    let n = channels.len();
    let [h, w] = shape.grid;
    let [_, columns] = shape.plane_sides();
    let k = shape.side;
    for y in 0..h {
        for x in (0..w).step_by(CELLS) {
            let mut sums = [*start; CELLS];
            for ky in 0..k {
                let row = &plane[((y + ky) * columns + x) * LANES..][..(k + CELLS - 1) * LANES];
                for (kx, weight) in weights[ky * k * LANES..][..k * LANES].chunks_exact(LANES).enumerate() {
                    for (sum, cell) in sums.iter_mut().zip(row[kx * LANES..].chunks_exact(LANES)) {
                        for lane in 0..LANES {
                            sum[lane] += weight[lane] * cell[lane];
                        }
                    }
                }
            }
            for (i, sum) in sums.iter().enumerate().take(w - x) {
                out[(y * w + x + i) * shape.channels + channels.start..][..n].copy_from_slice(&sum[..n]);
            }
        }
    }
}

/// Adds the products of the output gradient of an image and its plane to `taps`, the sums by tap,
/// and the gradient itself to `total`.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_tap_sums(
    shape: &Shape,
    plane: &[f32],
    grad: &[f32],
    channels: Range<usize>,
    taps: &mut [f32],
    total: &mut [f32; LANES],
) {
    let n = channels.len();
    let [h, w] = shape.grid;
    let [_, columns] = shape.plane_sides();
    let k = shape.side;
    for y in 0..h {
        for x in 0..w {
            let mut g = [0.0; LANES];
            g[..n].copy_from_slice(&grad[(y * w + x) * shape.channels + channels.start..][..n]);
            for lane in 0..LANES {
                total[lane] += g[lane];
            }
            for ky in 0..k {
                let row = &plane[((y + ky) * columns + x) * LANES..][..k * LANES];
                let sums = taps[ky * k * LANES..][..k * LANES].chunks_exact_mut(LANES);
                for (sum, cell) in sums.zip(row.chunks_exact(LANES)) {
                    for lane in 0..LANES {
                        sum[lane] += g[lane] * cell[lane];
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves};

    /// Cases cover grids of one cell, smaller than the kernel and wider than a group of cells, and
    /// channels that do not fill a vector.
    #[test]
    fn matches_plain_forward_and_backward() {
        let cases = [([1, 1], 5, 7), ([2, 3], 16, 7), ([5, 9], 24, 7), ([8, 8], 33, 3)];
        // Two threads share the images.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("threads");
        for device in devices() {
            for (grid, c, k) in cases {
                let x = leaves(&device, &[[5, grid[0] * grid[1], c]], 1).remove(0);
                let weight = leaves(&device, &[[c, 1, k, k]], 2).remove(0);
                let bias = leaves(&device, &[[c]], 3).remove(0);
                let (h, skip) =
                    pool.install(|| depthwise_branch(x.clone(), grid, weight.clone(), bias.clone()));
                let expected = plain(x.clone(), grid, weight.clone(), bias.clone());
                assert_close("forward", h.clone().inner(), expected.clone().inner(), 1e-6);
                let y = skip.join(h, None, None);
                let expected = x.clone() + expected;
                let grads = pool.install(|| backward(y));
                let expected = backward(expected);
                assert_gradients_close("input", &x, &grads, &expected, 5e-6);
                assert_gradients_close("weight", &weight, &grads, &expected, 5e-6);
                assert_gradients_close("bias", &bias, &grads, &expected, 5e-6);
            }
        }
    }
}
