//! Collectives in flight while a unit computes: the next gather, and the last reductions.
//!
//! Collectives run in the order of their submission, and statistics over the batch are waited for.
//! They are therefore submitted first: the next gather and the reductions of the previous unit
//! follow once the current unit has submitted its last sums ([`GatherQueue::look_ahead`],
//! [`ReductionQueue::release`]). The backward pass of heads is the one exception: the gather of the
//! last backbone unit may precede its sums.

use std::collections::{BTreeMap, VecDeque};

use burn_tensor::{DType, Device, Tensor};

use crate::collectives::{self, GatherRequest};
use crate::communicator::{Communicator, Pending};
use crate::error::EngineError;
use crate::topology::Extent;
use crate::wire::Wire;

/// Limit of reductions in flight: a step waits for the oldest before it submits another one.
pub const MAX_REDUCTIONS_IN_FLIGHT: usize = 2;

/// The gathers of a step, in order: while one is used, the next is in flight.
pub struct GatherQueue<'a> {
    comm: &'a Communicator,
    device: &'a Device,
    rest: VecDeque<GatherRequest<'a>>,
    in_flight: Option<InFlight<'a>>,
}

/// A gather in flight.
struct InFlight<'a> {
    unit: &'a str,
    dtype: DType,
    pending: Pending<Tensor<1>>,
}

impl<'a> GatherQueue<'a> {
    /// Takes the step's gathers in order and submits the first. Gathered buffers are moved to
    /// `device`.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn new(
        comm: &'a Communicator,
        requests: impl IntoIterator<Item = GatherRequest<'a>>,
        device: &'a Device,
    ) -> Result<Self, EngineError> {
        let mut gathers = Self { comm, device, rest: requests.into_iter().collect(), in_flight: None };
        gathers.look_ahead()?;
        Ok(gathers)
    }

    /// Submits the next gather, unless it is in flight. Statistics of the unit that computes must
    /// be submitted before: collectives run in the order of submission, and the statistics are
    /// waited for.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn look_ahead(&mut self) -> Result<(), EngineError> {
        if self.in_flight.is_some() {
            return Ok(());
        }
        let Some(request) = self.rest.pop_front() else { return Ok(()) };
        let GatherRequest { unit, dtype, .. } = request;
        let mut shard = request.shard.clone();
        // An engine on device memory sends tensors on the device only.
        if self.comm.supports_device_tensors {
            shard = shard.to_device(self.device);
        }
        let pending = collectives::gather(self.comm, &GatherRequest { shard: &shard, ..request })?;
        self.in_flight = Some(InFlight { unit, dtype, pending });
        Ok(())
    }

    /// Returns the gathered buffer `[padded]` of `unit`, which must be the name of the next unit of
    /// the requests. The gather after it is not submitted before [`GatherQueue::look_ahead`].
    ///
    /// # Errors
    /// [`EngineError`].
    ///
    /// # Panics
    /// If another unit is the next of the requests: a bug in the step.
    pub fn next_flat(&mut self, unit: &str) -> Result<Tensor<1>, EngineError> {
        self.look_ahead()?;
        let InFlight { unit: listed_unit, dtype, pending } =
            self.in_flight.take().expect("the step lists every gather");
        assert_eq!(listed_unit, unit, "the step gathers units in the order of its list");
        let flat = self.comm.wait(pending)?;
        let flat = flat.to_device(self.device);
        Ok(if flat.dtype() == dtype { flat } else { flat.cast(dtype) })
    }
}

/// Reductions in flight, by index of the unit.
pub struct ReductionQueue<'a> {
    comm: &'a Communicator,
    /// Gradients that are still to be submitted.
    held: Vec<HeldGradient<'a>>,
    pending: VecDeque<(usize, Pending<Tensor<1>>)>,
    done: BTreeMap<usize, Tensor<1>>,
}

/// A gradient that is to be reduced.
struct HeldGradient<'a> {
    /// Index and name of the unit.
    unit: (usize, &'a str),
    /// Gradient of the whole buffer, `[padded]`.
    full: Tensor<1>,
    /// Element type on the wire.
    wire: Wire,
    /// Part of the unit whose gradient it is.
    extent: Extent,
}

impl<'a> ReductionQueue<'a> {
    /// Creates an empty list of reductions.
    pub fn new(comm: &'a Communicator) -> Self {
        Self { comm, held: Vec::new(), pending: VecDeque::new(), done: BTreeMap::new() }
    }

    /// Holds the gradient `full`, `[padded]`, of the unit with this index and name until
    /// [`ReductionQueue::release`].
    pub fn push(&mut self, unit: (usize, &'a str), full: Tensor<1>, wire: Wire) {
        self.push_part(unit, full, wire, Extent::Whole);
    }

    /// Holds the gradient `full` of `extent` of the unit with this index and name until
    /// [`ReductionQueue::release`].
    pub fn push_part(&mut self, unit: (usize, &'a str), full: Tensor<1>, wire: Wire, extent: Extent) {
        self.held.push(HeldGradient { unit, full, wire, extent });
    }

    /// Submits the held gradients, after the statistics of the computing unit; waits first if too
    /// many are in flight.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn release(&mut self) -> Result<(), EngineError> {
        for HeldGradient { unit: (index, name), full, wire, extent } in std::mem::take(&mut self.held) {
            if self.pending.len() == MAX_REDUCTIONS_IN_FLIGHT {
                self.wait_for_one()?;
            }
            self.pending.push_back((index, collectives::reduce(self.comm, name, full, wire, extent)?));
        }
        Ok(())
    }

    fn wait_for_one(&mut self) -> Result<(), EngineError> {
        if let Some((index, pending)) = self.pending.pop_front() {
            let previous = self.done.insert(index, self.comm.wait(pending)?);
            assert!(previous.is_none(), "unit {index} has one gradient");
        }
        Ok(())
    }

    /// Submits the gradients that are still held, waits for all reductions and returns the reduced
    /// shards by unit index.
    ///
    /// # Errors
    /// [`EngineError`].
    ///
    /// # Panics
    /// If a unit was given two gradients: a bug in the step.
    pub fn finish(mut self) -> Result<BTreeMap<usize, Tensor<1>>, EngineError> {
        self.release()?;
        while !self.pending.is_empty() {
            self.wait_for_one()?;
        }
        Ok(self.done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(value: f32) -> Tensor<1> {
        Tensor::full([64], value, &Device::flex())
    }

    #[test]
    #[should_panic(expected = "in the order of its list")]
    fn gathering_a_unit_out_of_order_panics() {
        let comm = Communicator::solo();
        let device = Device::flex();
        let shards = [shard(1.0), shard(2.0)];
        let requests = ["a", "b"].into_iter().zip(&shards).map(|(unit, shard)| GatherRequest {
            unit,
            shard,
            wire: Wire::F32,
            dtype: DType::F32,
            is_kept: false,
            extent: Extent::Whole,
        });
        let mut gathers = GatherQueue::new(&comm, requests, &device).unwrap();
        let _ = gathers.next_flat("b");
    }

    #[test]
    fn reduced_shards_are_returned_by_unit_index() {
        let comm = Communicator::solo();
        let mut reductions = ReductionQueue::new(&comm);
        for index in [4, 0, 3, 1, 2] {
            reductions.push((index, "unit"), shard(index as f32), Wire::F32);
        }
        let sums = reductions.finish().unwrap();
        assert_eq!(sums.len(), 5);
        for (index, values) in sums {
            assert_eq!(values.into_data().try_to_vec::<f32>().unwrap()[0], index as f32);
        }
    }
}
