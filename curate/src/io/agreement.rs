//! Agreement of ranks on whether all of them have succeeded.

use ranks::communicator::Communicator;

use crate::CurateError;

/// Returns the `result` of this rank, if no rank has failed. All ranks call it.
pub(super) fn all_succeed<T>(ranks: &Communicator, result: Result<T, CurateError>) -> Result<T, CurateError> {
    let n_ranks = ranks.count("readiness", result.is_err())?;
    let value = result?;
    if n_ranks > 0 {
        return Err(CurateError::PeersFailed { n_ranks });
    }
    Ok(value)
}
