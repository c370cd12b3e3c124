//! Element type of flat buffers on the wire: f32, or bf16 for half the bytes.

use burn_tensor::DType;
use half::bf16;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Type of an element on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Wire {
    /// Unchanged f32.
    #[default]
    F32,
    /// Rounded to the nearest bf16.
    Bf16,
}

impl Wire {
    /// Returns the bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// Returns the type of a tensor that is sent without conversion.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// Encodes `values` into `bytes` in the type of `wire`.
///
/// # Panics
/// If the lengths do not match.
pub fn encode(values: &[f32], wire: Wire, bytes: &mut [u8]) {
    assert_eq!(bytes.len(), values.len() * wire.bytes(), "bytes of every element");
    match wire {
        Wire::F32 => bytes.copy_from_slice(bytemuck::cast_slice(values)),
        Wire::Bf16 => {
            for (pair, value) in bytes.chunks_exact_mut(2).zip(values) {
                pair.copy_from_slice(&bf16::from_f32(*value).to_bits().to_ne_bytes());
            }
        }
    }
}

/// Decodes `bytes`, written by [`encode`], into `values`.
///
/// # Panics
/// If the lengths do not match.
pub fn decode(bytes: &[u8], wire: Wire, values: &mut [f32]) {
    assert_eq!(bytes.len(), values.len() * wire.bytes(), "bytes of every element");
    match wire {
        Wire::F32 => bytemuck::cast_slice_mut(values).copy_from_slice(bytes),
        Wire::Bf16 => {
            for (value, pair) in values.iter_mut().zip(bytes.chunks_exact(2)) {
                *value = bf16::from_bits(u16::from_ne_bytes([pair[0], pair[1]])).to_f32();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_keeps_eight_bits_and_f32_is_exact() {
        let values = [1.0, -0.333_333_34, 1e30, 0.0, f32::INFINITY];
        let mut bytes = vec![0; 20];
        let mut back = [0.0; 5];
        encode(&values, Wire::F32, &mut bytes);
        decode(&bytes, Wire::F32, &mut back);
        assert_eq!(back, values);
        encode(&values, Wire::Bf16, &mut bytes[..10]);
        decode(&bytes[..10], Wire::Bf16, &mut back);
        for (value, back) in values.iter().zip(back) {
            assert!(*value == back || ((value - back) / value).abs() < 1.0 / 256.0, "{value} {back}");
        }
    }
}
