//! Time of a step on GPUs that people have, by their data sheets and one efficiency.
//!
//! ```text
//! t = (F / peak + B / bandwidth) / η      F: operations of matrix products; B: bytes of activations that are moved
//! B = b · n · Σ (6 g_trained + 2 g_other + 2 g_recomputed)      g: elements of a unit's graph, n: images of a rank,
//!                                                               b: bytes of an element
//! ```
//!
//! A forward pass writes and reads each activation once; a backward pass reads it again, and writes
//! and reads its gradient twice. η covers everything else: kernels below their peak, norms, the
//! optimizer, data, and communication that is not hidden. It is the one number that makes published
//! runs come out within a factor of 1.5 (tests of `ocelli plan`).

use super::Placement;
use super::placed::PlacedModel;
use crate::cost::ModelCost;

/// Share of the roofline that published runs reach.
pub const EFFICIENCY: f64 = 0.45;

/// Bytes of an activation: all published runs compute in 16 bits.
const ACTIVATION_BYTES: f64 = 2.0;

/// A GPU by its data sheet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gpu {
    /// Name on the command line.
    pub name: &'static str,
    /// Peak rate of matrix products in 16 bits, without sparsity, in TFLOP/s; of the V100 without
    /// its tensor cores, which take sizes that are multiples of 8: neither views of 197 tokens nor
    /// the widths of SEER are.
    pub tflops: f64,
    /// Memory, in GB.
    pub memory_gb: f64,
    /// Bandwidth of the memory, in GB/s.
    pub memory_gb_s: f64,
    /// Bandwidth to another GPU of the same node, in one direction, in GB/s.
    pub link_gb_s: f64,
}

/// GPUs by name.
pub const GPUS: [Gpu; 6] = [
    Gpu { name: "v100", tflops: 31.4, memory_gb: 32.0, memory_gb_s: 900.0, link_gb_s: 150.0 },
    Gpu { name: "a100-40", tflops: 312.0, memory_gb: 40.0, memory_gb_s: 1555.0, link_gb_s: 300.0 },
    Gpu { name: "a100-80", tflops: 312.0, memory_gb: 80.0, memory_gb_s: 2039.0, link_gb_s: 300.0 },
    Gpu { name: "h100", tflops: 989.0, memory_gb: 80.0, memory_gb_s: 3350.0, link_gb_s: 450.0 },
    Gpu { name: "h200", tflops: 989.0, memory_gb: 141.0, memory_gb_s: 4800.0, link_gb_s: 450.0 },
    Gpu { name: "4090", tflops: 165.0, memory_gb: 24.0, memory_gb_s: 1008.0, link_gb_s: 32.0 },
];

impl Gpu {
    /// Returns the GPU called `name`.
    pub fn named(name: &str) -> Option<Self> {
        GPUS.into_iter().find(|gpu| gpu.name == name)
    }

    /// Estimates the seconds that a rank computes in a step.
    pub fn compute_s(&self, model: &ModelCost, placement: &Placement) -> f64 {
        let placed = PlacedModel { model, placement };
        let work = placed.work(&placed.events());
        let products_s = placed.n_images() * work.flops / (self.tflops * 1e12);
        let moved_bytes = ACTIVATION_BYTES * placed.n_images() * work.moved_elements;
        (products_s + moved_bytes / (self.memory_gb_s * 1e9)) / EFFICIENCY
    }
}
