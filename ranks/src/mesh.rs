//! Ranks that share a unit: shard groups of S ranks, and R replicas of them.
//!
//! ```text
//! W = S · R       rank = q · S + s        q: replica, s: index in the shard group
//! none   S = 1    everything on every rank; gradients are summed over all
//! grad   S = W    shards; the trained network's gathered weights are kept for the backward pass
//! full   S = W    shards; weights are gathered again in the backward pass
//! group  S < W    shards within neighboring ranks, sums over replicas
//! ```
//!
//! A unit whose output's columns are divided over C of the S ranks is gathered and summed by the S
//! / C ranks with the same columns, whose shards are neighbors ([`Extent::Columns`]).
//!
//! A gradient is summed within the shard group, then over replicas; all modes share this code.

use burn_tensor::Tensor;
use kernels::ops::cast;

use crate::engine::{Engine, Transfer};
use crate::error::EngineError;
use crate::ordered;
use crate::topology::{Extent, Topology};
use crate::wire::Wire;

/// The engines of a rank: all ranks, its shard group, its replicas.
pub struct Mesh {
    topology: Topology,
    world: Box<dyn Engine>,
    /// Engine of the shard group; `None` where the group is one rank, or all.
    group: Option<Box<dyn Engine>>,
    replicas: Option<Box<dyn Engine>>,
    /// Engines of ranks that divide columns; `None` where no rank does.
    columns: Option<ColumnEngines>,
    /// True if sums are taken in the order of [`ordered`], not in the engine's.
    exact: bool,
    /// Bytes and collectives counted so far.
    pub traffic: Traffic,
}

/// The engines of a rank that computes some columns of units.
struct ColumnEngines {
    /// Engine of the column group: a rank for each part of the columns.
    group: Box<dyn Engine>,
    /// Engine of all ranks with the same columns; `None` for one.
    peers: Option<Box<dyn Engine>>,
    /// Engine of the ranks of the shard group with the same columns; `None` for one, or where these
    /// are all of `peers`.
    shards: Option<Box<dyn Engine>>,
}

/// Bytes that a rank received from others, and the number of collectives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of gathered weights.
    pub gather_bytes: u64,
    /// Number of gathers of weights.
    pub n_gathers: u64,
    /// Bytes of summed gradients.
    pub reduce_bytes: u64,
    /// Number of sums of gradients.
    pub n_reduces: u64,
    /// Bytes exchanged within column groups.
    pub column_bytes: u64,
    /// Number of exchanges within column groups.
    pub n_column: u64,
    /// Bytes of everything else: statistics, norms, flags.
    pub other_bytes: u64,
    /// Number of other collectives.
    pub n_other: u64,
}

impl Traffic {
    /// Returns the traffic since `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            gather_bytes: self.gather_bytes - before.gather_bytes,
            n_gathers: self.n_gathers - before.n_gathers,
            reduce_bytes: self.reduce_bytes - before.reduce_bytes,
            n_reduces: self.n_reduces - before.n_reduces,
            column_bytes: self.column_bytes - before.column_bytes,
            n_column: self.n_column - before.n_column,
            other_bytes: self.other_bytes - before.other_bytes,
            n_other: self.n_other - before.n_other,
        }
    }
}

impl Mesh {
    /// Splits the engines of `topology` off `world`. All ranks call it.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn new(mut world: Box<dyn Engine>, topology: Topology, exact: bool) -> Result<Self, EngineError> {
        let mut group = None;
        if topology.group_size != 1 && topology.group_size != topology.world_size {
            group = Some(world.split(topology.replica(), topology.shard())?);
        }
        let mut replicas = None;
        if topology.n_replicas() != 1 && topology.n_replicas() != topology.world_size {
            replicas = Some(world.split(topology.shard(), topology.replica())?);
        }
        let mut columns = None;
        if topology.column_group_size != 1 {
            columns = Some(ColumnEngines::new(world.as_mut(), topology)?);
        }
        Ok(Self { topology, world, group, replicas, columns, exact, traffic: Traffic::default() })
    }

    /// Regroups the ranks. All ranks call it.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn regroup(&mut self, topology: Topology, exact: bool) -> Result<(), EngineError> {
        let Topology { rank, world_size, .. } = topology;
        let world = self.world.split(0, rank)?;
        debug_assert_eq!((world.rank(), world.world_size()), (rank, world_size));
        *self = Self::new(world, topology, exact)?;
        Ok(())
    }

    /// Returns the engine of all ranks.
    pub fn world(&mut self) -> &mut dyn Engine {
        self.world.as_mut()
    }

    /// Returns the engine of the ranks that hold the shards of `extent`.
    fn shard_engine(&mut self, extent: Extent) -> &mut dyn Engine {
        match (extent, &mut self.columns) {
            (Extent::Columns, Some(columns)) => columns.shard_engine(),
            _ => self.group.as_deref_mut().unwrap_or(self.world.as_mut()),
        }
    }

    /// Returns the engines of ranks that divide columns.
    ///
    /// # Panics
    /// If no rank divides columns: a bug in the step, which knows the topology.
    fn columns(&mut self) -> &mut ColumnEngines {
        self.columns.as_mut().expect("the ranks divide columns")
    }

    /// Gathers `extent` of a unit, `[S·n]` or `[S/C·n]`, of which this rank sends the shard `[n]`.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn gather(&mut self, mut shard: Transfer, extent: Extent) -> Result<Tensor<1>, EngineError> {
        let [n, all] = shard.lengths();
        self.traffic.gather_bytes += ((all - n) * shard.wire().bytes()) as u64;
        self.traffic.n_gathers += 1;
        self.shard_engine(extent).all_gather_tensor(&mut shard)?;
        Ok(shard.received())
    }

    /// Creates the first transfer of [`Mesh::reduce`] of `full`, the gradient of `extent` of a
    /// unit.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn first_transfer(
        full: Tensor<1>,
        wire: Wire,
        topology: Topology,
        extent: Extent,
        exact: bool,
        device_memory: bool,
    ) -> Result<Transfer, EngineError> {
        let [len] = full.dims();
        let n_shards = topology.n_shards(extent);
        if n_shards == 1 {
            return replica_transfer(full, wire, topology, device_memory);
        }
        let n_receive = if is_native_sum(wire, exact) { len / n_shards } else { len };
        Transfer::new(full, n_receive, wire, device_memory)
    }

    /// Returns this rank's shard of the sum of a buffer of `len` elements over all ranks that
    /// compute with the same `extent`; `first` is the transfer made by [`Mesh::first_transfer`].
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn reduce(
        &mut self,
        mut first: Transfer,
        len: usize,
        extent: Extent,
    ) -> Result<Tensor<1>, EngineError> {
        let topology = self.topology;
        let wire = first.wire();
        let n_shards = topology.n_shards(extent);
        let n = len / n_shards;
        self.traffic.n_reduces += 1;
        if n_shards > 1 {
            self.traffic.reduce_bytes += ((len - n) * wire.bytes()) as u64;
            let mine = if is_native_sum(wire, self.exact) {
                self.shard_engine(extent).reduce_scatter_tensor(&mut first)?;
                first.received()
            } else {
                self.shard_engine(extent).all_to_all_tensor(&mut first)?;
                let order: Vec<usize> = (0..n_shards).collect();
                ordered::sum_of_parts(first.received(), &order)
            };
            if topology.n_replicas() == 1 {
                return Ok(mine);
            }
            first = replica_transfer(mine, wire, topology, self.world.supports_device_tensors())?;
        }
        self.reduce_over_replicas(first, n)
    }

    /// Returns the sum over replicas of the shards of `n` elements that `exchange` sends; the sum
    /// is gathered in f32.
    fn reduce_over_replicas(&mut self, mut exchange: Transfer, n: usize) -> Result<Tensor<1>, EngineError> {
        let [padded, _] = exchange.lengths();
        let n_replicas = self.topology.n_replicas();
        let part = padded / n_replicas;
        let n_bytes = exchange.wire().bytes() + Wire::F32.bytes();
        self.traffic.reduce_bytes += ((n_replicas - 1) * part * n_bytes) as u64;
        let supports_device_tensors = self.world.supports_device_tensors();
        let replicas = self.replicas.as_deref_mut().unwrap_or(self.world.as_mut());
        replicas.all_to_all_tensor(&mut exchange)?;
        let order: Vec<usize> = (0..n_replicas).collect();
        let sum = ordered::sum_of_parts(exchange.received(), &order);
        let mut sum = Transfer::new(sum, padded, Wire::F32, supports_device_tensors)?;
        replicas.all_gather_tensor(&mut sum)?;
        let sum = sum.received();
        Ok(if padded == n { sum } else { sum.narrow(0, 0, n) })
    }

    /// Returns the sum of `values` over all ranks, in the order of their data ranks.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn sum(&mut self, values: &[f32]) -> Result<Vec<f32>, EngineError> {
        let order = self.topology.by_data_rank();
        self.count_other(2 * 4 * values.len().div_ceil(order.len()) * (order.len() - 1));
        ordered::all_sum(self.world.as_mut(), values, &order)
    }

    /// Gathers every rank's `values`, in the order of their data ranks.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn gather_parts(&mut self, values: &[f32]) -> Result<Vec<Vec<f32>>, EngineError> {
        let order = self.topology.by_data_rank();
        self.count_other(4 * values.len() * (order.len() - 1));
        let mut all = vec![0.0; values.len() * order.len()];
        self.world.all_gather(bytemuck::cast_slice(values), bytemuck::cast_slice_mut(&mut all))?;
        Ok(order.into_iter().map(|rank| all[rank * values.len()..][..values.len()].to_vec()).collect())
    }

    /// Gathers the `values` of the ranks of the column group, in the order of their columns.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn gather_columns(&mut self, values: &[f32]) -> Result<Vec<Vec<f32>>, EngineError> {
        let n_ranks = self.topology.column_group_size;
        self.count_column(4 * values.len() * (n_ranks - 1));
        let mut all = vec![0.0; values.len() * n_ranks];
        let group = &mut self.columns().group;
        group.all_gather(bytemuck::cast_slice(values), bytemuck::cast_slice_mut(&mut all))?;
        Ok((0..n_ranks).map(|rank| all[rank * values.len()..][..values.len()].to_vec()).collect())
    }

    /// Returns this rank's part of the sum of `values` over the ranks of the column group, in the
    /// order of their columns.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn sum_scattered(&mut self, values: &[f32]) -> Result<Vec<f32>, EngineError> {
        let n_ranks = self.topology.column_group_size;
        let n = values.len() / n_ranks;
        self.count_column(4 * n * (n_ranks - 1));
        let mut received = vec![0.0f32; values.len()];
        let group = &mut self.columns().group;
        group.all_to_all(bytemuck::cast_slice(values), bytemuck::cast_slice_mut(&mut received))?;
        let order: Vec<usize> = (0..n_ranks).collect();
        Ok(ordered::sum_of_slices(&received, &order))
    }

    /// Returns the sum of `values` over all ranks with the same columns, in the order of their data
    /// ranks.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn sum_over_column_peers(&mut self, values: &[f32]) -> Result<Vec<f32>, EngineError> {
        let n_ranks = self.topology.n_column_peers();
        if n_ranks > 1 {
            self.count_other(2 * 4 * values.len().div_ceil(n_ranks) * (n_ranks - 1));
        }
        match &mut self.columns().peers {
            Some(peers) => ordered::all_sum(peers.as_mut(), values, &(0..n_ranks).collect::<Vec<_>>()),
            None => Ok(values.to_vec()),
        }
    }

    /// Counts an exchange within the column group, of `bytes` bytes.
    fn count_column(&mut self, bytes: usize) {
        self.traffic.n_column += 1;
        self.traffic.column_bytes += bytes as u64;
    }

    /// Counts a collective of neither weights nor gradients, which moves `bytes` bytes.
    pub fn count_other(&mut self, bytes: usize) {
        self.traffic.n_other += 1;
        self.traffic.other_bytes += bytes as u64;
    }
}

impl ColumnEngines {
    /// Splits the engines off `world`. All ranks call it.
    fn new(world: &mut dyn Engine, topology: Topology) -> Result<Self, EngineError> {
        let column = topology.column();
        let peer = topology.column_peer();
        let group = world.split(peer, column)?;
        let mut peers = None;
        if topology.n_column_peers() != 1 {
            peers = Some(world.split(column, peer)?);
        }
        let mut shards = None;
        if topology.n_shards(Extent::Columns) != 1 && topology.n_replicas() != 1 {
            let color = topology.replica() * topology.column_group_size + column;
            shards = Some(world.split(color, topology.column_shard())?);
        }
        Ok(Self { group, peers, shards })
    }

    /// Returns the engine of the ranks that hold the shards of this rank's columns.
    ///
    /// # Panics
    /// If a single rank holds them: a bug in the step, which knows the topology.
    fn shard_engine(&mut self) -> &mut dyn Engine {
        let engine = self.shards.as_mut().or(self.peers.as_mut());
        engine.expect("several ranks hold the shards").as_mut()
    }
}

/// Returns true if the engine may sum in its own order. Only f32 is summed by engines: in bf16 the
/// result would differ from engine to engine.
fn is_native_sum(wire: Wire, exact: bool) -> bool {
    !exact && wire == Wire::F32
}

/// Creates the exchange of `mine` of `[n]` among replicas, padded to equal parts.
fn replica_transfer(
    mine: Tensor<1>,
    wire: Wire,
    topology: Topology,
    device_memory: bool,
) -> Result<Transfer, EngineError> {
    let [n] = mine.dims();
    let padded = n.next_multiple_of(topology.n_replicas());
    if padded == n {
        return Transfer::new(mine, padded, wire, device_memory);
    }
    let zeros = cast(Tensor::zeros([padded - n], &mine.device()), mine.dtype());
    Transfer::new(Tensor::cat(vec![mine, zeros], 0), padded, wire, device_memory)
}

#[cfg(test)]
mod tests {
    use burn_tensor::Device;

    use super::*;
    use crate::engine::{Local, LocalGroup};
    use crate::topology::Sharding;
    use kernels::device::host::to_host;

    /// Returns element `i` of the addend of data rank `rank`.
    fn addend(rank: usize, i: usize) -> f32 {
        ((rank * 7919 + i) as f32).sin() * 10f32.powi(rank as i32 % 4)
    }

    /// Returns the sum of element `i` over the addends of `n_ranks` ranks.
    fn sum_of_addends(n_ranks: usize, i: usize) -> f32 {
        ordered::fold(n_ranks, &mut |rank| addend(rank, i), &|a, b| a + b)
    }

    /// Reduces `n` elements on a rank of shard groups of `group_size` ranks. Returns the index of
    /// its shard, and the shard.
    fn reduced_shard(engine: Local, group_size: usize, n: usize) -> (usize, Vec<f32>) {
        let topology = Topology::new(engine.rank(), engine.world_size(), Sharding::Full, group_size).unwrap();
        let mut mesh = Mesh::new(Box::new(engine), topology, true).unwrap();
        let full: Vec<f32> = (0..n).map(|i| addend(topology.data_rank(), i)).collect();
        let full = Tensor::from_floats(full.as_slice(), &Device::flex());
        let first = Mesh::first_transfer(full, Wire::F32, topology, Extent::Whole, true, false).unwrap();
        (topology.shard(), to_host(mesh.reduce(first, n, Extent::Whole).unwrap()))
    }

    #[test]
    fn every_grouping_of_ranks_gives_the_same_bits() {
        let n = 128;
        let world_size = 8;
        let expected: Vec<f32> = (0..n).map(|i| sum_of_addends(world_size, i)).collect();
        for group in [1, 2, 4, 8] {
            let shards: Vec<(usize, Vec<f32>)> = std::thread::scope(|scope| {
                let threads: Vec<_> = LocalGroup::ranks(world_size)
                    .into_iter()
                    .map(|engine| scope.spawn(move || reduced_shard(engine, group, n)))
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            for (shard, values) in shards {
                let len = n / group;
                assert!(values == expected[shard * len..(shard + 1) * len], "groups of {group}");
            }
        }
    }

    /// Ranks with the same columns gather them, and sum their gradient in the order of the tree,
    /// over replicas too.
    #[test]
    fn columns_are_gathered_and_summed_by_their_ranks() {
        let world = 8;
        let n = 64;
        for (group_size, n_columns) in [(4, 2), (8, 2), (8, 8), (2, 2)] {
            std::thread::scope(|scope| {
                for engine in LocalGroup::ranks(world) {
                    scope.spawn(move || {
                        let rank = engine.rank();
                        let topology = Topology::new(rank, world, Sharding::Full, group_size).unwrap();
                        let topology = topology.with_column_group(n_columns).unwrap();
                        let extent = Extent::Columns;
                        let mut mesh = Mesh::new(Box::new(engine), topology, true).unwrap();
                        let n_shards = topology.n_shards(extent);
                        let first = topology.shard() * n;
                        let shard: Vec<f32> = (first..first + n).map(|i| i as f32).collect();
                        if n_shards > 1 {
                            let shard = Tensor::from_floats(shard.as_slice(), &Device::flex());
                            let shard = Transfer::new(shard, n_shards * n, Wire::F32, false).unwrap();
                            let first = topology.column() * n_shards * n;
                            let expected: Vec<f32> =
                                (first..first + n_shards * n).map(|i| i as f32).collect();
                            assert_eq!(to_host(mesh.gather(shard, extent).unwrap()), expected);
                        }
                        if n_shards * topology.n_replicas() > 1 {
                            let full: Vec<f32> =
                                (0..n_shards * n).map(|i| addend(topology.column_peer(), i)).collect();
                            let full = Tensor::from_floats(full.as_slice(), &Device::flex());
                            let first =
                                Mesh::first_transfer(full, Wire::F32, topology, extent, true, false).unwrap();
                            let sum = to_host(mesh.reduce(first, n_shards * n, extent).unwrap());
                            let n_peers = topology.n_column_peers();
                            let start = topology.column_shard() * n;
                            let expected: Vec<f32> =
                                (start..start + n).map(|i| sum_of_addends(n_peers, i)).collect();
                            assert_eq!(sum, expected, "{group_size} {n_columns}");
                        }
                    });
                }
            });
        }
    }

    /// A gradient that is bf16 already is padded to equal parts, and summed in f32.
    #[test]
    fn bf16_is_summed_over_replicas_that_do_not_divide_it() {
        let n = 64;
        let world = 3;
        std::thread::scope(|scope| {
            for engine in LocalGroup::ranks(world) {
                scope.spawn(move || {
                    let topology = Topology::new(engine.rank(), world, Sharding::None, 1).unwrap();
                    let mut mesh = Mesh::new(Box::new(engine), topology, true).unwrap();
                    let full = Tensor::<1>::full([n], 1.0, &Device::flex()).cast(Wire::Bf16.dtype());
                    let extent = Extent::Whole;
                    let first =
                        Mesh::first_transfer(full, Wire::Bf16, topology, extent, true, false).unwrap();
                    assert_eq!(to_host(mesh.reduce(first, n, extent).unwrap()), vec![3.0; n]);
                });
            }
        });
    }
}
