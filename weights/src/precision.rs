//! Precision of stored weights.

use std::str::FromStr;

use half::{bf16, f16};

use crate::named::by_name;

/// Type of the numbers in a file. Readers may compute in any other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// 32 bits, as in training.
    #[default]
    F32,
    /// 16 bits, 11 of them significant.
    F16,
    /// 16 bits, 8 of them significant.
    Bf16,
    /// 8 bits and one scale for each output channel; vectors stay in 32 bits.
    Int8,
}

impl Precision {
    /// All precisions.
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::Int8];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }
}

impl FromStr for Precision {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name(&Self::ALL, Self::name, text)
    }
}

/// Rounds `values` of a parameter of `shape` to the numbers that a file of `precision` stores.
pub fn rounded(values: &[f32], shape: &[usize], precision: Precision) -> Vec<f32> {
    match precision {
        Precision::F32 => values.to_vec(),
        Precision::F16 => values.iter().map(|value| f16::from_f32(*value).to_f32()).collect(),
        Precision::Bf16 => values.iter().map(|value| bf16::from_f32(*value).to_f32()).collect(),
        Precision::Int8 if is_quantized(shape) => {
            let (codes, scales) = quantize(values, shape[0]);
            let row_len = (values.len() / shape[0].max(1)).max(1);
            codes.iter().enumerate().map(|(i, code)| f32::from(*code) * scales[i / row_len]).collect()
        }
        Precision::Int8 => values.to_vec(),
    }
}

/// Returns `true` if [`Precision::Int8`] stores a parameter of `shape` in 8 bits, as it does for
/// matrices and kernels but not for tokens.
pub(crate) fn is_quantized(shape: &[usize]) -> bool {
    matches!(shape.len(), 2 | 4)
}

/// Quantizes `values`, `[out, …]` in row-major order, to codes in -127..=127 and a scale for each
/// of `n_out` rows. The largest magnitude of a row gets the code 127 or -127; zero stays zero.
pub(crate) fn quantize(values: &[f32], n_out: usize) -> (Vec<i8>, Vec<f32>) {
    let row_len = (values.len() / n_out.max(1)).max(1);
    let mut codes = Vec::with_capacity(values.len());
    let mut scales = Vec::with_capacity(n_out);
    for row in values.chunks_exact(row_len) {
        let largest = row.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        let scale = if largest > 0.0 { largest / 127.0 } else { 1.0 };
        codes.extend(row.iter().map(|value| (value / scale).round_ties_even().clamp(-127.0, 127.0) as i8));
        scales.push(scale);
    }
    (codes, scales)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn int8_rounding_error_is_at_most_half_a_step() {
        let values: Vec<f32> = (0..64).map(|i| ((i * 37 % 64) as f32 - 20.0) * 0.013).collect();
        let decoded = rounded(&values, &[4, 16], Precision::Int8);
        for (row, decoded_row) in values.chunks(16).zip(decoded.chunks(16)) {
            let step = row.iter().fold(0.0f32, |a, b| a.max(b.abs())) / 127.0;
            assert!(row.iter().zip(decoded_row).all(|(a, b)| (a - b).abs() <= step * 0.5001));
        }
        assert_ne!(values, decoded);
        assert_eq!(rounded(&values, &[64], Precision::Int8), values, "vectors stay as they are");
    }

    #[test]
    fn a_row_of_zeros_stays_zero() {
        assert_eq!(rounded(&[0.0; 8], &[2, 4], Precision::Int8), [0.0; 8]);
    }

    #[test]
    fn f16_and_bf16_round_to_their_significant_bits() {
        let values = [1.0, 1.0 + 2f32.powi(-8), 1.0 + 2f32.powi(-10)];
        assert_eq!(rounded(&values, &[3], Precision::Bf16), [1.0, 1.0, 1.0]);
        assert_eq!(rounded(&values, &[3], Precision::F16), values);
    }
}
