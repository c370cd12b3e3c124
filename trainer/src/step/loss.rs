//! Heads and loss of the student: one ordinary graph a micro-batch.

use burn_tensor::Tensor;

use super::batch::{Groups, MicroBatch};
use super::forward::{Networks, in_f32};
use super::pass::SlicedGrads;
use super::scalars::Scalars;
use crate::comm::engine::EngineError;
use crate::comm::ordered;
use crate::comm::peers::Peers;
use crate::comm::prefetch::{Gathers, Reductions};
use crate::comm::wire::Wire;
use crate::device::host::add;
use crate::method::{BatchOutputs, Method};
use crate::model::features::Outputs;
use crate::model::head::On;

/// What heads and loss leave.
pub(super) struct Scored {
    /// This rank's share of loss and gauges.
    pub(super) scalars: Scalars,
    /// Gradients at the backbone's outputs, by micro-batch.
    pub(super) grads: Vec<SlicedGrads>,
    /// What the method wants to know after the step.
    pub(super) observed: Tensor<1>,
    /// The student's features by micro-batch, without a graph.
    pub(super) student: Vec<Outputs>,
}

/// What the loss of a step works with.
pub(super) struct Scoring<'a> {
    pub(super) networks: Networks<'a>,
    pub(super) method: &'a dyn Method,
    pub(super) peers: Peers<'a>,
    pub(super) step: u64,
    /// Images of a micro-batch.
    pub(super) n_images: usize,
    /// How gradients of heads travel.
    pub(super) wire: Wire,
}

impl Scoring<'_> {
    /// Loss, and its gradient at the backbone's outputs; gradients of the heads are on their way.
    pub(super) fn run(
        &self,
        batches: &[MicroBatch],
        followers: &[Vec<Outputs>],
        gathers: &mut Gathers<'_>,
        reductions: &mut Reductions<'_>,
    ) -> Result<Scored, EngineError> {
        let shards = self.networks.net.head_shards(self.networks.shards);
        let flats: Result<Vec<_>, _> = shards.iter().map(|_| gathers.next_flat()).collect();
        let flats = flats?;
        let features: Vec<Groups> = batches.iter().map(|batch| in_f32(batch.joined())).collect();
        let student = self.plain(features.clone(), &flats);
        let outputs = BatchOutputs { student: &student, followers };
        let loss = self.method.prepare(&outputs, self.step, self.peers)?;
        let mut grads: Vec<SlicedGrads> = batches.iter().map(|_| Vec::new()).collect();
        let mut scalars = Scalars::new(self.peers.n_micro_batches());
        let mut score = |number: usize| {
            let leaves = self.networks.leaves(&flats, On::Student, true);
            let inputs: Groups =
                features[number].iter().map(|g| g.with(g.x.clone().autodiff().require_grad())).collect();
            let heads = self.networks.heads(&inputs, &leaves, On::Student, self.n_images);
            let student = Outputs { n_images: self.n_images, features: inputs.clone(), heads };
            let scored = loss.of(number, &student);
            scalars.add(scored.loss.clone().inner(), scored.gauges);
            drop(student);
            let mut of_loss = scored.loss.backward();
            let of_input =
                |x: &Tensor<3>| x.grad_remove(&mut of_loss).unwrap_or_else(|| x.clone().inner().zeros_like());
            let of_inputs = inputs.iter().map(|group| &group.x).map(of_input).collect();
            grads[number] = batches[number].sliced(of_inputs);
            leaves.iter().map(|leaves| leaves.gradient(&mut of_loss)).collect::<Vec<_>>()
        };
        let sum =
            |a: Vec<Tensor<1>>, b: Vec<Tensor<1>>| a.into_iter().zip(b).map(|(a, b)| add(a, b)).collect();
        let of_heads = ordered::fold(batches.len(), &mut score, &sum);
        for (shard, grad) in shards.iter().zip(of_heads) {
            reductions.push(&shard.layout.name, grad, self.wire)?;
        }
        Ok(Scored { scalars, grads, observed: loss.observed(), student })
    }

    /// The student's outputs without a graph, with heads where the method prepares its loss with them.
    fn plain(&self, features: Vec<Groups>, flats: &[Tensor<1>]) -> Vec<Outputs> {
        if self.method.prepares_with_heads() {
            return self.networks.outputs(features, flats, On::Student, self.n_images);
        }
        let bare = |features| Outputs {
            n_images: self.n_images,
            features,
            heads: std::collections::BTreeMap::new(),
        };
        features.into_iter().map(bare).collect()
    }
}
