//! The backbone among the tensors of a file, whatever stands before their names.

use std::collections::BTreeSet;

use networks::ModelConfig;
use networks::NamedTensor;

use super::source::Source;
use crate::file::{Array, Arrays};
use crate::library::convnet::Renaming;

/// Names of the first convolution, by which a backbone is found: of transformers, then of convolutional networks.
const PATCHES: [&str; 3] =
    ["patch_embed.proj.weight", "conv_proj.weight", "embeddings.patch_embeddings.projection.weight"];
const STEMS: [&str; 4] =
    ["stem.0.weight", "stem.conv.weight", "embedder.embedder.convolution.weight", "conv1.weight"];

/// Beginnings of the names of what stands on a backbone: classifiers, projection heads, and what only training uses.
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

/// The tensors of a backbone that have not been asked for.
pub(super) struct Found {
    arrays: Arrays,
    /// Name of the first convolution.
    pub(super) anchor: &'static str,
}

impl Found {
    /// The backbone in `source`: the teacher where there are two, unless the student is wanted.
    pub(super) fn of(source: &Source, network: Option<&str>) -> Result<Self, String> {
        for anchor in PATCHES.into_iter().chain(STEMS) {
            let prefixes: BTreeSet<&str> = source
                .arrays
                .keys()
                .filter_map(|name| name.strip_suffix(anchor))
                .filter(|prefix| prefix.is_empty() || prefix.ends_with('.'))
                .filter(|prefix| !prefix.split('.').any(is_inner))
                .collect();
            let Some(prefix) = chosen(&prefixes, network)? else { continue };
            let mut arrays = Arrays::new();
            for (name, array) in &source.arrays {
                if let Some(name) = name.strip_prefix(prefix) {
                    arrays.insert(without_chunk(name), array.clone());
                }
            }
            return Ok(Self { arrays, anchor });
        }
        let names: Vec<&str> = source.arrays.keys().take(3).map(String::as_str).collect();
        Err(format!(
            "no vision transformer, ResNet or RegNetY is among its {} tensors ({}, …)",
            source.arrays.len(),
            names.join(", ")
        ))
    }

    pub(super) fn is_transformer(&self) -> bool {
        PATCHES.contains(&self.anchor)
    }

    pub(super) fn get(&self, name: &str) -> Option<&Array> {
        self.arrays.get(name)
    }

    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.get(name).map(|array| array.shape.as_slice())
    }

    pub(super) fn holds(&self, name: &str) -> bool {
        self.arrays.contains_key(name)
    }

    pub(super) fn take(&mut self, name: &str) -> Option<Array> {
        self.arrays.remove(name)
    }

    pub(super) fn put(&mut self, name: &str, array: Array) {
        self.arrays.insert(name.to_string(), array);
    }

    /// The parameters of `model`, each joined from what `theirs` calls it. What is left must stand on a backbone.
    pub(super) fn parameters(
        mut self,
        model: &ModelConfig,
        theirs: impl Fn(&str) -> Vec<String>,
    ) -> Result<Vec<NamedTensor>, String> {
        let mut tensors = Vec::new();
        for (name, shape) in model.params() {
            let mut values = Vec::with_capacity(shape.iter().product());
            for name in theirs(&name) {
                let array = self.take(&name).ok_or_else(|| format!("{name} is missing"))?;
                values.extend(array.values);
            }
            let numel: usize = shape.iter().product();
            if values.len() != numel {
                return Err(format!("{name} has {} elements, not {numel} {shape:?}", values.len()));
            }
            tensors.push(NamedTensor { name, shape, values });
        }
        let strangers: Vec<String> =
            self.arrays.into_keys().filter(|name| !HEADS.iter().any(|head| name.starts_with(head))).collect();
        match strangers.is_empty() {
            true => Ok(tensors),
            false => Err(format!(
                "it has {} parameters that a network of this kind has not: {}{}",
                strangers.len(),
                strangers[..strangers.len().min(4)].join(", "),
                if strangers.len() > 4 { ", …" } else { "" }
            )),
        }
    }

    /// [`Found::parameters`] by a table of one name each.
    pub(super) fn renamed(self, model: &ModelConfig, renaming: Renaming) -> Result<Vec<NamedTensor>, String> {
        self.parameters(model, |name| renaming(name).into_iter().collect())
    }
}

/// Whether part of a prefix lies within a network: `layer1.0.conv1.weight` ends like a stem.
fn is_inner(part: &str) -> bool {
    part.starts_with("layer") || part.starts_with("block") || part.parse::<usize>().is_ok()
}

/// The prefix of the network `wanted`, of the teacher where there is one, or the one that all others begin with; `None` if
/// there are no prefixes.
fn chosen<'a>(prefixes: &BTreeSet<&'a str>, wanted: Option<&str>) -> Result<Option<&'a str>, String> {
    let named =
        |part: &str| -> Vec<&'a str> { prefixes.iter().copied().filter(|p| p.contains(part)).collect() };
    let candidates = match wanted {
        Some(wanted) if !prefixes.is_empty() && named(wanted).is_empty() => {
            return Err(format!("it holds no network {wanted}"));
        }
        Some(wanted) => named(wanted),
        None if !named("teacher").is_empty() => named("teacher"),
        None => named(""),
    };
    let outermost = candidates.iter().copied().find(|p| candidates.iter().all(|other| other.starts_with(p)));
    match outermost {
        None if !candidates.is_empty() => Err(format!(
            "it holds several networks, under {}: write the one that is meant into a file of its own",
            candidates.join(" and ")
        )),
        found => Ok(found),
    }
}

/// DINOv2's training groups blocks: `blocks.0.3.norm1.weight` is block 3.
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

    #[test]
    fn the_teacher_is_taken_unless_another_is_wanted() {
        let both = BTreeSet::from(["student.module.backbone.", "teacher.backbone."]);
        assert_eq!(chosen(&both, None).unwrap(), Some("teacher.backbone."));
        assert_eq!(chosen(&both, Some("student")).unwrap(), Some("student.module.backbone."));
        assert!(chosen(&BTreeSet::from([""]), Some("student")).is_err());
    }

    #[test]
    fn of_several_networks_none_is_taken_by_chance() {
        assert_eq!(chosen(&BTreeSet::from(["", "decoder.backbone."]), None).unwrap(), Some(""));
        let error = chosen(&BTreeSet::from(["model.", "state_dict."]), None).unwrap_err();
        assert!(error.contains("model. and state_dict."), "{error}");
        assert!(chosen(&BTreeSet::from(["module.encoder_q.", "module.encoder_k."]), None).is_err());
    }
}
