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
    /// Whether the weights are also rounded to bf16, for products, by an update that supports it.
    pub is_rounded: bool,
    /// Moments of the optimizer; empty where no parameter is trained: in other networks, and in
    /// weights that have adapters or stay fixed beside them.
    pub moments: Vec<Buffer>,
    /// Number of updates of the moments of each parameter. Frozen steps do not count, as in
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
    /// Index of the parameter within the unit.
    pub param: usize,
    /// First element within the shard.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
    /// First element within the whole parameter.
    pub first: usize,
}

impl UnitShard {
    /// Creates a shard of `unit`, as [`UnitShard::with_layout`] does.
    pub fn init(
        unit: &dyn Unit,
        seed: u64,
        topology: Topology,
        moments: &[&'static str],
        device: &Device,
    ) -> Self {
        Self::with_layout(unit.layout(topology.group_size), seed, topology, moments, device)
    }

    /// Creates a shard of a unit with `layout`. The initial value of an element is a function of
    /// `seed`, the full name of its parameter and its position; `moments` are zero. Networks that
    /// share a unit start with the same weights.
    pub fn with_layout(
        layout: UnitLayout,
        seed: u64,
        topology: Topology,
        moments: &[&'static str],
        device: &Device,
    ) -> Self {
        let range = layout.shard(topology.shard(), topology.group_size);
        let mut values = vec![0.0; range.len()];
        for segment in segments(&layout, range.start, range.len()) {
            let name = layout.full_name(segment.slot);
            let values = &mut values[segment.start..segment.end];
            fill(segment.slot.spec.init, seed, &name, segment.first, values);
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

    /// Replaces the weights by the values of `tensors`, which must contain every parameter that is
    /// not optional.
    ///
    /// # Errors
    /// [`NetworkError::Weights`].
    pub fn start_from(&mut self, tensors: &[NamedTensor]) -> Result<(), NetworkError> {
        let tensors = by_name(tensors);
        let mut values = to_host(self.weights.values().clone());
        for segment in self.segments() {
            let mut name = self.layout.full_name(segment.slot);
            if !tensors.contains_key(name.as_str()) {
                if let Some(substitute) = self.layout.substitute(segment.slot) {
                    name = substitute;
                } else if segment.slot.spec.is_optional {
                    continue;
                }
            }
            let source = values_of(&tensors, &name, &segment.slot.spec)?;
            let len = segment.end - segment.start;
            values[segment.start..segment.end].copy_from_slice(&source[segment.first..segment.first + len]);
        }
        let len = values.len();
        self.weights =
            Tensor::from_data(TensorData::new(values, [len]), &self.weights.values().device()).into();
        Ok(())
    }

    /// Returns the parts of parameters that are in this shard.
    pub fn segments(&self) -> impl Iterator<Item = Segment<'_>> {
        segments(&self.layout, self.start, self.len())
    }

    /// Number of elements in the shard.
    pub fn len(&self) -> usize {
        self.weights.values().dims()[0]
    }

    /// Returns whether the shard has no element; a shard of a unit with parameters always has one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn segments(layout: &UnitLayout, start: usize, len: usize) -> impl Iterator<Item = Segment<'_>> {
    layout.params.iter().enumerate().filter_map(move |(param, slot)| {
        let range = slot.range();
        let first = range.start.max(start);
        let end = range.end.min(start + len);
        (first < end).then(|| Segment {
            slot,
            param,
            start: first - start,
            end: end - start,
            first: slot.spec.first_element() + first - slot.offset,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use networks::Network;
    use networks::init::fill;
    use networks::patches::Normalization;

    /// Returns the weights of `unit` after every rank of a group has copied its shard from
    /// `tensors`.
    fn gathered_weights(unit: &dyn Unit, group_size: usize, tensors: &[NamedTensor]) -> Vec<f32> {
        let mut weights = Vec::new();
        for rank in 0..group_size {
            let topology = Topology { rank, world_size: group_size, group_size, ..Topology::SINGLE_RANK };
            let mut shard = UnitShard::init(unit, 0, topology, &[], &Device::flex());
            shard.start_from(tensors).unwrap();
            weights.extend(to_host(shard.weights.values().clone()));
        }
        weights.truncate(unit.layout(1).numel);
        weights
    }

    /// Shards of 1, 2 and 4 ranks hold the same weights.
    #[test]
    fn initial_weights_do_not_depend_on_the_number_of_shards() {
        let model = networks::backbone::ModelConfig::examples().remove(1);
        let device = Device::flex();
        let mut tensors = Network::random(&model, Normalization::default(), 7, 1, &device).tensors();
        for (i, tensor) in tensors.iter_mut().enumerate() {
            fill(networks::params::Init::Normal(1.0), i as u64, "other", 0, &mut tensor.values);
        }
        for unit in model.units(networks::backbone::Readout::All) {
            let unsharded = gathered_weights(unit.as_ref(), 1, &tensors);
            assert_eq!(gathered_weights(unit.as_ref(), 2, &tensors), unsharded);
            assert_eq!(gathered_weights(unit.as_ref(), 4, &tensors), unsharded);
        }
    }
}
