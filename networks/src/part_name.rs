//! Names of the parts of a divided unit: that of the unit, and a number.

/// Separator between the name of a unit and the number of a part; no undivided unit has it in its
/// name.
const SEPARATOR: char = '/';

/// Returns the name of part `number` of the unit `name`.
pub(crate) fn part_name(name: &str, number: usize) -> String {
    format!("{name}{SEPARATOR}{number}")
}

/// Returns the name of the undivided unit of the unit `name`.
pub fn undivided_name(name: &str) -> &str {
    name.split_once(SEPARATOR).map_or(name, |(undivided, _)| undivided)
}
