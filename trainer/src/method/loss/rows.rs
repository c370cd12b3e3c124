//! Rows over prototypes, by micro-batch: scores or targets of all views, or of masked cells, whose
//! number varies between micro-batches.

use burn_tensor::{Device, Tensor};
use kernels::ops::sharpness;
use ranks::EngineError;
use ranks::peers::Peers;

/// Rows `[B, V, K]` by micro-batch of this rank.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    by_batch: Vec<Option<Tensor<3>>>,
    n: usize,
    n_prototypes: usize,
    device: Device,
}

impl Rows {
    /// Creates rows from micro-batches that have the same number of rows on all ranks, `[B, V, K]`
    /// each. Each rank has at least one micro-batch.
    pub(crate) fn new(by_batch: Vec<Tensor<3>>, peers: Peers<'_>) -> Self {
        let [b, v, _] = by_batch[0].dims();
        Self::with_total(by_batch, b * v * peers.n_micro_batches())
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

    /// Creates rows as [`Rows::from_ragged`] does. The number of rows of the global batch is summed
    /// over ranks.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn from_ragged_counted(
        by_batch: Vec<Option<Tensor<3>>>,
        n_prototypes: usize,
        device: Device,
        peers: Peers<'_>,
    ) -> Result<Self, EngineError> {
        let n_local = by_batch.iter().flatten().map(|rows| rows.dims()[0]).sum();
        let n = peers.count("rows", n_local)?;
        Ok(Self::from_ragged(by_batch, n, n_prototypes, device))
    }

    /// Rows of micro-batch `number`, if it has any.
    pub(crate) fn get(&self, number: usize) -> Option<&Tensor<3>> {
        self.by_batch[number].as_ref()
    }

    /// Rows of micro-batch `number`.
    ///
    /// # Panics
    /// If it has none, which is only possible for masked cells.
    pub(crate) fn batch(&self, number: usize) -> &Tensor<3> {
        self.get(number).expect("rows of every micro-batch")
    }

    /// Number of rows of the global batch.
    pub(crate) fn n(&self) -> usize {
        self.n
    }

    /// Number of prototypes, K.
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
}

/// Returns the sum of the entropies in nats of the rows of `targets`, `[1]`.
pub(crate) fn summed_entropy(targets: Tensor<3>) -> Tensor<1> {
    let [b, v, _] = targets.dims();
    let [mean, _] = sharpness(&targets);
    mean * (b * v) as f64
}
