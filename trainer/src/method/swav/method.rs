//! The method: networks, assignments and queue.

use augment::MultiCrop;
use burn_tensor::{Device, Tensor, TensorData};
use kernels::ops::unit_rows;
use networks::features::{HeadOutputs, Outputs};
use networks::head::projection::Projection;
use networks::head::unit_prototypes::UnitPrototypes;
use networks::head::{Head, Reads};
use ranks::EngineError;
use ranks::peers::Peers;

use super::config::Config;
use super::loss::{Assigned, QUEUE, SCORES, SwavLoss, TARGET_ENTROPY};
use crate::method::loss::columns::{self, ColumnTargets};
use crate::method::loss::mean::{self, batch_means, in_use};
use crate::method::loss::rows::Rows;
use crate::method::loss::sinkhorn;
use crate::method::network::NetworkSpec;
use crate::method::{
    BatchLoss, BatchOutputs, Collective, ColumnOutputs, Method, MethodContext, MethodRecipe,
    TargetDistribution,
};
#[cfg(test)]
use crate::schedule::Duration;

/// Name of the head that outputs z.
const PROJECTION: &str = "projection";

/// Keeps a norm away from zero.
const NORM_EPSILON: f64 = 1e-12;

/// Name of the network.
const STUDENT: &str = "student";

/// SwAV.
struct Swav {
    config: Config,
    views: MultiCrop,
    width: usize,
    frozen_steps: u64,
    /// First step whose embeddings enter the queue.
    queue_from: u64,
    /// Queue: ẑ of all assigned views of an image one after another, the newest image first.
    queue: Vec<f32>,
}

impl MethodRecipe for Config {
    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        self.validate(cx)?;
        let queue_from = cx.length.steps("method.queue_start", &self.queue_start)?;
        let is_full = queue_from.saturating_add(self.queue.div_ceil(cx.length.batch_size) as u64);
        if self.queue > 0 && is_full >= cx.length.total_steps {
            return Err(format!(
                "method.queue is full at step {is_full} of {}, too late to count: let it begin earlier \
                 (method.queue_start)",
                cx.length.total_steps
            ));
        }
        Ok(Box::new(Swav {
            frozen_steps: cx.length.steps("method.freeze_prototypes", &self.freeze_prototypes)?,
            queue_from,
            queue: Vec::new(),
            config: self.clone(),
            views: cx.views.clone(),
            width: cx.model.width(),
        }))
    }

    #[cfg(test)]
    fn examples() -> Vec<(Self, MultiCrop)> {
        let plain = Self {
            prototypes: 10,
            head_hidden: vec![12],
            head_output: 6,
            head_batch_norm: true,
            temperature: 0.1,
            epsilon: 0.05,
            sinkhorn_iterations: 3,
            freeze_prototypes: Duration::Steps(0),
            queue: 0,
            queue_start: Duration::Steps(0),
            prototype_group: 1,
        };
        let views = MultiCrop::dino(16, 8, 2);
        let queue = Self { queue: 13, head_hidden: vec![9, 12], head_batch_norm: false, ..plain.clone() };
        vec![(plain, views.clone()), (queue, views)]
    }
}

impl Swav {
    /// Number of views that are assigned to prototypes.
    fn n_assigned(&self) -> usize {
        self.views.groups()[0].n_views
    }

    /// Number of values that the queue holds of an image.
    fn n_each(&self) -> usize {
        self.n_assigned() * self.config.head_output
    }

    fn fills_queue(&self, step: u64) -> bool {
        self.config.queue > 0 && step >= self.queue_from
    }

    /// Returns the queue's share of micro-batch `number` of the global batch, `[n, V, D]`; `None`
    /// while it is not full.
    fn queued(&self, number: usize, n_micro_batches: usize, device: &Device) -> Option<Tensor<3>> {
        let n_each = self.n_each();
        if self.config.queue == 0 || self.queue.len() < self.config.queue * n_each {
            return None;
        }
        let images = self.queue.chunks_exact(n_each).skip(number).step_by(n_micro_batches);
        let values: Vec<f32> = images.flatten().copied().collect();
        let shape = [values.len() / n_each, self.n_assigned(), self.config.head_output];
        (!values.is_empty()).then(|| Tensor::from_data(TensorData::new(values, shape), device))
    }

    /// Returns the scores of a micro-batch, followed by those of the queue's share of it, number
    /// `number` in the batch.
    fn with_queue(
        &self,
        batch: &BatchOutputs<'_>,
        scores: &Tensor<3>,
        number: usize,
        n_micro_batches: usize,
    ) -> Tensor<3> {
        match self.queued(number, n_micro_batches, &scores.device()) {
            Some(queued) => Tensor::cat(vec![scores.clone(), (batch.score)(SCORES, queued)], 0),
            None => scores.clone(),
        }
    }

    /// Number of rows that are assigned, of each view, in a batch of `n_images`.
    fn n_rows(&self, n_images: usize) -> usize {
        let is_full = self.config.queue > 0 && self.queue.len() >= self.config.queue * self.n_each();
        n_images + if is_full { self.config.queue } else { 0 }
    }

    /// Computes this rank's columns of the assignments of the views, by micro-batch of the group.
    fn assign_columns(
        &self,
        batch: &BatchOutputs<'_>,
        columns: ColumnOutputs<'_>,
        peers: Peers<'_>,
    ) -> Result<ColumnTargets, EngineError> {
        let group = columns.group;
        let scores = |outputs: &HeadOutputs| outputs.on_views(SCORES, 0);
        let scores: Vec<Tensor<3>> = columns.trained.iter().map(scores).collect();
        let [b, v, _] = scores[0].dims();
        let n = group.n_micro_batches();
        let all: Vec<Tensor<3>> = scores
            .iter()
            .enumerate()
            .map(|(t, scores)| self.with_queue(batch, scores, group.number(t), n))
            .collect();
        let Config { prototypes, epsilon, sinkhorn_iterations, .. } = self.config;
        let of_view = |view: usize| {
            let logits = Rows::with_number(
                all.iter().map(|all| all.clone().narrow(1, view, 1)).collect(),
                self.n_rows(b * n),
            );
            columns::sinkhorn(&logits, prototypes, epsilon, sinkhorn_iterations, peers, group)
        };
        let by_view: Vec<ColumnTargets> = (0..v).map(of_view).collect::<Result<_, _>>()?;
        let rows = |t: usize| {
            let of_view = |targets: &ColumnTargets| targets.rows.even_of(t).clone().slice(0..b);
            Tensor::cat(by_view.iter().map(of_view).collect(), 1)
        };
        let others =
            |t: usize| (0..b).flat_map(|i| by_view.iter().map(move |targets| targets.others[t][i])).collect();
        let [.., k] = scores[0].dims();
        let device = scores[0].device();
        let rows = (0..group.n_group()).map(|t| Some(rows(t))).collect();
        let others = (0..group.n_group()).map(others).collect();
        Ok(ColumnTargets { rows: Rows::ragged(rows, b * v * n, k, device), others })
    }

    /// Computes the assignments of the views.
    fn assign(&self, batch: &BatchOutputs<'_>, peers: Peers<'_>) -> Result<Rows, EngineError> {
        let scores: Vec<Tensor<3>> =
            batch.trained.iter().map(|outputs| outputs.heads.on_views(SCORES, 0)).collect();
        let [b, v, _] = scores[0].dims();
        let n = peers.n_micro_batches();
        // Micro-batches are told apart by the position of their first image.
        let all: Vec<Tensor<3>> = scores
            .iter()
            .enumerate()
            .map(|(i, scores)| self.with_queue(batch, scores, peers.position(i, 0), n))
            .collect();
        let n_rows = self.n_rows(b * n);
        let by_view: Vec<Rows> = (0..v)
            .map(|view: usize| {
                let logits =
                    Rows::with_number(all.iter().map(|all| all.clone().narrow(1, view, 1)).collect(), n_rows);
                sinkhorn::targets(&logits, self.config.epsilon, self.config.sinkhorn_iterations, peers)
            })
            .collect::<Result<_, _>>()?;
        let of_batch = |number: usize| {
            let views = by_view.iter().filter_map(|targets| targets.of(number));
            Tensor::cat(views.map(|targets| targets.clone().slice(0..b)).collect(), 1)
        };
        Ok(Rows::even((0..scores.len()).map(of_batch).collect(), peers))
    }

    /// Gathers ẑ of the assigned views of the whole batch, if the queue fills.
    fn for_queue(
        &self,
        batch: &BatchOutputs<'_>,
        step: u64,
        peers: Peers<'_>,
    ) -> Result<Option<Tensor<1>>, EngineError> {
        let rows = |outputs: &Outputs| {
            let z = outputs.heads.on_views(PROJECTION, 0);
            let [b, v, d] = z.dims();
            unit_rows(z.reshape([b * v, d]), NORM_EPSILON).reshape([b, v * d])
        };
        if !self.fills_queue(step) {
            return Ok(None);
        }
        let rows: Vec<Tensor<2>> = batch.trained.iter().map(rows).collect();
        let all = peers.gather("queue", &rows)?;
        let [n, d] = all.dims();
        Ok(Some(all.reshape([n * d])))
    }
}

impl Method for Swav {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let Config { head_hidden, head_output, head_batch_norm, .. } = &self.config;
        let projection = Projection::of_head(self.width, head_hidden, *head_output, *head_batch_norm);
        let prototypes = UnitPrototypes {
            name: "head.prototypes".into(),
            input: self.config.head_output,
            count: self.config.prototypes,
            frozen_steps: self.frozen_steps,
        };
        let projection: Vec<Box<dyn networks::unit::Unit>> = vec![Box::new(projection)];
        let heads = vec![
            Head::new(PROJECTION, Reads::Pooled, projection),
            Head {
                may_divide: true,
                ..Head::new(SCORES, Reads::Head(PROJECTION), vec![Box::new(prototypes)])
            },
        ];
        vec![NetworkSpec::trained(STUDENT, heads, self.views.groups().len())]
    }

    fn evaluated(&self) -> &'static str {
        STUDENT
    }

    fn column_group_size(&self) -> usize {
        self.config.prototype_group
    }

    fn prepares_with_heads(&self) -> bool {
        true
    }

    fn prepare(
        &self,
        batch: &BatchOutputs<'_>,
        step: u64,
        peers: Peers<'_>,
    ) -> Result<Box<dyn BatchLoss>, EngineError> {
        let for_queue = self.for_queue(batch, step, peers)?;
        let temperature = self.config.temperature;
        if let Some(columns) = batch.columns {
            let targets = self.assign_columns(batch, columns, peers)?;
            let [mean] = columns::batch_means("prototypes in use", [&targets.rows], columns.group)?;
            let sharpness = columns::sharpness(&targets, columns.group)?;
            let assigned = Assigned::Columns(targets, sharpness);
            return Ok(Box::new(SwavLoss {
                assigned,
                for_queue,
                prototypes_in_use: in_use(mean),
                temperature,
            }));
        }
        let targets = self.assign(batch, peers)?;
        let [mean_target] = batch_means("prototypes in use", [&targets], peers)?;
        let assigned = Assigned::Whole(targets);
        let prototypes_in_use = in_use(mean_target);
        Ok(Box::new(SwavLoss { assigned, for_queue, prototypes_in_use, temperature }))
    }

    fn collectives(&self) -> Vec<Collective> {
        let Config { prototypes, sinkhorn_iterations, queue, .. } = self.config;
        let for_queue = (queue > 0).then_some(Collective::Gather(self.n_each()));
        let of_view = sinkhorn::collectives(prototypes, sinkhorn_iterations);
        let of_views = std::iter::repeat_n(of_view, self.n_assigned()).flatten();
        for_queue.into_iter().chain(of_views).chain([mean::collective(1, prototypes)]).collect()
    }

    fn after_step(&mut self, observed: &[(&'static str, Vec<f32>)]) {
        for (_, newest) in observed.iter().filter(|(name, _)| *name == QUEUE) {
            let mut queue = newest.clone();
            queue.append(&mut self.queue);
            queue.truncate(self.config.queue * self.n_each());
            self.queue = queue;
        }
    }

    fn uninformed_loss(&self) -> Option<f64> {
        Some((self.config.prototypes as f64).ln())
    }

    fn target_distributions(&self) -> Vec<TargetDistribution> {
        vec![TargetDistribution::over(self.config.prototypes, TARGET_ENTROPY, "method.epsilon")]
    }

    fn state(&self) -> Vec<(String, Vec<f32>)> {
        if self.config.queue == 0 { Vec::new() } else { vec![(QUEUE.into(), self.queue.clone())] }
    }

    fn load_state(&mut self, state: &[(String, Vec<f32>)]) -> Result<(), String> {
        for (name, values) in state {
            if name == QUEUE {
                let most = self.config.queue * self.n_each();
                if values.len() > most || !values.len().is_multiple_of(self.n_each()) {
                    return Err(format!(
                        "the queue has {} values; expected a multiple of {}, at most {most}",
                        values.len(),
                        self.n_each()
                    ));
                }
                self.queue.clone_from(values);
            }
        }
        Ok(())
    }
}
