//! `ocelli bench`: measures how a step and the loader spend their time.

mod clusters;
mod compare;
mod device;
mod layers;
mod loader;
mod memory_gauge;
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
    /// Time training steps on noise, by phase; or the backbone alone, unit by unit against one
    /// graph.
    Step(step::Args),
    /// Compare modes of sharding on noise: memory against `ocelli plan`, bytes moved, images per
    /// second. Run it under mpirun.
    Shard(shard::Args),
    /// Compare a device with the CPU: embeddings, loss, gradients and a few steps of the same
    /// network.
    Device(device::Args),
    /// Compare layers of a transformer with sums in f64, and time them; compare the operations
    /// between them with the CPU's.
    Layers(layers::Args),
    /// Time protocols of `ocelli probe` on noise, for a number of features of a width.
    Probe(probe::Args),
    /// Time k-means on features or on noise.
    Clusters(clusters::Args),
    /// Time the data path alone, by stage: read, decode, augment.
    Loader(loader::Args),
}

pub(crate) fn run(args: &Args, storage: &Storage) -> anyhow::Result<ExitCode> {
    match &args.verb {
        Verb::Step(args) => step::run(args),
        Verb::Shard(args) => shard::run(args),
        Verb::Device(args) => device::run(args),
        Verb::Layers(args) => layers::run(args),
        Verb::Probe(args) => probe::run(args),
        Verb::Clusters(args) => clusters::run(args),
        Verb::Loader(args) => loader::run(args, storage),
    }
}
