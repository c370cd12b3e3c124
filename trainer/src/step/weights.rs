//! Gathers of a step: the weights of each unit, in the order of the schedule.

use burn_tensor::DType;
use ranks::collectives::GatherRequest;
use ranks::wire::Wire;

use super::events::{Event, Schedule, StepNetwork};
use super::execution::RunningNetwork;
use super::precision::Precision;
use super::sharded::ShardedNet;

/// Returns all gathers of `schedule`, in order.
pub(super) fn gather_requests<'a>(
    schedule: &Schedule,
    others: &[RunningNetwork<'a>],
    trained: RunningNetwork<'a>,
    precision: Precision,
) -> Vec<GatherRequest<'a>> {
    let mut requests = Vec::new();
    for event in schedule.events() {
        if let Event::Gather { network, unit, is_kept } = event {
            let network = match network {
                StepNetwork::Other(index) => others[index].network,
                StepNetwork::Trained => trained.network,
            };
            requests.extend(base_request(network, unit));
            requests.push(request(network, unit, is_kept, precision));
        }
    }
    requests
}

/// Returns the request for the weights to which the adapters of a unit are added, if it has some.
/// The sums are rounded, not the weights: adapters may change them by less than their rounding.
fn base_request(network: ShardedNet<'_>, unit: usize) -> Option<GatherRequest<'_>> {
    let base = network.bases.get(&unit)?;
    Some(GatherRequest {
        unit: &base.layout.name,
        shard: base.weights.values(),
        wire: Wire::F32,
        dtype: DType::F32,
        is_kept: false,
        extent: network.extent(unit),
    })
}

/// Returns the request for the weights of a unit, or for its adapters, which are kept for their
/// gradients.
fn request<'a>(
    network: ShardedNet<'a>,
    unit: usize,
    is_kept: bool,
    precision: Precision,
) -> GatherRequest<'a> {
    let shard = &network.shards[unit];
    let has_adapters = network.bases.contains_key(&unit);
    let is_kept = is_kept || has_adapters;
    let (wire, dtype) = if has_adapters {
        (Wire::F32, DType::F32)
    } else if network.net.is_backbone(unit) {
        (precision.gather, precision.gathered())
    } else {
        (precision.head_gather, DType::F32)
    };
    let extent = network.extent(unit);
    let values = match (wire, shard.weights.in_bf16()) {
        (Wire::Bf16, Some(in_bf16)) => in_bf16,
        _ => shard.weights.values(),
    };
    GatherRequest { unit: &shard.layout.name, shard: values, wire, dtype, is_kept, extent }
}
