//! Arrays in NumPy's format as channels: `[H, W]`, `[H, W, C]` or `[C, H, W]`.

use npyz::{DType, NpyFile, Order, TypeChar};

use super::layer::{Kind, Layer, Shape, apart, check_shape};
use crate::{AugmentError, DecodeRules};

/// First bytes of a file.
pub(super) const MAGIC: &[u8] = b"\x93NUMPY";

/// Reads an array. Of three axes, the one with the expected number of channels is that of the channels, the last one if both outer
/// ones have it; where none has it, the shorter of the outer ones.
pub(super) fn decode(bytes: &[u8], rules: &DecodeRules) -> Result<Layer, AugmentError> {
    let array = open(bytes)?;
    let (shape, channels_first) = layout(&array, rules.format.n_channels)?;
    check_shape(rules, shape)?;
    let kind = kind(&array)?;
    let n_bytes = shape.n_values().checked_mul(size_of_kind(&array)?);
    if n_bytes.is_none_or(|n_bytes| n_bytes > bytes.len()) {
        return Err(broken("it ends before its last value"));
    }
    if array.order() != Order::C {
        return Err(broken("its first axis varies fastest (Fortran order)"));
    }
    let values = values(array)?;
    let values = if channels_first { values } else { apart(&values, shape.n_channels) };
    Ok(Layer { shape, kind, values })
}

/// Returns the shape and the type of an array, from its header.
pub(super) fn header(bytes: &[u8], rules: &DecodeRules) -> Result<(Shape, Kind), AugmentError> {
    let array = open(bytes)?;
    Ok((layout(&array, rules.format.n_channels)?.0, kind(&array)?))
}

fn open(bytes: &[u8]) -> Result<NpyFile<&[u8]>, AugmentError> {
    NpyFile::new(bytes).map_err(|error| broken(&error.to_string()))
}

fn broken(reason: &str) -> AugmentError {
    AugmentError::Decode(format!("NumPy array: {reason}"))
}

/// Returns the shape, and whether channels come first.
fn layout(array: &NpyFile<&[u8]>, n_channels: usize) -> Result<(Shape, bool), AugmentError> {
    let side = |side: u64| u32::try_from(side).unwrap_or(u32::MAX);
    let of = |height: u64, width: u64, channels: u64| Shape {
        width_px: side(width),
        height_px: side(height),
        n_channels: usize::try_from(channels).unwrap_or(usize::MAX),
    };
    match *array.shape() {
        [height, width] => Ok((of(height, width, 1), true)),
        [a, b, c] => {
            let wanted = n_channels as u64;
            let is_first = c != wanted && (a == wanted || a < c);
            Ok(if is_first { (of(b, c, a), true) } else { (of(a, b, c), false) })
        }
        _ => Err(broken(&format!("its shape is {:?}, not [H, W], [H, W, C] or [C, H, W]", array.shape()))),
    }
}

fn kind(array: &NpyFile<&[u8]>) -> Result<Kind, AugmentError> {
    let DType::Plain(plain) = array.dtype() else { return Err(broken("its values are records")) };
    Ok(match (plain.type_char(), plain.size_field()) {
        (TypeChar::Uint, 1) => Kind::Eight,
        (TypeChar::Uint, 2) => Kind::Sixteen,
        (TypeChar::Uint | TypeChar::Int | TypeChar::Float, 1..=8) => Kind::Other,
        _ => return Err(broken(&format!("its values are {plain}, not numbers of up to 64 bits"))),
    })
}

/// Returns the number of bytes of a value.
fn size_of_kind(array: &NpyFile<&[u8]>) -> Result<usize, AugmentError> {
    array.dtype().num_bytes().ok_or_else(|| broken("its values have no size"))
}

/// Reads all values, in the order of the file.
fn values(array: NpyFile<&[u8]>) -> Result<Vec<f32>, AugmentError> {
    let DType::Plain(plain) = array.dtype() else { return Err(broken("its values are records")) };
    macro_rules! read {
        ($type:ty) => {
            array
                .into_vec::<$type>()
                .map(|values| values.into_iter().map(|value| value as f32).collect())
                .map_err(|error| broken(&error.to_string()))
        };
    }
    match (plain.type_char(), plain.size_field()) {
        (TypeChar::Uint, 1) => read!(u8),
        (TypeChar::Uint, 2) => read!(u16),
        (TypeChar::Uint, 4) => read!(u32),
        (TypeChar::Uint, 8) => read!(u64),
        (TypeChar::Int, 1) => read!(i8),
        (TypeChar::Int, 2) => read!(i16),
        (TypeChar::Int, 4) => read!(i32),
        (TypeChar::Int, 8) => read!(i64),
        (TypeChar::Float, 4) => read!(f32),
        (TypeChar::Float, 8) => read!(f64),
        _ => Err(broken(&format!("values of type {plain} are not supported"))),
    }
}
