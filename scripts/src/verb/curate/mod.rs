//! `ocelli curate`: chooses images of a data set by their features.

mod balance;
mod map;
mod near_duplicates;
mod outliers;
mod remove;
mod retrieve;

use std::path::Path;
use std::process::ExitCode;

use clap::Subcommand;
use pipeline::Storage;

use crate::cluster::compute;
use crate::curation::Call;

/// Flags of `curate`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Find near-duplicate images, and keep the best of each group.
    NearDuplicates(near_duplicates::Args),
    /// Sample images evenly over hierarchical clusters, given clusters or classes, or weight all
    /// images accordingly.
    Balance(balance::Args),
    /// Keep the images most similar to given ones.
    Retrieve(retrieve::Args),
    /// Find images unlike any others.
    Outliers(outliers::Args),
    /// Remove images too similar to those of an evaluation set.
    Remove(remove::Args),
    /// Write an HTML page of the clusters: their images, their sizes and what was kept.
    Map(map::Args),
}

pub(crate) fn run(args: &Args, storage: &Storage, folder: &Path) -> anyhow::Result<ExitCode> {
    let call = Call { launch: compute::launch()?, storage, folder };
    match &args.verb {
        Verb::NearDuplicates(args) => near_duplicates::run(args, &call),
        Verb::Balance(args) => balance::run(args, &call),
        Verb::Retrieve(args) => retrieve::run(args, &call),
        Verb::Outliers(args) => outliers::run(args, &call),
        Verb::Remove(args) => remove::run(args, &call),
        Verb::Map(args) => map::run(args, &call),
    }
}
