//! `ocelli shards contact-sheet`: draws images of shards into one picture, as they are or as a
//! recipe's views.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::bail;
use augment::{DecodeRules, Transform};
use eval::image_sets::set_name;
use eval::{ImageSet, Source};
use pipeline::Storage;
use report::picture::sheets;

use crate::recipes;
use prep::classes::{ClassNames, class_name};
use prep::open::{open_dataset, split_folders};

/// Flags of `shards contact-sheet`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
        ocelli shards contact-sheet data/ --out sheet.png\n  \
        ocelli shards contact-sheet data/ --recipe dino_vits16 --count 8 --out v.png")]
pub(crate) struct Args {
    /// Shards: paths, patterns such as 'train-*.tar', folders, or URLs.
    #[arg(required = true)]
    shards: Vec<String>,
    /// PNG file to write.
    #[arg(long)]
    out: PathBuf,
    /// Draw the augmented views of this recipe (name or file), one image per row, instead of the
    /// images.
    #[arg(long)]
    recipe: Option<String>,
    /// Number of images, spread evenly over the shards.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..))]
    count: u64,
    /// Tile size, in pixels.
    #[arg(long, default_value_t = 96, value_parser = clap::value_parser!(u32).range(16..=512),
        conflicts_with = "recipe")]
    tile_px: u32,
    /// Seed for the views.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Replace an existing picture.
    #[arg(long)]
    overwrite: bool,
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    if args.out.exists() && !args.overwrite {
        bail!("{} exists; pass --overwrite or choose another --out", args.out.display());
    }
    let dataset = open_dataset(&args.shards, storage)?;
    match &args.recipe {
        Some(name) => {
            let recipe = recipes::load(name, &[])?;
            let views = recipe.views.multicrop().map_err(anyhow::Error::msg)?;
            let rules = recipe.data.rules();
            sheets::contact_sheet(&args.out, &dataset, &views, &rules, args.seed, args.count)?;
        }
        None => {
            let square = Transform { resize_px: args.tile_px, size_px: args.tile_px };
            let source = Source::Shards(Arc::new(dataset));
            let name = set_name(&args.shards);
            let images = ImageSet::open_some(source, square, DecodeRules::default(), name, args.count)?;
            // The classes of a folder of images are names.
            let sources = split_folders(&args.shards)?.sources(storage)?;
            let names = ClassNames::read(&sources)?.names;
            sheets::thumbnails(&args.out, &images, |class| format!("{:?}", class_name(&names, class)))?;
        }
    }
    out!("{}", args.out.display());
    Ok(ExitCode::SUCCESS)
}
