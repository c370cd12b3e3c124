//! Curation of data sets by features of their images.
//!
//! [`clusters`] groups rows of features into clusters, and clusters into clusters of a higher
//! level; [`selection`] chooses the images to keep, and how often to show each. Results depend
//! neither on the number of threads nor on that of ranks. [`io`] reads features and images, and
//! writes lists, clusters and shards: only it depends on files and images.
//!
//! Every rank can read all rows and compares its part of them; only keys, counts and sums are
//! exchanged.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod centers;
pub mod clusters;
mod draw;
mod error;
pub mod io;
mod progress;
mod rows;
pub mod selection;

pub use error::CurateError;
pub use progress::ClusterProgress;
pub use rows::{FeatureRows, Metric, Numbers, SelectedRows, part_of_rank};
