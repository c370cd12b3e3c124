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

/// Flags of `curate`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Find images that show nearly the same, and keep the best of each group.
    NearDuplicates(near_duplicates::Args),
    /// Choose images evenly over clusters of clusters, over given clusters or over classes; or
    /// weigh all images so.
    Balance(balance::Args),
    /// Keep the images that are most like given ones.
    Retrieve(retrieve::Args),
    /// Find images that are unlike all others.
    Outliers(outliers::Args),
    /// Remove images that are too much like those of an evaluation set.
    Remove(remove::Args),
    /// Draw clusters as a page: their images, their sizes, and what is kept of them.
    Map(map::Args),
}

pub(crate) fn run(args: &Args, storage: &Storage, folder: &Path) -> anyhow::Result<ExitCode> {
    match &args.verb {
        Verb::NearDuplicates(args) => near_duplicates::run(args, storage, folder),
        Verb::Balance(args) => balance::run(args, storage, folder),
        Verb::Retrieve(args) => retrieve::run(args, storage, folder),
        Verb::Outliers(args) => outliers::run(args, storage, folder),
        Verb::Remove(args) => remove::run(args, storage, folder),
        Verb::Map(args) => map::run(args, storage, folder),
    }
}
