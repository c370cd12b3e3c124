//! The loss of a micro-batch, given the targets of the batch.

use std::collections::BTreeMap;

use burn_tensor::Tensor;
use kernels::ops::{Pairs, cross_entropy, sharpness};
use networks::features::{Features, Outputs};
use ranks::EngineError;
use ranks::column_group::ColumnGroup;
use ranks::peers::Peers;

use super::heads::HEAD;
use super::targets::{Balanced, BalancedColumns};

use crate::method::loss::columns;
use crate::method::loss::cross_entropy::between_weighted_views;
use crate::method::loss::gram::{gram, on_grid};
use crate::method::loss::koleo::{Neighbors, view};
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
pub(super) enum ViewTargets {
    /// Targets over all prototypes.
    Whole(Balanced),
    /// Targets of this rank's columns, for the column group.
    Columns(BalancedColumns),
}

impl ViewTargets {
    /// Effective number of prototypes in use in the whole batch, `[1]`.
    fn prototypes_in_use(&self) -> &Tensor<1> {
        match self {
            Self::Whole(Balanced { prototypes_in_use, .. })
            | Self::Columns(BalancedColumns { prototypes_in_use, .. }) => prototypes_in_use,
        }
    }

    /// Mean of the teacher's scores, under the name of the center, if there is one.
    fn mean(&self) -> Option<(&'static str, Tensor<1>)> {
        match self {
            Self::Whole(Balanced { mean, .. }) | Self::Columns(BalancedColumns { mean, .. }) => mean.clone(),
        }
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
        let (anchor, patches) = (&self.features[number], student.features[0].patches());
        gram(patches.x, on_grid(anchor.x.clone(), anchor.grid[0], patches.grid[0]))
    }
}

/// Targets of masked cells.
pub(super) struct Cells {
    /// Name of the head that scores them.
    head: &'static str,
    balanced: Balanced,
    /// Mean entropy of the targets over the whole batch, `[1]`: micro-batches may have no masked cell.
    entropy: Tensor<1>,
    weight: f64,
}

impl Cells {
    /// Wraps the targets of masked cells, which the head `head` scores.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(super) fn of(
        head: &'static str,
        balanced: Balanced,
        weight: f64,
        peers: Peers<'_>,
    ) -> Result<Self, EngineError> {
        let targets = &balanced.targets;
        let summed = |targets: Tensor<3>| {
            let [rows, _, _] = targets.dims();
            let [entropy, _] = sharpness(&targets);
            entropy * rows as f64
        };
        let entropy = peers.sum("entropy", &targets.reduced(1, 0.0, summed))? / targets.n().max(1) as f64;
        Ok(Self { head, balanced, entropy, weight })
    }

    /// The loss of micro-batch `number`, `[1]`: the mean over all views of the mean over a view's masked cells, zero for a
    /// view without.
    fn loss(&self, number: usize, student: &Outputs, temperature: f64) -> Option<Tensor<1>> {
        let targets = self.balanced.targets.of(number)?;
        let scores = student.head_on_masked(self.head, 0)?;
        let [rows, _, _] = scores.dims();
        let masked = student.rows(0);
        let weights = Tensor::<1>::from_floats(&masked.weights()[..], self.balanced.targets.device());
        // Cross-entropy is linear in the targets.
        let weighted = targets.clone() * weights.reshape([rows, 1, 1]);
        Some(cross_entropy(scores, weighted, Pairs::All, temperature) / masked.cells.len() as f64)
    }
}

impl Loss {
    /// Gauges of the views' targets: mean entropy, mean largest probability, prototypes in use.
    fn gauges(
        &self,
        [entropy, max_prob]: [Tensor<1>; 2],
        in_use: Tensor<1>,
    ) -> Vec<(&'static str, Tensor<1>)> {
        vec![
            (TARGET_ENTROPY, entropy),
            ("health/teacher_max_prob", max_prob),
            ("health/prototypes_in_use", in_use),
        ]
    }

    /// Whether the loss has other parts than that of the views.
    fn has_other_parts(&self) -> bool {
        self.cells.is_some() || !self.neighbors.is_empty() || self.has_gram
    }
}

impl BatchLoss for Loss {
    fn of_columns(
        &self,
        number: usize,
        scores: &BTreeMap<&'static str, Vec<Tensor<3>>>,
        group: ColumnGroup<'_>,
    ) -> Result<MicroBatchLoss, EngineError> {
        let ViewTargets::Columns(views) = &self.views else {
            // The step calls it where heads are divided, and then `prepare` has made targets of columns.
            unreachable!("targets of columns where heads are divided");
        };
        let (targets, others) = (&views.targets.rows[number], &views.targets.others[number]);
        let [temperature, weight] = [self.student_temp, self.local_weight];
        let loss = columns::between_views(&scores[HEAD], targets, others, temperature, weight, group)?;
        let in_use = views.prototypes_in_use.clone() / group.n_parts() as f64;
        let mut gauges = self.gauges(views.sharpness[number].clone(), in_use);
        if self.has_other_parts() {
            gauges.push((MATCH_LOSS, loss.clone().inner()));
        }
        Ok(MicroBatchLoss { loss, gauges })
    }

    fn of(&self, number: usize, student: &Outputs) -> MicroBatchLoss {
        let globals = student.pooled(0);
        let (mut loss, mut gauges) = match &self.views {
            ViewTargets::Columns(_) => (globals.clone().sum() * 0.0, Vec::new()),
            ViewTargets::Whole(views) => {
                let targets = views.targets.even_of(number);
                let gauges = self.gauges(sharpness(targets), views.prototypes_in_use.clone());
                let n_sizes = student.head(HEAD).len();
                let scores: Vec<Tensor<3>> =
                    (0..n_sizes).map(|size| student.head_on_views(HEAD, size)).collect();
                let [temperature, weight] = [self.student_temp, self.local_weight];
                (between_weighted_views(&scores, targets, temperature, weight), gauges)
            }
        };
        if self.has_other_parts() && matches!(self.views, ViewTargets::Whole(_)) {
            gauges.push((MATCH_LOSS, loss.clone().inner()));
        }
        if let Some(cells) = &self.cells {
            let of_cells = cells.loss(number, student, self.student_temp);
            let value = of_cells.clone().map_or_else(|| cells.entropy.zeros_like(), Tensor::inner);
            gauges.push(("train/patch_loss", value));
            gauges.push((PATCH_TARGET_ENTROPY, cells.entropy.clone()));
            gauges.push(("health/patch_prototypes_in_use", cells.balanced.prototypes_in_use.clone()));
            loss = of_cells.into_iter().fold(loss, |loss, of_cells| loss + of_cells * cells.weight);
        }
        let of_view = |(i, n): (usize, &Neighbors)| n.koleo(view(&globals, i), &self.positions[number]);
        if let Some(spread) = self.neighbors.iter().enumerate().map(of_view).reduce(|sum, term| sum + term) {
            gauges.push(("train/koleo_loss", spread.clone().inner()));
            loss = loss + spread * self.koleo_weight;
        }
        if self.has_gram {
            let anchored =
                self.anchors.as_ref().map(|anchors| (anchors.loss(number, student), anchors.weight));
            let zero = || self.views.prototypes_in_use().zeros_like();
            gauges
                .push(("train/gram_loss", anchored.as_ref().map_or_else(zero, |(of, _)| of.clone().inner())));
            loss = anchored.into_iter().fold(loss, |loss, (of, weight)| loss + of * weight);
        }
        MicroBatchLoss { loss, gauges }
    }

    fn observed(&self) -> Vec<(&'static str, Tensor<1>)> {
        let of_cells = self.cells.as_ref().and_then(|cells| cells.balanced.mean.clone());
        self.views.mean().into_iter().chain(of_cells).collect()
    }
}
