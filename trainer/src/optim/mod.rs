//! The optimizer over flat shards, and the followers, which move with it.

mod adamw;
mod clip;
#[cfg(feature = "cube")]
mod cube;
mod host;
mod runs;
pub(crate) mod state;
mod tensors;
mod update;

pub(crate) use self::adamw::AdamW;
pub(crate) use self::clip::{ClipNorms, ClipRule};
