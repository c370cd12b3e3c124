//! Passes of micro-batches through a unit, stage by stage: without a graph, forwards, and
//! backwards.
//!
//! Micro-batches go through a unit one after another while it is gathered, their slices on workers
//! side by side. Between two stages the local sums are totaled over slices in sequence, over
//! micro-batches in the order of the tree ([`ranks::ordered`]) and over ranks; in the backward pass
//! the gradients at the totals are added up in the same way, so that the vector-Jacobian product is
//! that of the whole batch.
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

use super::batch::{GroupGrads, Groups, MicroBatch};
use super::tape::{Gathered, InputGrads, OutputGrads, StageArguments, StageRecord};

/// Passes that take micro-batches through units.
#[derive(Clone, Copy)]
pub(crate) struct Passes<'p> {
    pub(crate) comm: &'p Communicator,
    pub(crate) workers: &'p Workers,
    /// Sets of view sizes that share statistics.
    pub(crate) sets: &'p StatSets,
    /// Groups of micro-batches that share statistics: number `p` is in group `p mod G`.
    pub(crate) n_stat_groups: usize,
    /// Types of numbers.
    pub(crate) types: Types,
    /// Whether each image is processed by itself, with running statistics, as in evaluation.
    pub(crate) evaluates: bool,
}

/// Callback for a unit that has no more statistics to send, so that transfers that waited for them
/// may follow.
pub(crate) type OnStatisticsSent<'c> = &'c mut dyn FnMut() -> Result<(), EngineError>;

/// Draws of a unit by micro-batch and slice.
pub(crate) type UnitDraws = Vec<Vec<Draws>>;

/// Gradients of a micro-batch by slice.
pub(crate) type SlicedGrads = Vec<GroupGrads>;

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
    Again {
        /// Input by micro-batch.
        input: Vec<MicroBatch>,
        /// Totals by stage.
        totals: Vec<Totals>,
    },
    /// Nothing but totals, by stage: the unit runs again after those before it
    /// ([`super::segments`]).
    Totals(Vec<Totals>),
}

/// Data that a stage's backward pass needs.
pub(crate) struct StageTape<'a> {
    /// Kept data by micro-batch and slice.
    kept: Vec<Vec<StageRecord<'a>>>,
    /// Totals over the whole batch that the stage was given.
    totals: Totals,
}

impl UnitTape<'_> {
    /// The input that is kept, by micro-batch; `None` if there is none, or a graph.
    pub(crate) fn input(&self) -> Option<Vec<MicroBatch>> {
        match self {
            Self::Again { input, .. } => Some(input.clone()),
            Self::Stages(stages) => stages
                .first()?
                .kept
                .iter()
                .map(|records| {
                    let slices: Option<Vec<Groups>> = records.iter().map(StageRecord::input).collect();
                    Some(MicroBatch { slices: slices? })
                })
                .collect(),
            Self::Totals(_) => None,
        }
    }

    /// Returns the tape of a unit of `n_stages` with its input, which was computed again.
    pub(crate) fn with_input(self, n_stages: usize, input: &[MicroBatch]) -> Self {
        let Self::Totals(totals) = self else { return self };
        if n_stages > 1 {
            return Self::Again { input: input.to_vec(), totals };
        }
        // One micro-batch after another runs again.
        let record = |groups: &Groups| StageRecord::Input(groups.clone());
        let kept = input.iter().map(|batch| batch.slices.iter().map(record).collect()).collect();
        Self::Stages(vec![StageTape { kept, totals: Totals::new() }])
    }

    /// Returns the totals that each stage was given in the first run.
    pub(crate) fn totals_by_stage(&self) -> Vec<Totals> {
        match self {
            Self::Stages(stages) => stages.iter().map(|stage| stage.totals.clone()).collect(),
            Self::Again { totals, .. } | Self::Totals(totals) => totals.clone(),
        }
    }

    /// The totals that each stage but the first was given, over all groups, by set.
    pub(crate) fn totals(&self) -> Vec<Vec<Tensor<1>>> {
        self.totals_by_stage().iter().skip(1).map(over_groups).collect()
    }
}

/// Adds up totals over groups, by set.
pub(crate) fn over_groups(totals: &Totals) -> Vec<Tensor<1>> {
    totals
        .iter()
        .cloned()
        .reduce(|sums, group| -> Vec<Tensor<1>> {
            sums.into_iter().zip(group).map(|(sum, of_group)| sum + of_group).collect()
        })
        .unwrap_or_default()
}

impl<'p> Passes<'p> {
    /// Runs all stages without a graph. Also returns the totals that each stage was given. Without
    /// `draws` nothing is dropped.
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
                if self.evaluates { Ok(Totals::new()) } else { self.totals(unit.unit.name(), sums) }
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
        Ok(self
            .infer_with(
                unit,
                batches,
                Some(draws),
                |stage: usize, _| Ok(totals.get(stage + 1).cloned().unwrap_or_default()),
                on_sent,
            )?
            .0)
    }

    /// Runs all stages without a graph; `total` computes the totals of a stage's sums.
    fn infer_with(
        &self,
        unit: Gathered<'_, '_>,
        mut batches: Vec<MicroBatch>,
        draws: Option<&UnitDraws>,
        mut total: impl FnMut(usize, &[SlicedSums]) -> Result<Totals, EngineError>,
        on_sent: OnStatisticsSent<'_>,
    ) -> Result<(Vec<MicroBatch>, Vec<Totals>), EngineError> {
        let none = Draws::default();
        let mut given = vec![Totals::new()];
        for stage in 0..unit.unit.n_stages() {
            if stage + 1 == unit.unit.n_stages() {
                on_sent()?;
            }
            let mut sums = Vec::with_capacity(batches.len());
            for (number, batch) in batches.iter_mut().enumerate() {
                let totals = self.of_batch(&given[stage], number);
                let inputs = std::mem::take(&mut batch.slices);
                let outputs = self.workers.map(inputs, |i, input| {
                    let draws = draws.map_or(&none, |draws| &draws[number][i]);
                    unit.infer(input, self.beside(stage, draws, totals))
                });
                let (slices, of_batch) = parted(outputs);
                batch.slices = slices;
                sums.push(of_batch);
            }
            given.push(total(stage, &sums)?);
        }
        // The last stage has no sums.
        given.pop();
        Ok((batches, given))
    }

    /// Runs all stages, and keeps the data of the backward pass.
    ///
    /// # Errors
    /// [`EngineError`].
    pub(crate) fn forward<'a>(
        &self,
        unit: Gathered<'a, '_>,
        batches: Vec<MicroBatch>,
        draws: &UnitDraws,
        keeps_graph: bool,
        wants_input: bool,
        on_sent: OnStatisticsSent<'_>,
    ) -> Result<(Vec<MicroBatch>, UnitTape<'a>), EngineError> {
        if !keeps_graph && unit.unit.n_stages() > 1 {
            let input = batches.clone();
            let (batches, totals) = self.infer(unit, batches, Some(draws), on_sent)?;
            return Ok((batches, UnitTape::Again { input, totals }));
        }
        let (batches, stages) = self.stages(
            unit,
            batches,
            draws,
            [keeps_graph, wants_input],
            |_: usize, sums| self.totals(unit.unit.name(), sums),
            on_sent,
        )?;
        Ok((batches, UnitTape::Stages(stages)))
    }

    /// Runs all stages, and keeps only the totals, without which the unit cannot run again.
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

    /// Runs all stages; `total` computes the totals of a stage's sums.
    fn stages<'a>(
        &self,
        unit: Gathered<'a, '_>,
        mut batches: Vec<MicroBatch>,
        draws: &UnitDraws,
        [keeps_graph, wants_input]: [bool; 2],
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
            let mut kept = Vec::new();
            // Before the first stage there may be nothing to differentiate by; after it there are
            // parameters.
            let wants_input = wants_input || stage > 0;
            for (number, (batch, draws)) in batches.iter_mut().zip(draws).enumerate() {
                let of_batch = self.of_batch(&totals, number);
                let inputs = std::mem::take(&mut batch.slices);
                let results = self.workers.map(inputs, |i, input| {
                    unit.forward(input, self.beside(stage, &draws[i], of_batch), keeps_graph, wants_input)
                });
                let (outputs, kept_of_batch) = results.into_iter().unzip();
                let (slices, sums_of_batch) = parted(outputs);
                batch.slices = slices;
                sums.push(sums_of_batch);
                kept.push(kept_of_batch);
            }
            let given = std::mem::replace(&mut totals, total(stage, &sums)?);
            stages.push(StageTape { kept, totals: given });
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
        let mut at_sums = Totals::new();
        let mut params: Option<ParamGrads> = None;
        for (stage, tape) in self.replayed(unit, tape, draws, wants_input)?.into_iter().enumerate().rev() {
            if stage == 0 {
                on_sent()?;
            }
            let StageTape { mut kept, totals } = tape;
            let wants_input = wants_input || stage > 0;
            let mut at_totals = vec![Vec::new(); kept.len()];
            let mut run = |number: usize| {
                let kept = std::mem::take(&mut kept[number]);
                let totals = self.of_batch(&totals, number);
                let sums = self.of_batch(&at_sums, number);
                let inputs = kept.into_iter().zip(std::mem::take(&mut grads[number])).collect();
                let results = self.workers.map(inputs, |i, (kept, features)| {
                    let beside = self.beside(stage, &draws[number][i], totals);
                    unit.backward(kept, OutputGrads { features, sums }, beside, wants_input)
                });
                let mut sum: Option<ParamGrads> = None;
                for InputGrads { features, totals, params } in results {
                    grads[number].push(features);
                    at_totals[number].push(totals);
                    sum = Some(added(sum, params));
                }
                sum.expect("a micro-batch has at least one slice")
            };
            let of_stage = ordered::fold(draws.len(), &mut run, &ParamGrads::plus);
            params = Some(added(params, of_stage));
            at_sums = self.totals(unit.unit.name(), &at_totals)?;
        }
        Ok((grads, params.expect("a unit has at least one stage")))
    }

    /// Returns the stages of `tape`; where only the unit's input was kept, they run again with the
    /// totals of the first run.
    fn replayed<'a>(
        &self,
        unit: Gathered<'a, '_>,
        tape: UnitTape<'a>,
        draws: &UnitDraws,
        wants_input: bool,
    ) -> Result<Vec<StageTape<'a>>, EngineError> {
        let (input, totals) = match tape {
            UnitTape::Stages(stages) => return Ok(stages),
            UnitTape::Again { input, totals } => (input, totals),
            UnitTape::Totals(_) => panic!("{} has run again before its gradients", unit.unit.name()),
        };
        let (_, stages) = self.stages(
            unit,
            input,
            draws,
            [true, wants_input],
            |stage: usize, _| Ok(totals.get(stage + 1).cloned().unwrap_or_default()),
            &mut || Ok(()),
        )?;
        Ok(stages)
    }

    fn beside<'s>(&'s self, stage: usize, draws: &'s Draws, totals: &'s [Tensor<1>]) -> StageArguments<'s> {
        StageArguments { stage, draws, totals, sets: self.sets, types: self.types }
    }

    /// Number of the group of this rank's micro-batch `number`.
    fn stat_group(&self, number: usize) -> usize {
        let topology = self.comm.topology();
        (number * topology.world_size + topology.data_rank()) % self.n_stat_groups
    }

    /// Selects the part of `totals` for micro-batch `number`.
    fn of_batch<'t>(&self, totals: &'t Totals, number: usize) -> &'t [Tensor<1>] {
        totals.get(self.stat_group(number)).map_or(&[], Vec::as_slice)
    }

    /// Sums over slices, micro-batches and ranks; `sums` are by micro-batch. All sets and groups
    /// are sent together, so that there is one collective; entries of other groups are zero.
    fn totals(&self, unit: &str, sums: &[SlicedSums]) -> Result<Totals, EngineError> {
        let Some(first) = sums.first().and_then(|slices| slices.first()).filter(|sets| !sets.is_empty())
        else {
            return Ok(Totals::new());
        };
        let lengths: Vec<usize> = first.iter().map(|sum| sum.dims()[0]).collect();
        let len: usize = lengths.iter().sum();
        let n_groups = self.n_stat_groups;
        let device = first[0].device();
        let here: Vec<Tensor<1>> = sums
            .iter()
            .enumerate()
            .map(|(number, slices)| {
                let joined = slices.iter().map(|sets| Tensor::cat(sets.clone(), 0));
                let sum =
                    joined.reduce(|sum, term| sum + term).expect("a micro-batch has at least one slice");
                let group = self.stat_group(number);
                let zeros = |groups: usize| Tensor::<1>::zeros([groups * len], &device);
                match n_groups {
                    1 => sum,
                    _ => Tensor::cat(vec![zeros(group), sum, zeros(n_groups - 1 - group)], 0),
                }
            })
            .collect();
        let all = Peers::new(self.comm, here.len()).sum(unit, &here)?;
        let mut start = 0;
        let mut cut = |len: &usize| {
            start += len;
            all.clone().slice(start - len..start)
        };
        Ok((0..n_groups).map(|_| lengths.iter().map(&mut cut).collect()).collect())
    }
}

/// Separates features and sums, by slice.
fn parted(outputs: Vec<StageOutput>) -> (Vec<Groups>, SlicedSums) {
    outputs.into_iter().map(|output| (output.features, output.sums)).unzip()
}

fn added(sum: Option<ParamGrads>, term: ParamGrads) -> ParamGrads {
    match sum {
        Some(sum) => sum.plus(term),
        None => term,
    }
}
