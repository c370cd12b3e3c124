//! `ocelli bench`: where the time of a step and of the loader goes.

mod compare;
mod device;
mod loader;
mod probe;
mod shard;
mod step;

use std::process::ExitCode;

use pipeline::Storage;

/// Flags of `bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// Training steps on noise, by phase; and the backbone alone, unit by unit against one graph.
    Step(step::Args),
    /// Modes of sharding on noise: memory against `ocelli plan`, bytes moved, images a second. Run it under
    /// mpirun.
    Shard(shard::Args),
    /// A device beside the CPU: embeddings, loss, gradients and a few steps of the same network.
    Device(device::Args),
    /// Protocols of `ocelli probe` on noise: how long they take for so many features of such a width.
    Probe(probe::Args),
    /// The data path alone, by stage: read, decode, augment.
    Loader(loader::Args),
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    match &args.verb {
        Verb::Step(args) => step::run(args),
        Verb::Shard(args) => shard::run(args),
        Verb::Device(args) => device::run(args),
        Verb::Probe(args) => probe::run(args),
        Verb::Loader(args) => loader::run(args, storage),
    }
}
