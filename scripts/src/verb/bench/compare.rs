//! Comparison of figures with the figures of an earlier run.

use std::path::PathBuf;

use serde_json::Value;
use trainer::bench::figures::{compare_figures, read_figures};

/// Flag of benchmarks that can be compared.
#[derive(clap::Args)]
pub(super) struct CompareFlag {
    /// Print the ratio of each figure to an earlier run's, from a file with the output of that run
    /// with --json.
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
}

impl CompareFlag {
    /// Reads the earlier figures, if requested. Must be called before anything is measured.
    pub(super) fn read(&self) -> anyhow::Result<Option<Value>> {
        Ok(self.compare.as_deref().map(read_figures).transpose()?)
    }
}

/// Prints how `figures` compare with `before`, the figures of an earlier run, and `figures` as a
/// line of JSON if requested.
pub(super) fn print_figures(before: Option<&Value>, figures: &Value, json: bool) {
    if let Some(before) = before {
        let changes = compare_figures(before, figures);
        for change in changes.settings {
            out!("warning: {} was {} and is {}", change.name, change.before, change.now);
        }
        for change in changes.figures {
            let ratio = change.now / change.before;
            out!("{:<26} {:9.2} -> {:9.2}  {ratio:.3}", change.name, change.before, change.now);
        }
    }
    if json {
        out!("{figures}");
    }
}
