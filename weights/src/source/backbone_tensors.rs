//! The backbone among the tensors of a file, under any prefix of their names.
//!
//! Every tensor must belong to the backbone or to a known head: a network with an unknown part
//! computes something else.

use std::collections::BTreeSet;

use networks::ModelConfig;
use networks::NamedTensor;

use super::Source;
use crate::file::{Array, Arrays};

/// Prefixes of parameters outside of the backbone: classifiers, projection heads, and tensors that
/// only training uses.
const HEADS: [&str; 15] = [
    "head",
    "heads",
    "fc.",
    "classifier",
    "pooler",
    "mask_token",
    "embeddings.mask_token",
    "projection_head",
    "projector",
    "prototypes",
    "dino_head",
    "ibot_head",
    "last_layer",
    "queue",
    "dist_token_head",
];

/// Tensors of a backbone that have not been removed yet.
pub(crate) struct BackboneTensors {
    arrays: Arrays,
    /// Name of the first layer's weight, by which the backbone was found.
    pub(crate) anchor: &'static str,
    /// Prefix of the names of its tensors in the file.
    prefix: String,
    /// Names of the other networks in the file.
    others: String,
}

impl BackboneTensors {
    /// Finds the backbone in `source` whose first layer's weight is called `anchor`, under any
    /// prefix: the one that `network` names, or the teacher if there are a teacher and a student.
    /// `None` if no tensor has the name.
    ///
    /// # Errors
    /// A message, if there are several such networks, or none that is called `network`.
    pub(crate) fn find(
        source: &Source,
        anchor: &'static str,
        network: Option<&str>,
    ) -> Result<Option<Self>, String> {
        let prefixes: BTreeSet<&str> = source
            .arrays
            .keys()
            .filter_map(|name| name.strip_suffix(anchor))
            .filter(|prefix| prefix.is_empty() || prefix.ends_with('.'))
            .filter(|prefix| !prefix.split('.').any(is_inner))
            .collect();
        let prefix = choose_prefix(&prefixes, network, |a, b| have_equal_tensors(&source.arrays, a, b))?;
        let Some(prefix) = prefix else { return Ok(None) };
        let others = format_names(prefixes.iter().copied().filter(|other| !other.starts_with(prefix)));
        let mut arrays = Arrays::new();
        for (name, array) in &source.arrays {
            if let Some(name) = name.strip_prefix(prefix) {
                let name = without_chunk(name);
                if arrays.insert(name.clone(), array.clone()).is_some() {
                    return Err(format!("it holds two tensors for {name}, inside and outside a chunk"));
                }
            }
        }
        Ok(Some(Self { arrays, anchor, prefix: prefix.to_string(), others }))
    }

    /// Returns a sentence about the network that is read, if the file holds others.
    pub(crate) fn selection_note(&self) -> Option<String> {
        if self.others.is_empty() {
            return None;
        }
        let selected = format_names([self.prefix.as_str()]);
        Some(format!("it also holds {}; reading {selected} (choose another with --network)", self.others))
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Array> {
        self.arrays.get(name)
    }

    pub(crate) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.get(name).map(|array| array.shape.as_slice())
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.arrays.contains_key(name)
    }

    /// Returns the names of all tensors.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.arrays.keys()
    }

    pub(crate) fn remove(&mut self, name: &str) -> Option<Array> {
        self.arrays.remove(name)
    }

    pub(crate) fn insert(&mut self, name: &str, array: Array) {
        self.arrays.insert(name.to_string(), array);
    }

    /// Returns the parameters of `model`, each concatenated from the tensors whose names
    /// `library_names` returns. All other tensors must belong to heads.
    pub(crate) fn into_parameters(
        mut self,
        model: &ModelConfig,
        library_names: impl Fn(&str) -> Vec<String>,
    ) -> Result<Vec<NamedTensor>, String> {
        let mut tensors = Vec::new();
        for (name, shape) in model.params() {
            let mut values = Vec::new();
            let mut joined = Vec::new();
            for library_name in library_names(&name) {
                let array = self.remove(&library_name).ok_or_else(|| format!("{library_name} is missing"))?;
                let dims = without_ones(&array.shape);
                joined = match (joined.split_first(), dims.split_first()) {
                    (Some((rows, rest)), Some((more_rows, other_rest))) if rest == other_rest => {
                        [&[rows + more_rows], rest].concat()
                    }
                    _ => dims,
                };
                values.extend(array.values);
            }
            if joined != without_ones(&shape) || values.len() != shape.iter().product::<usize>() {
                return Err(format!("{name} has {} elements {joined:?}, not {shape:?}", values.len()));
            }
            tensors.push(NamedTensor { name, shape, values });
        }
        let unknown: Vec<String> =
            self.arrays.into_keys().filter(|name| !HEADS.iter().any(|head| name.starts_with(head))).collect();
        if unknown.is_empty() {
            Ok(tensors)
        } else {
            Err(format!(
                "it has {} parameters that are not part of such a network: {}{}",
                unknown.len(),
                unknown[..unknown.len().min(4)].join(", "),
                if unknown.len() > 4 { ", …" } else { "" }
            ))
        }
    }
}

/// Returns `true` if a part of a prefix is inside a network: `layer1.0.conv1.weight` ends like the
/// name of a stem.
fn is_inner(part: &str) -> bool {
    part.starts_with("layer") || part.starts_with("block") || part.parse::<usize>().is_ok()
}

/// Returns the prefix of the network `wanted`, of the teacher if there is one, or the one that all
/// others start with; `None` if there are no prefixes. Networks with equal tensors, as `are_equal`
/// reports them, count as one.
fn choose_prefix<'a>(
    prefixes: &BTreeSet<&'a str>,
    wanted: Option<&str>,
    are_equal: impl Fn(&str, &str) -> bool,
) -> Result<Option<&'a str>, String> {
    let candidates: Vec<&'a str> = match wanted {
        Some(wanted) => {
            let named = prefixes_named(prefixes, wanted);
            if named.is_empty() && !prefixes.is_empty() {
                let names = format_names(prefixes.iter().copied());
                return Err(format!("it holds no network {wanted}; it holds {names}"));
            }
            named
        }
        None => {
            let teachers = prefixes_containing(prefixes, "teacher");
            if teachers.is_empty() { prefixes.iter().copied().collect() } else { teachers }
        }
    };
    let Some(first) = candidates.first().copied() else { return Ok(None) };
    for prefix in &candidates {
        if candidates.iter().all(|other| other.starts_with(*prefix)) {
            return Ok(Some(*prefix));
        }
    }
    if candidates[1..].iter().all(|other| are_equal(first, other)) {
        return Ok(Some(first));
    }
    Err(format!(
        "it holds {} networks; choose one with --network: {}",
        candidates.len(),
        format_names(candidates)
    ))
}

/// Returns the prefixes that `wanted` names: those that are equal to it, else those that have a
/// part of this name, else those that contain it.
fn prefixes_named<'a>(prefixes: &BTreeSet<&'a str>, wanted: &str) -> Vec<&'a str> {
    let mut equal = Vec::new();
    let mut with_part = Vec::new();
    for prefix in prefixes {
        if prefix.trim_end_matches('.') == wanted.trim_end_matches('.') {
            equal.push(*prefix);
        }
        if prefix.split('.').any(|part| part == wanted) {
            with_part.push(*prefix);
        }
    }
    if !equal.is_empty() {
        equal
    } else if !with_part.is_empty() {
        with_part
    } else {
        prefixes_containing(prefixes, wanted)
    }
}

fn prefixes_containing<'a>(prefixes: &BTreeSet<&'a str>, text: &str) -> Vec<&'a str> {
    prefixes.iter().copied().filter(|prefix| prefix.contains(text)).collect()
}

/// Returns whether the tensors under two prefixes are equal.
fn have_equal_tensors(arrays: &Arrays, a: &str, b: &str) -> bool {
    tensors_under(arrays, a) == tensors_under(arrays, b)
}

/// Returns the tensors under `prefix`, by their names without it.
fn tensors_under<'a>(arrays: &'a Arrays, prefix: &str) -> Vec<(&'a str, &'a Array)> {
    arrays.iter().filter_map(|(name, array)| Some((name.strip_prefix(prefix)?, array))).collect()
}

/// Formats the names of networks, as `--network` takes them.
fn format_names<'a>(prefixes: impl IntoIterator<Item = &'a str>) -> String {
    let mut names = Vec::new();
    for prefix in prefixes {
        let name = prefix.trim_end_matches('.');
        names.push(if name.is_empty() { "(the outermost)" } else { name });
    }
    names.join(", ")
}

/// Returns the dimensions other than one, because libraries differ in dimensions of one.
fn without_ones(shape: &[usize]) -> Vec<usize> {
    shape.iter().copied().filter(|n| *n != 1).collect()
}

/// Removes the chunk number of DINOv2's training checkpoints: `blocks.0.3.norm1.weight` is block 3.
fn without_chunk(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    match parts.as_slice() {
        ["blocks", chunk, number, rest @ ..]
            if chunk.parse::<usize>().is_ok() && number.parse::<usize>().is_ok() && !rest.is_empty() =>
        {
            format!("blocks.{number}.{}", rest.join("."))
        }
        _ => name.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_numbers_are_removed_from_block_names() {
        assert_eq!(without_chunk("blocks.1.7.norm1.weight"), "blocks.7.norm1.weight");
        assert_eq!(without_chunk("blocks.7.norm1.weight"), "blocks.7.norm1.weight");
    }

    fn never_equal(_: &str, _: &str) -> bool {
        false
    }

    #[test]
    fn teacher_is_chosen_unless_another_network_is_requested() {
        let both = BTreeSet::from(["student.module.backbone.", "teacher.backbone."]);
        assert_eq!(choose_prefix(&both, None, never_equal).unwrap(), Some("teacher.backbone."));
        let student = choose_prefix(&both, Some("student"), never_equal).unwrap();
        assert_eq!(student, Some("student.module.backbone."));
        assert!(choose_prefix(&BTreeSet::from([""]), Some("student"), never_equal).is_err());
    }

    #[test]
    fn ambiguous_networks_must_be_chosen_by_name() {
        let nested = BTreeSet::from(["", "decoder.backbone."]);
        assert_eq!(choose_prefix(&nested, None, never_equal).unwrap(), Some(""));
        let copies = BTreeSet::from(["model.", "state_dict."]);
        let error = choose_prefix(&copies, None, never_equal).unwrap_err();
        assert!(error.ends_with("--network: model, state_dict"), "{error}");
        assert_eq!(choose_prefix(&copies, None, |_, _| true).unwrap(), Some("model."), "one network, twice");
        let encoders = BTreeSet::from(["module.encoder_q.", "module.encoder_k."]);
        assert!(choose_prefix(&encoders, None, never_equal).is_err());
        let momentum = BTreeSet::from(["backbone.", "momentum_backbone."]);
        assert_eq!(choose_prefix(&momentum, Some("backbone"), never_equal).unwrap(), Some("backbone."));
        let by_part_of_name = choose_prefix(&momentum, Some("momentum"), never_equal).unwrap();
        assert_eq!(by_part_of_name, Some("momentum_backbone."));
        let error = choose_prefix(&momentum, Some("teacher"), never_equal).unwrap_err();
        assert!(error.contains("teacher") && error.contains("backbone, momentum_backbone"), "{error}");
    }
}
