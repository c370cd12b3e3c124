//! Micro-batches through a unit, stage by stage: for a follower, forwards, and backwards.
//!
//! Micro-batches go through a unit one after another while it is gathered, their slices on workers side by side.
//! Between two stages the local sums are totalled over slices in sequence, over micro-batches in the order of the tree
//! ([`crate::comm::ordered`]) and over ranks; on the way back the gradients at the totals are added up in the same
//! way, so that the vector-Jacobian product is that of the whole batch.

use burn_tensor::{DType, Tensor};

use super::batch::{GroupGrads, Groups, MicroBatch};
use super::tape::{Beside, Gathered, InputGrads, Kept, OutputGrads};
use crate::comm::communicator::Comm;
use crate::comm::engine::EngineError;
use crate::comm::ordered;
use crate::comm::peers::Peers;
use crate::device::host::add;
use crate::device::workers::Workers;
use crate::model::unit::{Draws, StageOutput, StatSets};

/// What takes micro-batches through units.
#[derive(Clone, Copy)]
pub(crate) struct Passes<'p> {
    pub(crate) comm: &'p Comm,
    pub(crate) workers: &'p Workers,
    /// Which of the sizes of views that pass share statistics.
    pub(crate) sets: &'p StatSets,
    /// What matrix products are computed in.
    pub(crate) compute: DType,
}

/// Draws of a unit by micro-batch and slice.
pub(crate) type UnitDraws = Vec<Vec<Draws>>;

/// Gradients of a micro-batch by slice.
pub(crate) type SlicedGrads = Vec<GroupGrads>;

/// Local sums of a micro-batch by slice and set of statistics.
type SlicedSums = Vec<Vec<Tensor<1>>>;

/// What a unit's backward pass needs.
pub(crate) struct UnitTape<'a> {
    stages: Vec<StageTape<'a>>,
}

struct StageTape<'a> {
    /// By micro-batch and slice.
    kept: Vec<Vec<Kept<'a>>>,
    /// What it was given of the whole batch.
    totals: Vec<Tensor<1>>,
}

impl UnitTape<'_> {
    /// The totals that each stage but the first was given.
    pub(crate) fn totals(&self) -> Vec<Vec<Tensor<1>>> {
        self.stages.iter().skip(1).map(|stage| stage.totals.clone()).collect()
    }
}

impl<'p> Passes<'p> {
    /// Through all stages without a graph, and without a draw.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn infer(
        &self,
        unit: Gathered<'_, '_>,
        mut batches: Vec<MicroBatch>,
    ) -> Result<Vec<MicroBatch>, EngineError> {
        let draws = Draws::default();
        let mut totals = Vec::new();
        for stage in 0..unit.unit.n_stages() {
            let beside = self.beside(stage, &draws, &totals);
            let mut sums = Vec::with_capacity(batches.len());
            for batch in &mut batches {
                let inputs = std::mem::take(&mut batch.slices);
                let outputs = self.workers.map(inputs, |_, input| unit.infer(input, beside));
                let (slices, of_batch) = parted(outputs);
                batch.slices = slices;
                sums.push(of_batch);
            }
            totals = self.totals(unit.unit.name(), &sums)?;
        }
        Ok(batches)
    }

    /// Through all stages, with what the way back needs.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn forward<'a>(
        &self,
        unit: Gathered<'a, '_>,
        mut batches: Vec<MicroBatch>,
        draws: &UnitDraws,
        keeps_graph: bool,
        wants_input: bool,
    ) -> Result<(Vec<MicroBatch>, UnitTape<'a>), EngineError> {
        let mut stages = Vec::with_capacity(unit.unit.n_stages());
        let mut totals = Vec::new();
        for stage in 0..unit.unit.n_stages() {
            let (mut sums, mut kept) = (Vec::new(), Vec::new());
            // Before the first stage there may be nothing to differentiate by; after it there are parameters.
            let wants_input = wants_input || stage > 0;
            for (batch, draws) in batches.iter_mut().zip(draws) {
                let inputs = std::mem::take(&mut batch.slices);
                let results = self.workers.map(inputs, |i, input| {
                    unit.forward(input, self.beside(stage, &draws[i], &totals), keeps_graph, wants_input)
                });
                let (outputs, of_batch) = results.into_iter().unzip();
                let (slices, sums_of_batch) = parted(outputs);
                batch.slices = slices;
                sums.push(sums_of_batch);
                kept.push(of_batch);
            }
            let given = std::mem::replace(&mut totals, self.totals(unit.unit.name(), &sums)?);
            stages.push(StageTape { kept, totals: given });
        }
        Ok((batches, UnitTape { stages }))
    }

    /// Back through all stages. Gives the gradients of the unit's input, if they are wanted, and the flat gradient of
    /// its parameters: summed over slices in sequence and over micro-batches in the order of the tree.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn backward<'a>(
        &self,
        unit: Gathered<'a, '_>,
        tape: UnitTape<'a>,
        mut grads: Vec<SlicedGrads>,
        draws: &UnitDraws,
        wants_input: bool,
    ) -> Result<(Vec<SlicedGrads>, Tensor<1>), EngineError> {
        let mut at_sums: Vec<Tensor<1>> = Vec::new();
        let mut flat: Option<Tensor<1>> = None;
        for (stage, StageTape { mut kept, totals }) in tape.stages.into_iter().enumerate().rev() {
            let wants_input = wants_input || stage > 0;
            let mut at_totals = vec![Vec::new(); kept.len()];
            let mut run = |number: usize| {
                let kept = std::mem::take(&mut kept[number]);
                let inputs = kept.into_iter().zip(std::mem::take(&mut grads[number])).collect();
                let results = self.workers.map(inputs, |i, (kept, features)| {
                    let grads = OutputGrads { features, sums: &at_sums };
                    unit.backward(kept, grads, self.beside(stage, &draws[number][i], &totals), wants_input)
                });
                let mut sum: Option<Tensor<1>> = None;
                for InputGrads { features, totals, flat } in results {
                    grads[number].push(features);
                    at_totals[number].push(totals);
                    sum = Some(added(sum, flat));
                }
                sum.expect("a micro-batch has at least one slice")
            };
            let of_stage = ordered::fold(draws.len(), &mut run, &add);
            flat = Some(added(flat, of_stage));
            at_sums = self.totals(unit.unit.name(), &at_totals)?;
        }
        Ok((grads, flat.expect("a unit has at least one stage")))
    }

    fn beside<'s>(&'s self, stage: usize, draws: &'s Draws, totals: &'s [Tensor<1>]) -> Beside<'s> {
        Beside { stage, draws, totals, sets: self.sets, compute: self.compute }
    }

    /// Sums over slices, micro-batches and ranks, by set; `sums` are by micro-batch.
    fn totals(&self, unit: &str, sums: &[SlicedSums]) -> Result<Vec<Tensor<1>>, EngineError> {
        let n_sets = sums.first().and_then(|slices| slices.first()).map_or(0, Vec::len);
        let of_set = |set: usize| {
            let of_batch = |slices: &Vec<Vec<Tensor<1>>>| {
                let terms = slices.iter().map(|sets| sets[set].clone());
                terms.reduce(|sum, term| sum + term).expect("a micro-batch has at least one slice")
            };
            let here: Vec<Tensor<1>> = sums.iter().map(of_batch).collect();
            Peers::new(self.comm, here.len()).sum(unit, &here)
        };
        (0..n_sets).map(of_set).collect()
    }
}

/// Features and sums by slice.
fn parted(outputs: Vec<StageOutput>) -> (Vec<Groups>, SlicedSums) {
    outputs.into_iter().map(|output| (output.features, output.sums)).unzip()
}

fn added(sum: Option<Tensor<1>>, term: Tensor<1>) -> Tensor<1> {
    match sum {
        Some(sum) => add(sum, term),
        None => term,
    }
}
