//! Files of named tensors.

pub(crate) mod pytorch;
pub(crate) mod safetensors;

use std::collections::BTreeMap;

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Array {
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Elements in row-major order.
    pub values: Vec<f32>,
}

/// The tensors of a file, by name.
pub(crate) type Arrays = BTreeMap<String, Array>;

/// Type of the numbers in a file.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Element {
    F64,
    F32,
    F16,
    Bf16,
}

impl Element {
    /// Converts little-endian `bytes` to f32.
    pub(crate) fn values(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::F64 => bytes
                .chunks_exact(8)
                .map(|b| f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]) as f32)
                .collect(),
            Self::F32 => {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            Self::F16 => {
                bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
            Self::Bf16 => {
                bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
        }
    }
}
