//! The method: networks, targets and loss of self-distillation over prototypes.

use augment::MultiCrop;
use networks::head::{Head, Reads};
use networks::mask::{BlockMasks, MaskKind, MaskRule, Masking};
use networks::outputs::HeadOutputs;
use ranks::EngineError;
use ranks::peers::Peers;

use super::frozen::FrozenTeacher;
use super::heads::{HEAD, HeadSizes, PATCH_HEAD};
use super::loss::{Anchors, Loss, PATCH_TARGET_ENTROPY, TARGET_ENTROPY, ViewTargets};
use super::patches::{CenteredOn, PatchPrediction};
use super::settings::{
    GramAnchor, GramWeights, Teacher, check_koleo, check_masks, check_student_temp, check_views,
    repeats_first,
};
use super::targets::TargetRule;
use crate::method::bounds::check_bounds;
use crate::method::loss::koleo::{self, neighbors_by_view};
use crate::method::network::{Backbone, NetworkSpec, SeenViews, UpdateRule};
use crate::method::prototype_group::check_prototype_group;
use crate::method::prototypes::{PrototypeExchange, Rows};
use crate::method::{BatchLoss, BatchOutputs, Collective, Gauges, Method, MethodContext, TargetDistribution};
use crate::schedule::Schedule;

/// Name of the trained network.
const STUDENT: &str = "student";

/// Name of the trained network's moving average.
const TEACHER: &str = "teacher";

/// Name of the trained network's moving average where the teacher is a frozen network.
const AVERAGE: &str = "average";

/// Name of the earlier teacher.
const ANCHOR: &str = "gram_teacher";

/// Self-distillation over prototypes.
pub(in crate::method) struct SelfDistillation {
    views: MultiCrop,
    /// Channels of the backbone's features.
    width: usize,
    /// Head of the views, and of masked cells that have none of their own.
    head: HeadSizes,
    /// Rule by which the teacher's scores of views become targets.
    targets: TargetRule,
    /// Prediction of masked cells, if the method has one.
    patches: Option<PatchPrediction>,
    /// Temperature of the student's softmax.
    student_temp: f64,
    /// Weight of KoLeo.
    koleo_weight: f64,
    /// Number of consecutive images among which KoLeo searches for neighbors; 0 for the whole
    /// batch.
    koleo_group: usize,
    /// Decay of the teacher.
    decay: Schedule,
    /// Weight of the pairs with views of other sizes than the first.
    local_weight: f64,
    /// Number of ranks that divide the prototypes of each head among them.
    column_group: usize,
    /// Anchoring of similarities between patches, if the method has one.
    gram: Option<GramAnchor>,
    /// Frozen network in place of the moving average, if the method has one.
    frozen: Option<FrozenTeacher>,
}

impl SelfDistillation {
    /// Creates the method without masks and KoLeo. `head` scores views.
    ///
    /// # Errors
    /// A message with the key and the reason.
    pub(in crate::method) fn new(
        head: HeadSizes,
        teacher: &Teacher<'_>,
        student_temp: f64,
        cx: &MethodContext,
    ) -> Result<Self, String> {
        head.check("head_", "")?;
        check_student_temp(student_temp)?;
        check_views(cx)?;
        Ok(Self {
            targets: teacher.target_rule("center", head.prototypes, cx)?,
            decay: teacher.decay(cx)?,
            head,
            patches: None,
            student_temp,
            koleo_weight: 0.0,
            koleo_group: 0,
            local_weight: 1.0,
            column_group: 1,
            gram: None,
            frozen: None,
            views: cx.views.clone(),
            width: cx.model.width(),
        })
    }

    /// Adds the prediction of patches that `masks` hides, with `weight`. `head` scores them, or
    /// else the head of the views.
    ///
    /// # Errors
    /// A message with the key and the reason.
    pub(in crate::method) fn with_patches(
        self,
        head: Option<HeadSizes>,
        teacher: &Teacher<'_>,
        masks: BlockMasks,
        weight: f64,
        cx: &MethodContext,
    ) -> Result<Self, String> {
        check_masks(&masks, weight)?;
        head.iter().try_for_each(|head| head.check("patch_head.", "patch_head."))?;
        let n_prototypes = head.as_ref().unwrap_or(&self.head).prototypes;
        let targets = teacher.target_rule("patch_center", n_prototypes, cx)?;
        let centered_on = CenteredOn::MaskedPatches;
        Ok(Self { patches: Some(PatchPrediction { head, targets, weight, centered_on, masks }), ..self })
    }

    /// Sets the cells whose scores the center of masked cells follows, which the head of the views
    /// scores.
    pub(in crate::method) fn with_patch_center(mut self, centered_on: CenteredOn) -> Self {
        if let Some(patches) = &mut self.patches {
            patches.centered_on = centered_on;
        }
        self
    }

    /// Sets the weight of the pairs with views of other sizes than the first.
    ///
    /// # Errors
    /// A message with the key and the reason.
    pub(in crate::method) fn with_local_weight(self, weight: f64) -> Result<Self, String> {
        check_bounds(&[("local_weight", weight, [0.0, 1e6])])?;
        Ok(Self { local_weight: weight, ..self })
    }

    /// Returns the weights of `step` that a Gram anchor changes.
    fn gram_weights(&self, step: u64) -> GramWeights {
        match &self.gram {
            Some(gram) => gram.weights_at(step, self.local_weight),
            None => GramWeights { gram: 0.0, local: self.local_weight },
        }
    }

    /// Divides the prototypes of all heads among `size` ranks.
    ///
    /// # Errors
    /// A message with the key and the reason.
    pub(in crate::method) fn with_column_group(self, size: usize) -> Result<Self, String> {
        check_prototype_group(size, "method.prototypes", self.head.prototypes)?;
        if let Some(head) = self.patches.as_ref().and_then(|patches| patches.head.as_ref()) {
            check_prototype_group(size, "method.patch_head.prototypes", head.prototypes)?;
        }
        Ok(Self { column_group: size, ..self })
    }

    /// Adds the anchoring of similarities between patches. The earlier teacher sees the views of
    /// the last size: the first views again, at another size.
    ///
    /// # Errors
    /// A message with the key and the reason.
    pub(in crate::method) fn with_gram(self, gram: Option<GramAnchor>) -> Result<Self, String> {
        if let Some(GramAnchor { weight, every_steps, .. }) = gram {
            check_bounds(&[("gram.weight", weight, [0.0, 1e6])])?;
            if every_steps == 0 {
                return Err("method.gram.every is less than one step".into());
            }
            if !repeats_first(&self.views) {
                return Err("method.gram: the Gram teacher sees the last views, which must repeat all of \
                            the first ones, in the same order, at a size of their own (views.crops: like = \
                            0)"
                .into());
            }
        }
        Ok(Self { gram, ..self })
    }

    /// Adds KoLeo with `weight`, among `group` consecutive images or, with 0, the whole batch.
    ///
    /// # Errors
    /// A message with the key and the reason.
    pub(in crate::method) fn with_koleo(
        self,
        weight: f64,
        group: usize,
        cx: &MethodContext,
    ) -> Result<Self, String> {
        check_koleo(weight, group, cx)?;
        Ok(Self { koleo_weight: weight, koleo_group: group, ..self })
    }

    /// Takes targets from a frozen network, whose heads have as many prototypes as the method's.
    /// The student sees all of every view, and predicts the patches that masks select.
    ///
    /// # Errors
    /// A message with the key and the reason.
    pub(in crate::method) fn with_frozen_teacher(
        self,
        teacher: FrozenTeacher,
        cx: &MethodContext,
    ) -> Result<Self, String> {
        let teacher_px = teacher.model.cell_px();
        let model_px = cx.model.cell_px();
        if teacher_px != model_px {
            return Err(format!(
                "method.teacher.weights: the teacher's patches are {teacher_px} px and the model's \
                 {model_px}: they must be equal, because masked patches are compared one by one"
            ));
        }
        Ok(Self { frozen: Some(teacher), ..self })
    }

    /// Number of view sizes that the student sees: all but that of the earlier teacher.
    fn n_student_sizes(&self) -> usize {
        self.views.groups().len() - usize::from(self.gram.is_some())
    }

    /// Returns the heads of the student, and of its moving average.
    fn heads(&self) -> Vec<Head> {
        let patch_head = self.patches.as_ref().and_then(|patches| patches.head.as_ref());
        self.heads_with_sizes(&self.head, patch_head, self.width)
    }

    /// Returns heads of these sizes on features of `width` channels.
    fn heads_with_sizes(&self, head: &HeadSizes, patch_head: Option<&HeadSizes>, width: usize) -> Vec<Head> {
        if self.patches.is_none() {
            return vec![dividable_head(HEAD, Reads::Pooled, head, width)];
        }
        match patch_head {
            None => vec![dividable_head(HEAD, Reads::PooledAndMasked, head, width)],
            Some(patch_head) => vec![
                dividable_head(HEAD, Reads::Pooled, head, width),
                dividable_head(PATCH_HEAD, Reads::Masked, patch_head, width),
            ],
        }
    }

    /// The student, its teacher `frozen`, and its moving average, which sees nothing in training
    /// and is evaluated.
    fn networks_with(&self, frozen: &FrozenTeacher) -> Vec<NetworkSpec> {
        let FrozenTeacher { model, normalization, head, patch_head } = frozen;
        let teacher = NetworkSpec {
            backbone: Backbone::Custom(Box::new(model.clone()), normalization.clone()),
            heads: self.heads_with_sizes(head, patch_head.as_ref(), model.width()),
            update_rule: UpdateRule::Frozen,
            ..self.network(TEACHER, 1, false)
        };
        let update_rule =
            UpdateRule::Average { source: STUDENT, decay: self.decay, updates_before_step: false };
        let average = NetworkSpec { update_rule, ..self.network(AVERAGE, 0, false) };
        vec![teacher, average, self.network(STUDENT, self.n_student_sizes(), false)]
    }

    /// The specification of a network that sees `n_sizes` view sizes; masked cells are hidden from
    /// it if `hides`.
    fn network(&self, name: &'static str, n_sizes: usize, hides: bool) -> NetworkSpec {
        let takes_masks = self.patches.is_some();
        let mut sees = Vec::with_capacity(n_sizes);
        for size in 0..n_sizes {
            let is_hidden = hides && takes_masks && size == 0;
            let masking = if is_hidden { Masking::Replaced } else { Masking::Shown };
            sees.push(SeenViews { size, masking });
        }
        NetworkSpec { sees, takes_masks, ..NetworkSpec::trained(name, self.heads(), n_sizes) }
    }
}

/// Creates a head whose prototypes may be divided among ranks.
fn dividable_head(name: &'static str, reads: Reads, sizes: &HeadSizes, width: usize) -> Head {
    Head { may_divide: true, ..Head::new(name, reads, sizes.units(name, width)) }
}

impl SelfDistillation {
    /// Computes the targets of the views. `scored` are the outputs of the teacher's heads for the
    /// micro-batches that this rank scores.
    ///
    /// # Errors
    /// [`EngineError`].
    fn view_targets(
        &self,
        scored: &[&HeadOutputs],
        step: u64,
        exchange: PrototypeExchange<'_>,
    ) -> Result<ViewTargets, EngineError> {
        let scores = scored.iter().map(|outputs| outputs.on_views(HEAD, 0)).collect();
        let scores = Rows::new(scores, exchange.n_micro_batches());
        let balanced = self.targets.balance("views", &scores, step, exchange)?;
        let sharpness = balanced.targets.sharpness(exchange)?;
        Ok(ViewTargets { balanced, sharpness })
    }
}

impl Method for SelfDistillation {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        if let Some(frozen) = &self.frozen {
            return self.networks_with(frozen);
        }
        let update_rule =
            UpdateRule::Average { source: STUDENT, decay: self.decay, updates_before_step: false };
        let mut teacher = NetworkSpec { update_rule, ..self.network(TEACHER, 1, false) };
        if self.patches.as_ref().is_some_and(|patches| patches.centered_on == CenteredOn::AllPatches) {
            for head in teacher.heads.iter_mut().filter(|head| head.reads == Reads::PooledAndMasked) {
                head.reads = Reads::PooledAndCells;
            }
        }
        let n_sizes = self.n_student_sizes();
        let student = self.network(STUDENT, n_sizes, true);
        let anchor = self.gram.map(|GramAnchor { from_step, every_steps, max_updates, .. }| NetworkSpec {
            heads: Vec::new(),
            sees: vec![SeenViews { size: n_sizes, masking: Masking::Shown }],
            update_rule: UpdateRule::Copy { source: TEACHER, every_steps, from_step, max_updates },
            ..self.network(ANCHOR, 1, false)
        });
        [Some(teacher), anchor, Some(student)].into_iter().flatten().collect()
    }

    fn column_group_size(&self) -> usize {
        self.column_group
    }

    fn evaluated(&self) -> &'static str {
        if self.frozen.is_some() { AVERAGE } else { TEACHER }
    }

    fn needs_trained_weights(&self) -> Option<&'static str> {
        self.gram.filter(|gram| gram.from_step == 0).map(|_| "method.gram.from")
    }

    fn masks(&self) -> Option<MaskRule> {
        let patches = self.patches.as_ref()?;
        Some(MaskRule { size: 0, kind: MaskKind::Blocks(patches.masks) })
    }

    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        step: u64,
        peers: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        let teacher = batch.network_outputs(TEACHER);
        let exchange = PrototypeExchange::new(peers, batch.columns);
        let scored = exchange.outputs(batch, TEACHER);
        let views = self.view_targets(&scored, step, exchange)?;
        let neighbors = match self.koleo_weight {
            0.0 => Vec::new(),
            _ => neighbors_by_view(batch.trained, self.koleo_group, peers)?,
        };
        let positions = peers.positions(teacher[0].n_images());
        let patches = self.patches.as_ref();
        let cells = patches.map(|patches| patches.cells(teacher, &scored, step, exchange)).transpose()?;
        let weights = self.gram_weights(step);
        let anchors = self.gram.filter(|gram| step >= gram.from_step).map(|_| Anchors {
            patches: batch
                .network_outputs(ANCHOR)
                .iter()
                .map(|outputs| outputs.features[0].patches())
                .collect(),
            weight: weights.gram,
        });
        Ok(Box::new(Loss {
            views,
            cells,
            neighbors,
            positions,
            anchors,
            has_gram: self.gram.is_some(),
            student_temp: self.student_temp,
            koleo_weight: self.koleo_weight,
            local_weight: weights.local,
        }))
    }

    fn collectives(&self) -> Vec<Collective> {
        let mut collectives = self.targets.collectives();
        if self.koleo_weight != 0.0 {
            collectives.extend(koleo::collectives(self.views.groups()[0].n_views, self.width));
        }
        if let Some(patches) = &self.patches {
            collectives.extend(patches.collectives());
        }
        collectives
    }

    fn after_step(&mut self, observed: &[(&'static str, Vec<f32>)]) {
        self.targets.observe(observed);
        if let Some(patches) = &mut self.patches {
            patches.targets.observe(observed);
        }
    }

    fn scheduled_values(&self, step: u64) -> Gauges {
        let decay = if self.frozen.is_some() { "knobs/average_decay" } else { "knobs/teacher_decay" };
        let mut values =
            vec![(decay, self.decay.at(step)), ("knobs/teacher_temp", self.targets.temperature.at(step))];
        if let Some(patches) = &self.patches {
            values.push(("knobs/teacher_patch_temp", patches.targets.temperature.at(step)));
        }
        if self.gram.is_some_and(|gram| gram.ramp_steps > 0) {
            let weights = self.gram_weights(step);
            values.push(("knobs/gram_weight", weights.gram));
            values.push(("knobs/local_weight", weights.local));
        }
        values
    }

    fn uninformed_loss(&self) -> Option<f64> {
        // Pairs count by their weights, and are divided by their number.
        let n_views: Vec<usize> =
            self.views.groups()[..self.n_student_sizes()].iter().map(|group| group.n_views).collect();
        let first = (n_views[0] * (n_views[0] - 1)) as f64;
        let others = (n_views[0] * n_views[1..].iter().sum::<usize>()) as f64;
        let share = (first + self.local_weight * others) / (first + others);
        Some((self.head.prototypes as f64).ln() * share)
    }

    fn target_distributions(&self) -> Vec<TargetDistribution> {
        let n_prototypes = self.head.prototypes;
        let temperature_key = self.targets.temperature_key;
        let mut distributions = vec![TargetDistribution::new(n_prototypes, TARGET_ENTROPY, temperature_key)];
        if let Some(patches) = &self.patches {
            let n_prototypes = patches.head.as_ref().unwrap_or(&self.head).prototypes;
            let temperature_key = patches.targets.temperature_key;
            distributions.push(TargetDistribution::new(n_prototypes, PATCH_TARGET_ENTROPY, temperature_key));
        }
        distributions
    }

    fn state(&self) -> Vec<(String, Vec<f32>)> {
        let mut state = vec![self.targets.state()];
        if let Some(patches) = &self.patches {
            state.push(patches.targets.state());
        }
        state
    }

    fn load_state(&mut self, state: &[(String, Vec<f32>)]) -> Result<(), String> {
        self.targets.load(state)?;
        if let Some(patches) = &mut self.patches {
            patches.targets.load(state)?;
        }
        Ok(())
    }
}
