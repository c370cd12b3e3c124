//! Passes of micro-batches through a unit, stage by stage: without a graph, forwards, and
//! backwards.
//!
//! Micro-batches go through a unit one after another while it is gathered, and the slices of each
//! run in parallel on workers. Between two stages the local sums are totaled over slices in
//! sequence, over micro-batches in the order of the tree ([`ranks::ordered`]) and over ranks; in
//! the backward pass the gradients at the totals are summed in the same way, so that the
//! vector-Jacobian product is the product of the whole batch.
//!
//! A unit of several stages that does not keep its graph keeps its input and the totals, and runs
//! again as a whole, for all micro-batches: no stage can run its backward pass before the next has
//! done so for the whole batch. In a segment of several units ([`super::segments`]) only the first
//! keeps its input.

use burn_tensor::Tensor;
use kernels::device::workers::Workers;
use networks::draws::Draws;
use networks::leaves::ParamGrads;
use networks::unit::{StageOutput, StatSets, Types};
use ranks::EngineError;
use ranks::communicator::Communicator;
use ranks::ordered;
use ranks::peers::Peers;

use super::batch::{MicroBatch, StreamGrads, Streams};
use super::tape::{Gathered, InputGrads, OutputGrads, StageArgs, StageRecord};

/// Passes that take micro-batches through units.
#[derive(Clone, Copy)]
pub(crate) struct Passes<'p> {
    pub(crate) comm: &'p Communicator,
    pub(crate) workers: &'p Workers,
    /// Sets of view sizes that share statistics.
    pub(crate) sets: &'p StatSets,
    /// Number of groups of micro-batches, G, each with its own batch statistics: micro-batch `p` is
    /// in group `p mod G`.
    pub(crate) n_stat_groups: usize,
    /// Types of numbers.
    pub(crate) types: Types,
    /// Whether each image is processed by itself, with running statistics, as in evaluation.
    pub(crate) evaluates: bool,
}

/// Callback after a unit has sent its last statistics, so that transfers that waited for them may
/// be submitted.
pub(crate) type OnStatisticsSent<'c> = &'c mut dyn FnMut() -> Result<(), EngineError>;

/// Draws of a unit by micro-batch and slice.
pub(crate) type UnitDraws = Vec<Vec<Draws>>;

/// Gradients of a micro-batch by slice.
pub(crate) type SlicedGrads = Vec<StreamGrads>;

/// Local sums of a micro-batch by slice and set of statistics.
type SlicedSums = Vec<Vec<Tensor<1>>>;

/// Sums over the batch, by group of micro-batches and set of statistics; empty before the first
/// stage.
pub(crate) type Totals = Vec<Vec<Tensor<1>>>;

/// Data that a unit's backward pass needs.
pub(crate) enum UnitTape<'a> {
    /// Tapes of the stages.
    Stages(Vec<StageTape<'a>>),
    /// Input of the unit, all of whose stages run again.
    Recompute {
        /// Input by micro-batch.
        input: Vec<MicroBatch>,
        /// Totals by stage.
        totals: Vec<Totals>,
    },
    /// Only the totals, by stage: the previous units of the segment run again first
    /// ([`super::segments`]).
    Totals(Vec<Totals>),
}

/// Data that a stage's backward pass needs.
pub(crate) struct StageTape<'a> {
    /// Kept data by micro-batch and slice.
    records: Vec<Vec<StageRecord<'a>>>,
    /// Totals over the whole batch that the stage was given.
    totals: Totals,
}

impl UnitTape<'_> {
    /// Returns the input, by micro-batch; `None` if it was not kept, or only in a graph.
    pub(crate) fn input(&self) -> Option<Vec<MicroBatch>> {
        let stages = match self {
            Self::Recompute { input, .. } => return Some(input.clone()),
            Self::Stages(stages) => stages,
            Self::Totals(_) => return None,
        };
        let mut batches = Vec::new();
        for records in &stages.first()?.records {
            let slices: Option<Vec<Streams>> = records.iter().map(StageRecord::input).collect();
            batches.push(MicroBatch { slices: slices? });
        }
        Some(batches)
    }

    /// Adds the recomputed `input` of a unit of `n_stages` stages to a tape that has only the
    /// totals. Other tapes are returned as they are.
    pub(crate) fn with_input(self, n_stages: usize, input: &[MicroBatch]) -> Self {
        let Self::Totals(totals) = self else { return self };
        if n_stages > 1 {
            return Self::Recompute { input: input.to_vec(), totals };
        }
        // A unit of one stage can run again one micro-batch at a time.
        let mut records = Vec::with_capacity(input.len());
        for batch in input {
            records.push(batch.slices.iter().cloned().map(StageRecord::Input).collect());
        }
        Self::Stages(vec![StageTape { records, totals: Totals::new() }])
    }

    /// Returns the totals that each stage was given in the first run.
    pub(crate) fn totals_by_stage(&self) -> Vec<Totals> {
        match self {
            Self::Stages(stages) => stages.iter().map(|stage| stage.totals.clone()).collect(),
            Self::Recompute { totals, .. } | Self::Totals(totals) => totals.clone(),
        }
    }

    /// Returns the totals that each stage but the first was given, over all groups, by set.
    pub(crate) fn totals(&self) -> Vec<Vec<Tensor<1>>> {
        self.totals_by_stage().iter().skip(1).map(sum_over_groups).collect()
    }
}

/// Returns the sums of totals over groups, by set.
pub(crate) fn sum_over_groups(totals: &Totals) -> Vec<Tensor<1>> {
    let mut groups = totals.iter().cloned();
    let mut sums = groups.next().unwrap_or_default();
    for group in groups {
        sums = sums.into_iter().zip(group).map(|(sum, term)| sum + term).collect();
    }
    sums
}

/// Returns the totals of the sums of stage `stage`, as they were given to the next one in the first
/// run; none after the last stage.
fn recorded_totals(totals: &[Totals], stage: usize) -> Totals {
    totals.get(stage + 1).cloned().unwrap_or_default()
}

impl<'p> Passes<'p> {
    /// Runs all stages without a graph. Also returns the totals that each stage was given. No
    /// branch is dropped if `draws` is `None`.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn infer(
        &self,
        unit: Gathered<'_, '_>,
        batches: Vec<MicroBatch>,
        draws: Option<&UnitDraws>,
        on_sent: OnStatisticsSent<'_>,
    ) -> Result<(Vec<MicroBatch>, Vec<Totals>), EngineError> {
        self.infer_with(
            unit,
            batches,
            draws,
            |_: usize, sums| {
                if self.evaluates { Ok(Totals::new()) } else { self.sum_over_batch(unit.unit.name(), sums) }
            },
            on_sent,
        )
    }

    /// Runs all stages again, with the totals that they were given in the first run.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn repeat(
        &self,
        unit: Gathered<'_, '_>,
        batches: Vec<MicroBatch>,
        draws: &UnitDraws,
        totals: &[Totals],
        on_sent: OnStatisticsSent<'_>,
    ) -> Result<Vec<MicroBatch>, EngineError> {
        let (batches, _) = self.infer_with(
            unit,
            batches,
            Some(draws),
            |stage: usize, _| Ok(recorded_totals(totals, stage)),
            on_sent,
        )?;
        Ok(batches)
    }

    /// Runs all stages without a graph; `total` computes the totals of the sums of a stage.
    fn infer_with(
        &self,
        unit: Gathered<'_, '_>,
        mut batches: Vec<MicroBatch>,
        draws: Option<&UnitDraws>,
        mut total: impl FnMut(usize, &[SlicedSums]) -> Result<Totals, EngineError>,
        on_sent: OnStatisticsSent<'_>,
    ) -> Result<(Vec<MicroBatch>, Vec<Totals>), EngineError> {
        let empty = Draws::default();
        let mut totals_by_stage = vec![Totals::new()];
        for stage in 0..unit.unit.n_stages() {
            if stage + 1 == unit.unit.n_stages() {
                on_sent()?;
            }
            let mut sums = Vec::with_capacity(batches.len());
            for (index, batch) in batches.iter_mut().enumerate() {
                let totals = self.group_totals(&totals_by_stage[stage], index);
                let inputs = std::mem::take(&mut batch.slices);
                let outputs = self.workers.map(inputs, |i, input| {
                    let draws = draws.map_or(&empty, |draws| &draws[index][i]);
                    unit.infer(input, self.stage_args(stage, draws, totals))
                });
                let (slices, batch_sums) = split_outputs(outputs);
                batch.slices = slices;
                sums.push(batch_sums);
            }
            totals_by_stage.push(total(stage, &sums)?);
        }
        // The last stage has no sums.
        totals_by_stage.pop();
        Ok((batches, totals_by_stage))
    }

    /// Runs all stages, and keeps their graphs.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn forward<'a>(
        &self,
        unit: Gathered<'a, '_>,
        batches: Vec<MicroBatch>,
        draws: &UnitDraws,
        wants_input: bool,
        on_sent: OnStatisticsSent<'_>,
    ) -> Result<(Vec<MicroBatch>, UnitTape<'a>), EngineError> {
        let (batches, stages) = self.run_stages(
            unit,
            batches,
            draws,
            wants_input,
            |_: usize, sums| self.sum_over_batch(unit.unit.name(), sums),
            on_sent,
        )?;
        Ok((batches, UnitTape::Stages(stages)))
    }

    /// Runs all stages, and keeps the input and the totals, from which the unit runs again.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn forward_from_input(
        &self,
        unit: Gathered<'_, '_>,
        batches: Vec<MicroBatch>,
        draws: &UnitDraws,
        on_sent: OnStatisticsSent<'_>,
    ) -> Result<(Vec<MicroBatch>, UnitTape<'static>), EngineError> {
        let input = batches.clone();
        let (batches, tape) = self.forward_in_segment(unit, batches, draws, on_sent)?;
        Ok((batches, tape.with_input(unit.unit.n_stages(), &input)))
    }

    /// Runs all stages, and keeps only the totals, which the unit needs to run again.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn forward_in_segment(
        &self,
        unit: Gathered<'_, '_>,
        batches: Vec<MicroBatch>,
        draws: &UnitDraws,
        on_sent: OnStatisticsSent<'_>,
    ) -> Result<(Vec<MicroBatch>, UnitTape<'static>), EngineError> {
        let (batches, totals) = self.infer(unit, batches, Some(draws), on_sent)?;
        Ok((batches, UnitTape::Totals(totals)))
    }

    /// Runs all stages, and keeps their graphs; `total` computes the totals of the sums of a stage.
    fn run_stages<'a>(
        &self,
        unit: Gathered<'a, '_>,
        mut batches: Vec<MicroBatch>,
        draws: &UnitDraws,
        wants_input: bool,
        mut total: impl FnMut(usize, &[SlicedSums]) -> Result<Totals, EngineError>,
        on_sent: OnStatisticsSent<'_>,
    ) -> Result<(Vec<MicroBatch>, Vec<StageTape<'a>>), EngineError> {
        let mut stages = Vec::with_capacity(unit.unit.n_stages());
        let mut totals = Totals::new();
        for stage in 0..unit.unit.n_stages() {
            if stage + 1 == unit.unit.n_stages() {
                on_sent()?;
            }
            let mut sums = Vec::new();
            let mut records = Vec::new();
            // The input of the first stage may not depend on parameters; those of later stages do.
            let wants_input = wants_input || stage > 0;
            for (index, (batch, draws)) in batches.iter_mut().zip(draws).enumerate() {
                let group_totals = self.group_totals(&totals, index);
                let inputs = std::mem::take(&mut batch.slices);
                let results = self.workers.map(inputs, |i, input| {
                    let args = self.stage_args(stage, &draws[i], group_totals);
                    unit.forward(input, args, wants_input)
                });
                let (outputs, batch_records) = results.into_iter().unzip();
                let (slices, batch_sums) = split_outputs(outputs);
                batch.slices = slices;
                sums.push(batch_sums);
                records.push(batch_records);
            }
            let stage_totals = std::mem::replace(&mut totals, total(stage, &sums)?);
            stages.push(StageTape { records, totals: stage_totals });
        }
        Ok((batches, stages))
    }

    /// Runs the backward pass through all stages. Returns the gradients of the unit's input, if
    /// wanted, and those of its parameters: summed over slices in sequence and over micro-batches
    /// in the order of the tree.
    ///
    /// # Errors
    /// [`EngineError`].
    ///
    /// # Panics
    /// If the tape has no input yet: a bug in the backward pass.
    pub(crate) fn backward<'a>(
        &self,
        unit: Gathered<'a, '_>,
        tape: UnitTape<'a>,
        mut grads: Vec<SlicedGrads>,
        draws: &UnitDraws,
        wants_input: bool,
        on_sent: OnStatisticsSent<'_>,
    ) -> Result<(Vec<SlicedGrads>, ParamGrads), EngineError> {
        let mut sum_grads = Totals::new();
        let mut params: Option<ParamGrads> = None;
        let stages = self.recompute_stages(unit, tape, draws, wants_input)?;
        for (stage, tape) in stages.into_iter().enumerate().rev() {
            if stage == 0 {
                on_sent()?;
            }
            let StageTape { mut records, totals } = tape;
            let wants_input = wants_input || stage > 0;
            let mut total_grads = vec![Vec::new(); records.len()];
            let stage_params = ordered::fold(
                draws.len(),
                &mut |index: usize| {
                    let records = std::mem::take(&mut records[index]);
                    let totals = self.group_totals(&totals, index);
                    let sums = self.group_totals(&sum_grads, index);
                    let inputs = records.into_iter().zip(std::mem::take(&mut grads[index])).collect();
                    let results = self.workers.map(inputs, |i, (record, streams)| {
                        let args = self.stage_args(stage, &draws[index][i], totals);
                        unit.backward(record, OutputGrads { streams, sums }, args, wants_input)
                    });
                    let mut batch_params: Option<ParamGrads> = None;
                    for InputGrads { streams, totals, params } in results {
                        grads[index].push(streams);
                        total_grads[index].push(totals);
                        batch_params = Some(accumulate(batch_params, params));
                    }
                    batch_params.expect("a micro-batch has at least one slice")
                },
                &ParamGrads::plus,
            );
            params = Some(accumulate(params, stage_params));
            sum_grads = self.sum_over_batch(unit.unit.name(), &total_grads)?;
        }
        Ok((grads, params.expect("a unit has at least one stage")))
    }

    /// Returns the stages of `tape`; if only the unit's input was kept, they run again with the
    /// totals of the first run.
    fn recompute_stages<'a>(
        &self,
        unit: Gathered<'a, '_>,
        tape: UnitTape<'a>,
        draws: &UnitDraws,
        wants_input: bool,
    ) -> Result<Vec<StageTape<'a>>, EngineError> {
        let (input, totals) = match tape {
            UnitTape::Stages(stages) => return Ok(stages),
            UnitTape::Recompute { input, totals } => (input, totals),
            UnitTape::Totals(_) => panic!("{} has run again before its gradients", unit.unit.name()),
        };
        let (_, stages) = self.run_stages(
            unit,
            input,
            draws,
            wants_input,
            |stage: usize, _| Ok(recorded_totals(&totals, stage)),
            &mut || Ok(()),
        )?;
        Ok(stages)
    }

    fn stage_args<'s>(&'s self, stage: usize, draws: &'s Draws, totals: &'s [Tensor<1>]) -> StageArgs<'s> {
        StageArgs { stage, draws, totals, sets: self.sets, types: self.types }
    }

    /// Returns the index of the group of this rank's micro-batch `index`.
    fn stat_group(&self, index: usize) -> usize {
        let topology = self.comm.topology();
        (index * topology.world_size + topology.data_rank()) % self.n_stat_groups
    }

    /// Returns the totals of the group of micro-batch `index`.
    fn group_totals<'t>(&self, totals: &'t Totals, index: usize) -> &'t [Tensor<1>] {
        totals.get(self.stat_group(index)).map_or(&[], Vec::as_slice)
    }

    /// Returns the sums over slices, micro-batches and ranks; `sums` holds those of each
    /// micro-batch. All sets and groups are sent in one collective; entries of other groups are
    /// zero.
    fn sum_over_batch(&self, unit: &str, sums: &[SlicedSums]) -> Result<Totals, EngineError> {
        let Some(first) = sums.first().and_then(|slices| slices.first()) else {
            return Ok(Totals::new());
        };
        if first.is_empty() {
            return Ok(Totals::new());
        }
        let lengths: Vec<usize> = first.iter().map(|sum| sum.dims()[0]).collect();
        let len: usize = lengths.iter().sum();
        let n_groups = self.n_stat_groups;
        let device = first[0].device();
        let mut batch_sums: Vec<Tensor<1>> = Vec::with_capacity(sums.len());
        for (index, slices) in sums.iter().enumerate() {
            let sum = slices
                .iter()
                .map(|sets| Tensor::cat(sets.clone(), 0))
                .reduce(|sum, term| sum + term)
                .expect("a micro-batch has at least one slice");
            if n_groups == 1 {
                batch_sums.push(sum);
                continue;
            }
            let group = self.stat_group(index);
            let before = Tensor::zeros([group * len], &device);
            let after = Tensor::zeros([(n_groups - 1 - group) * len], &device);
            batch_sums.push(Tensor::cat(vec![before, sum, after], 0));
        }
        let all = Peers::new(self.comm, batch_sums.len()).sum(unit, &batch_sums)?;
        let mut start = 0;
        let mut totals = Totals::with_capacity(n_groups);
        for _ in 0..n_groups {
            let mut sets = Vec::with_capacity(lengths.len());
            for len in &lengths {
                sets.push(all.clone().slice(start..start + len));
                start += len;
            }
            totals.push(sets);
        }
        Ok(totals)
    }
}

/// Splits outputs into streams and sums, by slice.
fn split_outputs(outputs: Vec<StageOutput>) -> (Vec<Streams>, SlicedSums) {
    outputs.into_iter().map(|output| (output.streams, output.sums)).unzip()
}

/// Adds `term` to `sum`, if there is one.
fn accumulate(sum: Option<ParamGrads>, term: ParamGrads) -> ParamGrads {
    match sum {
        Some(sum) => sum.plus(term),
        None => term,
    }
}
