//! The loss of a micro-batch, given the assignments of the batch.

use burn_tensor::Tensor;
use networks::outputs::{HeadOutputs, Outputs};
use ranks::EngineError;
use ranks::column_group::ColumnGroup;

use crate::method::prototypes::{CompletedScores, PrototypeTargets, between_views};
use crate::method::{BatchLoss, MicroBatchLoss};

/// Gauge of the mean entropy of the targets.
pub(super) const TARGET_ENTROPY: &str = "health/target_entropy";

/// Name of the head that outputs scores.
pub(super) const SCORES: &str = "scores";

/// Name of the queue's rows among observed values and in checkpoints.
pub(super) const QUEUE: &str = "queue";

/// SwAV's loss of a batch.
pub(super) struct SwavLoss {
    /// Assignments of the views.
    pub(super) assignments: PrototypeTargets,
    /// Mean entropy and mean largest probability of the assignments of each micro-batch, `[1]`
    /// each, or this rank's shares of them.
    pub(super) sharpness: Vec<[Tensor<1>; 2]>,
    /// ẑ of the assigned views of the global batch, if they enter the queue.
    pub(super) queue_rows: Option<Tensor<1>>,
    /// Effective number of prototypes in use in the global batch, `[1]`, or this rank's share of
    /// it.
    pub(super) prototypes_in_use: Tensor<1>,
    pub(super) temperature: f64,
}

impl SwavLoss {
    /// Returns the loss of micro-batch `index` and its gauges, or this rank's shares of them.
    fn score_loss(&self, index: usize, scores: &[CompletedScores]) -> MicroBatchLoss {
        let loss = between_views(scores, &self.assignments, index, self.temperature, 1.0);
        let [entropy, max_prob] = self.sharpness[index].clone();
        let gauges = vec![
            (TARGET_ENTROPY, entropy),
            ("health/target_max_prob", max_prob),
            ("health/prototypes_in_use", self.prototypes_in_use.clone()),
        ];
        MicroBatchLoss { loss, gauges }
    }
}

impl BatchLoss for SwavLoss {
    fn micro_batch_loss(&self, index: usize, student: &Outputs) -> MicroBatchLoss {
        if self.assignments.is_divided() {
            // The whole loss depends on divided heads.
            return MicroBatchLoss { loss: student.pooled(0).sum() * 0.0, gauges: Vec::new() };
        }
        self.score_loss(index, &CompletedScores::from_all_columns(student.heads.on_all_views(SCORES)))
    }

    fn column_loss(
        &self,
        index: usize,
        scores: &HeadOutputs,
        group: ColumnGroup<'_>,
    ) -> Result<MicroBatchLoss, EngineError> {
        let completed = CompletedScores::complete(scores.on_all_views(SCORES), self.temperature, group)?;
        Ok(self.score_loss(index, &completed))
    }

    fn observed(&self) -> Vec<(&'static str, Tensor<1>)> {
        self.queue_rows.iter().map(|rows| (QUEUE, rows.clone())).collect()
    }
}
