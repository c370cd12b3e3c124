//! Agreement of ranks on whether all of them have succeeded.

use ranks::communicator::Communicator;
use ranks::engine::Reduction;

use crate::CurateError;

/// Returns the `result` of this rank, if no rank has failed. All ranks call it.
pub(super) fn all_succeed<T>(ranks: &Communicator, result: Result<T, CurateError>) -> Result<T, CurateError> {
    let failed = f64::from(u8::from(result.is_err()));
    let sum = ranks.all_reduce("readiness", vec![failed], Reduction::Sum)?;
    let value = result?;
    let n_ranks = sum[0] as usize;
    if n_ranks > 0 {
        return Err(CurateError::PeersFailed { n_ranks });
    }
    Ok(value)
}
