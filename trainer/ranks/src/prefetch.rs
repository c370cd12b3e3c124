//! Collectives in flight while a unit computes: the next gather, and the last reductions.

use std::collections::VecDeque;

use burn_tensor::{DType, Device, Tensor};

use crate::collectives;
use crate::communicator::{Communicator, Pending};
use crate::error::EngineError;
use crate::wire::Wire;

/// Limit of reductions in flight.
const MAX_REDUCTIONS_IN_FLIGHT: usize = 2;

/// A gather to be queued.
pub struct GatherRequest<'a> {
    /// Name of the unit.
    pub unit: &'a str,
    /// Shard of the unit that this rank holds.
    pub shard: &'a Tensor<1>,
    /// Element type on the wire.
    pub wire: Wire,
    /// True if the gathered buffer is kept for longer than its unit runs.
    pub stays: bool,
}

/// The gathers of a step, in order: while one is used, the next is in flight.
pub struct GatherQueue<'a> {
    comm: &'a Communicator,
    device: &'a Device,
    rest: VecDeque<GatherRequest<'a>>,
    ahead: Option<Pending<Tensor<1>>>,
}

impl<'a> GatherQueue<'a> {
    /// Queues the first gather of `list`; gathered buffers are moved to `device`.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn new(
        comm: &'a Communicator,
        list: impl IntoIterator<Item = GatherRequest<'a>>,
        device: &'a Device,
    ) -> Result<Self, EngineError> {
        let mut gathers = Self { comm, device, rest: list.into_iter().collect(), ahead: None };
        gathers.look_ahead()?;
        Ok(gathers)
    }

    /// Queues the next gather, unless it is in flight. Statistics of the unit that computes must be submitted before:
    /// collectives run in the order of submission, and the statistics are waited for.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn look_ahead(&mut self) -> Result<(), EngineError> {
        if self.ahead.is_some() {
            return Ok(());
        }
        let submit = |next: GatherRequest<'_>| {
            // An engine on device memory sends tensors on the device only.
            let shard = match self.comm.supports_device_tensors {
                true => next.shard.clone().to_device(self.device),
                false => next.shard.clone(),
            };
            collectives::gather(self.comm, next.unit, &shard, next.wire, next.stays)
        };
        self.ahead = self.rest.pop_front().map(submit).transpose()?;
        Ok(())
    }

    /// Returns the next unit's buffer, `[padded]`. The gather after it is not queued before [`GatherQueue::look_ahead`].
    ///
    /// # Errors
    /// [`EngineError`].
    ///
    /// # Panics
    /// If more buffers are requested than were listed: a bug in the step.
    pub fn next_flat(&mut self) -> Result<Tensor<1>, EngineError> {
        self.look_ahead()?;
        let pending = self.ahead.take().expect("the step lists every gather");
        let flat = self.comm.wait(pending)?;
        let flat = flat.to_device(self.device);
        // Leaves are f32, whatever the type on the wire, because gradients of several uses are summed in f32.
        Ok(if flat.dtype() == DType::F32 { flat } else { flat.cast(DType::F32) })
    }
}

/// Reductions in flight; results are in the order of submission.
pub struct ReductionQueue<'a> {
    comm: &'a Communicator,
    /// Units, gradients and wire types that are still to be submitted.
    held: Vec<(&'a str, Tensor<1>, Wire)>,
    pending: VecDeque<Pending<Tensor<1>>>,
    done: Vec<Tensor<1>>,
}

impl<'a> ReductionQueue<'a> {
    /// Creates an empty list of reductions.
    pub fn new(comm: &'a Communicator) -> Self {
        Self { comm, held: Vec::new(), pending: VecDeque::new(), done: Vec::new() }
    }

    /// Holds the gradient `full` of `unit` until [`ReductionQueue::release`].
    pub fn push(&mut self, unit: &'a str, full: Tensor<1>, wire: Wire) {
        self.held.push((unit, full, wire));
    }

    /// Submits the held gradients, after the statistics of the computing unit; waits first if too many are in flight.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn release(&mut self) -> Result<(), EngineError> {
        for (unit, full, wire) in std::mem::take(&mut self.held) {
            if self.pending.len() == MAX_REDUCTIONS_IN_FLIGHT {
                self.wait_for_one()?;
            }
            self.pending.push_back(collectives::reduce(self.comm, unit, full, wire)?);
        }
        Ok(())
    }

    fn wait_for_one(&mut self) -> Result<(), EngineError> {
        if let Some(pending) = self.pending.pop_front() {
            self.done.push(self.comm.wait(pending)?);
        }
        Ok(())
    }

    /// Waits for all reductions and returns their shards.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn finish(mut self) -> Result<Vec<Tensor<1>>, EngineError> {
        self.release()?;
        while !self.pending.is_empty() {
            self.wait_for_one()?;
        }
        Ok(self.done)
    }
}
