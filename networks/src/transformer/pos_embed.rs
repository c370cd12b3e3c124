//! Position embeddings, and their resampling to another grid.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::interpolation::{Resampling, matrix};

/// A kind of position embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Positions {
    /// A trained table.
    #[default]
    Learned,
    /// Fixed sines and cosines of rows and columns: MoCo v3.
    SinCos,
    /// Rotation of queries and keys by rows and columns: DINOv3.
    Rope,
}

/// Resamples the rows of patches in `embedding` of `[n_before + from², width]` from one square grid
/// to another, of side `to`; the first `n_before` rows are copied.
pub(crate) fn resample(
    embedding: &[f32],
    width: usize,
    n_before: usize,
    from: usize,
    to: usize,
    resampling: Resampling,
) -> Vec<f32> {
    let (before, patches) = embedding.split_at(n_before * width);
    let weights = matrix(from, [to; 2], resampling);
    let mut out = before.to_vec();
    for row in weights.chunks_exact(from * from) {
        let start = out.len();
        out.resize(start + width, 0.0);
        for (weight, patch) in row.iter().zip(patches.chunks_exact(width)) {
            for (sum, value) in out[start..].iter_mut().zip(patch) {
                *sum += weight * value;
            }
        }
    }
    out
}
