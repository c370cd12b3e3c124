//! Weights into numbers and pictures: features, k-NN, linear probe, report.
//!
//! [`features`] is the only module that sees a network; [`knn`] and [`linear`] see rows of numbers.
//! [`probe`] puts them together, for the verb and for a run that wants to know how it is doing.

pub(crate) mod error;
pub(crate) mod features;
pub mod histogram;
pub(crate) mod knn;
pub(crate) mod linear;
pub(crate) mod picture;
pub mod probe;
pub mod report;

pub use error::EvalError;
pub use features::{FeatureSet, ImageSet};
pub use probe::{ProbeScores, Split};
