//! This rank's shards: master weights, the two Adam moments and the teacher, unit by unit.

use burn_tensor::{Device, Tensor, TensorData};

use crate::comm::topology::Place;
use crate::model::init::fill;
use crate::model::layout::{ParamSlot, UnitLayout};
use crate::model::unit::Unit;

/// The shards of one unit, `[padded / S]` each.
#[derive(Debug, Clone)]
pub struct UnitShard {
    /// Where the parameters sit.
    pub layout: UnitLayout,
    /// First element of this rank's shard in the unit's buffer.
    pub start: usize,
    /// Master weights of the student.
    pub student: Tensor<1>,
    /// The teacher's weights.
    pub teacher: Tensor<1>,
    /// First Adam moment.
    pub exp_avg: Tensor<1>,
    /// Second Adam moment.
    pub exp_avg_sq: Tensor<1>,
    /// Updates that the moments have seen. Frozen steps do not count, as in PyTorch, where a
    /// parameter without gradient has no step.
    pub adam_steps: u64,
}

/// A parameter's part in a shard.
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
    /// The parameter.
    pub slot: &'a ParamSlot,
    /// Its number within the unit.
    pub param: usize,
    /// First element within the shard.
    pub start: usize,
    /// One past the last.
    pub end: usize,
}

impl UnitShard {
    /// A fresh shard: every parameter from (`seed`, its full name, element), moments zero, the
    /// teacher equal to the student.
    pub fn init(unit: &dyn Unit, seed: u64, place: Place, device: &Device) -> Self {
        let layout = UnitLayout::of(unit, place.group_size);
        let range = layout.shard(place.shard(), place.group_size);
        let mut values = vec![0.0; range.len()];
        for segment in segments(&layout, range.start, range.len()) {
            let first = range.start + segment.start - segment.slot.offset;
            let name = layout.full_name(segment.slot);
            fill(segment.slot.spec.init, seed, &name, first, &mut values[segment.start..segment.end]);
        }
        let zeros = || Tensor::zeros([range.len()], device);
        let student = Tensor::from_data(TensorData::new(values, [range.len()]), device);
        Self {
            start: range.start,
            teacher: student.clone(),
            student,
            exp_avg: zeros(),
            exp_avg_sq: zeros(),
            adam_steps: 0,
            layout,
        }
    }

    /// The parameters that have elements in this shard.
    pub fn segments(&self) -> impl Iterator<Item = Segment<'_>> {
        segments(&self.layout, self.start, self.len())
    }

    /// Elements of the shard.
    pub fn len(&self) -> usize {
        self.student.dims()[0]
    }

    /// Whether the shard has no element, which a unit with parameters never gives.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn segments(layout: &UnitLayout, start: usize, len: usize) -> impl Iterator<Item = Segment<'_>> {
    layout.params.iter().enumerate().filter_map(move |(param, slot)| {
        let range = slot.range();
        let (from, to) = (range.start.max(start), range.end.min(start + len));
        (from < to).then(|| Segment { slot, param, start: from - start, end: to - start })
    })
}
