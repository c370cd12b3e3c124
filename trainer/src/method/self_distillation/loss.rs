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
use crate::method::loss::gram::{gram, on_grid};
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
    /// Neighbors by view of the first size; none where KoLeo has no weight.
    pub(super) neighbors: Vec<Neighbors>,
    /// Positions in the batch of the images of each micro-batch.
    pub(super) positions: Vec<Vec<usize>>,
    /// Features of the earlier teacher, once there is one.
    pub(super) anchors: Option<Anchors>,
    /// Whether the method anchors similarities between patches, now or later.
    pub(super) has_gram: bool,
    pub(super) student_temp: f64,
    pub(super) koleo_weight: f64,
    /// Weight of the pairs with views of other sizes than the first.
    pub(super) local_weight: f64,
}

/// Targets of the views.
pub(super) struct ViewTargets {
    pub(super) targets: BatchTargets,
    /// Mean entropy and mean largest probability of the targets of each micro-batch, `[1]` each;
    /// where columns are divided, this rank's shares of them.
    pub(super) sharpness: Vec<[Tensor<1>; 2]>,
}

impl ViewTargets {
    /// Gauges of the targets of micro-batch `number`, of which `n_parts` ranks have a share each.
    fn gauges(&self, number: usize, n_parts: usize) -> Vec<(&'static str, Tensor<1>)> {
        let [entropy, max_prob] = self.sharpness[number].clone();
        let in_use = self.targets.prototypes_in_use().clone() / n_parts as f64;
        vec![
            (TARGET_ENTROPY, entropy),
            ("health/teacher_max_prob", max_prob),
            ("health/prototypes_in_use", in_use),
        ]
    }
}

/// Features of the earlier teacher.
pub(super) struct Anchors {
    /// Patches by micro-batch, `[B·V, N, D]`.
    pub(super) features: Vec<Features>,
    /// Weight of the anchoring's part of the loss.
    pub(super) weight: f64,
}

impl Anchors {
    /// The loss of micro-batch `number`, `[1]`.
    fn loss(&self, number: usize, student: &Outputs) -> Tensor<1> {
        let anchor = &self.features[number];
        let patches = student.features[0].patches();
        gram(patches.x, on_grid(anchor.x.clone(), anchor.grid[0], patches.grid[0]))
    }
}

/// Targets of masked cells.
pub(super) struct Cells {
    /// Name of the head that scores them.
    pub(super) head: &'static str,
    /// Targets, weighted as in the mean over the cells of each view.
    pub(super) targets: BatchTargets,
    /// Mean entropy of the targets over the whole batch, `[1]`: micro-batches may have no masked
    /// cell. Where columns are divided, this rank's share of it.
    pub(super) entropy: Tensor<1>,
    /// Weight of the cells' part of the loss.
    pub(super) weight: f64,
}

impl Cells {
    /// The loss of micro-batch `number` against whole targets, `[1]`: the mean over all views of
    /// the mean over a view's masked cells; `None` for a micro-batch without.
    fn loss(
        &self,
        targets: &Rows,
        number: usize,
        student: &HeadOutputs,
        temperature: f64,
    ) -> Option<Tensor<1>> {
        let targets = targets.of(number)?;
        let scores = student.on_masked(self.head, 0)?;
        let n_views = student.masked(0).cells.len();
        Some(cross_entropy(scores, targets.clone(), Pairs::All, temperature) / n_views as f64)
    }

    /// Adds the loss of a micro-batch, `of_cells`, to the rest of it, and its gauges, of which
    /// `n_parts` ranks have a share each.
    fn add(&self, of_cells: Option<Tensor<1>>, n_parts: usize, to: &mut MicroBatchLoss) {
        let value = of_cells.clone().map_or_else(|| self.entropy.zeros_like(), Tensor::inner);
        let in_use = self.targets.prototypes_in_use().clone() / n_parts as f64;
        to.gauges.push(("train/patch_loss", value));
        to.gauges.push((PATCH_TARGET_ENTROPY, self.entropy.clone()));
        to.gauges.push(("health/patch_prototypes_in_use", in_use));
        if let Some(of_cells) = of_cells {
            to.loss = to.loss.clone() + of_cells * self.weight;
        }
    }
}

impl Loss {
    /// Whether the loss has other parts than that of the views.
    fn has_other_parts(&self) -> bool {
        self.cells.is_some() || !self.neighbors.is_empty() || self.has_gram
    }

    /// Wraps the views' part of the loss of micro-batch `number`, with its gauges, of which
    /// `n_parts` ranks have a share each.
    fn of_views(&self, loss: Tensor<1>, number: usize, n_parts: usize) -> MicroBatchLoss {
        let mut gauges = self.views.gauges(number, n_parts);
        if self.has_other_parts() {
            gauges.push((MATCH_LOSS, loss.clone().inner()));
        }
        MicroBatchLoss { loss, gauges }
    }

    /// The part of the loss of micro-batch `number` that depends on heads, where these are not
    /// divided.
    fn of_heads(&self, targets: &Rows, number: usize, student: &HeadOutputs) -> MicroBatchLoss {
        let [temperature, weight] = [self.student_temp, self.local_weight];
        let scores = student.on_all_views(HEAD);
        let loss = between_weighted_views(&scores, targets.even_of(number), temperature, weight);
        let mut all = self.of_views(loss, number, 1);
        if let Some(cells) = &self.cells
            && let BatchTargets::Whole(balanced) = &cells.targets
        {
            cells.add(cells.loss(&balanced.targets, number, student, temperature), 1, &mut all);
        }
        all
    }
}

impl BatchLoss for Loss {
    fn of_columns(
        &self,
        number: usize,
        scores: &HeadOutputs,
        group: ColumnGroup<'_>,
    ) -> Result<MicroBatchLoss, EngineError> {
        let BatchTargets::Columns(views) = &self.views.targets else {
            // The step calls it where heads are divided, and then `prepare` has made targets of
            // columns.
            unreachable!("targets of columns where heads are divided");
        };
        let [temperature, weight] = [self.student_temp, self.local_weight];
        let of_views = scores.on_all_views(HEAD);
        let of_cells = self.cells.as_ref().and_then(|cells| scores.on_masked(cells.head, 0));
        let n_sizes = of_views.len();
        let of_all: Vec<Tensor<3>> = of_views.into_iter().chain(of_cells).collect();
        let completed = CompletedScores::of(&of_all, temperature, group)?;
        let (of_views, of_cells) = completed.split_at(n_sizes);
        let loss = columns::between_views(of_views, &views.targets, number, temperature, weight);
        let mut all = self.of_views(loss, number, group.n_parts());
        if let Some(cells) = &self.cells
            && let BatchTargets::Columns(balanced) = &cells.targets
        {
            let of_rows = |of_cells: &CompletedScores| {
                let masked = scores.masked(0);
                let targets = &balanced.targets;
                let sum = columns::weighted_rows(of_cells, targets, number, &masked.weights(), temperature);
                sum / masked.cells.len() as f64
            };
            cells.add(of_cells.first().map(of_rows), group.n_parts(), &mut all);
        }
        Ok(all)
    }

    fn of(&self, number: usize, student: &Outputs) -> MicroBatchLoss {
        let globals = student.pooled(0);
        let MicroBatchLoss { mut loss, mut gauges } = match &self.views.targets {
            BatchTargets::Columns(_) => {
                MicroBatchLoss { loss: globals.clone().sum() * 0.0, gauges: Vec::new() }
            }
            BatchTargets::Whole(views) => self.of_heads(&views.targets, number, &student.heads),
        };
        if let Some(spread) = self
            .neighbors
            .iter()
            .enumerate()
            .map(|(i, n)| n.koleo(view(&globals, i), &self.positions[number]))
            .reduce(|sum, term| sum + term)
        {
            gauges.push(("train/koleo_loss", spread.clone().inner()));
            loss = loss + spread * self.koleo_weight;
        }
        if self.has_gram {
            let anchored =
                self.anchors.as_ref().map(|anchors| (anchors.loss(number, student), anchors.weight));
            let zero = || self.views.targets.prototypes_in_use().zeros_like();
            gauges
                .push(("train/gram_loss", anchored.as_ref().map_or_else(zero, |(of, _)| of.clone().inner())));
            loss = anchored.into_iter().fold(loss, |loss, (of, weight)| loss + of * weight);
        }
        MicroBatchLoss { loss, gauges }
    }

    fn observed(&self) -> Vec<(&'static str, Tensor<1>)> {
        let of_cells = self.cells.as_ref().and_then(|cells| cells.targets.mean());
        self.views.targets.mean().into_iter().chain(of_cells).collect()
    }
}
