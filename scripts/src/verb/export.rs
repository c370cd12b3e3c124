//! `ocelli export`: a backbone as one safetensors file.

use std::path::PathBuf;
use std::process::ExitCode;

use trainer::Network;
use trainer::device::Opened;

/// Flags of `export`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A run's work directory, or a checkpoint's folder.
    #[arg(long)]
    checkpoint: PathBuf,
    /// The file to write.
    #[arg(long)]
    out: PathBuf,
    /// Export the student even if the method has a teacher.
    #[arg(long)]
    student: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (network, which) = Network::open(&args.checkpoint, args.student, 1, &Opened::cpu().device)?;
    network.export(&args.out, which)?;
    out!("{which} written to {}", args.out.display());
    Ok(ExitCode::SUCCESS)
}
