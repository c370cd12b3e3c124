//! `ocelli bench`: measures how a step and the loader spend their time.

mod clusters;
mod device;
mod layers;
mod loader;
mod probe;
mod shard;
mod step;

use std::path::PathBuf;
use std::process::ExitCode;

use pipeline::Storage;
use serde_json::Value;
use trainer::bench::figures::{compare_figures, read_figures};

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

/// Flag of benchmarks that can be compared.
#[derive(clap::Args)]
struct CompareFlag {
    /// Print the ratio of each figure to an earlier run's, from a file with the output of that run
    /// with --json.
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
}

impl CompareFlag {
    /// Reads the earlier figures, if requested. Must be called before anything is measured.
    fn read(&self) -> anyhow::Result<Option<Value>> {
        Ok(self.compare.as_deref().map(read_figures).transpose()?)
    }
}

/// Prints how `figures` compare with those of an earlier run, if there are any, and `figures` as a
/// line of JSON if requested.
fn print_figures(before: Option<&Value>, figures: &Value, json: bool) {
    if let Some(before) = before {
        let changes = compare_figures(before, figures);
        for change in changes.settings {
            out!("warning: {} was {} and is {}", change.name, change.before, change.now);
        }
        for change in changes.figures {
            let ratio = change.now / change.before;
            out!("{:<26} {:9.2} -> {:9.2}  {ratio:.3}", change.name, change.before, change.now);
        }
    }
    if json {
        out!("{figures}");
    }
}
