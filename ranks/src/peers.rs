//! Access of a micro-batch to the rest of the batch, on this rank and on others.
//!
//! A global batch is N micro-batches; position `p` is in micro-batch `p mod N`. Data rank `r` of
//! `W` holds micro-batches `r, r + W, …`. Statistics over the batch are sums over micro-batches, in
//! an order that does not depend on W ([`ordered`](crate::ordered)).

use burn_tensor::{Tensor, TensorData};
use kernels::device::readback::read_back;

use crate::communicator::Communicator;
use crate::engine::Reduction;
use crate::error::EngineError;
use crate::ordered;

/// The micro-batches of a batch, as one rank sees them.
#[derive(Clone, Copy)]
pub struct Peers<'a> {
    comm: &'a Communicator,
    n_local: usize,
}

impl<'a> Peers<'a> {
    /// Describes a batch of which this rank holds `n_local` micro-batches.
    pub fn new(comm: &'a Communicator, n_local: usize) -> Self {
        Self { comm, n_local }
    }

    /// Returns the number of micro-batches of the batch, N.
    pub fn n_micro_batches(&self) -> usize {
        self.n_local * self.comm.topology().world_size
    }

    /// Returns the position of image `i` of this rank's micro-batch `index` in the global batch.
    pub fn position(&self, index: usize, i: usize) -> usize {
        let topology = self.comm.topology();
        i * self.n_micro_batches() + index * topology.world_size + topology.data_rank()
    }

    /// Returns the positions in the global batch of the `n_images` images of each of this rank's
    /// micro-batches.
    pub fn positions(&self, n_images: usize) -> Vec<Vec<usize>> {
        (0..self.n_local).map(|index| (0..n_images).map(|i| self.position(index, i)).collect()).collect()
    }

    /// Returns the sum over all micro-batches; `values` holds the addends of this rank's
    /// micro-batches, `[n]` each.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn sum(&self, subject: &str, values: &[Tensor<1>]) -> Result<Tensor<1>, EngineError> {
        let local = ordered::fold(values.len(), &mut |i| values[i].clone(), &|a, b| a + b);
        self.sum_over_ranks(subject, local)
    }

    /// Returns the sum over all micro-batches of large addends: `addend` computes that of this
    /// rank's micro-batch of the given index, `[n]`, when it is added, so that only log₂ of the
    /// number of micro-batches are in memory at a time.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn sum_computed(
        &self,
        subject: &str,
        addend: &mut impl FnMut(usize) -> Tensor<1>,
    ) -> Result<Tensor<1>, EngineError> {
        let local = ordered::fold(self.n_local, addend, &|a, b| a + b);
        self.sum_over_ranks(subject, local)
    }

    /// Returns the sum over ranks of `local`, the sum over the micro-batches of this rank, `[n]`.
    fn sum_over_ranks(&self, subject: &str, local: Tensor<1>) -> Result<Tensor<1>, EngineError> {
        if self.comm.topology().world_size == 1 {
            return Ok(local);
        }
        let device = local.device();
        let sum = self.comm.sum(subject, read_back(local)?)?;
        let len = sum.len();
        Ok(Tensor::from_data(TensorData::new(sum, [len]), &device))
    }

    /// Returns the sum over ranks of `n_local`, a count already in host memory. On one rank this
    /// does not wait for the device.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn sum_counts(&self, subject: &str, n_local: usize) -> Result<usize, EngineError> {
        if self.comm.topology().world_size == 1 {
            return Ok(n_local);
        }
        // Exact in f64 up to 2^53.
        let n = self.comm.all_reduce(subject, vec![n_local as f64], Reduction::Sum)?;
        Ok(n[0] as usize)
    }

    /// Returns the largest number over all micro-batches, `[1]`; `values` holds those of this
    /// rank's micro-batches.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn max(&self, subject: &str, values: Vec<Tensor<1>>) -> Result<Tensor<1>, EngineError> {
        let local = Tensor::cat(values, 0).max();
        if self.comm.topology().world_size == 1 {
            return Ok(local);
        }
        let device = local.device();
        let local = read_back(local)?.into_iter().map(f64::from).collect();
        let max = self.comm.all_reduce(subject, local, Reduction::Max)?;
        Ok(Tensor::from_data(TensorData::from([max[0] as f32]), &device))
    }

    /// Gathers the rows of all micro-batches in the order of the global batch, `[B, D]`; `rows`
    /// holds those of this rank's micro-batches, `[B / N, D]` each.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn gather(&self, subject: &str, rows: &[Tensor<2>]) -> Result<Tensor<2>, EngineError> {
        let [b, d] = rows[0].dims();
        let device = rows[0].device();
        if self.comm.topology().world_size == 1 {
            return Ok(Tensor::stack::<3>(rows.to_vec(), 1).reshape([b * self.n_local, d]));
        }
        let flat = rows.iter().map(|rows| rows.clone().reshape([b * d])).collect();
        let local = read_back(Tensor::cat(flat, 0))?;
        let ranks = self.comm.gather_parts(subject, local)?;
        let n_ranks = ranks.len();
        let mut all = Vec::with_capacity(b * self.n_micro_batches() * d);
        for position in 0..b * self.n_micro_batches() {
            let i = position / self.n_micro_batches();
            let index = position % self.n_micro_batches();
            let local_index = index / n_ranks;
            let rank = index % n_ranks;
            let row = (local_index * b + i) * d;
            all.extend_from_slice(&ranks[rank][row..row + d]);
        }
        Ok(Tensor::from_data(TensorData::new(all, [b * self.n_micro_batches(), d]), &device))
    }
}
