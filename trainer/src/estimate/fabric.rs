//! Collectives: their bytes, and their time, which is a latency and the bytes of the busiest link
//! over its bandwidth.

use super::placed::F32;

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

/// A collective.
#[derive(Clone, Copy)]
pub(super) struct Transfer {
    pub(super) pattern: Pattern,
    pub(super) members: Members,
    pub(super) bytes: f64,
}

/// What happens to the bytes of a collective.
#[derive(Clone, Copy)]
pub(super) enum Pattern {
    /// Every rank gets all of them, of which each has contributed a part.
    Gather,
    /// Every rank gets its part of the bytes of every other one.
    Exchange,
    /// They are summed: an exchange, and a gather of the sums.
    Sum,
    /// They are a few numbers, which are summed: only messages take time.
    Numbers,
}

/// Ranks of a collective, in runs of neighbors. The other ranks form groups of the same kind, whose
/// collectives run at the same time.
#[derive(Clone, Copy)]
pub(super) struct Members {
    /// Number of ranks.
    pub(super) n_ranks: usize,
    /// Number of ranks in a run.
    pub(super) run: usize,
    /// Difference between the numbers of the first ranks of one run and the next.
    pub(super) stride: usize,
}

impl Members {
    /// Returns a group of neighbors.
    pub(super) fn neighbors(n_ranks: usize) -> Self {
        Self { n_ranks, run: 1, stride: 1 }
    }
}

impl Transfer {
    /// Returns the bytes that a rank receives.
    pub(super) fn received_bytes(&self) -> f64 {
        let n_ranks = self.members.n_ranks as f64;
        let from_others = self.bytes * (n_ranks - 1.0) / n_ranks;
        match self.pattern {
            Pattern::Gather | Pattern::Exchange => from_others,
            // Each rank adds up an equal number of values.
            Pattern::Sum => 2.0 * F32 * (self.bytes / F32 / n_ranks).ceil() * (n_ranks - 1.0),
            Pattern::Numbers if n_ranks > 1.0 => self.bytes,
            Pattern::Numbers => 0.0,
        }
    }
}

impl Fabric {
    /// Returns a fabric whose links all have `gb_s` and `latency_s`.
    #[cfg(test)]
    pub(super) fn uniform(ranks_per_node: usize, gb_s: f64, latency_s: f64) -> Self {
        let bytes_per_s = gb_s * 1e9;
        let latency = Latency { short_s: latency_s, long_s: latency_s };
        Self {
            ranks_per_node,
            local_bytes_per_s: bytes_per_s,
            node_bytes_per_s: bytes_per_s,
            local_latency: latency,
            node_latency: latency,
        }
    }

    /// Returns the seconds of a collective. The fabric has no more ranks on a node than there are.
    pub(super) fn seconds(&self, transfer: &Transfer) -> f64 {
        let Members { n_ranks, run, stride } = transfer.members;
        if n_ranks < 2 {
            return 0.0;
        }
        let on_node = match self.ranks_per_node / stride {
            0 => run.min(self.ranks_per_node),
            n_runs => n_runs * run,
        };
        let per_node = on_node.clamp(1, n_ranks);
        let n_nodes = n_ranks.div_ceil(per_node);
        // Groups to which the ranks of a node belong share its link.
        let n_groups = self.ranks_per_node.div_ceil(per_node);
        let bytes = if let Pattern::Numbers = transfer.pattern { 0.0 } else { transfer.bytes };
        let part_bytes = bytes / n_ranks as f64;
        let local_latency_s = self.local_latency.message_s(part_bytes);
        let node_latency_s = self.node_latency.message_s(part_bytes);
        // What goes to another node in an exchange is sent by each rank and to each rank.
        let local_s = (per_node - 1) as f64 * part_bytes / self.local_bytes_per_s;
        let n_remote = (n_ranks - per_node) * per_node * n_groups;
        let node_s = n_remote as f64 * part_bytes / self.node_bytes_per_s;
        let latency_s = if n_nodes > 1 { node_latency_s } else { local_latency_s };
        let exchange_s = local_s.max(node_s) + latency_s;
        // In a gather, a ring through the nodes, all parts but a rank's own enter each node once,
        // for all of its ranks.
        let moved_bytes = part_bytes * (n_ranks - 1) as f64;
        let local_s = if per_node > 1 { moved_bytes / self.local_bytes_per_s } else { 0.0 };
        let node_bytes = if n_nodes > 1 { moved_bytes * n_groups as f64 } else { 0.0 };
        let node_s = node_bytes / self.node_bytes_per_s;
        // A ring passes every rank, a tree has the logarithm of their number: libraries take what
        // is faster.
        let ring_s = (n_ranks - n_nodes) as f64 * local_latency_s + (n_nodes - 1) as f64 * node_latency_s;
        let tree_s = tree_levels(per_node) * local_latency_s + tree_levels(n_nodes) * node_latency_s;
        let gather_s = local_s.max(node_s) + ring_s.min(tree_s);
        match transfer.pattern {
            Pattern::Gather => gather_s,
            Pattern::Exchange => exchange_s,
            Pattern::Sum | Pattern::Numbers => exchange_s + gather_s,
        }
    }
}

impl Latency {
    /// Returns the latency of a message of `bytes`, in seconds.
    fn message_s(self, bytes: f64) -> f64 {
        if bytes < LONG_MESSAGE_BYTES { self.short_s } else { self.long_s }
    }
}

/// Returns the number of levels of a tree of `n` members.
fn tree_levels(n: usize) -> f64 {
    (n as f64).log2().ceil()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_seconds(fabric: &Fabric, pattern: Pattern, members: Members, bytes: f64, expected: f64) {
        let seconds = fabric.seconds(&Transfer { pattern, members, bytes });
        assert!((seconds - expected).abs() < 1e-4 * expected, "{seconds} s, expected {expected}");
    }

    /// Sixteen ranks on two nodes, 0.1 GB of each: by hand.
    #[test]
    fn an_exchange_sends_more_between_nodes_than_a_gather() {
        let fabric = Fabric { local_bytes_per_s: 100e9, ..Fabric::uniform(8, 10.0, 0.0) };
        let all = Members::neighbors(16);
        // All bytes but a sixteenth enter a node once; each of its ranks receives half of the bytes
        // from the other node.
        assert_seconds(&fabric, Pattern::Gather, all, 1.6e9, 0.15);
        assert_seconds(&fabric, Pattern::Exchange, all, 1.6e9, 8.0 * 0.08);
        // Replicas of groups that are whole nodes: each rank has one partner, and all share the
        // link.
        let replicas = Members { n_ranks: 2, run: 1, stride: 8 };
        assert_seconds(&fabric, Pattern::Exchange, replicas, 0.2e9, 8.0 * 0.01);
        assert_seconds(&fabric, Pattern::Gather, replicas, 0.2e9, 8.0 * 0.01);
        // Ranks with the same of two parts of columns in shard groups of sixteen: the eight of a
        // node.
        let peers = Members { n_ranks: 8, run: 8, stride: 16 };
        assert_seconds(&fabric, Pattern::Gather, peers, 0.8e9, 0.007);
        assert_seconds(&fabric, Pattern::Exchange, peers, 0.8e9, 0.007);
        // In shard groups of eight: four neighbors on each of two nodes, two such groups to a node.
        let peers = Members { n_ranks: 8, run: 4, stride: 8 };
        assert_seconds(&fabric, Pattern::Gather, peers, 0.8e9, 2.0 * 0.07);
        assert_seconds(&fabric, Pattern::Exchange, peers, 0.8e9, 2.0 * 4.0 * 0.04);
    }

    /// Two ranks on two nodes: a gather is one message, a sum two of them.
    #[test]
    fn long_messages_have_another_latency() {
        let node_latency = Latency { short_s: 1.0, long_s: 3.0 };
        let fabric = Fabric { node_latency, ..Fabric::uniform(1, 1000.0, 0.0) };
        let both = Members::neighbors(2);
        let long = 2.0 * LONG_MESSAGE_BYTES;
        assert_seconds(&fabric, Pattern::Gather, both, long - 8.0, 1.0);
        assert_seconds(&fabric, Pattern::Sum, both, long - 8.0, 2.0);
        assert_seconds(&fabric, Pattern::Gather, both, long, 3.0);
        assert_seconds(&fabric, Pattern::Sum, both, long, 6.0);
        assert_seconds(&fabric, Pattern::Numbers, both, 8.0, 2.0);
    }
}
