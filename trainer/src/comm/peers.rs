//! What a loss sees of the rest of the batch: its other parts, on this rank and on others.
//!
//! A global batch is N parts; position `p` is in part `p mod N`. Rank `r` of `W` holds the parts
//! `r, r + W, …`. Statistics over the batch are sums over parts, in an order that does not depend on W
//! ([`ordered`](crate::comm::ordered)).

use burn_tensor::{Tensor, TensorData};

use super::communicator::Comm;
use super::engine::{EngineError, Reduction};
use super::ordered;
use crate::device::readback::read_back;

/// The parts of a batch, as one rank sees them.
#[derive(Clone, Copy)]
pub struct Peers<'a> {
    comm: &'a Comm,
    n_here: usize,
}

impl<'a> Peers<'a> {
    /// A batch of which this rank holds `n_here` parts.
    pub fn new(comm: &'a Comm, n_here: usize) -> Self {
        Self { comm, n_here }
    }

    /// Parts of the batch, N.
    pub fn n_parts(&self) -> usize {
        self.n_here * self.comm.place().world_size
    }

    /// Position of image `i` of this rank's part `part` in the global batch.
    pub fn position(&self, part: usize, i: usize) -> usize {
        let place = self.comm.place();
        i * self.n_parts() + part * place.world_size + place.part()
    }

    /// The sum over all parts; `parts` are this rank's, `[n]` each.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn sum(&self, what: &str, parts: &[Tensor<1>]) -> Result<Tensor<1>, EngineError> {
        let here = ordered::fold(parts.len(), &mut |i| parts[i].clone(), &|a, b| a + b);
        if self.comm.place().world_size == 1 {
            return Ok(here);
        }
        let device = here.device();
        let sum = self.comm.sum(what, read_back(here)?)?;
        let len = sum.len();
        Ok(Tensor::from_data(TensorData::new(sum, [len]), &device))
    }

    /// The largest of the numbers of all parts, `[1]`; `parts` are this rank's.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn max(&self, what: &str, parts: Vec<Tensor<1>>) -> Result<Tensor<1>, EngineError> {
        let here = Tensor::cat(parts, 0).max();
        if self.comm.place().world_size == 1 {
            return Ok(here);
        }
        let device = here.device();
        let here = read_back(here)?.into_iter().map(f64::from).collect();
        let max = self.comm.all_reduce(what, here, Reduction::Max)?;
        Ok(Tensor::from_data(TensorData::from([max[0] as f32]), &device))
    }

    /// Rows of all parts in the order of the global batch, `[B, D]`; `parts` are this rank's, `[B / N, D]`
    /// each.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn gather(&self, what: &str, parts: &[Tensor<2>]) -> Result<Tensor<2>, EngineError> {
        let [b, d] = parts[0].dims();
        let device = parts[0].device();
        if self.comm.place().world_size == 1 {
            return Ok(Tensor::stack::<3>(parts.to_vec(), 1).reshape([b * self.n_here, d]));
        }
        let flat = parts.iter().map(|part| part.clone().reshape([b * d])).collect();
        let here = read_back(Tensor::cat(flat, 0))?;
        let ranks = self.comm.gather_parts(what, here)?;
        let n_ranks = ranks.len();
        let mut rows = Vec::with_capacity(b * self.n_parts() * d);
        for position in 0..b * self.n_parts() {
            let (i, number) = (position / self.n_parts(), position % self.n_parts());
            let (part, rank) = (number / n_ranks, number % n_ranks);
            let row = (part * b + i) * d;
            rows.extend_from_slice(&ranks[rank][row..row + d]);
        }
        Ok(Tensor::from_data(TensorData::new(rows, [b * self.n_parts(), d]), &device))
    }
}
