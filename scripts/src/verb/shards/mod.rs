//! `ocelli shards`: make, check and list shards.

mod dedup;
mod extract;
mod index;
mod ls;
mod pack;
mod regroup;
mod rewrite;
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
    /// Generate a labeled synthetic image set as shards.
    Synth(synth::Args),
    /// Read every byte, decode every image, and check the index and checksums against the tar.
    Verify(verify::Args),
    /// List the samples of shards.
    Ls(ls::Args),
    /// Write index files for shards made by other tools.
    Index(index::Args),
    /// Report image sizes, formats, colors, duplicates and loading speed.
    Stats(stats::Args),
    /// Draw a contact sheet of images, unmodified or as a recipe's augmented views.
    ContactSheet(sheet::Args),
    /// Shrink large images to a given short side, and convert progressive JPEGs to baseline.
    Resize(rewrite::ResizeArgs),
    /// Drop images that are corrupt, too small, too elongated or blank.
    Filter(rewrite::FilterArgs),
    /// Find exact and near duplicates, within a set and against a test set.
    Dedup(dedup::Args),
    /// Rewrite the samples into shards of a different size or order.
    Reshard(regroup::ReshardArgs),
    /// Split the samples into parts, such as train and test.
    Split(regroup::SplitArgs),
    /// Select a subset of the samples: a number, a list of keys, or classes.
    Subset(regroup::SubsetArgs),
    /// Extract shard members as files.
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
        Verb::Resize(args) => rewrite::run_resize(args, storage),
        Verb::Filter(args) => rewrite::run_filter(args, storage),
        Verb::Dedup(args) => dedup::run(args, storage),
        Verb::Reshard(args) => regroup::reshard(args, storage),
        Verb::Split(args) => regroup::split(args, storage),
        Verb::Subset(args) => regroup::subset(args, storage),
        Verb::Extract(args) => extract::run(args, storage),
    }
}
