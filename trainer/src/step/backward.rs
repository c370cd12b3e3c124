//! The trained network's backward pass through its backbone.

use std::collections::BTreeMap;

use burn_tensor::{Device, Tensor};
use kernels::device::host;
use ranks::EngineError;
use ranks::prefetch::{GatherQueue, ReductionQueue};
use ranks::wire::Wire;

use super::pass::{Passes, SlicedGrads, UnitDraws, UnitTape};
use super::sharded::ShardedNet;

/// Inputs of the backbone's backward pass.
pub(super) struct BackwardInputs<'a> {
    /// Tapes by unit, with the gathered weights where they stay.
    pub(super) tape: Vec<(UnitTape<'a>, Option<Tensor<1>>)>,
    /// Gradients at the backbone's features, by micro-batch.
    pub(super) grads: Vec<SlicedGrads>,
    /// Type in which gradients are sent.
    pub(super) wire: Wire,
}

/// Computes the flat gradients of the backbone's units, from the last unit on, and starts their
/// reductions.
///
/// # Errors
/// [`EngineError`].
pub(super) fn backward<'a>(
    trained: ShardedNet<'a>,
    BackwardInputs { mut tape, mut grads, wire }: BackwardInputs<'a>,
    draws: &[UnitDraws],
    passes: Passes<'_>,
    gathers: &mut GatherQueue<'_>,
    reductions: &mut ReductionQueue<'a>,
) -> Result<(), EngineError> {
    for number in (0..trained.net.backbone.len()).rev() {
        let shard = &trained.shards[number];
        if let Some((UnitTape::Totals(_), _)) = tape.last() {
            repeat_segment(trained, &mut tape, draws, passes, gathers, reductions)?;
        }
        // The forward pass leaves a tape for every unit.
        let (of_unit, flat) = tape.pop().expect("a tape for every unit");
        let flat = match flat {
            Some(flat) => flat,
            None => gathers.next_flat(&shard.layout.name)?,
        };
        let gathered = trained.gathered(number, &flat);
        let sum;
        let on_sent = &mut || gathers.look_ahead().and_then(|()| reductions.release());
        (grads, sum) = passes.backward(gathered, of_unit, grads, &draws[number], number > 0, on_sent)?;
        // In the type in which it is sent: rounding it here or there is the same.
        reductions.push((number, &shard.layout.name), sum.flat(&shard.layout, wire.dtype()), wire);
    }
    reductions.release()
}

/// Runs the units of the last segment of `tape` again, all but its last unit, and gives each but
/// the first its input.
fn repeat_segment<'a>(
    trained: ShardedNet<'a>,
    tape: &mut [(UnitTape<'a>, Option<Tensor<1>>)],
    draws: &[UnitDraws],
    passes: Passes<'_>,
    gathers: &mut GatherQueue<'_>,
    reductions: &mut ReductionQueue<'a>,
) -> Result<(), EngineError> {
    let lacks_input = |(tape, _): &(UnitTape<'a>, Option<Tensor<1>>)| matches!(tape, UnitTape::Totals(_));
    let n_without = tape.iter().rev().take_while(|of_unit| lacks_input(of_unit)).count();
    let first = tape.len() - 1 - n_without;
    // The first unit of a segment keeps its input.
    let mut batches = tape[first].0.input().expect("the input of a segment");
    for number in first..first + n_without {
        let flat = match &tape[number].1 {
            Some(flat) => flat.clone(),
            None => gathers.next_flat(trained.unit_name(number))?,
        };
        let totals = tape[number].0.totals_by_stage();
        let on_sent = &mut || gathers.look_ahead().and_then(|()| reductions.release());
        let unit = trained.gathered(number, &flat);
        batches = passes.repeat(unit, batches, &draws[number], &totals, on_sent)?;
        let next = &mut tape[number + 1].0;
        let n_stages = trained.net.backbone[number + 1].n_stages();
        *next = std::mem::replace(next, UnitTape::Totals(Vec::new())).with_input(n_stages, &batches);
    }
    Ok(())
}

/// Returns the mean gradients on `device` in the order of the units, given their sums over
/// `n_micro_batches` by number of the unit.
pub(super) fn mean_gradients(
    sums: BTreeMap<usize, Tensor<1>>,
    n_micro_batches: usize,
    device: &Device,
) -> Vec<Tensor<1>> {
    let factor = 1.0 / n_micro_batches as f32;
    let mean = |grad| if n_micro_batches > 1 { host::scale(grad, factor) } else { grad };
    sums.into_values().map(|grad| mean(grad).to_device(device)).collect()
}
