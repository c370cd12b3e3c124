//! `ocelli export`: a backbone as one safetensors file.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use trainer::Network;
use trainer::device::Opened;

/// Flags of `export`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A run's work directory, or a checkpoint's folder.
    #[arg(long)]
    checkpoint: PathBuf,
    /// The file to write: NAME.safetensors.
    #[arg(long)]
    out: PathBuf,
    /// Replace the file if it exists.
    #[arg(long)]
    overwrite: bool,
    /// Export the student even if the method has a teacher.
    #[arg(long)]
    student: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let extension = args.out.extension().map(|extension| extension.to_string_lossy().into_owned());
    if extension.as_deref() != Some("safetensors") {
        bail!("{} must end in .safetensors: no other format can be written", args.out.display());
    }
    if args.out.exists() && !args.overwrite {
        bail!("{} exists; --overwrite replaces it", args.out.display());
    }
    let (network, which) = Network::open(&args.checkpoint, args.student, 1, &Opened::cpu().device)?;
    network.export(&args.out, which)?;
    out!("{which} written to {}", args.out.display());
    Ok(ExitCode::SUCCESS)
}
