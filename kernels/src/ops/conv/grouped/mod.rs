//! Convolution of narrow groups of channels on the CPU. Matrix products this narrow leave most of a
//! vector unit idle; here a block of windows stays in registers during the loops over taps and
//! channels.
//!
//! ```text
//! y[i, o]     = Σ_t,c x[i, t, c] · W[t, c, o]     windows i in blocks, o in lanes
//! gW[t, c, o] = Σ_i x[i, t, c] · g[i, o]          c in rows, o in lanes
//! ```
//!
//! A group's channels are copied into a plane with padding, so that windows need no bounds tests
//! ([`plane`]). In bf16 both are sums over pairs of numbers ([`pairs`]), in f32 multiplications and
//! additions that are not fused ([`singles`]).

mod pairs;
mod part;
mod plane;
mod singles;

pub(super) use part::Part;

use burn_tensor::DType;
use half::bf16;

use self::plane::LANES;
use super::channels::Channels;
use super::geometry::Geometry;
use crate::ops::number::Number;

/// Returns true if this implementation computes groups of these sizes.
pub(super) fn supports(channels: Channels) -> bool {
    let [c, o] = channels.per_group();
    channels.groups > 1 && c.is_multiple_of(LANES) && o.is_multiple_of(LANES) && c.max(o) <= 32
}

/// Convolves `x` with the weights of all `parts`, each of which computes the results at some of
/// `n_cells` cells; returns `[N, G·O]`, with zeros at cells of no part.
pub(super) fn convolve<T: Number, W: Number>(
    x: &[T],
    parts: &[Part<'_, W>],
    channels: Channels,
    n_cells: usize,
) -> Vec<T> {
    match T::DTYPE {
        DType::F32 => {
            let mut y = vec![0.0; n_cells * channels.output];
            singles::convolve(bytemuck::cast_slice(x), parts, channels, &mut y);
            bytemuck::cast_vec(y)
        }
        _ => {
            let mut y = vec![bf16::ZERO; n_cells * channels.output];
            pairs::convolve(bytemuck::cast_slice(x), parts, channels, &mut y);
            bytemuck::cast_vec(y)
        }
    }
}

/// Returns the gradient of packed weights, `[G, T·C, O]`, given the gradient of the output.
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
