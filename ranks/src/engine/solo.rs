//! One rank: moving data copies it, and a sum is the value itself.

use super::{Engine, Reduction, check_parts};
use crate::error::EngineError;

/// The engine of a run on one rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct Solo;

impl Engine for Solo {
    fn name(&self) -> &'static str {
        "solo"
    }

    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut [u8]) -> Result<(), EngineError> {
        check_parts("all_gather", mine.len(), all.len(), 1)?;
        all.copy_from_slice(mine);
        Ok(())
    }

    fn all_to_all(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), EngineError> {
        check_parts("all_to_all", send.len(), receive.len(), 1)?;
        receive.copy_from_slice(send);
        Ok(())
    }

    fn reduce_scatter(&mut self, full: &[f32], mine: &mut [f32]) -> Result<(), EngineError> {
        check_parts("reduce_scatter", mine.len(), full.len(), 1)?;
        mine.copy_from_slice(full);
        Ok(())
    }

    fn all_reduce(&mut self, _: &mut [f64], _: Reduction) -> Result<(), EngineError> {
        Ok(())
    }

    fn broadcast(&mut self, _: &mut [u8], _: usize) -> Result<(), EngineError> {
        Ok(())
    }

    fn split(&mut self, _: usize, _: usize) -> Result<Box<dyn Engine>, EngineError> {
        Ok(Box::new(Self))
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_conforms() {
        crate::conformance::check_on_host(&mut crate::engine::solo::Solo).unwrap();
    }
}
