//! Clusters of rows, and clusters of clusters.

pub mod bench;
mod empty;
mod kmeans;
mod levels;
mod nearest;
mod resampling;
mod seeds;
mod split;
mod sums;
mod tree;

pub use kmeans::{Clustering, KMeans};
pub use levels::{Hierarchy, HierarchySettings, LevelSettings};
pub use resampling::Resampling;
pub use tree::Tree;

pub use crate::centers::Centers;
