//! Data sets of images in the forms in which users have them: folders, lists, shards, and columns
//! about them.
//!
//! Skipped files and assumptions are reported as events of `tracing`, at the levels `warn` and
//! `info`.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod bands;
pub mod bits;
mod channel_sums;
pub mod classes;
pub mod column;
pub mod dedup;
mod encode;
mod error;
pub mod extract;
pub mod files;
pub mod filter;
mod fingerprint;
pub mod folder_lock;
mod host_queue;
mod image_file;
pub mod index;
mod job;
pub mod keys;
mod lazy_shard;
mod list;
pub mod names;
pub mod open;
mod order;
pub mod pack;
mod pack_job;
pub mod parts;
pub mod regroup;
pub mod resize;
pub mod rewrite;
pub mod samples;
pub mod stats;
pub mod synth;
pub mod unusable;
pub mod urls;
pub mod verify;

pub use error::PrepError;
