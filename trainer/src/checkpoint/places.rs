//! Places of parameters in the files of a checkpoint, whose units may be divided otherwise than
//! those of the networks that read them.

use std::collections::HashMap;
use std::ops::Range;

use super::{ParamEntry, UnitEntry};

/// Units and parameters of a manifest by the name of a parameter.
pub(super) struct Places {
    /// By network and name, the numbers of a unit and of a parameter in it; several where parts of
    /// a divided unit have some rows each.
    by_name: HashMap<String, HashMap<String, Vec<[usize; 2]>>>,
}

/// A range of a unit's buffer.
#[derive(Debug, PartialEq)]
pub(super) struct Place<'m> {
    pub(super) unit: &'m UnitEntry,
    /// Elements of the buffer.
    pub(super) source: Range<usize>,
    /// Number of updates that the moments have seen.
    pub(super) n_updates: u64,
}

impl Places {
    /// Lists the parameters of `units`; those of a unit whose parameters are not all of it are left
    /// out.
    pub(super) fn of(units: &[UnitEntry]) -> Self {
        let mut by_name: HashMap<String, HashMap<String, Vec<[usize; 2]>>> = HashMap::new();
        for (number, unit) in units.iter().enumerate() {
            let sizes = unit.params.iter().map(|param| size(param).unwrap_or(usize::MAX));
            if sizes.fold(0, usize::saturating_add) != unit.numel {
                continue;
            }
            let of_network = by_name.entry(unit.network.clone()).or_default();
            for (param, entry) in unit.params.iter().enumerate() {
                of_network.entry(entry.name.clone()).or_default().push([number, param]);
            }
        }
        Self { by_name }
    }

    /// Returns where the elements `wanted` of the parameter `name` of `shape` are among `units`,
    /// from which this was made, in their order; `None` if they are not all there.
    pub(super) fn find<'m>(
        &self,
        units: &'m [UnitEntry],
        [network, name]: [&str; 2],
        shape: &[usize],
        wanted: Range<usize>,
    ) -> Option<Vec<Place<'m>>> {
        let mut at = wanted.start;
        let mut found = Vec::new();
        let entries = self.by_name.get(network)?.get(name)?;
        for [unit, param] in entries {
            let (unit, param) = (&units[*unit], &units[*unit].params[*param]);
            let end = param.first.checked_add(size(param)?)?;
            let is_part_of = param.shape.get(1..) == shape.get(1..) && param.shape.len() == shape.len();
            if !is_part_of || param.offset.checked_add(size(param)?)? > unit.numel {
                return None;
            }
            if at < wanted.end && (param.first..end).contains(&at) {
                let until = end.min(wanted.end);
                let source = param.offset + (at - param.first)..param.offset + (until - param.first);
                found.push(Place { unit, source, n_updates: param.n_updates });
                at = until;
            }
        }
        let sizes = entries.iter().filter_map(|[unit, param]| size(&units[*unit].params[*param]));
        let n_stored = sizes.fold(0, usize::saturating_add);
        (at == wanted.end && n_stored == shape.iter().product::<usize>()).then_some(found)
    }
}

/// Returns the number of elements of an entry.
fn size(param: &ParamEntry) -> Option<usize> {
    param.shape.iter().try_fold(1_usize, |product, side| product.checked_mul(*side))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(name: &str, params: &[(&str, [usize; 2], usize)]) -> UnitEntry {
        let mut offset = 0;
        let params: Vec<ParamEntry> = params
            .iter()
            .map(|(name, shape, first)| {
                offset += shape[0] * shape[1];
                let offset = offset - shape[0] * shape[1];
                let name = name.to_string();
                let shape = shape.to_vec();
                ParamEntry { name, shape, offset, first: *first, n_updates: 3 }
            })
            .collect();
        UnitEntry { network: "n".into(), name: name.into(), numel: offset, padded: 64, params }
    }

    /// Rows in two units, and what is read over their border; rows that are missing or of another
    /// width are not found.
    #[test]
    fn rows_are_found_in_any_unit() {
        let units = [unit("u/0", &[("b", [1, 2], 0), ("w", [2, 3], 0)]), unit("u/1", &[("w", [3, 3], 6)])];
        let places = Places::of(&units);
        let find = |shape: [usize; 2], wanted| {
            let found = places.find(&units, ["n", "w"], &shape, wanted)?;
            Some(found.into_iter().map(|place| (place.unit.name.as_str(), place.source)).collect::<Vec<_>>())
        };
        assert_eq!(find([5, 3], 4..9), Some(vec![("u/0", 6..8), ("u/1", 0..3)]));
        assert_eq!(find([5, 3], 0..6), Some(vec![("u/0", 2..8)]));
        assert_eq!(find([5, 3], 7..15), Some(vec![("u/1", 1..9)]));
        assert_eq!((find([6, 3], 4..9), find([5, 2], 4..9)), (None, None));
        let holes = [unit("u/0", &[("w", [2, 3], 0)]), unit("u/1", &[("w", [3, 3], 9)])];
        assert_eq!(Places::of(&holes).find(&holes, ["n", "w"], &[5, 3], 4..9), None);
    }
}
