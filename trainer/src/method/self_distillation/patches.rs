//! Prediction of masked patches.

use burn_tensor::Tensor;
use networks::features::Outputs;
use networks::mask::MaskRule;
use ranks::EngineError;
use ranks::peers::Peers;

use super::heads::{HEAD, HeadSizes, PATCH_HEAD};
use super::loss::Cells;
use super::targets::Targets;
use crate::method::Collective;
use crate::method::loss::rows::Rows;

/// Prediction of masked patches.
pub(super) struct PatchPrediction {
    /// Head of the patches; `None` for that of the views.
    pub(super) head: Option<HeadSizes>,
    /// Rule by which the teacher's scores of patches become targets.
    pub(super) targets: Targets,
    /// Weight of the patches' part of the loss.
    pub(super) weight: f64,
    /// Rule by which patches are hidden.
    pub(super) masks: MaskRule,
}

impl PatchPrediction {
    /// Computes the targets of masked cells from the outputs of the teacher.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(super) fn cells(
        &self,
        teacher: &[Outputs],
        step: u64,
        peers: Peers<'_>,
    ) -> Result<Cells, EngineError> {
        let name = if self.head.is_some() { PATCH_HEAD } else { HEAD };
        let scores: Vec<Option<Tensor<3>>> =
            teacher.iter().map(|outputs| outputs.head_on_masked(name, 0)).collect();
        let device = teacher[0].head(name)[0].device();
        let scores = Rows::ragged(scores, self.targets.center.len(), device, peers)?;
        let balanced = self.targets.of("masked patches", &scores, step, peers)?;
        Cells::of(name, balanced, self.weight, peers)
    }

    /// Returns the collectives of [`PatchPrediction::cells`]: the number of masked cells, targets, and their entropy.
    pub(super) fn collectives(&self) -> Vec<Collective> {
        // Heads of masked cells are not divided.
        let whole = |collective| match collective {
            Collective::ColumnSum(n_values) => Collective::Sum(n_values),
            other => other,
        };
        let targets = self.targets.collectives().into_iter().map(whole);
        std::iter::once(Collective::Number).chain(targets).chain([Collective::Sum(1)]).collect()
    }
}
