//! Connection of the ranks that curate together.

use ranks::communicator::Communicator;
use trainer::recipe::RunConfig;

use crate::cluster::compute::ComputeFlags;
use crate::cluster::launch::Launch;
use crate::cluster::start;

/// Connects the ranks of `launch`.
pub(crate) fn connect(launch: &Launch, compute: &ComputeFlags) -> anyhow::Result<Communicator> {
    if launch.world_size == 1 {
        return Ok(Communicator::solo());
    }
    let device = compute.open(launch)?;
    start::connect(launch, &RunConfig::default(), &device, compute.engine)
}
