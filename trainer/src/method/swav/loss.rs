//! The loss of a micro-batch, given the assignments of the batch.

use burn_tensor::Tensor;
use kernels::ops::sharpness;
use networks::features::{HeadOutputs, Outputs};
use ranks::EngineError;
use ranks::column_group::ColumnGroup;

use crate::method::loss::columns::{self, ColumnTargets, CompletedScores};
use crate::method::loss::cross_entropy::between_views;
use crate::method::loss::rows::Rows;
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
    pub(super) assignments: Assignments,
    /// ẑ of the assigned views of the global batch, if they enter the queue.
    pub(super) queue_rows: Option<Tensor<1>>,
    /// Effective number of prototypes in use in the global batch, `[1]`.
    pub(super) prototypes_in_use: Tensor<1>,
    pub(super) temperature: f64,
}

/// Assignments of the views of a batch.
pub(super) enum Assignments {
    /// Assignments to all prototypes.
    Full(Rows),
    /// Assignments to this rank's prototypes, and this rank's shares of their sharpness by
    /// micro-batch of the group.
    Columns(ColumnTargets, Vec<[Tensor<1>; 2]>),
}

impl SwavLoss {
    /// Adds gauges to the loss of a micro-batch: mean entropy and mean largest probability of its
    /// targets, and the effective number of prototypes in use.
    fn with_gauges(
        loss: Tensor<1>,
        entropy: Tensor<1>,
        max_prob: Tensor<1>,
        in_use: Tensor<1>,
    ) -> MicroBatchLoss {
        let gauges = vec![
            (TARGET_ENTROPY, entropy),
            ("health/target_max_prob", max_prob),
            ("health/prototypes_in_use", in_use),
        ];
        MicroBatchLoss { loss, gauges }
    }
}

impl BatchLoss for SwavLoss {
    fn micro_batch_loss(&self, number: usize, student: &Outputs) -> MicroBatchLoss {
        match &self.assignments {
            Assignments::Full(targets) => {
                let targets = targets.batch(number);
                let loss = between_views(&student.heads.on_all_views(SCORES), targets, self.temperature);
                let [entropy, max_prob] = sharpness(targets);
                Self::with_gauges(loss, entropy, max_prob, self.prototypes_in_use.clone())
            }
            // The whole loss depends on divided heads.
            Assignments::Columns(..) => {
                MicroBatchLoss { loss: student.pooled(0).sum() * 0.0, gauges: Vec::new() }
            }
        }
    }

    fn column_loss(
        &self,
        number: usize,
        scores: &HeadOutputs,
        group: ColumnGroup<'_>,
    ) -> Result<MicroBatchLoss, EngineError> {
        let Assignments::Columns(targets, sharpness) = &self.assignments else {
            // The step only calls this method where heads are divided, and then `prepare` has
            // computed assignments of columns.
            unreachable!("assignments of columns where heads are divided");
        };
        let completed = CompletedScores::complete(&scores.on_all_views(SCORES), self.temperature, group)?;
        let loss = columns::between_views(&completed, targets, number, self.temperature, 1.0);
        let in_use = self.prototypes_in_use.clone() / group.n_parts() as f64;
        let [entropy, max_prob] = sharpness[number].clone();
        Ok(Self::with_gauges(loss, entropy, max_prob, in_use))
    }

    fn observed(&self) -> Vec<(&'static str, Tensor<1>)> {
        self.queue_rows.iter().map(|rows| (QUEUE, rows.clone())).collect()
    }
}
