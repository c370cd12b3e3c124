//! Prediction of masked patches.

use networks::mask::BlockMasks;
use networks::outputs::{HeadOutputs, Outputs};
use ranks::EngineError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::heads::{HEAD, HeadSizes, PATCH_HEAD};
use super::loss::Cells;
use super::targets::TargetRule;
use crate::method::Collective;
use crate::method::prototypes::mean::{self, batch_means};
use crate::method::prototypes::{PrototypeExchange, Rows};

/// Patches of the views over which the teacher's scores are averaged, for the center of patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CenteredOn {
    /// The masked ones: DINOv2.
    #[default]
    MaskedPatches,
    /// All of them: iBOT's published runs. The teacher's head scores them all.
    AllPatches,
}

/// Prediction of masked patches.
pub(super) struct PatchPrediction {
    /// Head of patches; `None` for that of views.
    pub(super) head: Option<HeadSizes>,
    /// Rule by which the teacher's scores of patches become targets.
    pub(super) targets: TargetRule,
    /// Weight of the patches' part of the loss.
    pub(super) weight: f64,
    /// Cells over which the teacher's scores are averaged for the center.
    pub(super) centered_on: CenteredOn,
    /// Rule by which patches are hidden.
    pub(super) masks: BlockMasks,
}

impl PatchPrediction {
    /// Computes the targets of masked cells from the outputs of the teacher. `scored` are those of
    /// its heads for the micro-batches that this rank scores.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(super) fn cells(
        &self,
        teacher: &[Outputs],
        scored: &[&HeadOutputs],
        step: u64,
        exchange: PrototypeExchange<'_>,
    ) -> Result<Cells, EngineError> {
        let head = if self.head.is_some() { PATCH_HEAD } else { HEAD };
        let k = self.targets.center.len();
        let device = teacher[0].features[0].x.device();
        let n_local = teacher.iter().map(|outputs| outputs.heads.masked(0).n()).sum();
        let n = exchange.sum_counts("rows", n_local)?;
        let scores = scored.iter().map(|outputs| outputs.on_masked(head, 0)).collect();
        let scores = Rows::from_ragged(scores, n, k / exchange.n_parts(), device);
        let mut balanced = self.targets.balance("masked patches", &scores, step, exchange)?;
        if self.centered_on == CenteredOn::AllPatches {
            let all = scored.iter().map(|outputs| outputs.on_cells(head, 0)).collect();
            let all = Rows::new(all, exchange.n_micro_batches());
            let [mean] = batch_means("patches", [&all], exchange)?;
            balanced.mean = Some((self.targets.name, mean));
        }
        let entropy = balanced.targets.mean_entropy(exchange)?;
        let weights = scored.iter().map(|outputs| outputs.masked(0).weights()).collect();
        // Weighted targets give the weighted loss, because cross-entropy is linear in the targets.
        balanced.targets = balanced.targets.weighted(weights);
        Ok(Cells { head, balanced, entropy, weight: self.weight })
    }

    /// Returns the collectives of [`PatchPrediction::cells`]: the number of masked cells, targets,
    /// the mean over all cells if the center is averaged over them, and the targets' entropy.
    pub(super) fn collectives(&self) -> Vec<Collective> {
        let mut collectives = vec![Collective::Number];
        collectives.extend(self.targets.collectives());
        if self.centered_on == CenteredOn::AllPatches {
            collectives.push(mean::collective(1, self.targets.center.len()));
        }
        collectives.push(Collective::SumOfShares(1));
        collectives
    }
}
