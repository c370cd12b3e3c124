//! Time of a collective: a latency, and the bytes of the busiest link over its bandwidth.

use super::Placement;

/// Interconnect of the ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fabric {
    /// Number of ranks on a node.
    pub ranks_per_node: usize,
    /// Bytes per second between ranks of a node, for each rank.
    pub local_bytes_per_s: f64,
    /// Bytes per second between nodes, for each node.
    pub node_bytes_per_s: f64,
    /// Latency of messages within a node.
    pub local_latency: Latency,
    /// Latency of messages between nodes.
    pub node_latency: Latency,
}

/// Time that a message takes beside that of its bytes. A library sends a short one at once, and a
/// long one when the receiver has agreed to it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Latency {
    /// Seconds of a message of less than [`LONG_MESSAGE_BYTES`].
    pub short_s: f64,
    /// Seconds of a longer message.
    pub long_s: f64,
}

/// Bytes from which on a message waits for an agreement: those of Open MPI over TCP
/// (`btl_tcp_eager_limit`, which includes a header).
pub const LONG_MESSAGE_BYTES: f64 = 65_536.0;

impl Latency {
    /// Returns the latency of a message of `bytes`, in seconds.
    fn message_s(self, bytes: f64) -> f64 {
        if bytes < LONG_MESSAGE_BYTES { self.short_s } else { self.long_s }
    }
}

/// Ranks of a collective, as they lie on nodes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Members {
    /// Number of ranks.
    size: usize,
    /// Ranks of the collective on one node.
    per_node: usize,
    /// Number of groups to which the ranks of a node belong. Each runs a collective of its own at
    /// the same time, over the same link.
    n_groups_on_node: usize,
}

impl Members {
    /// Returns the members of a collective of `size` ranks whose numbers differ by `stride`. The
    /// other ranks of the placement form groups of the same kind, whose collectives run at the same
    /// time.
    pub(super) fn new(size: usize, stride: usize, placement: &Placement, fabric: &Fabric) -> Self {
        Self::with_runs(1, size, stride, placement, fabric)
    }

    /// Returns the members of a collective of `n_runs` runs of `run` neighbors, whose first ranks
    /// are `stride` apart.
    pub(super) fn with_runs(
        run: usize,
        n_runs: usize,
        stride: usize,
        placement: &Placement,
        fabric: &Fabric,
    ) -> Self {
        let ranks_per_node = fabric.ranks_per_node.min(placement.world_size);
        let on_node = match ranks_per_node / stride {
            0 => run.min(ranks_per_node),
            n_runs => n_runs * run,
        };
        let size = run * n_runs;
        let per_node = on_node.clamp(1, run * n_runs);
        Self { size, per_node, n_groups_on_node: ranks_per_node.div_ceil(per_node) }
    }

    fn n_nodes(self) -> usize {
        self.size.div_ceil(self.per_node)
    }

    /// Returns the seconds after which every rank has all `bytes`, of which each has contributed a
    /// part, in a ring through the nodes: all bytes but a rank's own enter each node once, for all
    /// of its ranks.
    pub(super) fn gather_s(self, bytes: f64, fabric: &Fabric) -> f64 {
        if self.size < 2 {
            return 0.0;
        }
        let size = self.size as f64;
        let n_nodes = self.n_nodes() as f64;
        let moved = bytes * (size - 1.0) / size;
        let local_s = if self.per_node > 1 { moved / fabric.local_bytes_per_s } else { 0.0 };
        let node_s = match self.n_nodes() {
            1 => 0.0,
            _ => moved * self.n_groups_on_node as f64 / fabric.node_bytes_per_s,
        };
        // A ring passes every rank, a tree has the logarithm of their number: libraries take what
        // is faster.
        let local = fabric.local_latency.message_s(bytes / size);
        let node = fabric.node_latency.message_s(bytes / size);
        let ring = (self.size - self.n_nodes()) as f64 * local + (n_nodes - 1.0) * node;
        let tree = tree_levels(self.per_node) * local + tree_levels(self.n_nodes()) * node;
        local_s.max(node_s) + ring.min(tree)
    }

    /// Returns the seconds after which every rank has received its part of `bytes` from every other
    /// one. What goes to another node is sent by each rank and to each rank, and all ranks of a
    /// node share its link.
    pub(super) fn exchange_s(self, bytes: f64, fabric: &Fabric) -> f64 {
        if self.size < 2 {
            return 0.0;
        }
        let part = bytes / self.size as f64;
        let local_s = (self.per_node - 1) as f64 * part / fabric.local_bytes_per_s;
        let n_remote = (self.size - self.per_node) * self.per_node * self.n_groups_on_node;
        let node_s = n_remote as f64 * part / fabric.node_bytes_per_s;
        let latency = if self.n_nodes() > 1 { fabric.node_latency } else { fabric.local_latency };
        local_s.max(node_s) + latency.message_s(part)
    }

    /// Returns the seconds of a sum of `bytes` that all ranks get: an exchange and a gather.
    pub(super) fn sum_s(self, bytes: f64, fabric: &Fabric) -> f64 {
        self.exchange_s(bytes, fabric) + self.gather_s(bytes, fabric)
    }

    /// Returns the seconds of a sum of a few numbers.
    pub(super) fn small_sum_s(self, fabric: &Fabric) -> f64 {
        self.sum_s(0.0, fabric)
    }
}

/// Returns the number of levels of a tree of `n` members.
fn tree_levels(n: usize) -> f64 {
    (n as f64).log2().ceil()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sixteen ranks on two nodes, 1.6 GB: by hand.
    #[test]
    fn an_exchange_sends_more_between_nodes_than_a_gather() {
        let fabric = Fabric {
            ranks_per_node: 8,
            local_bytes_per_s: 100e9,
            node_bytes_per_s: 10e9,
            local_latency: Latency::default(),
            node_latency: Latency::default(),
        };
        let placement = Placement::one_image_each(16);
        let all = Members::new(16, 1, &placement, &fabric);
        // All bytes but a sixteenth enter a node once; each of its ranks receives half of the bytes
        // from the other node.
        assert!((all.gather_s(1.6e9, &fabric) - 0.15).abs() < 1e-9);
        assert!((all.exchange_s(1.6e9, &fabric) - 8.0 * 0.08).abs() < 1e-9);
        // Replicas of groups that are whole nodes: each rank has one partner, and all share the
        // link.
        let replicas = Members::new(2, 8, &placement, &fabric);
        assert!((replicas.exchange_s(0.2e9, &fabric) - 8.0 * 0.01).abs() < 1e-9);
        assert!((replicas.gather_s(0.2e9, &fabric) - 8.0 * 0.01).abs() < 1e-9);
        // Ranks with the same of two parts of columns in shard groups of sixteen: the eight of a
        // node.
        let peers = Members::with_runs(8, 1, 16, &placement, &fabric);
        assert_eq!((peers.n_nodes(), peers.n_groups_on_node), (1, 1));
        // In shard groups of eight: four neighbors on each of two nodes, two such groups to a node.
        let peers = Members::with_runs(4, 2, 8, &placement, &fabric);
        assert_eq!((peers.n_nodes(), peers.n_groups_on_node), (2, 2));
    }

    /// Two ranks on two nodes: a gather is one message, a sum two of them.
    #[test]
    fn long_messages_have_another_latency() {
        let fabric = Fabric {
            ranks_per_node: 1,
            local_bytes_per_s: 1e12,
            node_bytes_per_s: 1e12,
            local_latency: Latency::default(),
            node_latency: Latency { short_s: 1.0, long_s: 3.0 },
        };
        let both = Members::new(2, 1, &Placement::one_image_each(2), &fabric);
        let short = 2.0 * LONG_MESSAGE_BYTES - 8.0;
        assert_eq!(both.gather_s(short, &fabric).round(), 1.0);
        assert_eq!(both.sum_s(short, &fabric).round(), 2.0);
        let long = 2.0 * LONG_MESSAGE_BYTES;
        assert_eq!(both.gather_s(long, &fabric).round(), 3.0);
        assert_eq!(both.sum_s(long, &fabric).round(), 6.0);
        assert_eq!(both.small_sum_s(&fabric), 2.0);
    }
}
