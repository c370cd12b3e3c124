//! Arrays in NumPy's format as channels: `[H, W]`, `[H, W, C]` or `[C, H, W]`.

use npyz::{DType, NpyFile, Order, TypeChar};

use super::layer::{Header, Kind, Layer, Shape, to_channels_first};
use crate::AugmentError;

/// First bytes of a file.
pub(super) const MAGIC: &[u8] = b"\x93NUMPY";

/// Largest length of a header, in bytes.
const MAX_HEADER_BYTES: usize = 4096;

/// Largest length of an axis, so that no product of three overflows.
const MAX_AXIS: u64 = 1 << 20;

/// Reads an array. Of three axes, the first or the last one is the axis of the channels: the one of
/// length `n_channels`, the last one if both have this length, or the shorter one if none has it.
pub(super) fn decode(bytes: &[u8], n_channels: usize) -> Result<Layer, AugmentError> {
    let array = open(bytes)?;
    let (shape, channels_first) = layout(&array, n_channels)?;
    let n_bytes = shape.n_values().checked_mul(size_of_kind(&array)?);
    if n_bytes.is_none_or(|n_bytes| n_bytes > bytes.len()) {
        return Err(broken("it ends before its last value"));
    }
    let values = values(array)?;
    let values = if channels_first { values } else { to_channels_first(&values, shape.n_channels) };
    Ok(Layer { shape, values })
}

/// Returns the shape and the type of an array, from its header.
pub(super) fn header(bytes: &[u8], n_channels: usize) -> Result<Header, AugmentError> {
    let array = open(bytes)?;
    let kind = kind(&array)?;
    if array.order() != Order::C {
        return Err(broken("its first axis varies fastest (Fortran order)"));
    }
    Ok(Header { shape: layout(&array, n_channels)?.0, kind, n_pages: 1 })
}

fn open(bytes: &[u8]) -> Result<NpyFile<&[u8]>, AugmentError> {
    check_header(bytes)?;
    NpyFile::new(bytes).map_err(|error| broken(&error.to_string()))
}

/// Checks that the header is one dictionary with one shape of up to three axes. The library's
/// parser takes exponential time for nested lists, allocates memory for any stated length, and
/// overflows in the product of the axes.
fn check_header(bytes: &[u8]) -> Result<(), AugmentError> {
    let start = if bytes.get(6) == Some(&1) { 10 } else { 12 };
    let mut len = 0;
    for byte in bytes.get(8..start).ok_or_else(invalid_header)?.iter().rev() {
        len = len << 8 | usize::from(*byte);
    }
    if len > MAX_HEADER_BYTES {
        return Err(invalid_header());
    }
    let text = bytes.get(start..start + len).ok_or_else(invalid_header)?;
    let text = std::str::from_utf8(text).map_err(|_| invalid_header())?;
    let (_, after_bracket) = text.split_once('(').ok_or_else(invalid_header)?;
    let (shape, _) = after_bracket.split_once(')').ok_or_else(invalid_header)?;
    let mut n_axes = 0;
    for axis in shape.split(',').map(str::trim).filter(|axis| !axis.is_empty()) {
        n_axes += 1;
        if !axis.parse::<u64>().is_ok_and(|len| len <= MAX_AXIS) {
            return Err(invalid_header());
        }
    }
    let has_one_shape = text.matches('{').count() == 1 && text.matches('(').count() == 1;
    if !has_one_shape || text.contains('[') || n_axes > 3 {
        return Err(invalid_header());
    }
    Ok(())
}

/// Returns the error for a header that NumPy does not write.
fn invalid_header() -> AugmentError {
    broken("its header is not one that NumPy writes for an array of numbers")
}

fn broken(reason: &str) -> AugmentError {
    AugmentError::Decode(format!("NumPy array: {reason}"))
}

/// Returns the shape, and whether channels come first.
fn layout(array: &NpyFile<&[u8]>, n_channels: usize) -> Result<(Shape, bool), AugmentError> {
    match *array.shape() {
        [height, width] => Ok((to_shape(height, width, 1), true)),
        [a, b, c] => {
            let expected = n_channels as u64;
            let channels_first = c != expected && (a == expected || a < c);
            let shape = if channels_first { to_shape(b, c, a) } else { to_shape(a, b, c) };
            Ok((shape, channels_first))
        }
        _ => Err(broken(&format!("its shape is {:?}, not [H, W], [H, W, C] or [C, H, W]", array.shape()))),
    }
}

/// Converts the lengths of axes, limited to the largest number of each type.
fn to_shape(height: u64, width: u64, n_channels: u64) -> Shape {
    Shape {
        width_px: u32::try_from(width).unwrap_or(u32::MAX),
        height_px: u32::try_from(height).unwrap_or(u32::MAX),
        n_channels: usize::try_from(n_channels).unwrap_or(usize::MAX),
    }
}

fn kind(array: &NpyFile<&[u8]>) -> Result<Kind, AugmentError> {
    let DType::Plain(plain) = array.dtype() else { return Err(broken("its values are records")) };
    Ok(match (plain.type_char(), plain.size_field()) {
        (TypeChar::Uint, 1) => Kind::Eight,
        (TypeChar::Uint, 2) => Kind::Sixteen,
        (TypeChar::Uint | TypeChar::Int, 1..=8) | (TypeChar::Float, 4 | 8) => Kind::Other,
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
