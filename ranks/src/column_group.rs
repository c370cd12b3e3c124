//! Access of a rank that computes some columns of scores to the micro-batches of its column group,
//! and to the other columns.
//!
//! The C ranks of a column group compute different columns for the micro-batches of all of them.
//! These micro-batches are a branch of the tree of sums ([`ordered`](crate::ordered)): data ranks
//! `c, c + W/C, …` hold the micro-batches with indices `c + t · W/C`, and `t` is their index within
//! the group.

use burn_tensor::{Tensor, TensorData};
use kernels::device::readback::read_back;

use crate::communicator::Communicator;
use crate::error::EngineError;
use crate::ordered;

/// The micro-batches of a column group, as one of its ranks sees them.
#[derive(Clone, Copy)]
pub struct ColumnGroup<'a> {
    comm: &'a Communicator,
    n_local: usize,
}

impl<'a> ColumnGroup<'a> {
    /// Describes a batch of which each rank holds `n_local` micro-batches.
    pub fn new(comm: &'a Communicator, n_local: usize) -> Self {
        Self { comm, n_local }
    }

    /// Returns the number of ranks in the group, C: the number of parts into which columns are
    /// divided.
    pub fn n_parts(&self) -> usize {
        self.comm.topology().column_group_size
    }

    /// Returns the index of this rank's part of the columns.
    pub fn part(&self) -> usize {
        self.comm.topology().column()
    }

    /// Returns the number of micro-batches of the group.
    pub fn n_group(&self) -> usize {
        self.n_local * self.n_parts()
    }

    /// Returns the number of micro-batches of the batch, N.
    pub fn n_micro_batches(&self) -> usize {
        self.n_local * self.comm.topology().world_size
    }

    /// Returns the index in the batch of micro-batch `t` of the group.
    pub fn global_index(&self, t: usize) -> usize {
        let topology = self.comm.topology();
        topology.column_peer() + t * topology.n_column_peers()
    }

    /// Returns the sum over all micro-batches of the batch, for this rank's columns; `values` holds
    /// the addends of the group's micro-batches, `[n]` each.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn sum(&self, subject: &str, values: &[Tensor<1>]) -> Result<Tensor<1>, EngineError> {
        let local = ordered::fold(values.len(), &mut |t| values[t].clone(), &|a, b| a + b);
        let device = local.device();
        let values = read_back(local)?;
        let sum = self.comm.submit("sum", subject, move |mesh| mesh.sum_over_column_peers(&values));
        let sum = self.comm.wait(sum)?;
        let len = sum.len();
        Ok(Tensor::from_data(TensorData::new(sum, [len]), &device))
    }

    /// Returns the values of all ranks of the group for their columns, by part; `mine` `[n]` are
    /// those of this rank.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn all_parts(&self, subject: &str, mine: Tensor<1>) -> Result<Vec<Vec<f32>>, EngineError> {
        let values = read_back(mine)?;
        self.comm.wait(self.comm.submit("gather", subject, move |mesh| mesh.gather_columns(&values)))
    }

    /// Gathers the values of the micro-batches of all ranks of the group. `mine` holds those of
    /// this rank's micro-batches, and `n_values` the number of values of each of the group's
    /// micro-batches. Returns the values of each of the group's micro-batches, in their order.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn all_micro_batches(
        &self,
        subject: &str,
        mine: &[Tensor<1>],
        n_values: &[usize],
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let n_mine: usize = mine.iter().map(|values| values.dims()[0]).sum();
        let mut padded = mine.to_vec();
        push_zeros(&mut padded, self.padded_len(n_values) - n_mine);
        let parts = self.all_parts(subject, Tensor::cat(padded, 0))?;
        let mut offsets = vec![0; self.n_parts()];
        let mut gathered = Vec::with_capacity(n_values.len());
        for (t, n) in n_values.iter().enumerate() {
            let part = t % self.n_parts();
            let start = offsets[part];
            offsets[part] += n;
            gathered.push(parts[part][start..start + n].to_vec());
        }
        Ok(gathered)
    }

    /// Returns the sums over the group's ranks for this rank's micro-batches; `by_batch` holds this
    /// rank's addends for each of the group's micro-batches.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn reduce_scatter(
        &self,
        subject: &str,
        by_batch: Vec<Tensor<1>>,
    ) -> Result<Vec<Tensor<1>>, EngineError> {
        let n_values: Vec<usize> = by_batch.iter().map(|values| values.dims()[0]).collect();
        let padded_len = self.padded_len(&n_values);
        let device = by_batch[0].device();
        let mut padded = Vec::new();
        for part in 0..self.n_parts() {
            let mut len = 0;
            for t in self.part_micro_batches(part) {
                padded.push(by_batch[t].clone());
                len += n_values[t];
            }
            push_zeros(&mut padded, padded_len - len);
        }
        let values = read_back(Tensor::cat(padded, 0))?;
        let sum = self.comm.submit("sum", subject, move |mesh| mesh.sum_scattered(&values));
        let sum = self.comm.wait(sum)?;
        let mut start = 0;
        let mut sums = Vec::new();
        for t in self.part_micro_batches(self.part()) {
            let n = n_values[t];
            let values = sum[start..start + n].to_vec();
            sums.push(Tensor::from_data(TensorData::new(values, [n]), &device));
            start += n;
        }
        Ok(sums)
    }

    /// Returns the indices within the group of the micro-batches of the rank that computes part
    /// `part`.
    pub fn part_micro_batches(&self, part: usize) -> impl Iterator<Item = usize> + Clone + use<> {
        (part..self.n_group()).step_by(self.n_parts())
    }

    /// Returns the largest number of values of a rank, to which the parts of all ranks are padded;
    /// `n_values` holds the number of values of each of the group's micro-batches.
    fn padded_len(&self, n_values: &[usize]) -> usize {
        (0..self.n_parts())
            .map(|part| self.part_micro_batches(part).map(|t| n_values[t]).sum())
            .max()
            .unwrap_or_default()
    }
}

/// Appends a tensor of `n` zeros to `values`, unless `n` is 0. `values` is not empty.
fn push_zeros(values: &mut Vec<Tensor<1>>, n: usize) {
    if n > 0 {
        let zeros = Tensor::zeros([n], &values[0].device());
        values.push(zeros);
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
        std::thread::scope(|scope| {
            let f = &f;
            let threads: Vec<_> = LocalGroup::ranks(8)
                .into_iter()
                .map(|engine| scope.spawn(move || f(start(engine))))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn start(engine: Local) -> Communicator {
        let topology = Topology::new(engine.rank(), 8, Sharding::Full, 4).unwrap();
        let topology = topology.with_column_group(2).unwrap();
        let config = CommunicatorConfig { topology, exact: true, deadline: Duration::from_secs(60) };
        let engine = Box::new(move || Ok(Box::new(engine) as Box<dyn Engine>));
        Communicator::start(config, engine).unwrap()
    }

    /// Returns the values of the micro-batch `index`.
    fn values(index: usize) -> Vec<f32> {
        vec![index as f32; index % 3 + 1]
    }

    fn tensor(values: &[f32]) -> Tensor<1> {
        Tensor::from_floats(values, &Device::flex())
    }

    /// Each rank holds two micro-batches. The values of each are its index in the batch; there are
    /// as many as that index modulo 3, plus one.
    #[test]
    fn ranks_see_the_micro_batches_of_their_group() {
        let sums = on_ranks(|comm| {
            let topology = comm.topology();
            let peers = ColumnGroup::new(&comm, 2);
            let indices: Vec<usize> = (0..2).map(|i| i * 8 + topology.data_rank()).collect();
            let mine: Vec<Tensor<1>> = indices.iter().map(|index| tensor(&values(*index))).collect();
            let expected: Vec<Vec<f32>> =
                (0..peers.n_group()).map(|t| values(peers.global_index(t))).collect();
            let n_values: Vec<usize> = expected.iter().map(Vec::len).collect();
            let all = peers.all_micro_batches("numbers", &mine, &n_values).unwrap();
            assert_eq!(all, expected);
            let by_batch: Vec<Tensor<1>> = all.iter().map(|values| tensor(values)).collect();
            // Both ranks of a group add the same values.
            let sums = peers.reduce_scatter("numbers", by_batch).unwrap();
            let mut doubled: Vec<Vec<f32>> = indices.iter().map(|index| values(*index)).collect();
            doubled.iter_mut().flatten().for_each(|value| *value *= 2.0);
            assert_eq!(sums.into_iter().map(to_host).collect::<Vec<_>>(), doubled);
            let parts = peers.all_parts("parts", tensor(&[peers.part() as f32])).unwrap();
            assert_eq!(parts, [vec![0.0], vec![1.0]]);
            let firsts: Vec<Tensor<1>> = all.iter().map(|values| tensor(&values[..1])).collect();
            to_host(peers.sum("numbers", &firsts).unwrap())
        });
        let sum_of_numbers = (0..16).sum::<usize>() as f32;
        assert_eq!(sums, vec![vec![sum_of_numbers]; 8]);
    }
}
