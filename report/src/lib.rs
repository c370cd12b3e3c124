//! Runs as their work directories show them.
//!
//! A [`Run`] is what the files of a work directory say, a [`Gallery`] what its network makes of a few images, and
//! [`html`] puts several of them side by side on one page. Nothing is written into a run, and a run that goes on never
//! notices.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub(crate) mod error;
pub(crate) mod gallery;
pub(crate) mod page;
pub(crate) mod run;

pub use error::ReportError;
pub use gallery::{Gallery, GalleryRules};
pub use page::{Report, html};
pub use run::Run;
pub use run::overview::Overview;
pub use run::row::{About, EvaluationRow, Number, SetOfImages};
pub use run::scores::{EVALUATIONS, ScoreAt, named_scores, score_name, scores_at};
pub use run::start::Start;
