//! A network of a step with its shards, and the new values of its running parameters after a batch.

use std::collections::BTreeMap;

use burn_tensor::{DType, Device, Tensor};
use kernels::device::host;
use kernels::ops::in_f32;
use networks::adapter::UnitAdapters;
use networks::draws::Draws;
use networks::layout::UnitLayout;
use networks::leaves::Leaves;
use networks::unit::{Context, Unit};
use ranks::topology::Extent;
use ranks::wire::Wire;

use super::net::{Net, Nets};
use super::pass::Passes;
use super::precision::Precision;
use super::state::NetworkState;
use super::tape::{Gathered, GatheredAdapters};
use crate::optim::state::UnitShard;

/// A network and this rank's shards of its units.
#[derive(Clone, Copy)]
pub(super) struct ShardedNet<'a> {
    pub(super) net: &'a Net,
    pub(super) shards: &'a [UnitShard],
    /// Shards of the weights to which adapters are added, by index of the unit.
    pub(super) bases: &'a BTreeMap<usize, UnitShard>,
}

/// New values of a parameter that do not come from a gradient.
pub(super) struct Observation {
    /// Name of the network.
    pub(super) network: &'static str,
    /// Index of the unit.
    pub(super) unit: usize,
    /// Name of the parameter.
    pub(super) param: String,
    /// New values.
    pub(super) values: Tensor<1>,
    /// Values from which these were computed: rounded if weights are sent in fewer bits than they
    /// have.
    pub(super) before: Tensor<1>,
    /// First element of the parameter that is observed, if only a part of it is.
    pub(super) first: usize,
}

/// Elements of a shard that an observation is written to.
struct Target {
    /// Index of the network.
    network: usize,
    /// First element within the shard.
    start: usize,
    /// One past the last element.
    end: usize,
    /// First of the observed values that belong to the shard.
    first: usize,
}

/// Values of a shard before an observation was written over them.
pub(super) struct Overwritten {
    /// Index of the network.
    network: usize,
    /// Index of the unit.
    unit: usize,
    /// First element within the shard.
    start: usize,
    values: Tensor<1>,
}

impl Overwritten {
    /// Writes the old values back.
    pub(super) fn restore(self, networks: &mut [NetworkState]) {
        let shard = &mut networks[self.network].shards[self.unit];
        host::assign(shard.weights.values_mut(), self.start, &self.values);
    }
}

impl Observation {
    /// Returns the elements that the values are written to; `None` if this rank holds none of them.
    fn target(&self, nets: &Nets, networks: &[NetworkState]) -> Option<Target> {
        let network = nets.position(self.network)?;
        let shard = &networks[network].shards[self.unit];
        let segment = shard.segments().find(|segment| segment.slot.spec.name == self.param)?;
        let first = segment.first - self.first;
        Some(Target { network, start: segment.start, end: segment.end, first })
    }

    /// Returns the values that [`Observation::write`] will overwrite.
    pub(super) fn overwritten(&self, nets: &Nets, networks: &[NetworkState]) -> Option<Overwritten> {
        let Target { network, start, end, .. } = self.target(nets, networks)?;
        let weights = networks[network].shards[self.unit].weights.values();
        // A copy, because the weights are written in place.
        let values = weights.clone().slice(start..end).mul_scalar(1.0);
        Some(Overwritten { network, unit: self.unit, start, values })
    }

    /// Writes the values into this rank's shards, which are on `device`.
    pub(super) fn write(
        self,
        nets: &Nets,
        networks: &mut [NetworkState],
        precision: Precision,
        device: &Device,
    ) {
        let Some(Target { network: index, start, end, first }) = self.target(nets, networks) else { return };
        let Self { unit, values, before, .. } = self;
        let shard = &mut networks[index].shards[unit];
        let Precision { gather, head_gather, .. } = precision;
        let wire = if nets.list[index].is_backbone(unit) { gather } else { head_gather };
        let range = first..first + end - start;
        let mut values = in_f32(values).slice(range.clone()).to_device(device);
        if wire != Wire::F32 {
            // Master weights keep the digits that were not sent.
            let before = in_f32(before).slice(range).to_device(device);
            values = shard.weights.values().clone().slice(start..end) + (values - before);
        }
        host::assign(shard.weights.values_mut(), start, &values);
    }
}

impl<'a> ShardedNet<'a> {
    /// Returns the name of unit `index`.
    pub(super) fn unit_name(&self, index: usize) -> &'a str {
        &self.shards[index].layout.name
    }

    /// Returns the part of unit `index` that this rank computes, and the layout of its buffer.
    pub(super) fn computed_unit(&self, index: usize) -> (&'a dyn Unit, &'a UnitLayout) {
        match self.net.part(index) {
            Some(part) => (part.unit.as_ref(), &part.layout),
            None => (self.net.unit(index), &self.shards[index].layout),
        }
    }

    /// Returns the extent of the part of unit `index` that this rank computes.
    pub(super) fn extent(&self, index: usize) -> Extent {
        if self.net.part(index).is_some() { Extent::Columns } else { Extent::Whole }
    }

    /// Returns the adapters of unit `index` with its base; `None` if it has none.
    pub(super) fn adapters(&self, index: usize) -> Option<UnitAdapters<'a>> {
        let base = &self.bases.get(&index)?.layout;
        Some(UnitAdapters { adapter: self.net.adapter?, base, adapters: &self.shards[index].layout })
    }

    /// Returns unit `index` with its gathered weights, to which its adapters have been added if it
    /// has some.
    pub(super) fn gathered<'f>(&self, index: usize, flat: &'f Tensor<1>) -> Gathered<'a, 'f>
    where
        'a: 'f,
    {
        let unit = self.net.unit(index);
        if let Some(base) = self.bases.get(&index) {
            return Gathered { unit, layout: &base.layout, flat, in_bf16: None, adapters: None };
        }
        let shard = &self.shards[index];
        // The shard's copy can be used if the shard is the whole unit and was gathered in f32.
        let is_whole = shard.len() == shard.layout.padded && flat.dtype() == DType::F32;
        let in_bf16 = if is_whole { shard.weights.in_bf16() } else { None };
        Gathered { unit, layout: &shard.layout, flat, in_bf16, adapters: None }
    }

    /// Returns unit `index` as [`ShardedNet::gathered`] does, with its gathered adapters, whose
    /// gradients the backward pass computes.
    pub(super) fn gathered_with_adapters<'f>(
        &self,
        index: usize,
        flat: &'f Tensor<1>,
        adapters: Option<&'f Tensor<1>>,
    ) -> Gathered<'a, 'f>
    where
        'a: 'f,
    {
        let mut gathered = self.gathered(index, flat);
        if let Some(buffers) = self.adapters(index)
            && let Some(flat) = adapters
        {
            gathered.adapters = Some(GatheredAdapters { buffers, flat });
        }
        gathered
    }

    /// Returns the new values of the running parameters of unit `index`, given the totals that each
    /// of its stages but the first received.
    pub(super) fn observed(
        &self,
        index: usize,
        unit: Gathered<'_, '_>,
        totals: &[Vec<Tensor<1>>],
        passes: Passes<'_>,
    ) -> Vec<Observation> {
        let leaves = Leaves::new(unit.layout, unit.flat, false);
        let draws = Draws::default();
        let Passes { sets, types, .. } = passes;
        let cx = Context { leaves: &leaves, draws: &draws, totals: &[], sets, types };
        let mut observations = Vec::new();
        for (param, values) in unit.unit.observe(totals, &cx) {
            // A unit observes parameters that it lists.
            let position = unit.layout.position(&param).expect("a parameter of the unit");
            let slice = unit.flat.clone().slice([unit.layout.params[position].range()]);
            // A slice would keep the memory of the whole gathered unit until the end of the step.
            let before = in_f32(slice).mul_scalar(1.0);
            let network = self.net.name;
            observations.push(Observation { network, unit: index, param, values, before, first: 0 });
        }
        observations
    }
}
