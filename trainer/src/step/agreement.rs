//! Agreement of ranks on loss, gauges, norms and votes at the end of a step, in one small
//! all-reduce.

use ranks::EngineError;
use ranks::communicator::Communicator;
use ranks::engine::Reduction;
use ranks::fixed::{FixedPoint, N_LIMBS};

use crate::method::Gauges;

/// Votes of a rank at the end of a step; once the ranks have agreed, the number of ranks for each.
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
    /// The rank has found a wrong result of a matrix product that was right before.
    pub wrong: f64,
}

/// Converts a flag to a vote, which the sum over ranks counts.
pub(crate) fn vote(flag: bool) -> f64 {
    f64::from(u8::from(flag))
}

/// Values that all ranks have agreed on.
pub(super) struct Agreed {
    /// Mean loss of the global batch.
    pub(super) loss: f64,
    /// Gauges over the global batch.
    pub(super) gauges: Gauges,
    /// Squared gradient norms by clip group.
    pub(super) squares: Vec<f64>,
    /// Votes of all ranks.
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
    let mut sums = squares.to_vec();
    if comm.topology().replica() != 0 {
        for sum in &mut sums {
            *sum = sum.zero_with_range_errors();
        }
    }
    sums.push(loss);
    sums.extend(gauges.iter().map(|(_, value)| *value));
    let mut shared: Vec<f64> = sums.into_iter().flat_map(FixedPoint::limbs).collect();
    let counts = [votes.stop, votes.failed, votes.saved, votes.save_failed, votes.due, votes.wrong];
    shared.extend(counts);
    let shared = comm.all_reduce("norms and votes", shared, Reduction::Sum)?;
    let (limbs, counts) = shared.split_at(shared.len() - counts.len());
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
