//! Index of the parameters of a checkpoint by name. Its units may be divided differently from those
//! of the networks that read them.

use std::collections::HashMap;
use std::ops::Range;

use super::{ParamEntry, UnitEntry};

/// Positions of the parameters in a list of units.
pub(super) struct ParamIndex {
    /// Positions by network and name of a parameter; several where each part of a divided unit has
    /// some of the rows.
    by_name: HashMap<String, HashMap<String, Vec<Position>>>,
}

/// Position of a parameter.
#[derive(Clone, Copy)]
struct Position {
    /// Index of the unit.
    unit: usize,
    /// Index of the parameter within the unit.
    param: usize,
}

/// A range of a unit's buffer.
#[derive(Debug, PartialEq)]
pub(super) struct UnitRange<'m> {
    pub(super) unit: &'m UnitEntry,
    /// Elements of the buffer.
    pub(super) source: Range<usize>,
    /// Number of updates of the moments.
    pub(super) n_updates: u64,
}

impl ParamIndex {
    /// Creates the index of `units`, without units whose parameters do not have as many elements as
    /// the unit.
    pub(super) fn new(units: &[UnitEntry]) -> Self {
        let mut by_name: HashMap<String, HashMap<String, Vec<Position>>> = HashMap::new();
        for (index, unit) in units.iter().enumerate() {
            let numels = unit.params.iter().map(|param| numel(param).unwrap_or(usize::MAX));
            if numels.fold(0, usize::saturating_add) != unit.numel {
                continue;
            }
            let params = by_name.entry(unit.network.clone()).or_default();
            for (param, entry) in unit.params.iter().enumerate() {
                params.entry(entry.name.clone()).or_default().push(Position { unit: index, param });
            }
        }
        Self { by_name }
    }

    /// Returns the ranges of `units`, from which the index was created, that hold the elements
    /// `range` of the parameter `name` of `shape`, in order; `None` if any are missing.
    pub(super) fn find<'m>(
        &self,
        units: &'m [UnitEntry],
        network: &str,
        name: &str,
        shape: &[usize],
        range: Range<usize>,
    ) -> Option<Vec<UnitRange<'m>>> {
        let mut next = range.start;
        let mut n_stored = 0_usize;
        let mut sources = Vec::new();
        for position in self.by_name.get(network)?.get(name)? {
            let unit = &units[position.unit];
            let param = &unit.params[position.param];
            let numel = numel(param)?;
            n_stored = n_stored.saturating_add(numel);
            let end = param.first.checked_add(numel)?;
            let has_same_rows = param.shape.get(1..) == shape.get(1..) && param.shape.len() == shape.len();
            if !has_same_rows || param.offset.checked_add(numel)? > unit.numel {
                return None;
            }
            if next < range.end && (param.first..end).contains(&next) {
                let source_end = end.min(range.end);
                let source = param.offset + (next - param.first)..param.offset + (source_end - param.first);
                sources.push(UnitRange { unit, source, n_updates: param.n_updates });
                next = source_end;
            }
        }
        let is_complete = next == range.end && n_stored == shape.iter().product::<usize>();
        is_complete.then_some(sources)
    }
}

/// Returns the number of elements of a parameter; `None` if it overflows.
fn numel(param: &ParamEntry) -> Option<usize> {
    param.shape.iter().try_fold(1_usize, |product, side| product.checked_mul(*side))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(name: &str, params: &[(&str, [usize; 2], usize)]) -> UnitEntry {
        let mut offset = 0;
        let mut entries = Vec::new();
        for (name, shape, first) in params {
            let name = name.to_string();
            entries.push(ParamEntry { name, shape: shape.to_vec(), offset, first: *first, n_updates: 3 });
            offset += shape[0] * shape[1];
        }
        UnitEntry { network: "n".into(), name: name.into(), numel: offset, padded: 64, params: entries }
    }

    /// Returns the name of each unit that holds some of the elements `range` of the parameter `w`,
    /// and the elements of its buffer.
    fn find(
        units: &[UnitEntry],
        shape: [usize; 2],
        range: Range<usize>,
    ) -> Option<Vec<(&str, Range<usize>)>> {
        let sources = ParamIndex::new(units).find(units, "n", "w", &shape, range)?;
        Some(sources.into_iter().map(|source| (source.unit.name.as_str(), source.source)).collect())
    }

    /// Rows in two units and ranges across their boundary are found; rows that are missing or of
    /// another width are not.
    #[test]
    fn rows_are_found_in_any_unit() {
        let units = [unit("u/0", &[("b", [1, 2], 0), ("w", [2, 3], 0)]), unit("u/1", &[("w", [3, 3], 6)])];
        assert_eq!(find(&units, [5, 3], 4..9), Some(vec![("u/0", 6..8), ("u/1", 0..3)]));
        assert_eq!(find(&units, [5, 3], 0..6), Some(vec![("u/0", 2..8)]));
        assert_eq!(find(&units, [5, 3], 7..15), Some(vec![("u/1", 1..9)]));
        assert_eq!(find(&units, [6, 3], 4..9), None);
        assert_eq!(find(&units, [5, 2], 4..9), None);
        let incomplete = [unit("u/0", &[("w", [2, 3], 0)]), unit("u/1", &[("w", [3, 3], 9)])];
        assert_eq!(find(&incomplete, [5, 3], 4..9), None);
    }
}
