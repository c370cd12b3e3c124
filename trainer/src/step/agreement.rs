//! Agreement of ranks at the end of a step, in one small all-reduce: loss, gauges, norms and votes.

use ranks::EngineError;
use ranks::communicator::Communicator;
use ranks::engine::Reduction;
use ranks::fixed::{FixedPoint, N_LIMBS};

use crate::method::Gauges;

/// Votes of a rank at the end of a step; numbers of ranks once they have agreed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Votes {
    /// The rank was asked to stop.
    pub stop: f64,
    /// The rank cannot continue: it has no batch, or something that only this rank does has failed.
    pub failed: f64,
    /// The rank's part of the checkpoint in flight is on disk.
    pub saved: f64,
    /// The rank's part of the checkpoint in flight could not be written.
    pub save_failed: f64,
    /// A checkpoint is due by the rank's clock.
    pub due: f64,
    /// The rank has found a matrix product wrong that had been right.
    pub wrong: f64,
}

/// Values that all ranks have agreed on.
pub(super) struct Agreed {
    pub(super) loss: f64,
    pub(super) gauges: Gauges,
    /// Squared gradient norms by clip group.
    pub(super) squares: Vec<f64>,
    pub(super) votes: Votes,
}

impl Agreed {
    /// Returns whether loss and gradients are finite on all ranks: a sum of squares is finite only
    /// if every gradient is.
    pub(super) fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.squares.iter().all(|square| square.is_finite())
    }
}

/// Sums the values of all ranks. Replicas hold the same shards, whose squares count once; a
/// gradient that is not finite counts on every rank.
pub(super) fn agree(
    comm: &Communicator,
    squares: &[FixedPoint],
    loss: FixedPoint,
    gauges: &[(&'static str, FixedPoint)],
    votes: Votes,
) -> Result<Agreed, EngineError> {
    let mut sums: Vec<FixedPoint> = match comm.topology().replica() {
        0 => squares.to_vec(),
        _ => squares.iter().map(|square| square.zero_with_range_errors()).collect(),
    };
    sums.push(loss);
    sums.extend(gauges.iter().map(|(_, value)| *value));
    let mut shared: Vec<f64> = sums.into_iter().flat_map(FixedPoint::limbs).collect();
    let said = [votes.stop, votes.failed, votes.saved, votes.save_failed, votes.due, votes.wrong];
    shared.extend(said);
    let shared = comm.all_reduce("norms and votes", shared, Reduction::Sum)?;
    let (limbs, counts) = shared.split_at(shared.len() - said.len());
    let numbers: Vec<f64> = limbs.chunks_exact(N_LIMBS).map(FixedPoint::from_limbs).collect();
    let (squares, rest) = numbers.split_at(squares.len());
    let gauges = gauges.iter().zip(&rest[1..]).map(|((name, _), mean)| (*name, *mean)).collect();
    let votes = Votes {
        stop: counts[0],
        failed: counts[1],
        saved: counts[2],
        save_failed: counts[3],
        due: counts[4],
        wrong: counts[5],
    };
    Ok(Agreed { loss: rest[0], gauges, squares: squares.to_vec(), votes })
}
