//! Cross-entropy of the classes of pixels, for scores of the cells of a coarser grid.
//!
//! ```text
//! s[b, i, j] = Σ_n m[i, j, n] · x[b, n]                         bilinear (`bilinear`)
//! L = -Σ_b,i,j log softmax(s[b, i, j])[y[b, i, j]]              over the pixels whose class y is not 255
//! ∂x[b, n] = Σ_i,j m[i, j, n] · (softmax(s[b, i, j]) - e(y[b, i, j]))
//! ```
//!
//! x `[B, N, C]`, scores of C classes for the N cells of a grid; y `[B, H·W]`; e the unit vectors.
//! On the CPU, the scores s exist for one pixel at a time: those of all pixels are as many times as
//! large as x as a cell has pixels.

use std::sync::Arc;

use burn_flex::{Flex, FlexTensor};
use burn_tensor::{Tensor, TensorData};
use multiversion::multiversion;
use rayon::prelude::*;

use super::bilinear::{Taps, bilinear_taps, interpolate};
use super::bridge::{Kernel, run};
use super::cpu::{contiguous, dims, is_flex, slice, tensor};
use super::cross_entropy::{Pairs, cross_entropy};
use super::linear::matmul;
use super::math::{exp, lane_max, lane_sum, over_rows};
use super::rows::select_rows;

/// Class of pixels that do not count.
const IGNORED: u8 = 255;

/// Returns the sum over all pixels that count, `[1]`, for `scores` of `[B, N, C]` on `grid`, and
/// the `classes` of the pixels, `[B, H·W]`, which are below C, or 255 where a pixel does not count.
/// `size_px` has the rows and columns of pixels, H and W.
///
/// # Panics
/// If there are not as many classes as pixels, or one is C or above.
pub fn pixel_cross_entropy(
    scores: Tensor<3>,
    grid: [usize; 2],
    classes: &Arc<[u8]>,
    size_px: [usize; 2],
) -> Tensor<1> {
    let [b, n, _] = scores.dims();
    assert_eq!(n, grid[0] * grid[1], "scores of the cells of a grid");
    assert_eq!(classes.len(), b * size_px[0] * size_px[1], "a class for every pixel");
    let kernel = PixelCrossEntropy {
        classes: Arc::clone(classes),
        grid,
        rows: bilinear_taps(grid[0], size_px[0]),
        columns: bilinear_taps(grid[1], size_px[1]),
    };
    if is_flex(&scores) { run(kernel, [scores.into()]) } else { kernel.plain(scores) }
}

#[derive(Debug, Clone)]
struct PixelCrossEntropy {
    classes: Arc<[u8]>,
    /// Rows and columns of cells.
    grid: [usize; 2],
    /// Rows of cells that each row of pixels is interpolated from.
    rows: Vec<Taps>,
    /// The same of columns.
    columns: Vec<Taps>,
}

impl PixelCrossEntropy {
    /// Returns the classes of row `row` of the pixels of all images.
    fn class_row(&self, row: usize) -> &[u8] {
        &self.classes[row * self.columns.len()..][..self.columns.len()]
    }

    /// Computes the same with operations on scores of all pixels.
    fn plain(&self, scores: Tensor<3>) -> Tensor<1> {
        let [b, _, c] = scores.dims();
        let [n_rows, n_columns] = self.grid;
        let height = self.rows.len();
        let width = self.columns.len();
        let x = resample(scores.reshape([b, n_rows, n_columns * c]), &self.rows, n_rows);
        let x = resample(x.reshape([b * height, n_columns, c]), &self.columns, n_columns);
        let n_pixels = b * height * width;
        // The row after those of the classes has no target.
        let mut unit_vectors = vec![0.0f32; (c + 1) * c];
        for class in 0..c {
            unit_vectors[class * c + class] = 1.0;
        }
        let device = x.device().inner();
        let unit_vectors: Tensor<2> = Tensor::from_data(TensorData::new(unit_vectors, [c + 1, c]), &device);
        let mut targets = Vec::with_capacity(n_pixels);
        for class in self.classes.iter() {
            targets.push(if *class == IGNORED { c as u32 } else { u32::from(*class) });
        }
        let targets = select_rows(unit_vectors, &targets.into()).reshape([n_pixels, 1, c]);
        cross_entropy(x.reshape([n_pixels, 1, c]), targets, Pairs::All, 1.0)
    }
}

/// Interpolates the rows of `x`, `[B, n_cells, D]`, to those of `taps`, `[B, n, D]`.
fn resample(x: Tensor<3>, taps: &[Taps], n_cells: usize) -> Tensor<3> {
    let [b, _, _] = x.dims();
    let n = taps.len();
    let mut matrix = vec![0.0f32; n * n_cells];
    for (row, taps) in matrix.chunks_exact_mut(n_cells).zip(taps) {
        row[taps.first] += 1.0 - taps.share;
        row[taps.second] += taps.share;
    }
    let device = x.device().inner();
    let matrix: Tensor<2> = Tensor::from_data(TensorData::new(matrix, [n, n_cells]), &device);
    let matrix = if x.is_autodiff() { matrix.autodiff() } else { matrix };
    matmul(matrix.reshape([1, n, n_cells]).expand([b, n, n_cells]), x)
}

impl Kernel<Flex, 1> for PixelCrossEntropy {
    type Saved = FlexTensor;

    fn forward(&self, [x]: [FlexTensor; 1]) -> (FlexTensor, FlexTensor) {
        let [b, n, c]: [usize; 3] = dims(&x);
        let x = contiguous(&x);
        let values = slice(&x);
        let height = self.rows.len();
        let row_len = self.grid[1] * c;
        let mut losses = vec![0.0f64; b * height];
        over_rows(&mut losses, 1, |first, losses| {
            let mut cells = vec![0.0; row_len];
            let mut pixel = vec![0.0; c];
            for (i, loss) in losses.iter_mut().enumerate() {
                let row = first + i;
                let image = &values[row / height * n * c..][..n * c];
                cell_row(image, self.rows[row % height], &mut cells);
                *loss = row_loss(&cells, &self.columns, self.class_row(row), &mut pixel);
            }
        });
        // Row by row, so that the sum does not depend on how rows were split over threads.
        let total: f64 = losses.iter().sum();
        (tensor(vec![total as f32], [1]), x)
    }

    fn backward(&self, x: FlexTensor, grad: FlexTensor, wanted: [bool; 1]) -> [Option<FlexTensor>; 1] {
        if !wanted[0] {
            return [None];
        }
        let [b, n, c]: [usize; 3] = dims(&x);
        let scale = slice(&contiguous(&grad))[0];
        let values = slice(&x);
        let height = self.rows.len();
        let row_len = self.grid[1] * c;
        let mut gx = vec![0.0; b * n * c];
        // The gradient of an image is computed by one thread, in the order of its pixels.
        gx.par_chunks_mut(n * c).zip(values.par_chunks(n * c)).enumerate().for_each(|(image, (gx, x))| {
            let mut cells = vec![0.0; row_len];
            let mut cell_gradients = vec![0.0; row_len];
            let mut pixel = vec![0.0; c];
            for (y, taps) in self.rows.iter().enumerate() {
                cell_row(x, *taps, &mut cells);
                cell_gradients.fill(0.0);
                let classes = self.class_row(image * height + y);
                add_row_gradient(&cells, &self.columns, classes, scale, &mut pixel, &mut cell_gradients);
                add_scaled(&mut gx[taps.first * row_len..][..row_len], &cell_gradients, 1.0 - taps.share);
                add_scaled(&mut gx[taps.second * row_len..][..row_len], &cell_gradients, taps.share);
            }
        });
        [Some(tensor(gx, [b, n, c]))]
    }
}

/// Writes the scores of an image, `[N, C]`, between two rows of its cells to `out`.
fn cell_row(image: &[f32], taps: Taps, out: &mut [f32]) {
    let len = out.len();
    interpolate(&image[taps.first * len..][..len], &image[taps.second * len..][..len], taps.share, out);
}

/// Returns the summed loss of a row of pixels, whose scores are interpolated from those of a row of
/// `cells`. `pixel` is scratch memory for the scores of a pixel.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn row_loss(cells: &[f32], columns: &[Taps], classes: &[u8], pixel: &mut [f32]) -> f64 {
    let c = pixel.len();
    let mut total = 0.0;
    for (taps, class) in columns.iter().zip(classes) {
        if *class == IGNORED {
            continue;
        }
        interpolate(&cells[taps.first * c..][..c], &cells[taps.second * c..][..c], taps.share, pixel);
        let max = lane_max(pixel);
        let sum = lane_sum(pixel, |s| exp(s - max));
        total += f64::from(sum.ln() + max - pixel[usize::from(*class)]);
    }
    total
}

/// Adds `scale` times the gradient of [`row_loss`] to `gradients`, those of the row of cells.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn add_row_gradient(
    cells: &[f32],
    columns: &[Taps],
    classes: &[u8],
    scale: f32,
    pixel: &mut [f32],
    gradients: &mut [f32],
) {
    let c = pixel.len();
    for (taps, class) in columns.iter().zip(classes) {
        if *class == IGNORED {
            continue;
        }
        interpolate(&cells[taps.first * c..][..c], &cells[taps.second * c..][..c], taps.share, pixel);
        let max = lane_max(pixel);
        for value in pixel.iter_mut() {
            *value = exp(*value - max);
        }
        let factor = scale / lane_sum(pixel, |e| e);
        for value in pixel.iter_mut() {
            *value *= factor;
        }
        pixel[usize::from(*class)] -= scale;
        add_scaled(&mut gradients[taps.first * c..][..c], pixel, 1.0 - taps.share);
        add_scaled(&mut gradients[taps.second * c..][..c], pixel, taps.share);
    }
}

/// Computes `y += factor · x`.
#[inline(always)]
fn add_scaled(y: &mut [f32], x: &[f32], factor: f32) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, devices, leaves};

    /// Returns the classes of `n` pixels, below `n_classes`, of which every fifth does not count.
    fn classes(n: usize, n_classes: usize) -> Arc<[u8]> {
        (0..n).map(|i| if i % 5 == 3 { IGNORED } else { (i * 7 % n_classes) as u8 }).collect()
    }

    /// More and fewer pixels than cells, a single cell, and more classes than a vector has lanes.
    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            for (b, grid, size_px, c) in [
                (3, [2, 3], [8, 9], 5),
                (2, [1, 1], [4, 4], 2),
                (9, [3, 3], [2, 2], 37),
                (1, [4, 4], [32, 32], 3),
                (2, [3, 2], [3, 2], 4),
            ] {
                let scores = leaves(&device, &[[b, grid[0] * grid[1], c]], 1).remove(0);
                let classes = classes(b * size_px[0] * size_px[1], c);
                let loss = pixel_cross_entropy(scores.clone(), grid, &classes, size_px);
                let grads = (loss.clone() * 0.25).backward();
                let kernel = PixelCrossEntropy {
                    classes,
                    grid,
                    rows: bilinear_taps(grid[0], size_px[0]),
                    columns: bilinear_taps(grid[1], size_px[1]),
                };
                let expected_loss = kernel.plain(scores.clone());
                let expected_grads = (expected_loss.clone() * 0.25).backward();
                assert_close("forward", loss.inner(), expected_loss.inner(), 2e-6);
                assert_gradients_close("scores", &scores, &grads, &expected_grads, 5e-6);
            }
        }
    }

    /// Equal scores of two classes are a loss of log 2 for every pixel that counts.
    #[test]
    fn pixels_that_do_not_count_have_no_loss() {
        let device = devices().remove(0);
        let scores = Tensor::<3>::zeros([1, 4, 2], &device);
        let half: Arc<[u8]> = vec![0, IGNORED, 1, IGNORED].into();
        let loss = pixel_cross_entropy(scores.clone(), [2, 2], &half, [2, 2]).into_scalar::<f32>();
        assert!((f64::from(loss) - 2.0 * 2.0_f64.ln()).abs() < 1e-6, "{loss}");
        let none: Arc<[u8]> = vec![IGNORED; 4].into();
        let scores = scores.autodiff().require_grad();
        let loss = pixel_cross_entropy(scores.clone(), [2, 2], &none, [2, 2]);
        let grads = loss.backward();
        let gradient = scores.grad(&grads).expect("a leaf");
        assert_eq!(gradient.abs().max().into_scalar::<f32>(), 0.0);
    }
}
