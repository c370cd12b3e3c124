//! How a rank ends: together with the others.

use super::super::stream::Next;
use super::super::{Observer, Outcome};
use super::Run;
use crate::error::TrainError;
use crate::shard::comm::Comm;
use crate::shard::engine::Reduction;
use crate::step::Votes;

impl Run<'_> {
    /// Some rank was asked to stop or has no batch: what was learned is saved by all.
    pub(super) fn end_early(
        &mut self,
        next: Next,
        agreed: Votes,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, TrainError> {
        let saved = self.save().and_then(|()| self.finish_saving());
        let next = self.failure.take().map_or(next, Next::Failed);
        match next {
            Next::Failed(error) => {
                if let Err(error) = saved {
                    observer.warned(&error.to_string());
                }
                // The others leave together with this one.
                let _ = self.leave();
                Err(error)
            }
            _ if agreed.failed > 0.0 => {
                let _ = self.leave();
                Err(TrainError::PeersFailed { n_ranks: agreed.failed as usize })
            }
            _ => {
                saved?;
                self.leave()?;
                Ok(Outcome::Stopped)
            }
        }
    }

    /// Leaves together with all other ranks.
    pub(super) fn leave(&mut self) -> Result<(), TrainError> {
        Ok(std::mem::replace(&mut self.trainer.comm, Comm::solo()).finish()?)
    }

    /// All steps are taken: what has failed since the last vote is told before ranks part.
    pub(super) fn finish(&mut self) -> Result<Outcome, TrainError> {
        let failed = f64::from(u8::from(self.failure.is_some()));
        let n_failed = self.trainer.comm.all_reduce("the last word", vec![failed], Reduction::Sum)?[0];
        self.leave()?;
        match self.failure.take() {
            Some(error) => Err(error),
            None if n_failed > 0.0 => Err(TrainError::PeersFailed { n_ranks: n_failed as usize }),
            None => Ok(Outcome::Finished),
        }
    }

    /// Ends with an error that all ranks have found alike.
    pub(super) fn end_together<T>(&mut self, error: TrainError) -> Result<T, TrainError> {
        // Launchers are easier on ranks that have taken leave of one another.
        let _ = self.leave();
        Err(error)
    }
}
