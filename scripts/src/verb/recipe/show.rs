//! `ocelli recipe show`: a recipe as it ships.

use std::process::ExitCode;

use crate::recipes::read_text;

/// Flags of `recipe show`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  ocelli recipe show dino_cifar")]
pub(super) struct Args {
    /// Recipe name or file.
    name: String,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    out!("{}", read_text(&args.name)?.trim_end());
    Ok(ExitCode::SUCCESS)
}
