//! `ocelli recipe`: the recipes that ship with the program, their keys, and new ones.

mod keys;
mod list;
mod new;
mod show;

use std::process::ExitCode;

/// Flags of `recipe`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// List the built-in recipes.
    List,
    /// Print a built-in recipe, with its comments.
    Show(show::Args),
    /// Print recipe keys with their types, units, defaults and meanings.
    Keys(keys::Args),
    /// Print a new recipe for a method, a backbone and an image size, ready to edit.
    New(new::Args),
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.verb {
        Verb::List => list::run(),
        Verb::Show(args) => show::run(args),
        Verb::Keys(args) => keys::run(args),
        Verb::New(args) => new::run(args),
    }
}
