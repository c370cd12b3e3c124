//! Data sets of images as people have them: folders, lists, shards, and columns about them.
//!
//! What is skipped or assumed on the way is said as events of `tracing`, at the levels of a warning
//! and of a note.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod column;
mod error;
pub mod files;
pub mod keys;
pub mod list;
pub mod open;
pub mod order;

pub use error::PrepError;
