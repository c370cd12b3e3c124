//! The passes of a step over a backbone alone, from features to gradients, with a given gradient at
//! its output.

use burn_tensor::{DType, Tensor};
use kernels::device::workers::Workers;
use networks::draws::Draws;
use networks::unit::{StatSets, Types, Unit};
use ranks::EngineError;
use ranks::communicator::Communicator;

use super::batch::{Groups, MicroBatch};
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
    /// Flat gradients of all units for one micro-batch, given as `slices`. `at_end` maps the output
    /// features `[B, N, D]` of a view size to the gradient with respect to them.
    pub(crate) fn gradients(
        &self,
        slices: Vec<Groups>,
        keeps_graph: bool,
        at_end: fn(&Tensor<3>) -> Tensor<3>,
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
        let mut on_sent = || Ok(());
        let draws = vec![vec![Draws::default(); slices.len()]];
        let gathered = |number: usize| {
            let shard = &self.shards[number];
            Gathered {
                unit: self.units[number].as_ref(),
                layout: &shard.layout,
                flat: shard.weights.values(),
                in_bf16: shard.weights.in_bf16(),
            }
        };
        let mut batches = vec![MicroBatch { slices }];
        let mut tape = Vec::new();
        for number in 0..self.units.len() {
            let of_unit;
            (batches, of_unit) =
                passes.forward(gathered(number), batches, &draws, keeps_graph, number > 0, &mut on_sent)?;
            tape.push(of_unit);
        }
        let of_slice =
            |groups: &Groups| groups.iter().map(|group| at_end(&group.x).into()).collect::<Vec<_>>();
        let mut grads = vec![batches[0].slices.iter().map(of_slice).collect()];
        let mut flats = Vec::new();
        for (number, of_unit) in tape.into_iter().enumerate().rev() {
            let params;
            (grads, params) =
                passes.backward(gathered(number), of_unit, grads, &draws, number > 0, &mut on_sent)?;
            flats.push(params.flat(&self.shards[number].layout, DType::F32));
        }
        flats.reverse();
        Ok(flats)
    }
}
