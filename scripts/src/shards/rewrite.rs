//! Flags and counts of verbs that rewrite shards.

use std::path::PathBuf;

use prep::rewrite::{RewriteJob, RewriteTotals};
use serde_json::json;

/// Flags of every verb that rewrites shards.
#[derive(clap::Args)]
pub(crate) struct RewriteFlags {
    /// Shards: paths, patterns such as 'train-*.tar', folders, or URLs.
    #[arg(required = true)]
    shards: Vec<String>,
    /// Output folder for the shards, which keep their names, and for lists.
    #[arg(long)]
    pub(crate) out: PathBuf,
    /// Delete the output of another such job in the folder and start over.
    #[arg(long)]
    overwrite: bool,
    /// Print a line of JSON at the end.
    #[arg(long)]
    pub(crate) json: bool,
}

impl RewriteFlags {
    /// Returns the job that the flags describe.
    pub(crate) fn job(&self) -> RewriteJob<'_> {
        RewriteJob { shards: &self.shards, out: &self.out, overwrite: self.overwrite }
    }
}

/// Prints the counts of a job.
pub(crate) fn print_totals(totals: &RewriteTotals, json: bool) {
    let existing = match totals.n_existing_shards {
        0 => String::new(),
        n => format!(", {n} already done"),
    };
    out!(
        "{} shard(s) written{existing}: {} samples unchanged, {} changed, {} dropped; {:.1} MB of {:.1} MB",
        totals.n_shards,
        totals.n_kept,
        totals.n_replaced,
        totals.n_dropped,
        totals.bytes_out as f64 / 1e6,
        totals.bytes_in as f64 / 1e6
    );
    if let Some(list) = &totals.list {
        out!("reasons for dropped samples: {}", list.display());
    }
    if json {
        out!(
            "{}",
            json!({
                "shards": totals.n_shards,
                "shards_there": totals.n_existing_shards,
                "kept": totals.n_kept,
                "changed": totals.n_replaced,
                "dropped": totals.n_dropped,
                "bytes_in": totals.bytes_in,
                "bytes_out": totals.bytes_out,
            })
        );
    }
}
