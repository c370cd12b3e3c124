//! Shards on disk, of a server or in a store into samples, in a defined order.
//!
//! A data set is a list of WebDataset tar files ([`url`]), which [`storage`] opens wherever they are.
//! Each has an index of its members ([`shard::index`]), read from a [sidecar](shard::sidecar) or built by walking the tar
//! headers once ([`shard::tar`]). A tar on a disk is read where it stands; others are fetched as a whole
//! ([`remote`]), a window ahead, into a bounded folder that threads and processes share.
//!
//! [`read::order`] says which sample stands at which position of an endless stream, [`read::share`] which
//! positions a rank reads, and [`read::loader`] reads them on threads, bounded by bytes. A sample that
//! cannot be used goes into the ledger ([`read::quarantine`]) and is replaced by the next one of the
//! permutation. [`shard::write`] is the way back: samples into shards with sidecars.
//!
//! This crate knows nothing of images, tensors or training.

mod braces;
pub(crate) mod error;
pub mod file;
mod hash;
pub mod read;
pub mod remote;
pub mod secrets;
pub mod shard;
mod source;
pub(crate) mod storage;
pub mod url;

pub use error::PipelineError;
pub use read::cursor::Cursor;
pub use read::dataset::{Dataset, Sample, SampleId};
pub use read::loader::{Item, Loader, LoaderConfig};
pub use read::order::Order;
pub use read::quarantine::Quarantine;
pub use read::share::Share;
pub use remote::RetryPolicy;
pub use shard::Shard;
pub use source::Source;
pub use storage::{Storage, StorageConfig};
