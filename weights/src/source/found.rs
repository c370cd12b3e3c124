//! The backbone among the tensors of a file, under any prefix of their names.

use std::collections::BTreeSet;

use networks::ModelConfig;
use networks::NamedTensor;

use super::Source;
use crate::file::{Array, Arrays};

/// Prefixes of parameters beyond the backbone: classifiers, projection heads, and tensors that only
/// training uses.
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

/// Tensors of a backbone that have not been taken.
pub(crate) struct Found {
    arrays: Arrays,
    /// Name of the first layer's weight, by which the backbone was found.
    pub(crate) anchor: &'static str,
    /// Beginning of the names of its tensors in the file.
    prefix: String,
    /// Names of the other networks in the file.
    others: String,
}

impl Found {
    /// Finds the backbone in `source` whose first layer's weight is called `anchor`, under any
    /// prefix: the one that `network` names, or the teacher if there are a teacher and a student.
    /// `None` if no tensor has the name.
    ///
    /// # Errors
    /// A message, if there are several such networks, or none that is called `network`.
    pub(crate) fn of(
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
        let Some(prefix) = chosen(&prefixes, network, |a, b| are_same(&source.arrays, a, b))? else {
            return Ok(None);
        };
        let others = names_of(prefixes.iter().copied().filter(|other| !other.starts_with(prefix)));
        let mut arrays = Arrays::new();
        for (name, array) in &source.arrays {
            if let Some(name) = name.strip_prefix(prefix) {
                let name = without_chunk(name);
                if arrays.insert(name.clone(), array.clone()).is_some() {
                    return Err(format!("it holds two tensors for {name}, in and outside of a chunk"));
                }
            }
        }
        Ok(Some(Self { arrays, anchor, prefix: prefix.to_string(), others }))
    }

    /// Says which network is read, if the file holds others.
    pub(crate) fn told(&self) -> Option<String> {
        let Self { prefix, others, .. } = self;
        (!others.is_empty()).then(|| {
            format!(
                "it also holds {others}: {} is read (--network)",
                names_of(std::iter::once(prefix.as_str()))
            )
        })
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Array> {
        self.arrays.get(name)
    }

    pub(crate) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.get(name).map(|array| array.shape.as_slice())
    }

    pub(crate) fn holds(&self, name: &str) -> bool {
        self.arrays.contains_key(name)
    }

    /// Names of all tensors.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.arrays.keys()
    }

    pub(crate) fn take(&mut self, name: &str) -> Option<Array> {
        self.arrays.remove(name)
    }

    pub(crate) fn put(&mut self, name: &str, array: Array) {
        self.arrays.insert(name.to_string(), array);
    }

    /// Returns the parameters of `model`, each joined from the tensors that `theirs` names. The
    /// rest must belong to heads.
    pub(crate) fn parameters(
        mut self,
        model: &ModelConfig,
        theirs: impl Fn(&str) -> Vec<String>,
    ) -> Result<Vec<NamedTensor>, String> {
        let mut tensors = Vec::new();
        for (name, shape) in model.params() {
            let mut values = Vec::new();
            let mut joined = Vec::new();
            for name in theirs(&name) {
                let array = self.take(&name).ok_or_else(|| format!("{name} is missing"))?;
                let dims = without_ones(&array.shape);
                joined = match (joined.split_first(), dims.split_first()) {
                    (Some((rows, rest)), Some((more, others))) if rest == others => {
                        [&[rows + more], rest].concat()
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

/// Returns `true` if part of a prefix is inside a network: `layer1.0.conv1.weight` ends like a
/// stem.
fn is_inner(part: &str) -> bool {
    part.starts_with("layer") || part.starts_with("block") || part.parse::<usize>().is_ok()
}

/// Returns the prefix of the network `wanted`, of the teacher if there is one, or the one that all
/// others start with; `None` if there are no prefixes. Networks with the same values, which
/// `are_same` tells, are one.
fn chosen<'a>(
    prefixes: &BTreeSet<&'a str>,
    wanted: Option<&str>,
    are_same: impl Fn(&str, &str) -> bool,
) -> Result<Option<&'a str>, String> {
    let containing =
        |part: &str| -> Vec<&'a str> { prefixes.iter().copied().filter(|p| p.contains(part)).collect() };
    let named = |wanted: &str| -> Vec<&'a str> {
        let is_whole = |prefix: &&'a str| prefix.trim_end_matches('.') == wanted.trim_end_matches('.');
        let has_part = |prefix: &&'a str| prefix.split('.').any(|part| part == wanted);
        let whole: Vec<&str> = prefixes.iter().copied().filter(|p| is_whole(p)).collect();
        let parts: Vec<&str> = prefixes.iter().copied().filter(|p| has_part(p)).collect();
        match (whole.is_empty(), parts.is_empty()) {
            (false, _) => whole,
            (true, false) => parts,
            (true, true) => containing(wanted),
        }
    };
    let candidates = match wanted {
        Some(wanted) if !prefixes.is_empty() && named(wanted).is_empty() => {
            return Err(format!("it holds no network {wanted}, but {}", names_of(prefixes.iter().copied())));
        }
        Some(wanted) => named(wanted),
        None if !containing("teacher").is_empty() => containing("teacher"),
        None => containing(""),
    };
    let outermost = candidates.iter().copied().find(|p| candidates.iter().all(|other| other.starts_with(p)));
    let Some(first) = candidates.first().copied() else { return Ok(None) };
    if outermost.is_none() && candidates[1..].iter().all(|other| are_same(first, other)) {
        return Ok(Some(first));
    }
    match outermost {
        Some(found) => Ok(Some(found)),
        None => Err(format!(
            "it holds {} networks: --network chooses one of {}",
            candidates.len(),
            names_of(candidates.into_iter())
        )),
    }
}

/// Returns whether the tensors under two prefixes are the same.
fn are_same(arrays: &Arrays, a: &str, b: &str) -> bool {
    let under = |prefix: &str| -> Vec<(String, &Array)> {
        let within = arrays.iter().filter_map(|(name, array)| Some((name.strip_prefix(prefix)?, array)));
        within.map(|(name, array)| (name.to_string(), array)).collect()
    };
    under(a) == under(b)
}

/// Names of networks, as `--network` takes them.
fn names_of<'a>(prefixes: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<String> = prefixes
        .map(|prefix| match prefix.trim_end_matches('.') {
            "" => "(the outermost)".to_string(),
            name => name.to_string(),
        })
        .collect();
    names.join(", ")
}

/// Returns the dimensions other than one: libraries differ in those.
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
    fn blocks_in_chunks_have_their_number() {
        assert_eq!(without_chunk("blocks.1.7.norm1.weight"), "blocks.7.norm1.weight");
        assert_eq!(without_chunk("blocks.7.norm1.weight"), "blocks.7.norm1.weight");
    }

    /// No network is the same as another.
    fn apart(_: &str, _: &str) -> bool {
        false
    }

    #[test]
    fn the_teacher_is_taken_unless_another_is_wanted() {
        let both = BTreeSet::from(["student.module.backbone.", "teacher.backbone."]);
        assert_eq!(chosen(&both, None, apart).unwrap(), Some("teacher.backbone."));
        assert_eq!(chosen(&both, Some("student"), apart).unwrap(), Some("student.module.backbone."));
        assert!(chosen(&BTreeSet::from([""]), Some("student"), apart).is_err());
    }

    #[test]
    fn of_several_networks_none_is_taken_by_chance() {
        assert_eq!(chosen(&BTreeSet::from(["", "decoder.backbone."]), None, apart).unwrap(), Some(""));
        let copies = BTreeSet::from(["model.", "state_dict."]);
        let error = chosen(&copies, None, apart).unwrap_err();
        assert!(error.contains("--network chooses one of model, state_dict"), "{error}");
        assert_eq!(chosen(&copies, None, |_, _| true).unwrap(), Some("model."), "one network, twice");
        assert!(chosen(&BTreeSet::from(["module.encoder_q.", "module.encoder_k."]), None, apart).is_err());
        let momentum = BTreeSet::from(["backbone.", "momentum_backbone."]);
        assert_eq!(chosen(&momentum, Some("backbone"), apart).unwrap(), Some("backbone."));
        assert_eq!(chosen(&momentum, Some("momentum"), apart).unwrap(), Some("momentum_backbone."));
        let error = chosen(&momentum, Some("teacher"), apart).unwrap_err();
        assert!(error.contains("no network teacher, but backbone, momentum_backbone"), "{error}");
    }
}
