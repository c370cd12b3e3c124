//! Evaluation of trained backbones.
//!
//! [`images`] are seen through one transform, [`features`] are what a network makes of them, a [`protocol`] says what
//! these are worth, a [`measure`] what can be said without labels, [`probe`] puts them together, and [`picture`] draws.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub(crate) mod error;
pub mod features;
pub(crate) mod images;
pub(crate) mod measure;
pub mod picture;
pub mod probe;
pub(crate) mod protocol;
pub(crate) mod score;

pub use error::EvalError;
pub use features::cache::{FeatureCache, features};
pub use features::columns::{Columns, Wanted};
pub use features::extract::{Attention, Progress, Silent, attention_of, extract, pixels};
pub use features::set::FeatureSet;
pub use features::table::Table;
pub use images::ImageSet;
pub use images::check::Check;
pub use images::source::{ImageFile, Source};
pub use images::transform::Transform;
pub use measure::{Effort, Measures, label_free};
pub use probe::Split;
pub use protocol::knn::neighbors;
pub use protocol::task::{Scored, Sets, Task};
pub use protocol::views::Views;
pub use protocol::{Needs, Protocol};
pub use score::Classified;
pub use score::outcome::Outcome;
pub use score::ranked::Ranked;
pub use score::segmented::Segmented;
