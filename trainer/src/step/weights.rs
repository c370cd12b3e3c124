//! Weights that a step gathers: their order, and which of them are kept.

use burn_tensor::DType;
use ranks::prefetch::GatherRequest;
use ranks::topology::Sharding;
use ranks::wire::Wire;

use super::config::StepConfig;
use super::forward::Retention;
use super::precision::Precision;
use super::segments::Segments;
use super::sharded::ShardedNet;

/// The weights of a step.
pub(super) struct Weights<'a> {
    /// Networks without gradients, in the order in which they run.
    pub(super) others: Vec<ShardedNet<'a>>,
    /// The trained network.
    pub(super) trained: ShardedNet<'a>,
    pub(super) config: &'a StepConfig,
}

impl<'a> Weights<'a> {
    /// Returns all gathers of a step, in order: those of the networks without gradients, of the
    /// trained network's forward pass, and of its backward pass.
    pub(super) fn gathers(&self) -> Vec<GatherRequest<'a>> {
        let mut requests = Vec::new();
        for network in &self.others {
            for number in 0..network.shards.len() {
                requests.push(self.request(network, number, false));
            }
        }
        let trained = &self.trained;
        for number in 0..trained.shards.len() {
            requests.push(self.request(trained, number, self.retention(number).weights));
        }
        if self.config.sharding != Sharding::Grad {
            for range in self.segments().ranges().rev() {
                let repeated = range.start..range.end - 1;
                for number in repeated.chain(range.rev()) {
                    requests.push(self.request(trained, number, false));
                }
            }
        }
        requests
    }

    /// Returns the request for unit `number` of `network`.
    fn request(&self, network: &ShardedNet<'a>, number: usize, is_kept: bool) -> GatherRequest<'a> {
        let Precision { gather, head_gather, .. } = self.config.precision;
        let shard = &network.shards[number];
        let (wire, dtype) = if network.net.is_backbone(number) {
            (gather, self.config.precision.gathered())
        } else {
            (head_gather, DType::F32)
        };
        let extent = network.extent(number);
        let values = match (wire, shard.weights.in_bf16()) {
            (Wire::Bf16, Some(in_bf16)) => in_bf16,
            _ => shard.weights.values(),
        };
        GatherRequest { unit: &shard.layout.name, shard: values, wire, dtype, is_kept, extent }
    }

    /// Returns the data that unit `number` of the trained network keeps from its forward to its
    /// backward pass.
    pub(super) fn retention(&self, number: usize) -> Retention {
        let net = self.trained.net;
        if !net.is_backbone(number) {
            return Retention { graph: false, weights: false, input: false };
        }
        let segments = self.segments();
        let graph = number >= segments.n_units;
        let input = segments.keeps_input(number);
        Retention { graph, weights: graph || self.config.sharding == Sharding::Grad, input }
    }

    /// Returns the segments of the trained backbone's units that keep no graph.
    fn segments(&self) -> Segments {
        let StepConfig { n_kept_graphs, segment_len, .. } = self.config;
        Segments::new(self.trained.net.backbone.len(), *n_kept_graphs, *segment_len)
    }
}
