//! The passes of a step through a backbone without heads and loss, from features to gradients, with
//! a given gradient at its output.

use burn_tensor::{DType, Tensor};
use kernels::device::workers::Workers;
use networks::draws::Draws;
use networks::unit::{StatSets, Types, Unit};
use ranks::EngineError;
use ranks::communicator::Communicator;

use super::batch::{MicroBatch, StreamGrads, Streams};
use super::pass::Passes;
use super::tape::Gathered;
use crate::optim::state::UnitShard;

/// A backbone on one rank.
pub(crate) struct BackbonePass<'a> {
    pub(crate) units: &'a [Box<dyn Unit>],
    pub(crate) shards: &'a [UnitShard],
    pub(crate) workers: &'a Workers,
    pub(crate) comm: &'a Communicator,
    /// Types of numbers.
    pub(crate) types: Types,
}

impl BackbonePass<'_> {
    /// Returns the flat gradients of all units for one micro-batch, given as `slices`.
    /// `output_grad` maps the values of a stream of output tokens, `[T, D]`, to the gradient with
    /// respect to them.
    pub(crate) fn gradients(
        &self,
        slices: Vec<Streams>,
        keeps_graph: bool,
        output_grad: fn(&Tensor<2>) -> Tensor<2>,
    ) -> Result<Vec<Tensor<1>>, EngineError> {
        let sets = StatSets::per_size(slices[0].len());
        let passes = Passes {
            comm: self.comm,
            workers: self.workers,
            sets: &sets,
            n_stat_groups: 1,
            types: self.types,
            evaluates: false,
        };
        let draws = vec![vec![Draws::default(); slices.len()]];
        let mut batches = vec![MicroBatch { slices }];
        let mut tapes = Vec::new();
        for index in 0..self.units.len() {
            let unit = self.gathered(index);
            let tape;
            (batches, tape) = if keeps_graph {
                passes.forward(unit, batches, &draws, index > 0, &mut || Ok(()))?
            } else {
                passes.forward_from_input(unit, batches, &draws, &mut || Ok(()))?
            };
            tapes.push(tape);
        }
        let mut slice_grads = Vec::new();
        for streams in &batches[0].slices {
            let grads: StreamGrads = streams.iter().map(|tokens| output_grad(&tokens.x).into()).collect();
            slice_grads.push(grads);
        }
        let mut grads = vec![slice_grads];
        let mut flats = Vec::new();
        for (index, tape) in tapes.into_iter().enumerate().rev() {
            let unit = self.gathered(index);
            let params;
            (grads, params) = passes.backward(unit, tape, grads, &draws, index > 0, &mut || Ok(()))?;
            flats.push(params.flat(&self.shards[index].layout, DType::F32));
        }
        flats.reverse();
        Ok(flats)
    }

    /// Returns unit `index` with its weights, of which this rank has all.
    fn gathered(&self, index: usize) -> Gathered<'_, '_> {
        let shard = &self.shards[index];
        Gathered {
            unit: self.units[index].as_ref(),
            layout: &shard.layout,
            flat: shard.weights.values(),
            in_bf16: shard.weights.in_bf16(),
            adapters: None,
        }
    }
}
