//! Convolution of narrow groups of channels on the CPU. Matrix products this narrow leave most of a vector unit
//! idle; here a block of windows stays in registers during the loops over taps and channels.
//!
//! ```text
//! y[i, o]  = Σ_t,c x[i, t, c] · W[t, c, o]        windows i in blocks, o in lanes
//! gx[i, t, c] += Σ_o g[i, o] · W[t, o, c]         c in lanes
//! gW[t, c, o] = Σ_i x[i, t, c] · g[i, o]          c in rows, o in lanes
//! ```
//!
//! A group's channels are copied into a plane with padding, so that windows need no bounds tests ([`plane`]). In bf16 the output and the
//! weights' gradient are sums over pairs of numbers ([`pairs`]); the rest, and everything in f32, are multiplications and additions in f32
//! that are not fused ([`singles`]).

mod pairs;
mod plane;
mod singles;

use burn_tensor::DType;

use self::plane::LANES;
use super::channels::Channels;
use super::geometry::Geometry;
use crate::ops::number::{Number, rounded, wide};

/// Returns whether this implementation is the one for groups of these sizes.
pub(super) fn suits(channels: Channels) -> bool {
    let [c, o] = channels.each();
    channels.groups > 1 && c.is_multiple_of(LANES) && o.is_multiple_of(LANES) && c.max(o) <= 32
}

/// Returns the convolution of `x` with `packed` weights of `[G, T·C, O]`, `[M, G·O]`.
pub(super) fn forward<T: Number, W: Number>(
    x: &[T],
    packed: &[W],
    channels: Channels,
    geometry: &Geometry,
) -> Vec<T> {
    match T::DTYPE {
        DType::F32 => {
            bytemuck::cast_vec(singles::forward(bytemuck::cast_slice(x), &wide(packed), channels, geometry))
        }
        _ => bytemuck::cast_vec(pairs::forward(bytemuck::cast_slice(x), packed, channels, geometry)),
    }
}

/// Returns the gradient of packed weights, `[G, T·C, O]`, given that of the output.
pub(super) fn weight_gradient<T: Number>(
    x: &[T],
    grad: &[T],
    channels: Channels,
    geometry: &Geometry,
) -> Vec<f32> {
    match T::DTYPE {
        DType::F32 => {
            singles::weight_gradient(bytemuck::cast_slice(x), bytemuck::cast_slice(grad), channels, geometry)
        }
        _ => pairs::weight_gradient(bytemuck::cast_slice(x), bytemuck::cast_slice(grad), channels, geometry),
    }
}

/// Returns the input's gradient, `[N, G·C]`, given that of the output and weights `[G, T·O, C]`. Used for strides above one; the gradient
/// of others is a convolution.
pub(super) fn input_gradient<T: Number, W: Number>(
    grad: &[T],
    weights: &[W],
    channels: Channels,
    geometry: &Geometry,
) -> Vec<T> {
    singles::input_gradient(grad, &rounded::<T>(&wide(weights)), channels, geometry)
}
