//! Division of units that have many parameters, so that less of a network is gathered at once.
//!
//! A unit with more parameters than `run.max_unit_parameters` is replaced by its parts
//! ([`Unit::parts`](crate::unit::Unit::parts)). They are units of the network's list, which
//! gathers, sums and tapes treat like any other, but share the index of the undivided unit, and
//! with it its random numbers, its learning rate and its name in exports.
//! [`Tokens`](crate::tokens::Tokens) carry what later parts need: the skip connection, and
//! columns of a product that is not complete. A parameter may be divided by rows, which have the
//! initial values of the whole and share its clip norm.

use crate::unit::Unit;

/// A unit of a divided network.
pub struct DividedUnit {
    /// An undivided unit, or a part of one.
    pub unit: Box<dyn Unit>,
    /// Index of the undivided unit in its network.
    pub index: usize,
}

/// Divides each unit with more than `max_numel` elements of parameters into smaller parts, where
/// that is possible. With `None` no unit is divided.
pub fn divided(units: Vec<Box<dyn Unit>>, max_numel: Option<usize>) -> Vec<DividedUnit> {
    let max_numel = max_numel.unwrap_or(usize::MAX);
    let mut divided_units = Vec::new();
    for (index, unit) in units.into_iter().enumerate() {
        let parts = if numel(unit.as_ref()) > max_numel { unit.parts(max_numel) } else { None };
        for unit in parts.unwrap_or_else(|| vec![unit]) {
            divided_units.push(DividedUnit { unit, index });
        }
    }
    divided_units
}

/// Returns the number of elements of the parameters of `unit`.
pub fn numel(unit: &dyn Unit) -> usize {
    unit.params().iter().map(|param| param.numel()).sum()
}
