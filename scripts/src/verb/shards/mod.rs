//! `ocelli shards`: make, check and list shards.

mod constants;
mod dedup;
mod extract;
mod filter;
mod index;
mod ls;
mod pack;
mod regroup;
mod resize;
mod sheet;
mod stats;
pub(crate) mod synth;
mod verify;

use std::process::ExitCode;

use clap::Subcommand;
use pipeline::Storage;

/// Flags of `shards`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Pack a folder of images, or a list of them, into shards.
    Pack(pack::Args),
    /// Generate a procedural, labeled image set as shards.
    Synth(synth::Args),
    /// Read every byte, decode every image, compare index and checksums with the tar.
    Verify(verify::Args),
    /// List the samples of shards.
    Ls(ls::Args),
    /// Write index sidecars for shards that other tools made.
    Index(index::Args),
    /// Report the images' sizes, formats, colors, duplicates and loading speed.
    Stats(stats::Args),
    /// Draw images into one picture, as they are or as a recipe's augmented views.
    ContactSheet(sheet::Args),
    /// Shrink large images to a short side, and convert progressive JPEGs to baseline.
    Resize(resize::Args),
    /// Drop images that are corrupt, too small, too long or blank.
    Filter(filter::Args),
    /// Find exact and near copies, within a set and against a test set.
    Dedup(dedup::Args),
    /// Write the samples again in shards of another size or order.
    Reshard(regroup::ReshardArgs),
    /// Split the samples into parts, by their keys.
    Split(regroup::SplitArgs),
    /// Select some of the samples: a number, a list of keys, classes.
    Subset(regroup::SubsetArgs),
    /// Write members of shards as files.
    Extract(extract::Args),
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    match &args.verb {
        Verb::Pack(args) => pack::run(args, storage.columns()),
        Verb::Synth(args) => synth::run(args),
        Verb::Verify(args) => verify::run(args, storage),
        Verb::Ls(args) => ls::run(args, storage),
        Verb::Index(args) => index::run(args, storage),
        Verb::Stats(args) => stats::run(args, storage),
        Verb::ContactSheet(args) => sheet::run(args, storage),
        Verb::Resize(args) => resize::run(args, storage),
        Verb::Filter(args) => filter::run(args, storage),
        Verb::Dedup(args) => dedup::run(args, storage),
        Verb::Reshard(args) => regroup::reshard(args, storage),
        Verb::Split(args) => regroup::split(args, storage),
        Verb::Subset(args) => regroup::subset(args, storage),
        Verb::Extract(args) => extract::run(args, storage),
    }
}
