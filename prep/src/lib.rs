//! Data sets of images in the forms in which users have them: folders, lists, shards, and columns
//! about them.
//!
//! Skipped files and assumptions are reported as events of `tracing`, at the levels `warn` and
//! `info`.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod column;
mod error;
pub mod files;
pub mod keys;
pub mod list;
pub mod open;
pub mod order;

pub use error::PrepError;
