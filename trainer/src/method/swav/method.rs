//! The method: networks, assignments and queue.

use augment::MultiCrop;
use burn_tensor::{Device, Tensor, TensorData};
use kernels::ops::{NORM_EPSILON, unit_rows};
use networks::head::projection::Projection;
use networks::head::unit_prototypes::UnitPrototypes;
use networks::head::{Head, Reads};
use networks::outputs::Outputs;
use ranks::EngineError;
use ranks::peers::Peers;

use super::config::Config;
use super::loss::{QUEUE, SCORES, SwavLoss, TARGET_ENTROPY};
use crate::method::network::NetworkSpec;
use crate::method::prototypes::mean::{self, batch_means};
use crate::method::prototypes::{PrototypeExchange, PrototypeTargets, Rows, sinkhorn};
use crate::method::{
    BatchLoss, BatchOutputs, Collective, Method, MethodContext, MethodRecipe, TargetDistribution,
};
#[cfg(test)]
use crate::schedule::Duration;

/// Name of the head that outputs z.
const PROJECTION: &str = "projection";

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
    /// Queue: ẑ of all assigned views of an image one after another, images from new to old.
    queue: Vec<f32>,
}

impl MethodRecipe for Config {
    const TITLE: &'static str = "SwAV";

    fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
        self.validate(cx)?;
        let queue_from = cx.length.steps("method.queue_start", &self.queue_start)?;
        let full_step = queue_from.saturating_add(self.queue.div_ceil(cx.length.batch_size) as u64);
        if self.queue > 0 && full_step >= cx.length.total_steps {
            return Err(format!(
                "method.queue is not full until step {full_step} of {}, too late to be used: start it \
                 earlier (method.queue_start)",
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

    /// Number of values of an image in the queue.
    fn n_values_per_image(&self) -> usize {
        self.n_assigned() * self.config.head_output
    }

    /// Returns whether the embeddings of `step` enter the queue.
    fn fills_queue(&self, step: u64) -> bool {
        self.config.queue > 0 && step >= self.queue_from
    }

    /// Returns whether the queue is used: it is configured and full.
    fn has_full_queue(&self) -> bool {
        self.config.queue > 0 && self.queue.len() >= self.config.queue * self.n_values_per_image()
    }

    /// Returns the queue's share of micro-batch `index` of the global batch, `[n, V, D]`; `None`
    /// while the queue is not full, or if the share is empty.
    fn queue_share(&self, index: usize, n_micro_batches: usize, device: &Device) -> Option<Tensor<3>> {
        if !self.has_full_queue() {
            return None;
        }
        let n_values = self.n_values_per_image();
        let images = self.queue.chunks_exact(n_values).skip(index).step_by(n_micro_batches);
        let values: Vec<f32> = images.flatten().copied().collect();
        if values.is_empty() {
            return None;
        }
        let shape = [values.len() / n_values, self.n_assigned(), self.config.head_output];
        Some(Tensor::from_data(TensorData::new(values, shape), device))
    }

    /// Returns the scores of micro-batch `index` of the global batch, followed by those of its
    /// share of the queue.
    fn append_queue(
        &self,
        batch: &BatchOutputs<'_>,
        scores: &Tensor<3>,
        index: usize,
        n_micro_batches: usize,
    ) -> Tensor<3> {
        match self.queue_share(index, n_micro_batches, &scores.device()) {
            Some(share) => Tensor::cat(vec![scores.clone(), (batch.score)(SCORES, share)], 0),
            None => scores.clone(),
        }
    }

    /// Number of rows of each view that are assigned, in a global batch of `n_images`.
    fn n_rows(&self, n_images: usize) -> usize {
        if self.has_full_queue() { n_images + self.config.queue } else { n_images }
    }

    /// Computes the assignments of the views, by micro-batch that this rank scores.
    fn assign(
        &self,
        batch: &BatchOutputs<'_>,
        exchange: PrototypeExchange<'_>,
    ) -> Result<PrototypeTargets, EngineError> {
        let outputs = exchange.trained_outputs(batch);
        let scores: Vec<Tensor<3>> = outputs.iter().map(|outputs| outputs.on_views(SCORES, 0)).collect();
        let [b, v, _] = scores[0].dims();
        let n = exchange.n_micro_batches();
        let all: Vec<Tensor<3>> = scores
            .iter()
            .enumerate()
            .map(|(i, scores)| self.append_queue(batch, scores, exchange.global_index(i), n))
            .collect();
        let n_rows = self.n_rows(b * n);
        let Config { epsilon, sinkhorn_iterations, .. } = self.config;
        let mut by_view = Vec::with_capacity(v);
        for view in 0..v {
            let logits = all.iter().map(|scores| scores.clone().narrow(1, view, 1)).collect();
            let logits = Rows::with_total(logits, n_rows);
            by_view.push(sinkhorn::targets(&logits, epsilon, sinkhorn_iterations, exchange)?);
        }
        Ok(PrototypeTargets::join_views(&by_view, b, n))
    }

    /// Gathers ẑ of the assigned views of the global batch, if they enter the queue.
    fn gather_queue_rows(
        &self,
        batch: &BatchOutputs<'_>,
        step: u64,
        peers: Peers<'_>,
    ) -> Result<Option<Tensor<1>>, EngineError> {
        if !self.fills_queue(step) {
            return Ok(None);
        }
        let rows: Vec<Tensor<2>> = batch.trained.iter().map(unit_embeddings).collect();
        let all = peers.gather("queue", &rows)?;
        let [n, d] = all.dims();
        Ok(Some(all.reshape([n * d])))
    }
}

/// Returns ẑ of the views of the first size of each image, `[B, V · D]`.
fn unit_embeddings(outputs: &Outputs) -> Tensor<2> {
    let z = outputs.heads.on_views(PROJECTION, 0);
    let [b, v, d] = z.dims();
    unit_rows(z.reshape([b * v, d]), NORM_EPSILON).reshape([b, v * d])
}

impl Method for Swav {
    fn views(&self) -> &MultiCrop {
        &self.views
    }

    fn networks(&self) -> Vec<NetworkSpec> {
        let Config { head_hidden, head_output, head_batch_norm, .. } = &self.config;
        let projection = Projection::for_head(self.width, head_hidden, *head_output, *head_batch_norm);
        let prototypes = UnitPrototypes {
            name: "head.prototypes".into(),
            input: self.config.head_output,
            count: self.config.prototypes,
            frozen_steps: self.frozen_steps,
        };
        let projection = Head::new(PROJECTION, Reads::Pooled, vec![Box::new(projection)]);
        let scores = Head::new(SCORES, Reads::Head(PROJECTION), vec![Box::new(prototypes)]);
        let heads = vec![projection, Head { may_divide: true, ..scores }];
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
        let queue_rows = self.gather_queue_rows(batch, step, peers)?;
        let exchange = PrototypeExchange::new(peers, batch.columns);
        let assignments = self.assign(batch, exchange)?;
        let [mean_target] = batch_means("prototypes in use", [assignments.rows()], exchange)?;
        let sharpness = assignments.sharpness(exchange)?;
        let prototypes_in_use = exchange.share(mean::prototypes_in_use(mean_target));
        let temperature = self.config.temperature;
        Ok(Box::new(SwavLoss { assignments, sharpness, queue_rows, prototypes_in_use, temperature }))
    }

    fn collectives(&self) -> Vec<Collective> {
        let Config { prototypes, sinkhorn_iterations, queue, .. } = self.config;
        let mut collectives = Vec::new();
        if queue > 0 {
            collectives.push(Collective::Gather(self.n_values_per_image()));
        }
        for _ in 0..self.n_assigned() {
            collectives.extend(sinkhorn::collectives(prototypes, sinkhorn_iterations));
        }
        collectives.push(mean::collective(1, prototypes));
        collectives
    }

    fn after_step(&mut self, observed: &[(&'static str, Vec<f32>)]) {
        for (_, newest) in observed.iter().filter(|(name, _)| *name == QUEUE) {
            let mut queue = newest.clone();
            queue.append(&mut self.queue);
            queue.truncate(self.config.queue * self.n_values_per_image());
            self.queue = queue;
        }
    }

    fn uninformed_loss(&self) -> Option<f64> {
        Some((self.config.prototypes as f64).ln())
    }

    fn target_distributions(&self) -> Vec<TargetDistribution> {
        vec![TargetDistribution::new(self.config.prototypes, TARGET_ENTROPY, "method.epsilon")]
    }

    fn state(&self) -> Vec<(String, Vec<f32>)> {
        if self.config.queue == 0 { Vec::new() } else { vec![(QUEUE.into(), self.queue.clone())] }
    }

    fn load_state(&mut self, state: &[(String, Vec<f32>)]) -> Result<(), String> {
        for (name, values) in state {
            if name == QUEUE {
                let per_image = self.n_values_per_image();
                let max = self.config.queue * per_image;
                if values.len() > max || !values.len().is_multiple_of(per_image) {
                    return Err(format!(
                        "the queue has {} values; expected a multiple of {per_image}, at most {max}",
                        values.len()
                    ));
                }
                self.queue.clone_from(values);
            }
        }
        Ok(())
    }
}
