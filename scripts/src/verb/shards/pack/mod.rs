//! `ocelli shards pack`: packs a folder of images, or a list of them, into shards.

mod files;
mod flags;
mod urls;

use std::process::ExitCode;

pub(crate) use flags::Args;
use pipeline::ColumnNames;

pub(crate) fn run(args: &Args, columns: &ColumnNames) -> anyhow::Result<ExitCode> {
    if args.web.urls {
        return urls::run(args, columns);
    }
    files::run(args, columns)
}
