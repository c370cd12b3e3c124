//! Rows over prototypes, by micro-batch: scores or targets of all views, or of masked cells, whose
//! number varies.

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
    /// Creates rows with the same number in every micro-batch: `[B, V, K]` each, at least one on
    /// each rank.
    pub(crate) fn even(by_batch: Vec<Tensor<3>>, peers: Peers<'_>) -> Self {
        let [b, v, _] = by_batch[0].dims();
        Self::with_number(by_batch, b * v * peers.n_micro_batches())
    }

    /// Creates rows of which the batch has `n`: `[B, V, K]` each, at least one on each rank.
    pub(crate) fn with_number(by_batch: Vec<Tensor<3>>, n: usize) -> Self {
        let [_, _, n_prototypes] = by_batch[0].dims();
        let device = by_batch[0].device();
        Self { by_batch: by_batch.into_iter().map(Some).collect(), n, n_prototypes, device }
    }

    /// Creates rows of which the batch has `n`, and micro-batches have different numbers, `[R, 1,
    /// K]` each over `n_prototypes`, or none.
    pub(crate) fn ragged(
        by_batch: Vec<Option<Tensor<3>>>,
        n: usize,
        n_prototypes: usize,
        device: Device,
    ) -> Self {
        Self { by_batch, n, n_prototypes, device }
    }

    /// Creates rows as [`Rows::ragged`] does. Ranks add up how many there are.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn counted(
        by_batch: Vec<Option<Tensor<3>>>,
        n_prototypes: usize,
        device: Device,
        peers: Peers<'_>,
    ) -> Result<Self, EngineError> {
        let here = by_batch.iter().flatten().map(|rows| rows.dims()[0]).sum();
        Ok(Self::ragged(by_batch, peers.count("rows", here)?, n_prototypes, device))
    }

    /// Rows of micro-batch `number`, if it has any.
    pub(crate) fn of(&self, number: usize) -> Option<&Tensor<3>> {
        self.by_batch[number].as_ref()
    }

    /// Rows of micro-batch `number`, when all have the same number.
    ///
    /// # Panics
    /// If it has none, which only masked cells can have.
    pub(crate) fn even_of(&self, number: usize) -> &Tensor<3> {
        self.of(number).expect("rows of every micro-batch")
    }

    /// Number of rows of the whole batch.
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

    /// Rows of each micro-batch, if it has any.
    pub(crate) fn by_batch(&self) -> impl Iterator<Item = Option<&Tensor<3>>> {
        self.by_batch.iter().map(Option::as_ref)
    }

    /// Returns the rows changed by `f`.
    pub(crate) fn map(&self, f: impl Fn(&Tensor<3>) -> Tensor<3>) -> Self {
        self.map_with(&vec![(); self.by_batch.len()], |rows, ()| f(rows))
    }

    /// Returns the rows changed by `f`, which is also given one of `values` for each micro-batch.
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
    pub(crate) fn weighted(self, weights: &[Vec<f32>]) -> Self {
        Self {
            by_batch: self
                .by_batch
                .into_iter()
                .zip(weights)
                .map(|(rows, weights)| {
                    let rows = rows?;
                    let [b, v, _] = rows.dims();
                    let device = rows.device();
                    let weights = Tensor::<1>::from_floats(&weights[..], &device).reshape([b, v, 1]);
                    // What is not weighted is freed.
                    Some(rows * weights)
                })
                .collect(),
            ..self
        }
    }

    /// Returns `f` of the rows of each micro-batch, `[n]`; `otherwise` in each of the `n` places
    /// for one without rows.
    pub(crate) fn reduced(
        &self,
        n: usize,
        otherwise: f32,
        f: impl Fn(Tensor<3>) -> Tensor<1>,
    ) -> Vec<Tensor<1>> {
        self.by_batch
            .iter()
            .map(|rows| rows.clone().map_or_else(|| Tensor::full([n], otherwise, &self.device), &f))
            .collect()
    }
}

/// Returns the sum of the entropies in nats of the rows of `targets`, `[1]`.
pub(crate) fn summed_entropy(targets: Tensor<3>) -> Tensor<1> {
    let [b, v, _] = targets.dims();
    let [mean, _] = sharpness(&targets);
    mean * (b * v) as f64
}
