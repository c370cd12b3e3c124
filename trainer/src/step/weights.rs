//! Which weights a step gathers, in what order, and which of them stay.

use networks::head::On;
use ranks::prefetch::Wanted;
use ranks::topology::Sharding;

use super::config::StepConfig;
use super::forward::Keeps;
use super::networks::Networks;
use super::precision::Precision;

/// The weights of a step.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    pub(super) networks: Networks<'a>,
    pub(super) config: &'a StepConfig,
}

impl<'a> Weights<'a> {
    /// Every gather of a step, in order: followers, the student, and the way back.
    pub(super) fn gathers(&self) -> Vec<Wanted<'a>> {
        let Networks { net, shards } = self.networks;
        let Precision { gather, head_gather, .. } = self.config.precision;
        let wanted = |number: usize, shard, stays| {
            let wire = if net.is_backbone(number) { gather } else { head_gather };
            Wanted { unit: &shards[number].layout.name, shard, wire, stays }
        };
        let mut list = Vec::new();
        for follower in &net.followers {
            for unit in net.units().filter(|unit| unit.on == On::Both) {
                let shard = shards[unit.number].follower(follower.name);
                // Units of both have a shard of every follower.
                list.extend(shard.map(|shard| wanted(unit.number, shard, false)));
            }
        }
        for (number, shard) in shards.iter().enumerate() {
            list.push(wanted(number, &shard.student, self.keeps(number).weights));
        }
        for (number, shard) in shards[..net.backbone.len()].iter().enumerate().rev() {
            if !self.keeps(number).weights {
                list.push(wanted(number, &shard.student, false));
            }
        }
        list
    }

    /// What unit `number` keeps from its forward to its backward pass.
    pub(super) fn keeps(&self, number: usize) -> Keeps {
        let net = self.networks.net;
        if !net.is_backbone(number) {
            return Keeps { graph: false, weights: false };
        }
        let graph = number >= net.backbone.len().saturating_sub(self.config.n_kept_graphs);
        Keeps { graph, weights: graph || self.config.sharding == Sharding::Grad }
    }
}
