//! Rows over prototypes, by micro-batch: scores or targets of all views, or of masked cells, whose
//! number varies between micro-batches.

use burn_tensor::{Device, Tensor};
use kernels::ops::column_sums;

/// Rows `[B, V, K]` of the micro-batches that a rank scores. Targets may have one more column.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    by_batch: Vec<Option<Tensor<3>>>,
    n: usize,
    n_prototypes: usize,
    device: Device,
}

impl Rows {
    /// Creates rows from micro-batches that have the same number of rows on all ranks, `[B, V, K]`
    /// each, where the global batch has `n_micro_batches`. Each rank has at least one micro-batch.
    pub(crate) fn new(by_batch: Vec<Tensor<3>>, n_micro_batches: usize) -> Self {
        let [b, v, _] = by_batch[0].dims();
        Self::with_total(by_batch, b * v * n_micro_batches)
    }

    /// Creates rows from micro-batches, `[B, V, K]` each, where the global batch has `n` rows. Each
    /// rank has at least one micro-batch.
    pub(crate) fn with_total(by_batch: Vec<Tensor<3>>, n: usize) -> Self {
        let [_, _, n_prototypes] = by_batch[0].dims();
        let device = by_batch[0].device();
        Self { by_batch: by_batch.into_iter().map(Some).collect(), n, n_prototypes, device }
    }

    /// Creates rows from micro-batches that have different numbers of rows over `n_prototypes`,
    /// `[R, 1, K]` each or none, where the global batch has `n` rows.
    pub(crate) fn from_ragged(
        by_batch: Vec<Option<Tensor<3>>>,
        n: usize,
        n_prototypes: usize,
        device: Device,
    ) -> Self {
        Self { by_batch, n, n_prototypes, device }
    }

    /// Rows of micro-batch `index`, if it has any.
    pub(crate) fn get(&self, index: usize) -> Option<&Tensor<3>> {
        self.by_batch[index].as_ref()
    }

    /// Rows of micro-batch `index`.
    ///
    /// # Panics
    /// If it has none, which is only possible for masked cells.
    pub(crate) fn batch(&self, index: usize) -> &Tensor<3> {
        self.get(index).expect("rows of every micro-batch")
    }

    /// Number of rows of the global batch.
    pub(crate) fn n(&self) -> usize {
        self.n
    }

    /// Number of prototypes that the rank scores, K.
    pub(crate) fn n_prototypes(&self) -> usize {
        self.n_prototypes
    }

    /// Device of the rows.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Rows of each micro-batch; `None` for one without rows.
    pub(crate) fn by_batch(&self) -> impl Iterator<Item = Option<&Tensor<3>>> {
        self.by_batch.iter().map(Option::as_ref)
    }

    /// Applies `f` to the rows of each micro-batch.
    pub(crate) fn map(&self, f: impl Fn(&Tensor<3>) -> Tensor<3>) -> Self {
        self.map_with(&vec![(); self.by_batch.len()], |rows, ()| f(rows))
    }

    /// Applies `f` to the rows of each micro-batch and the element of `values` for it.
    pub(crate) fn map_with<T>(&self, values: &[T], f: impl Fn(&Tensor<3>, &T) -> Tensor<3>) -> Self {
        let by_batch = self
            .by_batch
            .iter()
            .zip(values)
            .map(|(rows, value)| rows.as_ref().map(|rows| f(rows, value)))
            .collect();
        Self { by_batch, device: self.device.clone(), ..*self }
    }

    /// Multiplies each row `r` of micro-batch `b` by `weights[b][r]`.
    pub(crate) fn weighted(mut self, weights: &[Vec<f32>]) -> Self {
        for (rows, weights) in self.by_batch.iter_mut().zip(weights) {
            // The product takes the rows by value, so that their memory is freed.
            if let Some(unweighted) = rows.take() {
                let [b, v, _] = unweighted.dims();
                let device = unweighted.device();
                let weights = Tensor::<1>::from_floats(&weights[..], &device).reshape([b, v, 1]);
                *rows = Some(unweighted * weights);
            }
        }
        self
    }

    /// Applies `f` to the rows of each micro-batch and returns the results, `[n]` each; `n` times
    /// `default` for a micro-batch without rows.
    pub(crate) fn reduce(
        &self,
        n: usize,
        default: f32,
        f: impl Fn(Tensor<3>) -> Tensor<1>,
    ) -> Vec<Tensor<1>> {
        self.by_batch
            .iter()
            .map(|rows| match rows {
                Some(rows) => f(rows.clone()),
                None => Tensor::full([n], default, &self.device),
            })
            .collect()
    }

    /// Returns the sums of the K columns of each micro-batch, `[K]` each.
    pub(super) fn column_sums(&self) -> Vec<Tensor<1>> {
        self.reduce(self.n_prototypes, 0.0, |rows| column_sums(rows).narrow(0, 0, self.n_prototypes))
    }
}
