//! `ocelli bench`: where the time of a step and of the loader goes.

use std::process::ExitCode;

use pipeline::Storage;

use super::{bench_device, bench_loader, bench_shard, bench_step};

/// Flags of `bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// Training steps on noise, by phase; and the backbone alone, unit by unit against one graph.
    Step(bench_step::Args),
    /// Modes of sharding on noise: memory against `ocelli plan`, bytes moved, images a second. Run it under
    /// mpirun.
    Shard(bench_shard::Args),
    /// A device beside the CPU: embeddings, loss, gradients and a few steps of the same network.
    Device(bench_device::Args),
    /// The data path alone, by stage: read, decode, augment.
    Loader(bench_loader::Args),
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    match &args.verb {
        Verb::Step(args) => bench_step::run(args),
        Verb::Shard(args) => bench_shard::run(args),
        Verb::Device(args) => bench_device::run(args),
        Verb::Loader(args) => bench_loader::run(args, storage),
    }
}
