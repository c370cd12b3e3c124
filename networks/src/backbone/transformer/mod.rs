//! Units of transformers.

pub(super) mod block;
pub(super) mod embed;
pub(super) mod initial_weights;
pub(super) mod norm;
pub(super) mod pos_embed;
pub(super) mod rope;
