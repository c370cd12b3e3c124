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
    // One rank may read images, or compare a large cell, while others wait for it.
    let run = RunConfig { deadline_s: 24 * 3600, ..RunConfig::default() };
    Ok(connect::connect(launch, &run, &device, compute.engine)?)
}

/// Ends the work of all ranks once the first one has `written` the result: a launcher may kill the
/// others some time after a rank has ended.
pub(crate) fn finish(ranks: Communicator, written: anyhow::Result<()>) -> anyhow::Result<ExitCode> {
    all_succeed(&ranks, written)?;
    ranks.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the `result` of this rank, if no rank has failed. All ranks call it.
pub(crate) fn all_succeed<T>(ranks: &Communicator, result: anyhow::Result<T>) -> anyhow::Result<T> {
    connect::all_ready(ranks, result)
}
