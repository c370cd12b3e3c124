//! SwAV: every view predicts the prototypes to which another view of its image is assigned (Caron
//! et al. 2020); with a head without batch normalization it is SEER's objective (Goyal et al.
//! 2021).
//!
//! ```text
//! z_v = head(student(x_v))      s_v = ẑ_v · Cᵀ      ẑ = z / |z|, prototypes C of length one
//! Q_a = sinkhorn(s_a / ε)       for a view a of the first size, over the whole batch and the queue, each a by itself
//! loss = mean over a, v≠a of H(Q_a, softmax(s_v / τ))
//! ```
//!
//! There is no teacher. The queue holds ẑ of earlier batches by view, so that small batches are
//! assigned among more images; it is used once it is full.

mod config;
mod loss;
mod method;

pub(super) use config::Config;
