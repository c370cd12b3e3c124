//! Data types of computation and of transfers.

use burn_tensor::DType;
use ranks::wire::Wire;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Data type in which the units of a backbone compute. Master weights, moments, sums of gradients, norms, softmax and the
/// head are f32 in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Arithmetic {
    /// f32.
    #[default]
    F32,
    /// bf16: weights and the values that they multiply are rounded; the residual stream, norms, depthwise convolutions, scores and
    /// softmax are f32.
    Bf16,
}

impl Arithmetic {
    /// Data type of weights and tokens.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// Data types of computation, and of the weights and gradients that are sent. Sums are f32 in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Precision {
    /// Data type in which the backbone computes.
    pub compute: Arithmetic,
    /// Type in which gathered weights of backbones are sent.
    pub gather: Wire,
    /// Type in which gradients of the backbone are sent.
    pub reduce: Wire,
    /// Type in which gathered weights of heads are sent.
    pub head_gather: Wire,
    /// Type in which gradients of heads are sent: DINOv2 found 16 bits unstable there.
    pub head_reduce: Wire,
}
