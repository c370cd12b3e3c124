//! Arrays in NumPy's format as channels: `[H, W]`, `[H, W, C]` or `[C, H, W]`.

use npyz::{DType, NpyFile, Order, TypeChar};

use super::layer::{Header, Kind, Layer, Shape, apart};
use crate::AugmentError;

/// First bytes of a file.
pub(super) const MAGIC: &[u8] = b"\x93NUMPY";

/// Largest length of a header, in bytes.
const MAX_HEADER_BYTES: usize = 4096;

/// Largest length of an axis, so that no product of three overflows.
const MAX_AXIS: u64 = 1 << 20;

/// Reads an array. Of three axes, the one of `n_channels` is that of the channels, the last one if
/// both outer ones have so many; where none has it, the shorter of the outer ones.
pub(super) fn decode(bytes: &[u8], n_channels: usize) -> Result<Layer, AugmentError> {
    let array = open(bytes)?;
    let (shape, channels_first) = layout(&array, n_channels)?;
    let n_bytes = shape.n_values().checked_mul(size_of_kind(&array)?);
    if n_bytes.is_none_or(|n_bytes| n_bytes > bytes.len()) {
        return Err(broken("it ends before its last value"));
    }
    let values = values(array)?;
    let values = if channels_first { values } else { apart(&values, shape.n_channels) };
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
    check_text(bytes)?;
    NpyFile::new(bytes).map_err(|error| broken(&error.to_string()))
}

/// Checks that the header is one table with one shape of up to three axes. The library's parser
/// takes exponential time for nested lists, memory for any stated length, and overflows in the
/// product of the axes.
fn check_text(bytes: &[u8]) -> Result<(), AugmentError> {
    let odd = || broken("its header is not one that NumPy writes for an array of numbers");
    let start = if bytes.get(6) == Some(&1) { 10 } else { 12 };
    let len =
        bytes.get(8..start).ok_or_else(odd)?.iter().rev().fold(0, |len, byte| len << 8 | usize::from(*byte));
    if len > MAX_HEADER_BYTES {
        return Err(odd());
    }
    let text =
        bytes.get(start..start + len).and_then(|text| std::str::from_utf8(text).ok()).ok_or_else(odd)?;
    let count = |bracket: char| text.matches(bracket).count();
    let shape = text.split_once('(').and_then(|(_, rest)| rest.split_once(')')).ok_or_else(odd)?.0;
    let axes: Vec<&str> = shape.split(',').map(str::trim).filter(|axis| !axis.is_empty()).collect();
    if count('{') == 1
        && count('(') == 1
        && count('[') == 0
        && axes.len() <= 3
        && axes.iter().all(|axis| axis.parse::<u64>().is_ok_and(|axis| axis <= MAX_AXIS))
    {
        Ok(())
    } else {
        Err(odd())
    }
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
