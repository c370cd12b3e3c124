//! Names of the parts of a divided unit: the name of the unit, and an index. The buffer of the
//! weights to which the adapters of a unit or a part are added has a name of this form, too.

/// Separator between the name of a unit and the index of a part; no undivided unit has it in its
/// name.
const SEPARATOR: char = '/';

/// Returns the name of part `index` of the unit `name`.
pub(crate) fn part_name(name: &str, index: usize) -> String {
    format!("{name}{SEPARATOR}{index}")
}

/// Returns the name of the buffer of the weights to which the adapters of the unit `name` are
/// added.
pub(crate) fn base_name(name: &str) -> String {
    format!("{name}{SEPARATOR}base")
}

/// Returns the name of the undivided unit of the unit `name`.
pub fn undivided_name(name: &str) -> &str {
    name.split_once(SEPARATOR).map_or(name, |(undivided, _)| undivided)
}
