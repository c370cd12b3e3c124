//! Connection of the ranks that curate together.

use std::process::ExitCode;

use ranks::communicator::Communicator;
use trainer::recipe::RunConfig;

use crate::cluster::compute::ComputeFlags;
use ranks::launch::Launch;
use session::connect;

/// Connects the ranks of `launch`.
pub(crate) fn connect(launch: &Launch, compute: &ComputeFlags) -> anyhow::Result<Communicator> {
    if launch.world_size == 1 {
        return Ok(Communicator::solo());
    }
    let device = compute.open(launch)?;
    // One rank may look at images, or compare a large cell, while others wait for it.
    let run = RunConfig { deadline_s: 24 * 3600, ..RunConfig::default() };
    Ok(connect::connect(launch, &run, &device, compute.engine)?)
}

/// Ends the work of all ranks when the first one has `written` the result: a launcher may end those
/// that are left a while after one has ended.
pub(crate) fn finish(ranks: Communicator, written: anyhow::Result<()>) -> anyhow::Result<ExitCode> {
    together(&ranks, written)?;
    ranks.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// Returns what this rank has done, if no rank has failed. All ranks call it.
pub(crate) fn together<T>(ranks: &Communicator, done: anyhow::Result<T>) -> anyhow::Result<T> {
    connect::all_ready(ranks, done)
}
