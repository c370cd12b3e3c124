//! Access of a rank that computes some columns of scores to the micro-batches of its column group, and to the other columns.
//!
//! The C ranks of a column group compute different columns for the micro-batches of all of them. These are a branch of the tree
//! of sums ([`ordered`](crate::ordered)): data ranks `c, c + W/C, …` hold micro-batches of the numbers `c + t · W/C`, and
//! `t` is their number within the group.

use burn_tensor::{Tensor, TensorData};
use kernels::device::readback::read_back;

use crate::communicator::Communicator;
use crate::error::EngineError;
use crate::ordered;

/// The micro-batches of a column group, as one of its ranks sees them.
#[derive(Clone, Copy)]
pub struct ColumnGroup<'a> {
    comm: &'a Communicator,
    n_here: usize,
}

impl<'a> ColumnGroup<'a> {
    /// Describes a batch of which each rank holds `n_here` micro-batches.
    pub fn new(comm: &'a Communicator, n_here: usize) -> Self {
        Self { comm, n_here }
    }

    /// Returns the number of ranks in the group, C: the number of parts into which columns are divided.
    pub fn n_parts(&self) -> usize {
        self.comm.topology().column_group_size
    }

    /// Returns the number of this rank's part of the columns.
    pub fn part(&self) -> usize {
        self.comm.topology().column()
    }

    /// Returns the number of micro-batches of the group.
    pub fn n_group(&self) -> usize {
        self.n_here * self.n_parts()
    }

    /// Returns the number of micro-batches of the batch, N.
    pub fn n_micro_batches(&self) -> usize {
        self.n_here * self.comm.topology().world_size
    }

    /// Returns the number in the batch of micro-batch `t` of the group.
    pub fn number(&self, t: usize) -> usize {
        let topology = self.comm.topology();
        topology.column_peer() + t * topology.n_column_peers()
    }

    /// Returns the sum over all micro-batches of the batch, for this rank's columns; `values` holds the addends of the group's
    /// micro-batches, `[n]` each.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn sum(&self, what: &str, values: &[Tensor<1>]) -> Result<Tensor<1>, EngineError> {
        let here = ordered::fold(values.len(), &mut |t| values[t].clone(), &|a, b| a + b);
        let device = here.device();
        let values = read_back(here)?;
        let sum = self.comm.submit("sum", what, move |mesh| mesh.sum_over_column_peers(&values));
        let sum = self.comm.wait(sum)?;
        let len = sum.len();
        Ok(Tensor::from_data(TensorData::new(sum, [len]), &device))
    }

    /// Returns the values of all ranks of the group for their columns, by part; `mine` `[n]` are those of this rank.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn all_parts(&self, what: &str, mine: Tensor<1>) -> Result<Vec<Vec<f32>>, EngineError> {
        let values = read_back(mine)?;
        self.comm.wait(self.comm.submit("gather", what, move |mesh| mesh.gather_columns(&values)))
    }

    /// Gathers values of this rank's micro-batches for the whole group: `mine` has `[n]` of each, the result of each of the
    /// group's, in its order.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn all_micro_batches(&self, what: &str, mine: &[Tensor<1>]) -> Result<Vec<Vec<f32>>, EngineError> {
        let [n] = mine[0].dims();
        let parts = self.all_parts(what, Tensor::cat(mine.to_vec(), 0))?;
        let of_batch = |t: usize| {
            let (own, part) = (t / self.n_parts(), t % self.n_parts());
            parts[part][own * n..(own + 1) * n].to_vec()
        };
        Ok((0..self.n_group()).map(of_batch).collect())
    }

    /// Returns the sums over the group's ranks for this rank's micro-batches, `[n]` each; `by_batch` holds this rank's addends for
    /// each of the group's micro-batches.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn sum_own(&self, what: &str, by_batch: Vec<Tensor<1>>) -> Result<Vec<Tensor<1>>, EngineError> {
        let ([n], device) = (by_batch[0].dims(), by_batch[0].device());
        let of_part = |part: usize| (0..self.n_here).map(move |own| own * self.n_parts() + part);
        let order = (0..self.n_parts()).flat_map(of_part);
        let values = read_back(Tensor::cat(order.map(|t| by_batch[t].clone()).collect(), 0))?;
        let sum = self.comm.submit("sum", what, move |mesh| mesh.sum_scattered(&values));
        let sum = self.comm.wait(sum)?;
        let own = |values: &[f32]| Tensor::from_data(TensorData::new(values.to_vec(), [n]), &device);
        Ok(sum.chunks_exact(n).map(own).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use burn_tensor::Device;
    use kernels::device::host::to_host;

    use super::*;
    use crate::communicator::CommunicatorConfig;
    use crate::engine::{Engine, Local, LocalGroup};
    use crate::topology::{Sharding, Topology};

    /// Runs `f` on eight ranks, in shard groups of four and column groups of two.
    fn on_ranks<R: Send>(f: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
        let run = |engine: Local| {
            let topology = Topology::new(engine.rank(), 8, Sharding::Full, 4).unwrap();
            let topology = topology.with_column_group(2).unwrap();
            let config = CommunicatorConfig { topology, exact: true, deadline: Duration::from_secs(60) };
            let engine = Box::new(move || Ok(Box::new(engine) as Box<dyn Engine>));
            f(Communicator::start(config, engine).unwrap())
        };
        std::thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> =
                LocalGroup::ranks(8).into_iter().map(|engine| scope.spawn(move || run(engine))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn tensor(values: &[f32]) -> Tensor<1> {
        Tensor::from_floats(values, &Device::flex())
    }

    /// Each rank holds two micro-batches, whose only value is their number in the batch.
    #[test]
    fn ranks_see_the_micro_batches_of_their_group() {
        let found = on_ranks(|comm| {
            let (topology, peers) = (comm.topology(), ColumnGroup::new(&comm, 2));
            let own: Vec<usize> = (0..2).map(|own| own * 8 + topology.data_rank()).collect();
            let mine: Vec<Tensor<1>> = own.iter().map(|number| tensor(&[*number as f32])).collect();
            let all = peers.all_micro_batches("numbers", &mine).unwrap();
            let expected: Vec<Vec<f32>> =
                (0..peers.n_group()).map(|t| vec![peers.number(t) as f32]).collect();
            assert_eq!(all, expected);
            let by_batch: Vec<Tensor<1>> = all.iter().map(|values| tensor(values)).collect();
            // All ranks of a group add the same.
            let sums = peers.sum_own("numbers", by_batch.clone()).unwrap();
            let doubled: Vec<Vec<f32>> = own.iter().map(|number| vec![2.0 * *number as f32]).collect();
            assert_eq!(sums.into_iter().map(to_host).collect::<Vec<_>>(), doubled);
            let parts = peers.all_parts("parts", tensor(&[peers.part() as f32])).unwrap();
            assert_eq!(parts, [vec![0.0], vec![1.0]]);
            to_host(peers.sum("numbers", &by_batch).unwrap())
        });
        let sum_of_numbers = (0..16).sum::<usize>() as f32;
        assert_eq!(found, vec![vec![sum_of_numbers]; 8]);
    }
}
