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
    /// Tapes by unit, with the gathered weights if they are kept.
    pub(super) tapes: Vec<(UnitTape<'a>, Option<Tensor<1>>)>,
    /// Gradients at the backbone's features, by micro-batch.
    pub(super) grads: Vec<SlicedGrads>,
    /// Type in which gradients are sent.
    pub(super) wire: Wire,
}

/// Computes the flat gradients of the backbone's units, from the last unit to the first, and starts
/// their reductions.
///
/// # Errors
/// [`EngineError`].
pub(super) fn backward<'a>(
    trained: ShardedNet<'a>,
    BackwardInputs { mut tapes, mut grads, wire }: BackwardInputs<'a>,
    draws: &[UnitDraws],
    passes: Passes<'_>,
    gathers: &mut GatherQueue<'_>,
    reductions: &mut ReductionQueue<'a>,
) -> Result<(), EngineError> {
    for number in (0..trained.net.backbone.len()).rev() {
        let shard = &trained.shards[number];
        if let Some((UnitTape::Totals(_), _)) = tapes.last() {
            repeat_segment(trained, &mut tapes, draws, passes, gathers, reductions)?;
        }
        // The forward pass leaves a tape for every unit.
        let (tape, flat) = tapes.pop().expect("a tape for every unit");
        let flat = match flat {
            Some(flat) => flat,
            None => gathers.next_flat(&shard.layout.name)?,
        };
        let unit = trained.gathered(number, &flat);
        let params;
        let on_sent = &mut || gathers.look_ahead().and_then(|()| reductions.release());
        (grads, params) = passes.backward(unit, tape, grads, &draws[number], number > 0, on_sent)?;
        // Rounding to the type on the wire gives the same values here as before the transfer.
        reductions.push((number, &shard.layout.name), params.flat(&shard.layout, wire.dtype()), wire);
    }
    reductions.release()
}

/// Runs the units of the last segment of `tapes` again except for its last unit, and stores the
/// input of every unit but the first in its tape.
fn repeat_segment<'a>(
    trained: ShardedNet<'a>,
    tapes: &mut [(UnitTape<'a>, Option<Tensor<1>>)],
    draws: &[UnitDraws],
    passes: Passes<'_>,
    gathers: &mut GatherQueue<'_>,
    reductions: &mut ReductionQueue<'a>,
) -> Result<(), EngineError> {
    let mut first = tapes.len() - 1;
    while matches!(tapes[first].0, UnitTape::Totals(_)) {
        first -= 1;
    }
    // The first unit of a segment keeps its input.
    let mut batches = tapes[first].0.input().expect("the input of a segment");
    for number in first..tapes.len() - 1 {
        let flat = match &tapes[number].1 {
            Some(flat) => flat.clone(),
            None => gathers.next_flat(trained.unit_name(number))?,
        };
        let totals = tapes[number].0.totals_by_stage();
        let on_sent = &mut || gathers.look_ahead().and_then(|()| reductions.release());
        let unit = trained.gathered(number, &flat);
        batches = passes.repeat(unit, batches, &draws[number], &totals, on_sent)?;
        let next = &mut tapes[number + 1].0;
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
    let mut means = Vec::with_capacity(sums.len());
    for sum in sums.into_values() {
        let mean = if n_micro_batches > 1 { host::scale(sum, factor) } else { sum };
        means.push(mean.to_device(device));
    }
    means
}
