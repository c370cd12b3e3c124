//! Shards of a network on one rank: master weights and the optimizer's moments, unit by unit.

use burn_tensor::{Device, Tensor, TensorData};
use kernels::device::host::to_host;
use networks::NetworkError;
use networks::init::fill;
use networks::layout::{ParamSlot, UnitLayout};
use networks::tensor::{NamedTensor, by_name, values_of};
use networks::unit::Unit;
use ranks::topology::Topology;

use super::weights::ShardWeights;

/// The shards of one unit, `[padded / S]` each.
#[derive(Debug, Clone)]
pub struct UnitShard {
    /// Layout of the parameters in the unit's buffer.
    pub layout: UnitLayout,
    /// First element of this rank's shard in the unit's buffer.
    pub start: usize,
    /// Master weights.
    pub weights: ShardWeights,
    /// Whether an update that can rounds the weights to bf16 as well, for products.
    pub is_rounded: bool,
    /// Moments of the optimizer; empty in networks other than the trained one.
    pub moments: Vec<Buffer>,
    /// Updates that the moments of each parameter have seen. Frozen steps do not count, as in
    /// PyTorch, where a parameter without gradient has no step.
    pub n_updates: Vec<u64>,
}

/// A shard of the optimizer's moments.
#[derive(Debug, Clone)]
pub struct Buffer {
    /// Name in checkpoints.
    pub name: &'static str,
    /// Elements of the shard.
    pub values: Tensor<1>,
}

/// A parameter's elements in a shard.
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
    /// The parameter.
    pub slot: &'a ParamSlot,
    /// Number of the parameter within the unit.
    pub param: usize,
    /// First element within the shard.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
}

impl UnitShard {
    /// Creates a shard of `unit`, as [`UnitShard::laid_out`] does.
    pub fn init(
        unit: &dyn Unit,
        seed: u64,
        topology: Topology,
        moments: &[&'static str],
        device: &Device,
    ) -> Self {
        Self::laid_out(unit.layout(topology.group_size), seed, topology, moments, device)
    }

    /// Creates a shard of a unit with `layout`: every parameter from (`seed`, its full name,
    /// element), `moments` zero. Networks that share a unit start with the same weights.
    pub fn laid_out(
        layout: UnitLayout,
        seed: u64,
        topology: Topology,
        moments: &[&'static str],
        device: &Device,
    ) -> Self {
        let range = layout.shard(topology.shard(), topology.group_size);
        let mut values = vec![0.0; range.len()];
        for segment in segments(&layout, range.start, range.len()) {
            let first = segment.slot.spec.first_element() + range.start + segment.start - segment.slot.offset;
            let name = layout.full_name(segment.slot);
            fill(segment.slot.spec.init, seed, &name, first, &mut values[segment.start..segment.end]);
        }
        let weights = ShardWeights::from(Tensor::from_data(TensorData::new(values, [range.len()]), device));
        Self {
            start: range.start,
            moments: moments
                .iter()
                .map(|name| Buffer { name, values: Tensor::zeros([range.len()], device) })
                .collect(),
            weights,
            is_rounded: false,
            n_updates: vec![0; layout.params.len()],
            layout,
        }
    }

    /// Replaces the weights by the values of `tensors`, which must hold every parameter that is not
    /// optional.
    ///
    /// # Errors
    /// [`NetworkError::Weights`].
    pub fn start_from(&mut self, tensors: &[NamedTensor]) -> Result<(), NetworkError> {
        let tensors = by_name(tensors);
        let mut values = to_host(self.weights.values().clone());
        for segment in self.segments() {
            let first = segment.slot.spec.first_element() + self.start + segment.start - segment.slot.offset;
            let name = self.layout.full_name(segment.slot);
            let is_held = tensors.contains_key(name.as_str());
            let name = match (is_held, self.layout.substitute(segment.slot)) {
                (false, Some(substitute)) => substitute,
                (false, None) if segment.slot.spec.is_optional => continue,
                _ => name,
            };
            let found = values_of(&tensors, &name, &segment.slot.spec)?;
            values[segment.start..segment.end]
                .copy_from_slice(&found[first..first + segment.end - segment.start]);
        }
        let len = values.len();
        self.weights =
            Tensor::from_data(TensorData::new(values, [len]), &self.weights.values().device()).into();
        Ok(())
    }

    /// The parameters that have elements in this shard.
    pub fn segments(&self) -> impl Iterator<Item = Segment<'_>> {
        segments(&self.layout, self.start, self.len())
    }

    /// Number of elements in the shard.
    pub fn len(&self) -> usize {
        self.weights.values().dims()[0]
    }

    /// Returns whether the shard has no element, which no shard of a unit with parameters is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn segments(layout: &UnitLayout, start: usize, len: usize) -> impl Iterator<Item = Segment<'_>> {
    layout.params.iter().enumerate().filter_map(move |(param, slot)| {
        let range = slot.range();
        let from = range.start.max(start);
        let to = range.end.min(start + len);
        (from < to).then(|| Segment { slot, param, start: from - start, end: to - start })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use networks::Network;
    use networks::init::fill;
    use networks::patches::Normalization;

    /// Shards of 1, 2 and 4 ranks hold the same weights.
    #[test]
    fn every_shard_starts_with_its_part_of_the_weights() {
        let model = networks::backbone::ModelConfig::examples().remove(1);
        let device = Device::flex();
        let mut tensors = Network::random(&model, Normalization::default(), 7, 1, &device).tensors();
        for (i, tensor) in tensors.iter_mut().enumerate() {
            fill(networks::params::Init::Normal(1.0), i as u64, "other", 0, &mut tensor.values);
        }
        for unit in model.units(networks::backbone::Readout::All) {
            let of_group = |group_size: usize| -> Vec<f32> {
                let mut whole: Vec<f32> = (0..group_size)
                    .flat_map(|rank: usize| {
                        let topology =
                            Topology { rank, world_size: group_size, group_size, ..Topology::SINGLE_RANK };
                        let mut shard = UnitShard::init(unit.as_ref(), 0, topology, &[], &device);
                        shard.start_from(&tensors).unwrap();
                        to_host(shard.weights.values().clone())
                    })
                    .collect();
                whole.truncate(unit.layout(1).numel);
                whole
            };
            let whole = of_group(1);
            assert_eq!(of_group(2), whole);
            assert_eq!(of_group(4), whole);
        }
    }
}
