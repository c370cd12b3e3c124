//! The loss of a micro-batch, given the targets of the batch.

use burn_tensor::Tensor;
use kernels::ops::add_term;
use networks::outputs::{HeadOutputs, Outputs};
use networks::tokens::Tokens;
use ranks::EngineError;
use ranks::column_group::ColumnGroup;

use super::heads::HEAD;
use super::targets::Balanced;
use crate::method::loss::gram::{gram_loss, resample_bicubic};
use crate::method::loss::koleo::{Neighbors, view};
use crate::method::prototypes::{CompletedScores, between_views, weighted_rows};
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
    pub(super) balanced: Balanced,
    /// Mean entropy and mean largest probability of the targets of each micro-batch, `[1]` each, or
    /// this rank's shares of them.
    pub(super) sharpness: Vec<[Tensor<1>; 2]>,
}

impl ViewTargets {
    /// Returns the gauges of the targets of micro-batch `index`, or this rank's shares of them.
    fn gauges(&self, index: usize) -> Vec<(&'static str, Tensor<1>)> {
        let [entropy, max_prob] = self.sharpness[index].clone();
        vec![
            (TARGET_ENTROPY, entropy),
            ("health/teacher_max_prob", max_prob),
            ("health/prototypes_in_use", self.balanced.prototypes_in_use.clone()),
        ]
    }
}

/// Features of the earlier teacher.
pub(super) struct Anchors {
    /// Patches by micro-batch.
    pub(super) patches: Vec<Tokens>,
    /// Weight of the anchoring's part of the loss.
    pub(super) weight: f64,
}

impl Anchors {
    /// Returns the loss of micro-batch `index`, `[1]`.
    fn loss(&self, index: usize, student: &Outputs) -> Tensor<1> {
        let anchor = &self.patches[index];
        let patches = student.features[0].patches();
        let resampled = resample_bicubic(anchor.by_sequence(), anchor.grid()[0], patches.grid()[0]);
        gram_loss(patches.by_sequence(), resampled)
    }
}

/// Targets of masked cells.
pub(super) struct Cells {
    /// Name of the head that scores the cells.
    pub(super) head: &'static str,
    /// Targets, multiplied by the weights of cells in the mean over the cells of each view.
    pub(super) balanced: Balanced,
    /// Mean entropy of the targets over the global batch, because a micro-batch may have no masked
    /// cell, `[1]`, or this rank's share of it.
    pub(super) entropy: Tensor<1>,
    /// Weight of the cells' part of the loss.
    pub(super) weight: f64,
}

impl Cells {
    /// Adds the loss of the masked cells of a micro-batch, if it has any, and its gauges to
    /// `total`.
    fn add_to(&self, total: &mut MicroBatchLoss, cell_loss: Option<Tensor<1>>) {
        let value = match &cell_loss {
            Some(cell_loss) => cell_loss.clone().inner(),
            None => self.entropy.zeros_like(),
        };
        total.gauges.push(("train/patch_loss", value));
        total.gauges.push((PATCH_TARGET_ENTROPY, self.entropy.clone()));
        total.gauges.push(("health/patch_prototypes_in_use", self.balanced.prototypes_in_use.clone()));
        if let Some(cell_loss) = cell_loss {
            total.loss = total.loss.clone() + cell_loss * self.weight;
        }
    }
}

impl Loss {
    /// Returns whether the loss has parts other than the loss of the views.
    fn has_other_parts(&self) -> bool {
        self.cells.is_some() || !self.neighbors.is_empty() || self.has_gram
    }

    /// Returns the student's scores of the views of each size, and then those of masked cells if
    /// there are any.
    fn scores(&self, heads: &HeadOutputs) -> Vec<Tensor<3>> {
        let mut scores = heads.on_all_views(HEAD);
        if let Some(cells) = &self.cells {
            scores.extend(heads.on_masked(cells.head, 0));
        }
        scores
    }

    /// Returns the part of the loss of micro-batch `index` that depends on [`Loss::scores`] of
    /// `heads`, or this rank's share of it. The part of the cells is the mean over all views of the
    /// mean over a view's masked cells.
    fn score_loss(&self, index: usize, heads: &HeadOutputs, scores: &[CompletedScores]) -> MicroBatchLoss {
        let n_sizes = heads.by_name[HEAD].len();
        let targets = &self.views.balanced.targets;
        let loss = between_views(&scores[..n_sizes], targets, index, self.student_temp, self.local_weight);
        let mut gauges = self.views.gauges(index);
        if self.has_other_parts() {
            gauges.push((MATCH_LOSS, loss.clone().inner()));
        }
        let mut total = MicroBatchLoss { loss, gauges };
        if let Some(cells) = &self.cells {
            let n_views = heads.masked(0).cells.len();
            let cell_loss = scores.get(n_sizes).map(|scores| {
                weighted_rows(scores, &cells.balanced.targets, index, self.student_temp) / n_views as f64
            });
            cells.add_to(&mut total, cell_loss);
        }
        total
    }
}

impl BatchLoss for Loss {
    fn column_loss(
        &self,
        index: usize,
        scores: &HeadOutputs,
        group: ColumnGroup<'_>,
    ) -> Result<MicroBatchLoss, EngineError> {
        // Scores of views and cells are completed with one exchange.
        let completed = CompletedScores::complete(self.scores(scores), self.student_temp, group)?;
        Ok(self.score_loss(index, scores, &completed))
    }

    fn micro_batch_loss(&self, index: usize, student: &Outputs) -> MicroBatchLoss {
        let globals = student.pooled(0);
        let MicroBatchLoss { mut loss, mut gauges } = if self.views.balanced.targets.is_divided() {
            // The step adds what depends on scores, by `column_loss`.
            MicroBatchLoss { loss: globals.clone().sum() * 0.0, gauges: Vec::new() }
        } else {
            let scores = CompletedScores::from_all_columns(self.scores(&student.heads));
            self.score_loss(index, &student.heads, &scores)
        };
        let mut koleo: Option<Tensor<1>> = None;
        for (i, neighbors) in self.neighbors.iter().enumerate() {
            let term = neighbors.koleo(view(&globals, i), &self.positions[index]);
            koleo = Some(add_term(koleo, term));
        }
        if let Some(koleo) = koleo {
            gauges.push(("train/koleo_loss", koleo.clone().inner()));
            loss = loss + koleo * self.koleo_weight;
        }
        if let Some(anchors) = &self.anchors {
            let gram = anchors.loss(index, student);
            gauges.push(("train/gram_loss", gram.clone().inner()));
            loss = loss + gram * anchors.weight;
        } else if self.has_gram {
            gauges.push(("train/gram_loss", self.views.balanced.prototypes_in_use.zeros_like()));
        }
        MicroBatchLoss { loss, gauges }
    }

    fn observed(&self) -> Vec<(&'static str, Tensor<1>)> {
        let mut means = Vec::new();
        means.extend(self.views.balanced.mean.clone());
        if let Some(cells) = &self.cells {
            means.extend(cells.balanced.mean.clone());
        }
        means
    }
}
