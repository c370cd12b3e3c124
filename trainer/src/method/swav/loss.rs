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
    pub(super) assigned: Assigned,
    /// ẑ of the assigned views of the whole batch, if the queue fills.
    pub(super) for_queue: Option<Tensor<1>>,
    /// Effective number of prototypes in use in the whole batch, `[1]`.
    pub(super) prototypes_in_use: Tensor<1>,
    pub(super) temperature: f64,
}

/// Assignments of the views of a batch.
pub(super) enum Assigned {
    /// Assignments to all prototypes.
    Whole(Rows),
    /// Assignments to this rank's prototypes, and this rank's shares of their sharpness by
    /// micro-batch of the group.
    Columns(ColumnTargets, Vec<[Tensor<1>; 2]>),
}

impl SwavLoss {
    /// The loss of a micro-batch with its gauges, given the sharpness of its targets.
    fn with_gauges(
        &self,
        loss: Tensor<1>,
        [entropy, max_prob]: [Tensor<1>; 2],
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
    fn of(&self, number: usize, student: &Outputs) -> MicroBatchLoss {
        match &self.assigned {
            Assigned::Whole(targets) => {
                let targets = targets.even_of(number);
                let loss = between_views(&student.heads.on_all_views(SCORES), targets, self.temperature);
                self.with_gauges(loss, sharpness(targets), self.prototypes_in_use.clone())
            }
            // All of the loss depends on scores.
            Assigned::Columns(..) => {
                MicroBatchLoss { loss: student.pooled(0).sum() * 0.0, gauges: Vec::new() }
            }
        }
    }

    fn of_columns(
        &self,
        number: usize,
        scores: &HeadOutputs,
        group: ColumnGroup<'_>,
    ) -> Result<MicroBatchLoss, EngineError> {
        let Assigned::Columns(targets, sharpness) = &self.assigned else {
            // The step calls it where heads are divided, and then `prepare` has assigned columns.
            unreachable!("assignments of columns where heads are divided");
        };
        let completed = CompletedScores::of(&scores.on_all_views(SCORES), self.temperature, group)?;
        let loss = columns::between_views(&completed, targets, number, self.temperature, 1.0);
        let in_use = self.prototypes_in_use.clone() / group.n_parts() as f64;
        Ok(self.with_gauges(loss, sharpness[number].clone(), in_use))
    }

    fn observed(&self) -> Vec<(&'static str, Tensor<1>)> {
        self.for_queue.iter().map(|rows| (QUEUE, rows.clone())).collect()
    }
}
