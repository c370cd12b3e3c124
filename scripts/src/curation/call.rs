//! A call of a verb of `ocelli curate`: its ranks, and the bars of the first one.

use std::path::Path;
use std::process::ExitCode;

use curate::clusters::Centers;
use curate::io::{ClusterCost, ClusterObserver};
use pipeline::Storage;
use pipeline::words::thousands;
use ranks::communicator::Communicator;
use ranks::launch::Launch;
use session::connect;
use trainer::recipe::RunConfig;

use crate::cluster::compute::ComputeFlags;
use crate::console::say;
use crate::progress::{StageBar, format_duration};

/// Surroundings of a call.
pub(crate) struct Call<'a> {
    /// Position of this process among the ranks.
    pub(crate) launch: Launch,
    pub(crate) storage: &'a Storage,
    /// Folder of caches.
    pub(crate) folder: &'a Path,
}

impl Call<'_> {
    /// Connects the ranks.
    pub(crate) fn connect(&self, compute: &ComputeFlags) -> anyhow::Result<Communicator> {
        if self.launch.world_size == 1 {
            return Ok(Communicator::solo());
        }
        let device = compute.open(&self.launch)?;
        // One rank may read images, or compare a large cell, while others wait for it.
        let run = RunConfig { deadline_s: 24 * 3600, ..RunConfig::default() };
        Ok(connect::connect(&self.launch, &run, &device, compute.engine)?)
    }
}

/// Writes the result by `write` on the first rank, and ends the work of all ranks when it is
/// written: a launcher may kill the others some time after a rank has ended.
pub(crate) fn finish(
    ranks: Communicator,
    write: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    let written = if ranks.topology().rank == 0 { write() } else { Ok(()) };
    connect::all_ready(&ranks, written)?;
    ranks.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the bars of a stage of the work, which only the first rank shows.
pub(crate) fn bars(ranks: &Communicator) -> StageBar {
    if ranks.topology().rank == 0 { StageBar::new() } else { StageBar::hidden() }
}

impl ClusterObserver for StageBar {
    fn on_cost(&self, cost: &ClusterCost) {
        let ClusterCost { n_rows, width, n_clusters, seconds, flops_per_s } = cost;
        let numbers: Vec<String> = n_clusters.iter().map(|n| thousands(*n as u64)).collect();
        let numbers = numbers.join(", ");
        let mut line = format!("{} x {width} features into {numbers} clusters", thousands(*n_rows as u64));
        if *seconds >= 2.0 {
            let duration = format_duration(*seconds);
            let speed = flops_per_s / 1e9;
            line += &format!(": takes at most {duration} at this machine's {speed:.0} GFLOP/s");
        }
        say(line);
    }

    fn on_continue(&self, centers: &Centers) {
        say(match centers.n_resamplings {
            0 => format!("continuing after iteration {} of k-means", centers.n_iterations),
            n => format!("continuing after resampling {n}"),
        });
    }
}
