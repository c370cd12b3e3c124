//! Units of transformers, for backbones and for heads that are networks of their own.

pub(crate) mod block;
pub(crate) mod embed;
pub(crate) mod initial_weights;
pub(crate) mod norm;
pub(crate) mod pos_embed;
pub(crate) mod position_table;
pub(crate) mod rope;
