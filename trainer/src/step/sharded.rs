//! A network of a step with its shards, and the new values of its running parameters after a batch.

use burn_tensor::{Device, Tensor};
use kernels::device::host;
use kernels::ops::in_f32;
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
use super::tape::Gathered;
use crate::optim::state::UnitShard;

/// A network and this rank's shards of its units.
#[derive(Clone, Copy)]
pub(super) struct ShardedNet<'a> {
    pub(super) net: &'a Net,
    pub(super) shards: &'a [UnitShard],
}

/// New values of a parameter that do not come from a gradient.
pub(super) struct Observation {
    /// Name of the network.
    pub(super) of: &'static str,
    /// Number of the unit.
    pub(super) unit: usize,
    /// Name of the parameter.
    pub(super) param: String,
    /// New values.
    pub(super) values: Tensor<1>,
    /// Values from which these were computed: rounded, where weights are sent in fewer bits than they have.
    pub(super) before: Tensor<1>,
    /// First element of the parameter that they are, where they are a part of it.
    pub(super) first: usize,
}

impl Observation {
    /// Writes the values into this rank's shards, which are on `device`.
    pub(super) fn write(
        self,
        nets: &Nets,
        networks: &mut [NetworkState],
        precision: Precision,
        device: &Device,
    ) {
        let Self { of, unit, param, values, before, first: first_value } = self;
        let Some(number) = nets.position(of) else { return };
        let shard = &mut networks[number].shards[unit];
        let found = shard.segments().find(|segment| segment.slot.spec.name == param);
        let Some((start, end, first)) = found.map(|s| {
            let first = s.slot.spec.first_element() + shard.start + s.start - s.slot.offset;
            (s.start, s.end, first - first_value)
        }) else {
            return;
        };
        let Precision { gather, head_gather, .. } = precision;
        let wire = if nets.list[number].is_backbone(unit) { gather } else { head_gather };
        let here =
            |tensor: &Tensor<1>| in_f32(tensor.clone()).slice(first..first + end - start).to_device(device);
        // Master weights keep the digits that were not sent.
        let values = match wire {
            Wire::F32 => here(&values),
            _ => shard.weights.clone().slice(start..end) + (here(&values) - here(&before)),
        };
        host::assign(&mut shard.weights, start, &values);
    }
}

impl<'a> ShardedNet<'a> {
    /// Name of unit `number`.
    pub(super) fn unit_name(&self, number: usize) -> &'a str {
        &self.shards[number].layout.name
    }

    /// The part of unit `number` that this rank computes, with the layout of its buffer.
    pub(super) fn computed(&self, number: usize) -> (&'a dyn Unit, &'a UnitLayout) {
        match self.net.part(number) {
            Some(part) => (part.unit.as_ref(), &part.layout),
            None => (self.net.unit(number), &self.shards[number].layout),
        }
    }

    /// The extent of the part of unit `number` that this rank computes.
    pub(super) fn extent(&self, number: usize) -> Extent {
        if self.net.part(number).is_some() { Extent::Columns } else { Extent::Whole }
    }

    /// Unit `number` with its gathered weights.
    pub(super) fn gathered<'f>(&self, number: usize, flat: &'f Tensor<1>) -> Gathered<'a, 'f> {
        Gathered { unit: self.net.unit(number), layout: &self.shards[number].layout, flat }
    }

    /// Returns the new values of the running parameters of unit `number`, given the totals that its stages were given.
    pub(super) fn observed(
        &self,
        number: usize,
        unit: Gathered<'_, '_>,
        totals: &[Vec<Tensor<1>>],
        passes: Passes<'_>,
    ) -> Vec<Observation> {
        let leaves = Leaves::new(unit.layout, unit.flat, false);
        let draws = Draws::default();
        let Passes { sets, types, .. } = passes;
        let cx = Context { leaves: &leaves, draws: &draws, totals: &[], sets, types };
        let observed = unit.unit.observe(totals, &cx).into_iter();
        let before = |param: &str| {
            // A unit observes parameters that it lists.
            let at = unit.layout.position(param).expect("a parameter of the unit");
            let part = unit.flat.clone().slice([unit.layout.params[at].range()]);
            // A slice would keep the memory of the whole gathered unit until the end of the step.
            in_f32(part).mul_scalar(1.0)
        };
        let observation = |(param, values): (String, _)| Observation {
            of: self.net.name,
            unit: number,
            before: before(&param),
            first: 0,
            param,
            values,
        };
        observed.map(observation).collect()
    }
}
