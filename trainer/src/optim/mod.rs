//! The optimizer over flat shards, and the followers, which move with it.

mod adamw;
mod clip;
#[cfg(feature = "cube")]
mod cube;
mod host;
mod runs;
pub mod state;
mod tensors;
mod update;

pub use self::adamw::AdamW;
pub use self::clip::{ClipNorms, ClipRule};
