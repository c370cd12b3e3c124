//! Ranks that share a unit: shard groups of S ranks, and R replicas of them; column groups within a
//! shard group.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Data that is sharded over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Sharding {
    /// Nothing: every rank holds all data (DDP).
    None,
    /// Weights and moments of all networks, and gradients; gathered weights are kept until the
    /// backward pass (ZeRO-2).
    Grad,
    /// As `grad`, but gathered weights are dropped as soon as a unit has run (ZeRO-3).
    #[default]
    Full,
}

impl Sharding {
    /// Returns the name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Grad => "grad",
            Self::Full => "full",
        }
    }
}

/// Position of a rank among the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topology {
    /// Index of this rank.
    pub rank: usize,
    /// Number of ranks, W.
    pub world_size: usize,
    /// Number of ranks in a shard group, S.
    pub group_size: usize,
    /// Number of ranks in a column group, C, which divides S: they compute different columns of the
    /// outputs of some units, for the images of all of them. 1 where every rank computes all
    /// columns.
    pub column_group_size: usize,
}

/// Part of a unit that a rank computes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All of it.
    Whole,
    /// The rank's columns, the same on S / C ranks of a shard group.
    Columns,
}

impl Topology {
    /// Topology of a single rank.
    pub const SINGLE_RANK: Self = Self { rank: 0, world_size: 1, group_size: 1, column_group_size: 1 };

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
        Ok(Self { rank, world_size, group_size, column_group_size: 1 })
    }

    /// Returns the topology with column groups of `size` ranks.
    ///
    /// # Errors
    /// A message, if they do not divide shard groups.
    pub fn with_column_group(self, size: usize) -> Result<Self, String> {
        if size == 0 || !self.group_size.is_multiple_of(size) {
            return Err(format!("{size} does not divide the {} ranks of a shard group", self.group_size));
        }
        Ok(Self { column_group_size: size, ..self })
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

    /// Returns the share of a global batch that this rank takes: positions p with p mod W = data
    /// rank. Data ranks are such that sums over a group and then over replicas are branches of one
    /// tree ([`super::ordered`]).
    pub fn data_rank(&self) -> usize {
        self.shard() * self.n_replicas() + self.replica()
    }

    /// Returns the number of ranks that hold the shards of what a rank computes with of a unit.
    pub fn n_shards(&self, extent: Extent) -> usize {
        match extent {
            Extent::Whole => self.group_size,
            Extent::Columns => self.group_size / self.column_group_size,
        }
    }

    /// Returns the index of this rank's part of the columns, from 0 to C - 1. Ranks whose shards of
    /// a unit are neighbors have the same part.
    pub fn column(&self) -> usize {
        self.shard() / self.n_shards(Extent::Columns)
    }

    /// Returns the index among the ranks of the shard group with the same columns.
    pub fn column_shard(&self) -> usize {
        self.shard() % self.n_shards(Extent::Columns)
    }

    /// Returns the number of ranks with the same columns in all replicas, W / C.
    pub fn n_column_peers(&self) -> usize {
        self.world_size / self.column_group_size
    }

    /// Returns the index among the ranks with the same columns, in the order of their data ranks.
    /// The ranks of a column group have the same; their data ranks are this index plus multiples of
    /// W / C, so that the sum over their micro-batches is a branch of the tree.
    pub fn column_peer(&self) -> usize {
        self.column_shard() * self.n_replicas() + self.replica()
    }

    /// Returns the ranks in the order of their data ranks.
    pub fn by_data_rank(&self) -> Vec<usize> {
        let s = self.group_size;
        let r = self.n_replicas();
        (0..self.world_size).map(|data_rank| (data_rank % r) * s + data_rank / r).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn groups_must_divide() {
        let error = Topology::new(0, 4, Sharding::Full, 3).unwrap_err();
        assert!(error.contains("run.shard_group 3 does not divide 4 ranks"), "{error}");
        assert_eq!(Topology::new(2, 4, Sharding::None, 3).unwrap().group_size, 1);
    }

    #[test]
    fn column_groups_must_divide_shard_groups() {
        let topology = Topology::new(5, 8, Sharding::Full, 4).unwrap();
        let error = topology.with_column_group(3).unwrap_err();
        assert!(error.contains("3 does not divide the 4 ranks"), "{error}");
        assert!(topology.with_column_group(8).is_err() && topology.with_column_group(0).is_err());
    }

    proptest! {
        /// Data ranks of a column group are one residue class, in the order of columns, and each
        /// group has every column.
        #[test]
        fn column_groups_are_branches_of_the_tree(
            log_columns in 0u32..3,
            log_shards in 0u32..3,
            log_replicas in 0u32..3,
        ) {
            let columns = 1usize << log_columns;
            let shards = 1usize << log_shards;
            let world = (columns * shards) << log_replicas;
            for rank in 0..world {
                let topology = Topology::new(rank, world, Sharding::Full, columns * shards).unwrap();
                let topology = topology.with_column_group(columns).unwrap();
                let n_peers = topology.n_column_peers();
                prop_assert_eq!(topology.data_rank() % n_peers, topology.column_peer());
                prop_assert_eq!(topology.data_rank() / n_peers, topology.column());
            }
        }

        #[test]
        fn by_data_rank_is_the_inverse_of_data_rank(log_group in 0u32..4, log_replicas in 0u32..4) {
            let group = 1 << log_group;
            let world = 1usize << (log_group + log_replicas);
            let order = Topology::new(0, world, Sharding::Full, group).unwrap().by_data_rank();
            for (part, rank) in order.iter().enumerate() {
                let topology = Topology::new(*rank, world, Sharding::Full, group).unwrap();
                prop_assert_eq!(topology.data_rank(), part);
            }
        }
    }
}
