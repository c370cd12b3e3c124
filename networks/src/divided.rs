//! Division of units that have many parameters, so that less of a network is gathered at once.

use crate::unit::Unit;

/// A unit of a divided network.
pub struct DividedUnit {
    /// An undivided unit, or a part of one.
    pub unit: Box<dyn Unit>,
    /// Number of the undivided unit in its network.
    pub number: usize,
}

/// Divides each unit with more than `max_numel` elements of parameters into smaller parts, where
/// that is possible. With `None` no unit is divided.
pub fn divided(units: Vec<Box<dyn Unit>>, max_numel: Option<usize>) -> Vec<DividedUnit> {
    let max_numel = max_numel.unwrap_or(usize::MAX);
    let mut divided_units = Vec::new();
    for (number, unit) in units.into_iter().enumerate() {
        let parts = if numel(unit.as_ref()) > max_numel { unit.parts(max_numel) } else { None };
        for unit in parts.unwrap_or_else(|| vec![unit]) {
            divided_units.push(DividedUnit { unit, number });
        }
    }
    divided_units
}

/// Returns the number of elements of the parameters of `unit`.
pub fn numel(unit: &dyn Unit) -> usize {
    unit.params().iter().map(|param| param.numel()).sum()
}
