//! Reading of shards, from a disk, a server or an object store, into samples in a defined order.
//!
//! A data set is a list of WebDataset tar files ([`url`]), which [`storage`] opens, local or
//! remote. Each has an index of its members ([`shard::index`]), read from a
//! [sidecar](shard::sidecar) or built by walking the tar headers once ([`shard::tar`]). A tar on a
//! local disk is read in place; others are fetched as a whole ([`remote`]), one window ahead, into
//! a bounded folder that threads and processes share.
//!
//! [`read::order`] defines which sample is at which position of an endless stream, [`read::share`]
//! which positions a rank reads, and [`read::loader`] reads them on threads, bounded by bytes. A
//! sample that cannot be used is recorded in the ledger ([`read::quarantine`]) and replaced by the
//! next one of the permutation. [`shard::write`] is the inverse: it writes samples into shards with
//! sidecars.
//!
//! The crate does not depend on pixels, tensors or training.

mod address;
mod braces;
pub(crate) mod error;
pub mod file;
mod hash;
pub mod identity;
pub mod magic;
mod progress;
pub mod read;
pub mod remote;
pub mod secrets;
pub mod shard;
mod source;
pub mod source_name;
pub(crate) mod storage;
pub mod url;
pub mod words;

pub use error::PipelineError;
pub use progress::{NoProgress, Progress};
pub use read::cursor::Cursor;
pub use read::dataset::{Dataset, Sample, SampleId};
pub use read::loader::{Item, Loader, LoaderConfig};
pub use read::order::Order;
pub use read::quarantine::Quarantine;
pub use read::sampling::{MixedSource, Sampling};
pub use read::share::Share;
pub use remote::RetryPolicy;
pub use shard::Shard;
pub use source::Source;
pub use storage::{ColumnNames, Storage, StorageConfig};
