//! Reports on runs, from the files of their work directories.
//!
//! A [`Run`] holds the contents of those files, and a [`Gallery`] holds pictures of the features
//! that its network computes from a few images. Neither writes into a work directory, so that a run
//! in progress is not disturbed. [`write_page`] puts several runs side by side on one page, and
//! [`write_network`] describes a network of any library. [`map_html`] draws the clusters of a data
//! set. [`picture`] draws charts and sheets of images into the files that its callers name.
//! [`track`] sends a run to a tracking server.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod data_url;
pub(crate) mod error;
pub(crate) mod gallery;
pub(crate) mod map;
pub(crate) mod network;
pub(crate) mod page;
pub mod picture;
pub(crate) mod run;
mod template;
pub mod track;

pub use error::ReportError;
pub use gallery::{Gallery, GalleryOptions};
pub use map::{ClusterMap, DrawnCluster, MapTile, map_html};
pub use network::{NetworkReport, network_files, write_network};
pub use page::{Report, is_page, write_page};
pub use run::Run;
pub use run::learning::Learning;
pub use run::overview::Overview;
pub use run::scores::{NamedScore, ScoreAt, named_scores, scores_at};
pub use run::seeds::{ScoreColumn, SeedRow, SeedScore, SeedTable};
pub use run::start::{Start, shell_quote};
