//! Shards on disk into samples, in a defined order.
//!
//! A data set is a list of WebDataset tar files ([`url`]). Each has an index of its members
//! ([`index`]), read from a sidecar or built by walking the tar headers once ([`tar`]).
//! [`order`] says which sample stands at which position of an endless stream, [`share`] which
//! positions a rank reads, and [`loader`] reads them on threads, bounded by bytes. A sample that
//! cannot be used goes into the ledger ([`quarantine`]) and is replaced by the next one of the
//! permutation. [`write`](mod@write) is the way back: samples into shards with sidecars.
//!
//! This crate knows nothing of images, tensors or training.

pub mod cursor;
pub mod dataset;
pub mod error;
pub mod file;
pub mod index;
pub mod loader;
pub mod order;
pub mod quarantine;
pub mod shard;
pub mod share;
pub mod stats;
pub mod store;
pub mod tar;
pub mod url;
pub mod wids;
pub mod write;

pub use cursor::Cursor;
pub use dataset::{Dataset, Sample, SampleId};
pub use error::PipelineError;
pub use loader::{Item, Loader, LoaderConfig};
pub use order::Order;
pub use quarantine::Quarantine;
pub use shard::Shard;
pub use share::Share;
