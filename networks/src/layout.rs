//! Positions of parameters in a unit's flat buffer.
//!
//! Parameters are ordered by name. The end of the buffer is padded so that the buffer divides
//! evenly over the ranks that share it, and every shard is a multiple of [`ALIGNMENT`] elements.
//! Where ranks compute parts of a unit's columns, each part is a range of the buffer.

use std::collections::HashMap;
use std::ops::Range;

use crate::error::NetworkError;
use crate::params::ParamSpec;
use crate::part_name::undivided_name;
use crate::tensor::{NamedTensor, values_of};

/// Divisor of the number of elements of every shard: 256 bytes of f32.
pub const ALIGNMENT: usize = 64;

/// The flat buffer of one unit.
#[derive(Debug, Clone, PartialEq)]
pub struct UnitLayout {
    /// Name of the unit.
    pub name: String,
    /// Name of the unit in exports, which prefixes its parameters: the name of the undivided unit.
    pub export_name: String,
    /// Parameters of the unit, by offset.
    pub params: Vec<ParamSlot>,
    /// Number of elements of all parameters.
    pub numel: usize,
    /// Number of elements of the buffer.
    pub padded: usize,
}

/// A parameter and its position in the buffer.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamSlot {
    /// Specification of the parameter.
    pub spec: ParamSpec,
    /// Index of the first element.
    pub offset: usize,
}

impl ParamSlot {
    /// Returns the elements of the parameter in the flat buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.spec.numel()
    }
}

impl UnitLayout {
    /// Creates the layout of the unit `name` that has parameters `specs`, over a shard group of
    /// `group_size` ranks.
    pub fn new(name: &str, mut specs: Vec<ParamSpec>, group_size: usize) -> Self {
        specs.sort_by(|a, b| a.name.cmp(&b.name));
        Self::in_order(name, specs, group_size)
    }

    /// Creates the layout of the unit `name` in which all parameters of one of `n_parts` equal
    /// parts of the columns of its output are together, before those of the next part. Each of
    /// `specs` has a row for each column.
    pub fn by_columns(name: &str, mut specs: Vec<ParamSpec>, n_parts: usize, group_size: usize) -> Self {
        specs.sort_by(|a, b| a.name.cmp(&b.name));
        if specs.len() < 2 {
            // The rows of a single parameter are already in the order of the parts.
            return Self::in_order(name, specs, group_size);
        }
        let mut part_specs = Vec::with_capacity(n_parts * specs.len());
        for part in 0..n_parts {
            for spec in &specs {
                let n_rows = spec.shape[0] / n_parts;
                part_specs.push(spec.clone().rows(part * n_rows..(part + 1) * n_rows));
            }
        }
        Self::in_order(name, part_specs, group_size)
    }

    /// Creates the layout of the unit `name` with its parameters in the order of `specs`.
    fn in_order(name: &str, specs: Vec<ParamSpec>, group_size: usize) -> Self {
        let mut params = Vec::with_capacity(specs.len());
        let mut offset = 0;
        for spec in specs {
            let slot = ParamSlot { spec, offset };
            offset = slot.range().end;
            params.push(slot);
        }
        let padded = offset.next_multiple_of(ALIGNMENT * group_size.max(1));
        let export_name = undivided_name(name).to_string();
        Self { name: name.to_string(), export_name, params, numel: offset, padded }
    }

    /// Returns the index of the parameter `name`, or of its first rows.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.params.iter().position(|slot| slot.spec.name == name)
    }

    /// Returns the elements that rank `rank` of a group of `group_size` ranks holds.
    pub fn shard(&self, rank: usize, group_size: usize) -> Range<usize> {
        let len = self.padded / group_size;
        rank * len..(rank + 1) * len
    }

    /// Returns the name of a parameter in exports: the unit's name and its own.
    pub fn full_name(&self, slot: &ParamSlot) -> String {
        format!("{}{}", self.prefix(), slot.spec.name)
    }

    /// Returns the name, within its network, of the parameter whose values `slot` takes if a file
    /// lacks its own.
    pub fn substitute(&self, slot: &ParamSlot) -> Option<String> {
        slot.spec.substitute.as_ref().map(|name| format!("{}{name}", self.prefix()))
    }

    /// Returns the parameters with their values in `flat`, the whole buffer; a parameter of which
    /// the unit has only some rows is returned with these rows.
    pub fn tensors(&self, flat: &[f32]) -> Vec<NamedTensor> {
        self.params
            .iter()
            .map(|slot| NamedTensor {
                name: self.full_name(slot),
                shape: slot.spec.shape.clone(),
                values: flat[slot.range()].to_vec(),
            })
            .collect()
    }

    /// Returns the whole buffer with the values of `tensors`, by name: the inverse of
    /// [`UnitLayout::tensors`] for a unit that has all rows of its parameters.
    ///
    /// # Errors
    /// [`NetworkError::Weights`] for a parameter that is missing or has another shape.
    pub(crate) fn flat_values(
        &self,
        tensors: &HashMap<&str, &NamedTensor>,
    ) -> Result<Vec<f32>, NetworkError> {
        let mut values = vec![0.0; self.padded];
        for slot in &self.params {
            let param_values = values_of(tensors, &self.full_name(slot), &slot.spec)?;
            values[slot.range()].copy_from_slice(param_values);
        }
        Ok(values)
    }

    /// Returns the prefix of the parameter names; empty for a unit whose name begins with a dot.
    fn prefix(&self) -> String {
        if self.export_name.starts_with('.') { String::new() } else { format!("{}.", self.export_name) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::Init;
    use proptest::prelude::*;

    fn spec(name: &str, shape: impl Into<Vec<usize>>) -> ParamSpec {
        ParamSpec::weight(name, shape, Init::Constant(0.0))
    }

    /// A part has the same layout as a unit that consists of the rows of the part, with its
    /// parameters in the order of their names.
    #[test]
    fn parts_of_columns_are_ranges() {
        let specs = vec![spec("v", [128, 8]), spec("g", [128, 1])];
        let layout = UnitLayout::by_columns("unit", specs.clone(), 2, 2);
        assert_eq!(layout.padded, 128 * 9);
        let part = UnitLayout::new("unit", vec![spec("v", [64, 8]), spec("g", [64, 1])], 1);
        for (index, slots) in layout.params.chunks(2).enumerate() {
            for (slot, part_slot) in slots.iter().zip(&part.params) {
                assert_eq!(slot.offset, index * part.padded + part_slot.offset);
                assert_eq!(slot.spec.name, part_slot.spec.name);
                assert_eq!(slot.spec.shape, part_slot.spec.shape);
                let rows = slot.spec.first_element() / slot.spec.shape[1];
                assert_eq!((rows, slot.spec.whole_shape()[0]), (index * 64, 128));
            }
        }
        let single = UnitLayout::by_columns("unit", specs[..1].to_vec(), 2, 2);
        assert_eq!(single, UnitLayout::new("unit", specs[..1].to_vec(), 2));
    }

    proptest! {
        #[test]
        fn shards_cover_the_buffer_and_parameters_do_not_overlap(
            sizes in proptest::collection::vec(1usize..300, 1..12),
            world in 1usize..9,
        ) {
            let specs = sizes.iter().enumerate().map(|(i, n)| spec(&format!("p{i}"), [*n]));
            let layout = UnitLayout::new("unit", specs.collect(), world);
            prop_assert_eq!(layout.numel, sizes.iter().sum::<usize>());
            let mut end = 0;
            for slot in &layout.params {
                prop_assert_eq!(slot.offset, end);
                end = slot.range().end;
                prop_assert_eq!(layout.position(&slot.spec.name).map(|i| &layout.params[i]), Some(slot));
            }
            let mut covered = 0;
            for rank in 0..world {
                let shard = layout.shard(rank, world);
                prop_assert_eq!(shard.start, covered);
                prop_assert_eq!(shard.len() % ALIGNMENT, 0);
                covered = shard.end;
            }
            prop_assert_eq!(covered, layout.padded);
            prop_assert!(layout.padded - layout.numel < ALIGNMENT * world);
        }
    }
}
