//! Prediction of masked patches.

use networks::features::{HeadOutputs, Outputs};
use networks::mask::MaskRule;
use ranks::EngineError;
use ranks::column_group::ColumnGroup;
use ranks::peers::Peers;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::heads::{HEAD, HeadSizes, PATCH_HEAD};
use super::loss::Cells;
use super::targets::{BatchTargets, Targets};
use crate::method::Collective;
use crate::method::loss::columns::{self, mean_entropy};
use crate::method::loss::mean::{self, batch_means};
use crate::method::loss::rows::{Rows, summed_entropy};

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
    pub(super) targets: Targets,
    /// Weight of the patches' part of the loss.
    pub(super) weight: f64,
    /// Cells over which the teacher's scores are averaged for the center.
    pub(super) centered_on: CenteredOn,
    /// Rule by which patches are hidden.
    pub(super) masks: MaskRule,
}

impl PatchPrediction {
    /// Computes the targets of masked cells from the outputs of the teacher. `columns` are the
    /// outputs of its heads, if they are divided.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(super) fn cells(
        &self,
        teacher: &[Outputs],
        columns: Option<(ColumnGroup<'_>, &[HeadOutputs])>,
        step: u64,
        peers: Peers<'_>,
    ) -> Result<Cells, EngineError> {
        let head = if self.head.is_some() { PATCH_HEAD } else { HEAD };
        let what = "masked patches";
        let k = self.targets.center.len();
        let weight = self.weight;
        let device = teacher[0].features[0].x.device();
        if let Some((group, outputs)) = columns {
            let n_local = teacher.iter().map(|outputs| outputs.heads.masked(0).n()).sum();
            let n = peers.count("rows", n_local)?;
            let scores = outputs.iter().map(|outputs| outputs.on_masked(head, 0)).collect();
            let scores = Rows::from_ragged(scores, n, k / group.n_parts(), device);
            let mut balanced = self.targets.balance_columns(what, &scores, step, peers, group)?;
            if self.centered_on == CenteredOn::AllPatches {
                let all: Vec<_> = outputs.iter().map(|outputs| outputs.on_cells(head, 0)).collect();
                let n = all[0].dims()[0] * peers.n_micro_batches();
                let [mean] = columns::batch_means("patches", [&Rows::with_total(all, n)], group)?;
                balanced.mean = Some((self.targets.name, mean));
            }
            let entropy = mean_entropy(&balanced.targets, group)?;
            balanced.targets.rows = balanced.targets.rows.weighted(&weights(outputs.iter()));
            return Ok(Cells { head, targets: BatchTargets::Columns(balanced), entropy, weight });
        }
        let scores = teacher.iter().map(|outputs| outputs.heads.on_masked(head, 0)).collect();
        let scores = Rows::from_ragged_counted(scores, k, device, peers)?;
        let mut balanced = self.targets.balance(what, &scores, step, peers)?;
        if self.centered_on == CenteredOn::AllPatches {
            let all = teacher.iter().map(|outputs| outputs.heads.on_cells(head, 0)).collect();
            let [mean] = batch_means("patches", [&Rows::new(all, peers)], peers)?;
            balanced.mean = Some((self.targets.name, mean));
        }
        let entropy = peers.sum("entropy", &balanced.targets.reduce(1, 0.0, summed_entropy))?;
        let entropy = entropy / scores.n().max(1) as f64;
        // Weighted targets give the weighted loss, because cross-entropy is linear in the targets.
        balanced.targets = balanced.targets.weighted(&weights(teacher.iter().map(|outputs| &outputs.heads)));
        Ok(Cells { head, targets: BatchTargets::Full(balanced), entropy, weight })
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

/// Returns the weights of masked cells in the mean over the cells of each view, by micro-batch.
fn weights<'a>(outputs: impl Iterator<Item = &'a HeadOutputs>) -> Vec<Vec<f32>> {
    outputs.map(|outputs| outputs.masked(0).weights()).collect()
}
