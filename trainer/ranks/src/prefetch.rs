//! What is on its way while a unit computes: the next gather, and the last reductions.

use std::collections::VecDeque;

use burn_tensor::{DType, Device, Tensor};

use crate::collectives;
use crate::communicator::{Comm, Pending};
use crate::error::EngineError;
use crate::wire::Wire;

/// Reductions on their way.
const REDUCE_SLOTS: usize = 2;

/// A gather that is to come.
pub struct Wanted<'a> {
    /// Name of the unit.
    pub unit: &'a str,
    /// This rank's shard of it.
    pub shard: &'a Tensor<1>,
    /// How it travels.
    pub wire: Wire,
    /// Whether it stays for longer than its unit runs.
    pub stays: bool,
}

/// The gathers of a step, in order: while one is used, the next is on its way.
pub struct Gathers<'a> {
    comm: &'a Comm,
    device: &'a Device,
    rest: VecDeque<Wanted<'a>>,
    ahead: Option<Pending<Tensor<1>>>,
}

impl<'a> Gathers<'a> {
    /// Starts with the first of `list`; what is gathered comes to `device`.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn new(
        comm: &'a Comm,
        list: impl IntoIterator<Item = Wanted<'a>>,
        device: &'a Device,
    ) -> Result<Self, EngineError> {
        let mut gathers = Self { comm, device, rest: list.into_iter().collect(), ahead: None };
        gathers.look_ahead()?;
        Ok(gathers)
    }

    /// Sends for the next buffer, unless it is on its way. Statistics of the unit that computes go first: what is
    /// submitted runs in order, and they are waited for.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn look_ahead(&mut self) -> Result<(), EngineError> {
        if self.ahead.is_some() {
            return Ok(());
        }
        let submit = |next: Wanted<'_>| {
            // What an engine on device memory sends must lie there.
            let shard = match self.comm.takes_tensors {
                true => next.shard.clone().to_device(self.device),
                false => next.shard.clone(),
            };
            collectives::gather(self.comm, next.unit, &shard, next.wire, next.stays)
        };
        self.ahead = self.rest.pop_front().map(submit).transpose()?;
        Ok(())
    }

    /// The next unit's buffer, `[padded]`. The one after it is not on its way before [`Gathers::look_ahead`].
    ///
    /// # Errors
    /// [`EngineError`].
    ///
    /// # Panics
    /// If more are asked for than were listed: a bug in the step.
    pub fn next_flat(&mut self) -> Result<Tensor<1>, EngineError> {
        self.look_ahead()?;
        let pending = self.ahead.take().expect("the step lists every gather");
        let flat = self.comm.wait(pending)?;
        let flat = flat.to_device(self.device);
        // Leaves are f32, whatever weights travel in: gradients of several uses are added up in it.
        Ok(if flat.dtype() == DType::F32 { flat } else { flat.cast(DType::F32) })
    }
}

/// Reductions on their way, results in the order of submission.
pub struct Reductions<'a> {
    comm: &'a Comm,
    /// Units, gradients and how they travel, still to be submitted.
    held: Vec<(&'a str, Tensor<1>, Wire)>,
    pending: VecDeque<Pending<Tensor<1>>>,
    done: Vec<Tensor<1>>,
}

impl<'a> Reductions<'a> {
    /// None yet.
    pub fn new(comm: &'a Comm) -> Self {
        Self { comm, held: Vec::new(), pending: VecDeque::new(), done: Vec::new() }
    }

    /// Holds one until [`Reductions::release`].
    pub fn push(&mut self, unit: &'a str, full: Tensor<1>, wire: Wire) {
        self.held.push((unit, full, wire));
    }

    /// Submits what is held, after the statistics of the unit that computes; waits first if too many are on their way.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn release(&mut self) -> Result<(), EngineError> {
        for (unit, full, wire) in std::mem::take(&mut self.held) {
            if self.pending.len() == REDUCE_SLOTS {
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

    /// All shards.
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
