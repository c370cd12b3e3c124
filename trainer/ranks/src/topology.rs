//! Ranks that share a unit: shard groups of S ranks, and R replicas of them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Data that is sharded over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Sharding {
    /// Nothing: every rank holds all data (DDP).
    None,
    /// Weights and moments of all networks, and gradients; gathered weights are kept until the backward pass (ZeRO-2).
    Grad,
    /// As `grad`, but gathered weights are dropped as soon as a unit has run (ZeRO-3).
    #[default]
    Full,
}

/// Position of a rank among the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topology {
    /// Number of this rank.
    pub rank: usize,
    /// Number of ranks, W.
    pub world_size: usize,
    /// Number of ranks in a shard group, S.
    pub group_size: usize,
}

impl Topology {
    /// Topology of a single rank.
    pub const SINGLE_RANK: Self = Self { rank: 0, world_size: 1, group_size: 1 };

    /// Returns the topology as `rank` sees it; `group` ranks share a unit, or all ranks if it is 0.
    ///
    /// # Errors
    /// A message, if groups do not divide the ranks.
    pub fn new(rank: usize, world_size: usize, sharding: Sharding, group: usize) -> Result<Self, String> {
        let group_size = match (sharding, group) {
            (Sharding::None, _) => 1,
            (_, 0) => world_size,
            (_, group) => group,
        };
        if !world_size.is_multiple_of(group_size) {
            return Err(format!("run.shard_group {group_size} does not divide {world_size} ranks"));
        }
        Ok(Self { rank, world_size, group_size })
    }

    /// Returns the index within the shard group, s: the shard that this rank holds.
    pub fn shard(&self) -> usize {
        self.rank % self.group_size
    }

    /// Returns the index of the replica that this rank belongs to, q.
    pub fn replica(&self) -> usize {
        self.rank / self.group_size
    }

    /// Returns the number of replicas, R.
    pub fn n_replicas(&self) -> usize {
        self.world_size / self.group_size
    }

    /// Returns the share of a global batch that this rank takes: positions p with p mod W = data rank. Data ranks are
    /// such that sums over a group and then over replicas are branches of one tree ([`super::ordered`]).
    pub fn data_rank(&self) -> usize {
        self.shard() * self.n_replicas() + self.replica()
    }

    /// Returns the ranks in the order of their data ranks.
    pub fn by_data_rank(&self) -> Vec<usize> {
        let (s, r) = (self.group_size, self.n_replicas());
        (0..self.world_size).map(|data_rank| (data_rank % r) * s + data_rank / r).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn groups_must_divide() {
        assert!(Topology::new(0, 4, Sharding::Full, 3).unwrap_err().contains("3 does not divide 4"));
        assert_eq!(Topology::new(2, 4, Sharding::None, 3).unwrap().group_size, 1);
    }

    proptest! {
        #[test]
        fn parts_number_the_ranks(log_group in 0u32..4, log_replicas in 0u32..4) {
            let (group, world) = (1 << log_group, 1usize << (log_group + log_replicas));
            let order = Topology::new(0, world, Sharding::Full, group).unwrap().by_data_rank();
            for (part, rank) in order.iter().enumerate() {
                prop_assert_eq!(Topology::new(*rank, world, Sharding::Full, group).unwrap().data_rank(), part);
            }
        }
    }
}
