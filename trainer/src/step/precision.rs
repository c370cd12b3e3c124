//! Data types of computation and of transfers.

use burn_tensor::DType;
use networks::unit::Types;
use ranks::communicator::Communicator;
use ranks::wire::Wire;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Data type in which the units of a backbone compute. Master weights, moments, sums of gradients,
/// norms, softmax and the head are f32 in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Arithmetic {
    /// f32.
    #[default]
    F32,
    /// bf16: weights and the values that they multiply are rounded; the residual stream, norms,
    /// depthwise convolutions, scores and softmax are f32.
    Bf16,
}

impl Arithmetic {
    /// Returns the data type of weights and tokens.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// Data types of computation, and of the weights and gradients that are sent. Sums are f32 in any
/// case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Precision {
    /// Data type in which the backbone computes.
    pub compute: Arithmetic,
    /// Data type in which a convolutional network with batch normalization holds its maps, between
    /// operations and between its units, and their gradients, as PyTorch does under `autocast`;
    /// bf16 needs `compute = "bf16"`. The default is f32 on a CPU, and the type of `compute` on a
    /// GPU: a run that moves from one to the other must set it. Whatever its value, with `compute =
    /// "bf16"` the graph of a transformer keeps the values that it multiplies in bf16, and gathered
    /// weights have the type of `gather`; residual streams of transformers are f32.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Arithmetic>,
    /// Type in which gathered weights of backbones are sent; those with adapters are sent in f32.
    pub gather: Wire,
    /// Type in which gradients of the backbone are sent.
    pub reduce: Wire,
    /// Type in which gathered weights of heads are sent.
    pub head_gather: Wire,
    /// Type in which gradients of heads are sent: DINOv2 found 16 bits unstable there.
    pub head_reduce: Wire,
}

impl Precision {
    /// bf16 for everything except weights and gradients of heads.
    pub const BF16: Self = Self {
        compute: Arithmetic::Bf16,
        memory: Some(Arithmetic::Bf16),
        gather: Wire::Bf16,
        reduce: Wire::Bf16,
        head_gather: Wire::F32,
        head_reduce: Wire::F32,
    };

    /// Returns the types of numbers in the backbone.
    pub fn types(self) -> Types {
        Types { products: self.compute.dtype(), maps: self.memory.unwrap_or_default().dtype() }
    }

    /// Returns the type in which gathered weights of the backbone are held.
    pub fn gathered(self) -> DType {
        match (self.compute, self.gather) {
            // Products would round them anyway, and other operations use the values that were sent.
            (Arithmetic::Bf16, Wire::Bf16) => DType::BF16,
            _ => DType::F32,
        }
    }

    /// Returns whether products or transfers of `comm` read the shards of a rank in bf16, so that
    /// the update should write them in bf16 as well.
    pub fn rounds_with_update(self, comm: &Communicator) -> bool {
        let is_whole = comm.topology().group_size == 1;
        let is_sent = self.gather == Wire::Bf16 && comm.supports_device_tensors();
        self.compute == Arithmetic::Bf16 && (is_whole || is_sent)
    }

    /// Fills in the defaults for a rank that computes on a GPU, or on a CPU.
    pub fn with_defaults(self, is_gpu: bool) -> Self {
        if is_gpu && self.memory.is_none() && self.compute == Arithmetic::Bf16 {
            return Self { memory: Some(Arithmetic::Bf16), ..self };
        }
        self
    }
}
