//! The loss of a micro-batch, given the targets of the batch.

use burn_tensor::Tensor;
use kernels::ops::{Pairs, cross_entropy};
use networks::features::{Features, HeadOutputs, Outputs};
use ranks::EngineError;
use ranks::column_group::ColumnGroup;

use super::heads::HEAD;
use super::targets::BatchTargets;
use crate::method::loss::columns::{self, CompletedScores};
use crate::method::loss::cross_entropy::between_weighted_views;
use crate::method::loss::gram::{gram_loss, resample_bicubic};
use crate::method::loss::koleo::{Neighbors, view};
use crate::method::loss::rows::Rows;
use crate::method::{BatchLoss, MATCH_LOSS, MicroBatchLoss};

/// Gauge of the mean entropy of the targets of views.
pub(super) const TARGET_ENTROPY: &str = "health/teacher_entropy";

/// Gauge of the mean entropy of the targets of masked patches.
pub(super) const PATCH_TARGET_ENTROPY: &str = "health/teacher_patch_entropy";

/// The loss of a batch.
pub(super) struct Loss {
    /// Targets of the views.
    pub(super) views: ViewTargets,
    /// Targets of masked cells, if the method predicts them.
    pub(super) cells: Option<Cells>,
    /// Neighbors by view of the first size; empty if the weight of KoLeo is zero.
    pub(super) neighbors: Vec<Neighbors>,
    /// Positions in the batch of the images of each micro-batch.
    pub(super) positions: Vec<Vec<usize>>,
    /// Features of the earlier teacher, if it already exists.
    pub(super) anchors: Option<Anchors>,
    /// Whether the method anchors similarities between patches, in this step or later.
    pub(super) has_gram: bool,
    pub(super) student_temp: f64,
    pub(super) koleo_weight: f64,
    /// Weight of the pairs with views of other sizes than the first.
    pub(super) local_weight: f64,
}

/// Targets of the views.
pub(super) struct ViewTargets {
    pub(super) targets: BatchTargets,
    /// Mean entropy and mean largest probability of the targets of each micro-batch, `[1]` each.
    /// Where columns are divided, this rank's shares of them.
    pub(super) sharpness: Vec<[Tensor<1>; 2]>,
}

impl ViewTargets {
    /// Returns the gauges of the targets of micro-batch `number`. Each of `n_parts` ranks has a
    /// share of them.
    fn gauges(&self, number: usize, n_parts: usize) -> Vec<(&'static str, Tensor<1>)> {
        let [entropy, max_prob] = self.sharpness[number].clone();
        let prototypes_in_use = self.targets.prototypes_in_use().clone() / n_parts as f64;
        vec![
            (TARGET_ENTROPY, entropy),
            ("health/teacher_max_prob", max_prob),
            ("health/prototypes_in_use", prototypes_in_use),
        ]
    }
}

/// Features of the earlier teacher.
pub(super) struct Anchors {
    /// Features of patches by micro-batch, `[B·V, N, D]`.
    pub(super) features: Vec<Features>,
    /// Weight of the anchoring's part of the loss.
    pub(super) weight: f64,
}

impl Anchors {
    /// Returns the loss of micro-batch `number`, `[1]`.
    fn loss(&self, number: usize, student: &Outputs) -> Tensor<1> {
        let anchor = &self.features[number];
        let patches = student.features[0].patches();
        gram_loss(patches.x, resample_bicubic(anchor.x.clone(), anchor.grid[0], patches.grid[0]))
    }
}

/// Targets of masked cells.
pub(super) struct Cells {
    /// Name of the head that scores the cells.
    pub(super) head: &'static str,
    /// Targets, multiplied by the weights of cells in the mean over the cells of each view.
    pub(super) targets: BatchTargets,
    /// Mean entropy of the targets over the global batch, because a micro-batch may have no masked
    /// cell, `[1]`. Where columns are divided, this rank's share of it.
    pub(super) entropy: Tensor<1>,
    /// Weight of the cells' part of the loss.
    pub(super) weight: f64,
}

impl Cells {
    /// Returns the loss of micro-batch `number` for targets over all prototypes, `[1]`: the mean
    /// over all views of the mean over a view's masked cells; `None` for a micro-batch without
    /// masked cells.
    fn loss(
        &self,
        targets: &Rows,
        number: usize,
        student: &HeadOutputs,
        temperature: f64,
    ) -> Option<Tensor<1>> {
        let targets = targets.get(number)?;
        let scores = student.on_masked(self.head, 0)?;
        let n_views = student.masked(0).cells.len();
        Some(cross_entropy(scores, targets.clone(), Pairs::All, temperature) / n_views as f64)
    }

    /// Adds the loss of the masked cells of a micro-batch, if it has any, and its gauges to
    /// `total`. Each of `n_parts` ranks has a share of the gauges.
    fn add_to(&self, total: &mut MicroBatchLoss, cell_loss: Option<Tensor<1>>, n_parts: usize) {
        let value = match &cell_loss {
            Some(cell_loss) => cell_loss.clone().inner(),
            None => self.entropy.zeros_like(),
        };
        let prototypes_in_use = self.targets.prototypes_in_use().clone() / n_parts as f64;
        total.gauges.push(("train/patch_loss", value));
        total.gauges.push((PATCH_TARGET_ENTROPY, self.entropy.clone()));
        total.gauges.push(("health/patch_prototypes_in_use", prototypes_in_use));
        if let Some(cell_loss) = cell_loss {
            total.loss = total.loss.clone() + cell_loss * self.weight;
        }
    }
}

impl Loss {
    /// Returns whether the loss has other parts than that of the views.
    fn has_other_parts(&self) -> bool {
        self.cells.is_some() || !self.neighbors.is_empty() || self.has_gram
    }

    /// Adds gauges to the views' part of the loss of micro-batch `number`. Each of `n_parts` ranks
    /// has a share of the gauges.
    fn with_view_gauges(&self, loss: Tensor<1>, number: usize, n_parts: usize) -> MicroBatchLoss {
        let mut gauges = self.views.gauges(number, n_parts);
        if self.has_other_parts() {
            gauges.push((MATCH_LOSS, loss.clone().inner()));
        }
        MicroBatchLoss { loss, gauges }
    }

    /// Returns the part of the loss of micro-batch `number` that depends on heads, if they are not
    /// divided.
    fn head_loss(&self, targets: &Rows, number: usize, student: &HeadOutputs) -> MicroBatchLoss {
        let scores = student.on_all_views(HEAD);
        let targets = targets.batch(number);
        let loss = between_weighted_views(&scores, targets, self.student_temp, self.local_weight);
        let mut total = self.with_view_gauges(loss, number, 1);
        if let Some(cells) = &self.cells
            && let BatchTargets::Full(balanced) = &cells.targets
        {
            let cell_loss = cells.loss(&balanced.targets, number, student, self.student_temp);
            cells.add_to(&mut total, cell_loss, 1);
        }
        total
    }
}

impl BatchLoss for Loss {
    fn column_loss(
        &self,
        number: usize,
        scores: &HeadOutputs,
        group: ColumnGroup<'_>,
    ) -> Result<MicroBatchLoss, EngineError> {
        let BatchTargets::Columns(views) = &self.views.targets else {
            // The step only calls this method where heads are divided, and then `prepare` has
            // computed targets of columns.
            unreachable!("targets of columns where heads are divided");
        };
        let temperature = self.student_temp;
        let mut all_scores: Vec<Tensor<3>> = scores.on_all_views(HEAD);
        let n_sizes = all_scores.len();
        if let Some(cells) = &self.cells {
            all_scores.extend(scores.on_masked(cells.head, 0));
        }
        // Scores of views and cells are completed with one exchange.
        let completed = CompletedScores::complete(&all_scores, temperature, group)?;
        let (view_scores, cell_scores) = completed.split_at(n_sizes);
        let loss =
            columns::between_views(view_scores, &views.targets, number, temperature, self.local_weight);
        let mut total = self.with_view_gauges(loss, number, group.n_parts());
        if let Some(cells) = &self.cells
            && let BatchTargets::Columns(balanced) = &cells.targets
        {
            let masked = scores.masked(0);
            let weights = masked.weights();
            let cell_loss = cell_scores.first().map(|cell_scores| {
                columns::weighted_rows(cell_scores, &balanced.targets, number, &weights, temperature)
                    / masked.cells.len() as f64
            });
            cells.add_to(&mut total, cell_loss, group.n_parts());
        }
        Ok(total)
    }

    fn micro_batch_loss(&self, number: usize, student: &Outputs) -> MicroBatchLoss {
        let globals = student.pooled(0);
        let MicroBatchLoss { mut loss, mut gauges } = match &self.views.targets {
            BatchTargets::Columns(_) => {
                MicroBatchLoss { loss: globals.clone().sum() * 0.0, gauges: Vec::new() }
            }
            BatchTargets::Full(views) => self.head_loss(&views.targets, number, &student.heads),
        };
        let mut koleo: Option<Tensor<1>> = None;
        for (i, neighbors) in self.neighbors.iter().enumerate() {
            let term = neighbors.koleo(view(&globals, i), &self.positions[number]);
            koleo = Some(match koleo {
                Some(sum) => sum + term,
                None => term,
            });
        }
        if let Some(koleo) = koleo {
            gauges.push(("train/koleo_loss", koleo.clone().inner()));
            loss = loss + koleo * self.koleo_weight;
        }
        if let Some(anchors) = &self.anchors {
            let gram = anchors.loss(number, student);
            gauges.push(("train/gram_loss", gram.clone().inner()));
            loss = loss + gram * anchors.weight;
        } else if self.has_gram {
            gauges.push(("train/gram_loss", self.views.targets.prototypes_in_use().zeros_like()));
        }
        MicroBatchLoss { loss, gauges }
    }

    fn observed(&self) -> Vec<(&'static str, Tensor<1>)> {
        let mut means = Vec::new();
        means.extend(self.views.targets.mean());
        if let Some(cells) = &self.cells {
            means.extend(cells.targets.mean());
        }
        means
    }
}
