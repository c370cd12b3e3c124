//! [`conv`](crate::ops::conv) as matrix products: of the cells themselves for a kernel of one cell,
//! else of copied windows (im2col).
//!
//! ```text
//! X[g, i, (t, c)] = x[b, s·i + t - p, g·C' + c]      [G, windows, T·C'], C' = C / G, zero outside
//! y[i, g·O' + o]  = X[g] · W[g]ᵀ                     W [G, O', T·C'], O' = O / G
//! gW[g] = g[g]ᵀ · X[g]   in f32                      gX[g] = g[g] · W[g]   in f32
//! gx[b, j, g·C' + c] = Σ_t gX[g, i, (t, c)]          over windows i with s·i + t - p = j
//! ```
//!
//! i counts the windows of all images b, and t the taps of a window, which are summed in ascending
//! order. Windows of a few images are copied at a time, so that they take at most [`MOST_BYTES`].
//! The input's gradient is collected cell by cell, without atomic operations.

use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::DType;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::product::{add_weight_gradient, product, product_in};
use super::{Rows, cast, elem, empty, one_unit_each, transposed, vector_size};
use crate::ops::bridge::Kernel;
use crate::ops::places::GradientPlace;

/// Largest number of bytes of the windows that are copied at a time, unless one image has more.
const MOST_BYTES: usize = 256 << 20;

/// Windows over the grids of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::ops) struct Windows {
    /// Numbers of rows and columns of the input.
    pub(in crate::ops) input: (usize, usize),
    /// Numbers of rows and columns of windows.
    pub(in crate::ops) output: (usize, usize),
    /// Numbers of rows and columns of a window.
    pub(in crate::ops) kernel: (usize, usize),
    /// Distance between neighboring windows.
    pub(in crate::ops) stride: usize,
    /// Number of rows and columns of zeros before the input.
    pub(in crate::ops) padding: usize,
}

impl Windows {
    fn n_cells(&self) -> usize {
        self.input.0 * self.input.1
    }

    fn n_windows(&self) -> usize {
        self.output.0 * self.output.1
    }

    fn n_taps(&self) -> usize {
        self.kernel.0 * self.kernel.1
    }
}

/// Kernels of the forward and backward pass.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Conv {
    pub(in crate::ops) windows: Windows,
    pub(in crate::ops) n_groups: usize,
    /// Whether every window is one cell of the input.
    pub(in crate::ops) is_linear: bool,
    /// Number of images whose windows are copied at a time; `None` for as many as [`MOST_BYTES`]
    /// allows.
    pub(in crate::ops) chunk_len: Option<usize>,
}

impl Kernel<CubeBackend, 2> for Conv {
    /// The input, and the packed weight, `[G, O', T·C']`, or `[O, C]` if windows are cells.
    type Saved = [CubeTensor; 2];

    fn forward(&self, [x, weight]: [CubeTensor; 2]) -> (CubeTensor, Self::Saved) {
        let n_images = x.meta.shape()[0];
        let o = weight.meta.shape()[0];
        let weight = self.packed(cast(weight, x.dtype));
        let shape = [n_images, self.windows.n_windows(), o];
        if self.is_linear {
            let y = product(matrix(&x), transposed(weight.clone()));
            return (CubeBackend::float_reshape(y, shape.into()), [x, weight]);
        }
        let mut parts = Vec::new();
        for images in self.chunks(&x, self.images_per_chunk(&weight)) {
            let n_rows = images.meta.shape()[0] * self.windows.n_windows();
            let y = product(self.unfold(&images), transposed(weight.clone()));
            parts.push(merge_groups(y, n_rows, o));
        }
        (CubeBackend::float_reshape(concatenate(parts), shape.into()), [x, weight])
    }

    fn backward(
        &self,
        [x, weight]: Self::Saved,
        grad: CubeTensor,
        wanted: [bool; 2],
    ) -> [Option<CubeTensor>; 2] {
        let gx = wanted[0].then(|| self.input_gradient(&x, &weight, &grad));
        let gw = wanted[1].then(|| self.weight_gradient(&x, &weight, &grad));
        [gx, gw]
    }

    /// Adds the gradient of the weight to its place, if it has one and windows are cells.
    fn backward_to(
        &self,
        saved: Self::Saved,
        grad: CubeTensor,
        wanted: [bool; 2],
        places: [Option<GradientPlace>; 2],
    ) -> [Option<CubeTensor>; 2] {
        match &places[1] {
            Some(place) if self.is_linear => {
                add_weight_gradient(&matrix(&grad), &matrix(&saved[0]), Some(place), None);
                self.backward(saved, grad, [wanted[0], false])
            }
            _ => self.backward(saved, grad, wanted),
        }
    }
}

impl Conv {
    /// Returns the weight of `[O, C', kh, kw]` as a factor of the product, `[G, O', T·C']`, or
    /// `[O, C]` if windows are cells.
    fn packed(&self, weight: CubeTensor) -> CubeTensor {
        let shape = weight.meta.shape();
        let o = shape[0];
        let c = shape[1];
        if self.is_linear {
            return CubeBackend::float_reshape(weight, [o, c].into());
        }
        let n_taps = self.windows.n_taps();
        let taps = CubeBackend::float_reshape(weight, [o, c, n_taps].into());
        let taps = into_contiguous(CubeBackend::float_swap_dims(taps, 1, 2));
        CubeBackend::float_reshape(taps, [self.n_groups, o / self.n_groups, n_taps * c].into())
    }

    /// Returns the gradient of the input.
    fn input_gradient(&self, x: &CubeTensor, weight: &CubeTensor, grad: &CubeTensor) -> CubeTensor {
        if self.is_linear {
            let gx = product(matrix(grad), weight.clone());
            return CubeBackend::float_reshape(gx, x.shape());
        }
        let mut parts = Vec::new();
        for grad in self.chunks(grad, self.images_per_chunk(weight)) {
            let n_images = grad.meta.shape()[0];
            let windows = product_in(self.split_groups(&grad), weight.clone(), DType::F32);
            parts.push(self.fold(windows, n_images, x));
        }
        concatenate(parts)
    }

    /// Returns the gradient of the weight, `[O, C', kh, kw]` in f32.
    fn weight_gradient(&self, x: &CubeTensor, weight: &CubeTensor, grad: &CubeTensor) -> CubeTensor {
        let (kh, kw) = self.windows.kernel;
        if self.is_linear {
            let o = weight.meta.shape()[0];
            let c = weight.meta.shape()[1];
            let gw = product_in(transposed(matrix(grad)), matrix(x), DType::F32);
            return CubeBackend::float_reshape(gw, [o, c, kh, kw].into());
        }
        let n_groups = weight.meta.shape()[0];
        let o = weight.meta.shape()[1];
        let columns = weight.meta.shape()[2];
        let chunk_len = self.images_per_chunk(weight);
        let mut sum = None;
        for (x, grad) in self.chunks(x, chunk_len).into_iter().zip(self.chunks(grad, chunk_len)) {
            let part = product_in(transposed(self.split_groups(&grad)), self.unfold(&x), DType::F32);
            sum = Some(match sum {
                Some(sum) => CubeBackend::float_add(sum, part),
                None => part,
            });
        }
        // A batch has at least one image.
        let gw = sum.expect("images to convolve");
        let c = columns / self.windows.n_taps();
        let gw = CubeBackend::float_reshape(gw, [n_groups * o, kh * kw, c].into());
        let gw = into_contiguous(CubeBackend::float_swap_dims(gw, 1, 2));
        CubeBackend::float_reshape(gw, [n_groups * o, c, kh, kw].into())
    }

    /// Returns the number of images whose windows are copied at a time: at least one, and otherwise
    /// as many as fit into [`MOST_BYTES`] in f32. `weight` is `[G, O', T·C']`.
    fn images_per_chunk(&self, weight: &CubeTensor) -> usize {
        let bytes_per_image =
            self.windows.n_windows() * self.n_groups * weight.meta.shape()[2] * size_of::<f32>();
        self.chunk_len.unwrap_or(MOST_BYTES / bytes_per_image.max(1)).max(1)
    }

    /// Divides images of `[B, .., C]`, or their gradient, into chunks of `chunk_len` images.
    fn chunks(&self, images: &CubeTensor, chunk_len: usize) -> Vec<CubeTensor> {
        let shape: Vec<usize> = images.meta.shape().iter().copied().collect();
        let n_images = shape[0];
        if chunk_len >= n_images {
            return vec![images.clone()];
        }
        let mut chunks = Vec::with_capacity(n_images.div_ceil(chunk_len));
        for start in (0..n_images).step_by(chunk_len) {
            let end = (start + chunk_len).min(n_images);
            let ranges = [(start..end).into(), (0..shape[1]).into(), (0..shape[2]).into()];
            chunks.push(CubeBackend::float_slice(images.clone(), &ranges));
        }
        chunks
    }

    /// Returns the windows, `[G, B·H'·W', T·C']`, of `images` of `[B, H·W, C]`.
    fn unfold(&self, images: &CubeTensor) -> CubeTensor {
        let n_images = images.meta.shape()[0];
        let c = images.meta.shape()[2];
        let group_channels = c / self.n_groups;
        let n_rows = n_images * self.windows.n_windows();
        let columns = self.windows.n_taps() * group_channels;
        let x = Rows::new(images);
        let out = Rows::new(&empty(images, [self.n_groups, n_rows, columns], images.dtype));
        let n = channel_vector_size(&[&x, &out], group_channels);
        let client = &images.client;
        let n_units = self.n_groups * n_rows * columns / n;
        let (count, dim) = one_unit_each(client, n_units);
        copy_windows::launch(
            client,
            count,
            dim,
            n,
            x.arg(),
            out.arg(),
            x.stride / n,
            n_rows,
            n_units,
            group_channels / n,
            self.windows,
            elem(images),
        );
        out.tensor
    }

    /// Returns the gradient of `n_images` images, in the type of `like`, given the gradient of
    /// their windows, `[G, B·H'·W', T·C']`.
    fn fold(&self, windows: CubeTensor, n_images: usize, like: &CubeTensor) -> CubeTensor {
        let c = like.meta.shape()[2];
        let group_channels = c / self.n_groups;
        let windows = Rows::new(&windows);
        let gx = Rows::new(&empty(like, [n_images, self.windows.n_cells(), c], like.dtype));
        let n = channel_vector_size(&[&windows, &gx], group_channels);
        let client = &like.client;
        let n_units = gx.n_rows * c / n;
        let (count, dim) = one_unit_each(client, n_units);
        collect_windows::launch(
            client,
            count,
            dim,
            n,
            windows.arg(),
            gx.arg(),
            windows.stride / n,
            gx.stride / n,
            n_images * self.windows.n_windows(),
            n_units,
            c / n,
            group_channels / n,
            self.windows,
            elem(&windows.tensor),
            elem(like),
        );
        gx.tensor
    }

    /// Returns the output's gradient, `[B, H'·W', O]`, as `[G, B·H'·W', O']`.
    fn split_groups(&self, grad: &CubeTensor) -> CubeTensor {
        let rows = matrix(grad);
        let n_rows = rows.meta.shape()[0];
        let o = rows.meta.shape()[1];
        if self.n_groups == 1 {
            return CubeBackend::float_reshape(rows, [1, n_rows, o].into());
        }
        let groups = CubeBackend::float_reshape(rows, [n_rows, self.n_groups, o / self.n_groups].into());
        into_contiguous(CubeBackend::float_swap_dims(groups, 0, 1))
    }
}

/// Returns the products of all groups, `[G, rows, O']`, as `[rows, O]`.
fn merge_groups(y: CubeTensor, n_rows: usize, o: usize) -> CubeTensor {
    let n_groups = y.meta.shape()[0];
    let y = if n_groups == 1 { y } else { into_contiguous(CubeBackend::float_swap_dims(y, 0, 1)) };
    CubeBackend::float_reshape(y, [n_rows, o].into())
}

/// Concatenates the parts of a batch.
fn concatenate(mut parts: Vec<CubeTensor>) -> CubeTensor {
    if parts.len() == 1 { parts.remove(0) } else { CubeBackend::float_cat(parts, 0) }
}

/// Returns rows of the last dimension as a contiguous matrix, `[rows, D]`.
fn matrix(tensor: &CubeTensor) -> CubeTensor {
    let tensor = into_contiguous(tensor.clone());
    let d = tensor.meta.shape()[tensor.meta.num_dims() - 1];
    let n_rows = tensor.meta.shape().num_elements() / d.max(1);
    CubeBackend::float_reshape(tensor, [n_rows, d].into())
}

/// Returns the number of elements that a unit reads at once, within the channels of a single tap
/// and group.
fn channel_vector_size(rows: &[&Rows], n_channels: usize) -> usize {
    let mut n = vector_size(rows);
    while !n_channels.is_multiple_of(n) {
        n /= 2;
    }
    n
}

/// Copies one vector of a window in each unit.
#[cube(launch)]
fn copy_windows<F: Float, N: Size>(
    x: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    x_stride: usize,
    n_rows: usize,
    n_units: usize,
    #[comptime] n_channels: usize,
    #[comptime] windows: Windows,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n_units {
        let n_taps = comptime!(windows.kernel.0 * windows.kernel.1);
        let n_windows = comptime!(windows.output.0 * windows.output.1);
        let channel = ABSOLUTE_POS % n_channels;
        let tap = (ABSOLUTE_POS / n_channels) % n_taps;
        let row = (ABSOLUTE_POS / comptime!(n_channels * windows.kernel.0 * windows.kernel.1)) % n_rows;
        let group = ABSOLUTE_POS / comptime!(n_channels * windows.kernel.0 * windows.kernel.1) / n_rows;
        let image = row / n_windows;
        let window = row % n_windows;
        // Positions in the padded input, which are not negative.
        let y = (window / windows.output.1) * windows.stride + tap / windows.kernel.1;
        let z = (window % windows.output.1) * windows.stride + tap % windows.kernel.1;
        let is_inside = y >= windows.padding
            && y < comptime!(windows.padding + windows.input.0)
            && z >= windows.padding
            && z < comptime!(windows.padding + windows.input.1);
        if is_inside {
            let cell =
                (image * windows.input.0 + y - windows.padding) * windows.input.1 + z - windows.padding;
            out[ABSOLUTE_POS] = x[cell * x_stride + group * n_channels + channel];
        } else {
            out[ABSOLUTE_POS] = Vector::new(F::from_int(0));
        }
    }
}

/// Sums one vector of the input's gradient in each unit, over the taps that read it.
#[cube(launch)]
fn collect_windows<W: Float, F: Float, N: Size>(
    gradients: &[Vector<W, N>],
    gx: &mut [Vector<F, N>],
    row_stride: usize,
    gx_stride: usize,
    n_rows: usize,
    n_units: usize,
    n_vectors: usize,
    #[comptime] n_channels: usize,
    #[comptime] windows: Windows,
    #[define(W)] _gradients: ElemType,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < n_units {
        let n_cells = comptime!(windows.input.0 * windows.input.1);
        let row = ABSOLUTE_POS / n_vectors;
        let vector = ABSOLUTE_POS % n_vectors;
        let group = vector / n_channels;
        let channel = vector % n_channels;
        let image = row / n_cells;
        let cell = row % n_cells;
        let y = cell / windows.input.1 + windows.padding;
        let z = cell % windows.input.1 + windows.padding;
        let mut total = Vector::<f32, N>::new(0.0f32);
        for tap in 0..comptime!(windows.kernel.0 * windows.kernel.1) {
            let tap_y = tap / windows.kernel.1;
            let tap_z = tap % windows.kernel.1;
            if y >= tap_y && z >= tap_z {
                let window_y = y - tap_y;
                let window_z = z - tap_z;
                let i = window_y / windows.stride;
                let j = window_z / windows.stride;
                let is_window = window_y % windows.stride == 0
                    && window_z % windows.stride == 0
                    && i < windows.output.0
                    && j < windows.output.1;
                if is_window {
                    let window = (image * windows.output.0 + i) * windows.output.1 + j;
                    let index = (group * n_rows + window) * row_stride + tap * n_channels + channel;
                    total += Vector::cast_from(gradients[index]);
                }
            }
        }
        gx[row * gx_stride + vector] = Vector::cast_from(total);
    }
}
