//! Data sets of images in the forms in which users have them: folders, lists, shards, and columns
//! about them.
//!
//! Skipped files and assumptions are reported as events of `tracing`, at the levels `warn` and
//! `info`.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod bands;
pub mod bits;
pub mod classes;
pub mod column;
pub mod encode;
mod error;
pub mod files;
pub mod folder_lock;
pub mod host_queue;
mod image_file;
pub mod keys;
pub mod list;
pub mod names;
pub mod open;
pub mod order;
pub mod pack;
mod pack_job;
pub mod parts;
pub mod rewrite;
pub mod samples;
pub mod synth;

pub use error::PrepError;
