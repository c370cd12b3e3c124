//! `ocelli shards pack`: packs a folder of images, or a list of them, into shards.

mod files;
mod flags;
mod urls;

use std::process::ExitCode;

pub(crate) use flags::Args;

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match args.web.urls {
        true => urls::run(args),
        false => files::run(args),
    }
}
