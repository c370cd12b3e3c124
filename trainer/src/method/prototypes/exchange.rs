//! What a method needs from other ranks to score prototypes.

use burn_tensor::Tensor;
use networks::outputs::HeadOutputs;
use ranks::EngineError;
use ranks::column_group::ColumnGroup;
use ranks::peers::Peers;

use crate::method::{BatchOutputs, ColumnOutputs};

/// The ranks that score the prototypes of a batch. Each rank scores either all prototypes for its
/// own micro-batches, or its columns for those of its column group.
#[derive(Clone, Copy)]
pub(crate) struct PrototypeExchange<'a> {
    peers: Peers<'a>,
    /// This rank's columns of scores; `None` where every rank scores all prototypes.
    columns: Option<ColumnOutputs<'a>>,
}

impl<'a> PrototypeExchange<'a> {
    /// Describes a batch of which `columns` are this rank's columns of scores, if ranks divide the
    /// prototypes.
    pub(crate) fn new(peers: Peers<'a>, columns: Option<ColumnOutputs<'a>>) -> Self {
        Self { peers, columns }
    }

    /// Returns the ranks that divide the prototypes among them; `None` if none do.
    pub(super) fn group(&self) -> Option<ColumnGroup<'a>> {
        self.columns.map(|columns| columns.group)
    }

    /// Returns the number of ranks that divide the prototypes of a head; 1 if none do.
    pub(crate) fn n_parts(&self) -> usize {
        self.group().map_or(1, |group| group.n_parts())
    }

    /// Returns the outputs of prototype heads of the network `name`, which is not the trained one:
    /// one per micro-batch that this rank scores.
    pub(crate) fn outputs<'b>(&'b self, batch: &'b BatchOutputs<'_>, name: &str) -> Vec<&'b HeadOutputs> {
        match &self.columns {
            Some(columns) => columns.network_outputs(name).iter().collect(),
            None => batch.network_outputs(name).iter().map(|outputs| &outputs.heads).collect(),
        }
    }

    /// Returns the outputs of prototype heads of the trained network: one per micro-batch that this
    /// rank scores.
    pub(crate) fn trained_outputs<'b>(&'b self, batch: &'b BatchOutputs<'_>) -> Vec<&'b HeadOutputs> {
        match &self.columns {
            Some(columns) => columns.trained.iter().collect(),
            None => batch.trained.iter().map(|outputs| &outputs.heads).collect(),
        }
    }

    /// Returns the number of micro-batches of the batch, N.
    pub(crate) fn n_micro_batches(&self) -> usize {
        self.peers.n_micro_batches()
    }

    /// Converts an index among the micro-batches that this rank scores to one in the batch.
    pub(crate) fn global_index(&self, local: usize) -> usize {
        match self.group() {
            Some(group) => group.global_index(local),
            // Position p is in micro-batch p mod N: the first image's position is the index.
            None => self.peers.position(local, 0),
        }
    }

    /// Returns the sum over ranks of `n_local`, a count already in host memory, of this rank's own
    /// micro-batches.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn sum_counts(&self, subject: &str, n_local: usize) -> Result<usize, EngineError> {
        self.peers.sum_counts(subject, n_local)
    }

    /// Returns the largest number over all micro-batches and columns, `[1]`; `values` holds those
    /// of the micro-batches that this rank scores.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(super) fn max(&self, subject: &str, values: Vec<Tensor<1>>) -> Result<Tensor<1>, EngineError> {
        self.peers.max(subject, values)
    }

    /// Returns the sum over all micro-batches of the batch, for the columns that this rank scores;
    /// `values` holds the addends of the micro-batches that it scores, `[n]` each.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(super) fn sum(&self, subject: &str, values: &[Tensor<1>]) -> Result<Tensor<1>, EngineError> {
        match self.group() {
            Some(group) => group.sum(subject, values),
            None => self.peers.sum(subject, values),
        }
    }

    /// Returns the values of the columns that this rank scores, of `values` for all prototypes.
    pub(super) fn own_columns(&self, values: Tensor<1>) -> Tensor<1> {
        let Some(group) = self.group() else { return values };
        let [n_prototypes] = values.dims();
        let k = n_prototypes / group.n_parts();
        values.narrow(0, group.part() * k, k)
    }

    /// `values` holds N lists end to end, each of this rank's columns; returns each list for all
    /// prototypes.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(super) fn all_columns<const N: usize>(
        &self,
        subject: &str,
        values: Tensor<1>,
    ) -> Result<[Tensor<1>; N], EngineError> {
        let [n] = values.dims();
        debug_assert!(n.is_multiple_of(N), "{N} lists of the same length in {n} values");
        let k = n / N;
        let Some(group) = self.group() else {
            return Ok(std::array::from_fn(|i| values.clone().slice(i * k..(i + 1) * k)));
        };
        let device = values.device();
        let parts = group.all_parts(subject, values)?;
        Ok(std::array::from_fn(|i| {
            let all: Vec<f32> = parts.iter().flat_map(|part| &part[i * k..(i + 1) * k]).copied().collect();
            Tensor::from_floats(&all[..], &device)
        }))
    }

    /// Returns this rank's share of `value`, which all ranks that divide the prototypes know. The
    /// shares of these ranks add up to it.
    pub(crate) fn share(&self, value: Tensor<1>) -> Tensor<1> {
        value / self.n_parts() as f64
    }
}
