//! `ocelli bench`: measures how a step and the loader spend their time.

mod clusters;
mod compare;
mod device;
mod layers;
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
    /// Time training steps on noise, by phase, or the backbone alone, unit by unit versus as one
    /// graph.
    Step(step::Args),
    /// Compare sharding modes on noise: memory versus `ocelli plan`, bytes moved, step time. Run it
    /// under mpirun.
    Shard(shard::Args),
    /// Check a device against the CPU: embeddings, loss, gradients and a few steps of the same
    /// network.
    Device(device::Args),
    /// Check transformer layers against f64 sums and time them; check the operations between them
    /// against the CPU.
    Layers(layers::Args),
    /// Time `ocelli probe` protocols on noise, for a given number and width of features.
    Probe(probe::Args),
    /// Time k-means on features or on noise.
    Clusters(clusters::Args),
    /// Time the data pipeline alone, by stage: read, decode, augment.
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
