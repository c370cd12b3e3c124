//! Shards on disk, of a server or in a store into samples, in a defined order.
//!
//! A data set is a list of WebDataset tar files ([`url`]), which [`storage`] opens wherever they are.
//! Each has an index of its members ([`index`]), read from a [`sidecar`] or built by walking the tar
//! headers once ([`tar`]). A tar on a disk is read where it stands; others are fetched as a whole
//! ([`remote`]), a window ahead, into a bounded folder that threads and processes share.
//!
//! [`order`] says which sample stands at which position of an endless stream, [`share`] which
//! positions a rank reads, and [`loader`] reads them on threads, bounded by bytes. A sample that
//! cannot be used goes into the ledger ([`quarantine`]) and is replaced by the next one of the
//! permutation. [`write`](mod@write) is the way back: samples into shards with sidecars.
//!
//! This crate knows nothing of images, tensors or training.

mod cache;
pub mod cursor;
pub mod dataset;
pub mod error;
pub mod file;
pub mod index;
mod known;
pub mod loader;
pub mod order;
mod part;
pub mod quarantine;
mod receive;
pub mod remote;
pub mod shard;
pub mod share;
pub mod sidecar;
pub mod stats;
pub mod storage;
pub mod store;
pub mod tar;
pub mod url;
mod verify;
mod wids;
pub mod write;

pub use cursor::Cursor;
pub use dataset::{Dataset, Sample, SampleId};
pub use error::PipelineError;
pub use loader::{Item, Loader, LoaderConfig};
pub use order::Order;
pub use quarantine::Quarantine;
pub use remote::RetryPolicy;
pub use shard::Shard;
pub use share::Share;
pub use storage::{Source, Storage, StorageConfig};
