//! What is computed in which type of number, and what travels in which.

use burn_tensor::DType;
use ranks::wire::Wire;
use serde::{Deserialize, Serialize};

/// What the units of a backbone compute in. Master weights, moments, sums of gradients, norms, softmax and the head
/// are f32 whatever it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arithmetic {
    /// f32.
    #[default]
    F32,
    /// bf16: weights and what they are multiplied with are rounded; the residual stream, norms, scores and softmax are f32.
    Bf16,
}

impl Arithmetic {
    /// Type of weights and tokens.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// How weights and gradients travel, and what is computed with them. Sums are taken in f32 whatever travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Precision {
    /// What the backbone computes in.
    pub compute: Arithmetic,
    /// Gathered weights of the backbone, student and teacher.
    pub gather: Wire,
    /// Gradients of the backbone.
    pub reduce: Wire,
    /// Gathered weights of the head.
    pub head_gather: Wire,
    /// Gradients of the head: DINOv2 found 16 bits unstable there.
    pub head_reduce: Wire,
}
