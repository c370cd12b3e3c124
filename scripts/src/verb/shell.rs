//! `ocelli completions` and `ocelli man`: completion scripts for shells, and manual pages.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Command;
use clap_complete::Shell;

use crate::help::shown;

/// Flags of `completions`.
#[derive(clap::Args)]
pub(crate) struct CompletionsArgs {
    /// Shell: bash, zsh, fish, elvish or powershell.
    shell: Shell,
}

/// Flags of `man`.
#[derive(clap::Args)]
pub(crate) struct ManArgs {
    /// Output folder for the pages, one per command.
    #[arg(long)]
    out: PathBuf,
}

/// Prints the script with which `args.shell` completes the program's verbs and flags.
pub(crate) fn completions(args: &CompletionsArgs, mut command: Command) -> ExitCode {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "ocelli", &mut text);
    out!("{}", String::from_utf8_lossy(&text).trim_end());
    ExitCode::SUCCESS
}

/// Writes a page for the program and each of its verbs.
pub(crate) fn man(args: &ManArgs, command: Command) -> anyhow::Result<ExitCode> {
    std::fs::create_dir_all(&args.out).with_context(|| format!("cannot create {}", args.out.display()))?;
    clap_mangen::generate_to(command.mut_args(shown), &args.out)
        .with_context(|| format!("cannot write into {}", args.out.display()))?;
    out!(
        "manual pages written to {}; read them with: man -l {}",
        args.out.display(),
        args.out.join("ocelli.1").display()
    );
    Ok(ExitCode::SUCCESS)
}
