//! Access of a rank that computes some columns of scores to the micro-batches of its column group,
//! and to the other columns.
//!
//! The C ranks of a column group compute different columns for the micro-batches of all of them.
//! These are a branch of the tree of sums ([`ordered`](crate::ordered)): data ranks `c, c + W/C, …`
//! hold micro-batches of the numbers `c + t · W/C`, and `t` is their number within the group.

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

    /// Returns the number of ranks in the group, C: the number of parts into which columns are
    /// divided.
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

    /// Returns the sum over all micro-batches of the batch, for this rank's columns; `values` holds
    /// the addends of the group's micro-batches, `[n]` each.
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

    /// Returns the values of all ranks of the group for their columns, by part; `mine` `[n]` are
    /// those of this rank.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn all_parts(&self, what: &str, mine: Tensor<1>) -> Result<Vec<Vec<f32>>, EngineError> {
        let values = read_back(mine)?;
        self.comm.wait(self.comm.submit("gather", what, move |mesh| mesh.gather_columns(&values)))
    }

    /// Gathers values of this rank's micro-batches for the whole group. `mine` are those of this
    /// rank's; `n_values` says how many each of the group's has. Returns those of each of the
    /// group's, in its order.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn all_micro_batches(
        &self,
        what: &str,
        mine: &[Tensor<1>],
        n_values: &[usize],
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let padding = self.padded(n_values) - mine.iter().map(|values| values.dims()[0]).sum::<usize>();
        let device = mine[0].device();
        let padding = (padding > 0).then(|| Tensor::zeros([padding], &device));
        let parts = self.all_parts(what, Tensor::cat(mine.iter().cloned().chain(padding).collect(), 0))?;
        let mut starts = vec![0; self.n_parts()];
        Ok(n_values
            .iter()
            .enumerate()
            .map(|(t, n)| {
                let part = t % self.n_parts();
                starts[part] += n;
                parts[part][starts[part] - n..starts[part]].to_vec()
            })
            .collect())
    }

    /// Returns the sums over the group's ranks for this rank's micro-batches; `by_batch` holds this
    /// rank's addends for each of the group's micro-batches.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn reduce_scatter(
        &self,
        what: &str,
        by_batch: Vec<Tensor<1>>,
    ) -> Result<Vec<Tensor<1>>, EngineError> {
        let n_values: Vec<usize> = by_batch.iter().map(|values| values.dims()[0]).collect();
        let padded = self.padded(&n_values);
        let device = by_batch[0].device();
        let of_part = |part: usize| -> Vec<Tensor<1>> {
            let own = self.part_micro_batches(part);
            let padding = padded - own.clone().map(|t| n_values[t]).sum::<usize>();
            let padding = (padding > 0).then(|| Tensor::zeros([padding], &device));
            own.map(|t| by_batch[t].clone()).chain(padding).collect()
        };
        let values = read_back(Tensor::cat((0..self.n_parts()).flat_map(of_part).collect(), 0))?;
        let sum = self.comm.submit("sum", what, move |mesh| mesh.sum_scattered(&values));
        let sum = self.comm.wait(sum)?;
        let mut start = 0;
        Ok(self
            .part_micro_batches(self.part())
            .map(|t: usize| {
                let n = n_values[t];
                start += n;
                Tensor::from_data(TensorData::new(sum[start - n..start].to_vec(), [n]), &device)
            })
            .collect())
    }

    /// Returns the numbers within the group of the micro-batches of the rank that computes part
    /// `part`.
    pub fn part_micro_batches(&self, part: usize) -> impl Iterator<Item = usize> + Clone + use<> {
        (part..self.n_group()).step_by(self.n_parts())
    }

    /// Returns the largest number of values of a rank, given those of each of the group's
    /// micro-batches: what is exchanged is as long for all ranks.
    fn padded(&self, n_values: &[usize]) -> usize {
        (0..self.n_parts())
            .map(|part: usize| self.part_micro_batches(part).map(|t| n_values[t]).sum())
            .max()
            .unwrap_or_default()
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

    /// Each rank holds two micro-batches. Each has its number in the batch as values, as many as
    /// that number modulo 3, and one more.
    #[test]
    fn ranks_see_the_micro_batches_of_their_group() {
        let values = |number: usize| vec![number as f32; number % 3 + 1];
        let found = on_ranks(|comm| {
            let topology = comm.topology();
            let peers = ColumnGroup::new(&comm, 2);
            let own: Vec<usize> = (0..2).map(|own| own * 8 + topology.data_rank()).collect();
            let mine: Vec<Tensor<1>> = own.iter().map(|number| tensor(&values(*number))).collect();
            let expected: Vec<Vec<f32>> = (0..peers.n_group()).map(|t| values(peers.number(t))).collect();
            let n_values: Vec<usize> = expected.iter().map(Vec::len).collect();
            let all = peers.all_micro_batches("numbers", &mine, &n_values).unwrap();
            assert_eq!(all, expected);
            let by_batch: Vec<Tensor<1>> = all.iter().map(|values| tensor(values)).collect();
            // All ranks of a group add the same.
            let sums = peers.reduce_scatter("numbers", by_batch).unwrap();
            let doubled: Vec<Vec<f32>> =
                own.iter().map(|number| values(*number).iter().map(|value| 2.0 * value).collect()).collect();
            assert_eq!(sums.into_iter().map(to_host).collect::<Vec<_>>(), doubled);
            let parts = peers.all_parts("parts", tensor(&[peers.part() as f32])).unwrap();
            assert_eq!(parts, [vec![0.0], vec![1.0]]);
            let numbers: Vec<Tensor<1>> = all.iter().map(|values| tensor(&values[..1])).collect();
            to_host(peers.sum("numbers", &numbers).unwrap())
        });
        let sum_of_numbers = (0..16).sum::<usize>() as f32;
        assert_eq!(found, vec![vec![sum_of_numbers]; 8]);
    }
}
