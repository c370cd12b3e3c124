//! `ocelli shards contact-sheet`: images of shards on one picture, as they are or as a recipe's views.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use eval::picture::report;
use pipeline::{Dataset, Storage};

use crate::recipes;

/// Flags of `shards contact-sheet`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Shard lists.
    #[arg(required = true)]
    shards: Vec<String>,
    /// The PNG to write.
    #[arg(long)]
    out: PathBuf,
    /// Draw the augmented views of this recipe (a name or a file), one image a row, instead of the
    /// images themselves.
    #[arg(long)]
    recipe: Option<String>,
    /// Images, spread evenly over the shards.
    #[arg(long, default_value_t = 64)]
    count: u64,
    /// Seed of the views.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Write over a picture that is there.
    #[arg(long)]
    overwrite: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    if args.out.exists() && !args.overwrite {
        bail!("{} exists; give --overwrite, or another --out", args.out.display());
    }
    let dataset = Dataset::open(&args.shards, storage)?;
    match &args.recipe {
        Some(name) => {
            let recipe = recipes::load(name, &[])?;
            let views = recipe.views.multicrop().map_err(anyhow::Error::msg)?;
            let rules = recipe.data.rules();
            report::contact_sheet(&args.out, &dataset, &views, &rules, args.seed, args.count)?;
        }
        None => report::thumbnails(&args.out, &dataset, args.count)?,
    }
    out!("{}", args.out.display());
    Ok(ExitCode::SUCCESS)
}
