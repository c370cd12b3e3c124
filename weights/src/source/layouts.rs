//! Conversion of the parameter names of training programs to the names of the network's library.
//!
//! ```text
//! wrapped         blocks.0._orig_mod.attn.qkv.weight           blocks.0.attn.qkv.weight
//! a sequence      backbone.4.0.conv1.weight                    backbone.layer1.0.conv1.weight
//! VISSL           trunk._feature_blocks.res2.block1-0.f.c.weight
//!                 trunk._feature_blocks.trunk_output.block1.block1-0.f.c.0.weight
//! ```

use std::collections::BTreeSet;

use crate::file::Arrays;

/// Parts of names that PyTorch adds for wrapped modules: compiled, sharded, with recomputation.
const WRAPPERS: [&str; 5] = [
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "_ddp_wrapped_module",
];

/// Part of the names of VISSL's trunks.
const VISSL: &str = "_feature_blocks.";

/// Renames `arrays` as the network's own library names them.
///
/// # Errors
/// A message, if two tensors would have the same name.
pub(super) fn normalize_names(arrays: Arrays) -> Result<Arrays, String> {
    let arrays = rename_all(arrays, without_wrappers)?;
    let arrays = rename_all(arrays, vissl_to_torchvision)?;
    let prefixes = sequence_prefixes(&arrays)?;
    rename_all(arrays, |name| sequence_to_torchvision(name, &prefixes))
}

fn rename_all(arrays: Arrays, rename: impl Fn(&str) -> String) -> Result<Arrays, String> {
    let mut renamed = Arrays::new();
    for (name, array) in arrays {
        let new_name = rename(&name);
        if renamed.insert(new_name.clone(), array).is_some() {
            return Err(format!("it holds two tensors for {new_name}, one of them {name}"));
        }
    }
    Ok(renamed)
}

fn without_wrappers(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').filter(|part| !WRAPPERS.contains(part)).collect();
    parts.join(".")
}

/// Returns torchvision's name of a parameter of one of VISSL's RegNets; other names are returned
/// unchanged.
fn vissl_to_torchvision(name: &str) -> String {
    let Some((before, rest)) = name.split_once(VISSL) else { return name.to_string() };
    let within = if let Some(stem) = rest.strip_prefix("conv1.stem.") {
        format!("stem.{stem}")
    } else if let Some((block, part)) = vissl_block(rest) {
        let part = match part.split_once('.') {
            Some(("proj", last)) if !last.starts_with(|c: char| c.is_ascii_digit()) => {
                format!("proj.0.{last}")
            }
            Some(("bn", last)) => format!("proj.1.{last}"),
            _ => part
                .replace("f.se.excitation.0.", "f.se.fc1.")
                .replace("f.se.excitation.2.", "f.se.fc2.")
                .replace("f.final_bn.", "f.c.1."),
        };
        let part = match part.strip_prefix("f.c.") {
            Some(last) if !last.starts_with(|c: char| c.is_ascii_digit()) => format!("f.c.0.{last}"),
            _ => part,
        };
        let stage = block.trim_start_matches("block").split('-').next().unwrap_or_default();
        format!("trunk_output.block{stage}.{block}.{part}")
    } else {
        return name.to_string();
    };
    format!("{before}{VISSL}{within}")
}

/// Splits `res2.block1-0.f.c.weight` into `block1-0` and `f.c.weight`.
fn vissl_block(rest: &str) -> Option<(&str, &str)> {
    let (stage, rest) = rest.split_once('.')?;
    let (block, part) = rest.split_once('.')?;
    let is_stage = stage.strip_prefix("res").is_some_and(|number| number.parse::<usize>().is_ok());
    let is_block = block.strip_prefix("block").is_some_and(|number| number.contains('-'));
    (is_stage && is_block).then_some((block, part))
}

/// Numbers of the four stages in a sequence of torchvision's layers, after convolution, norm,
/// activation and pooling.
const STAGES: std::ops::Range<usize> = 4..8;

/// Finds ResNets of torchvision that were put into `torch.nn.Sequential`; returns the prefixes of
/// their layers' numbers.
///
/// # Errors
/// A message for lightly's own ResNet in a sequence. The activation after its stem is not a layer
/// and therefore missing in the sequence, unlike in any ResNet of the libraries.
fn sequence_prefixes(arrays: &Arrays) -> Result<Vec<String>, String> {
    let prefixes: BTreeSet<&str> = arrays
        .iter()
        .filter(|(_, array)| array.shape.len() == 4)
        .filter_map(|(name, _)| name.strip_suffix("0.weight"))
        .filter(|prefix| prefix.is_empty() || prefix.ends_with('.'))
        .collect();
    let mut sequences = Vec::new();
    for prefix in prefixes {
        if !arrays.contains_key(&format!("{prefix}1.running_mean")) {
            continue;
        }
        if has_stages(arrays, prefix, STAGES) {
            sequences.push(prefix.to_string());
        } else if has_stages(arrays, prefix, 2..6) {
            return Err(format!(
                "{prefix}0.weight is the first layer of lightly's ResNetGenerator in a sequence, which lacks \
                 the activation after the stem: this is not supported"
            ));
        }
    }
    Ok(sequences)
}

/// Returns whether the layers `numbers` of the sequence under `prefix` are stages.
fn has_stages(arrays: &Arrays, prefix: &str, mut numbers: std::ops::Range<usize>) -> bool {
    numbers.all(|number| arrays.contains_key(&format!("{prefix}{number}.0.conv1.weight")))
}

/// Returns torchvision's name of a parameter of a sequence under one of `prefixes`; other names are
/// returned unchanged.
fn sequence_to_torchvision(name: &str, prefixes: &[String]) -> String {
    for prefix in prefixes {
        let within = name.strip_prefix(prefix.as_str()).and_then(|rest| rest.split_once('.'));
        let Some((number, rest)) = within else { continue };
        let layer = match number.parse::<usize>() {
            Ok(0) => "conv1".to_string(),
            Ok(1) => "bn1".to_string(),
            Ok(number) if STAGES.contains(&number) => format!("layer{}", number - STAGES.start + 1),
            _ => continue,
        };
        return format!("{prefix}{layer}.{rest}");
    }
    name.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::Array;

    fn zeros(shape: &[usize]) -> Array {
        Array { shape: shape.to_vec(), values: vec![0.0; shape.iter().product()] }
    }

    #[test]
    fn wrappers_are_removed_from_all_parts_of_a_name() {
        for (wrapped, name) in [
            ("module._orig_mod.blocks.0.attn.qkv.weight", "module.blocks.0.attn.qkv.weight"),
            ("blocks.3._orig_mod.mlp.fc1.bias", "blocks.3.mlp.fc1.bias"),
            ("_fsdp_wrapped_module.blocks.3._fsdp_wrapped_module._checkpoint_wrapped_module.x", "blocks.3.x"),
        ] {
            assert_eq!(without_wrappers(wrapped), name);
        }
        let duplicate = Arrays::from([("a._orig_mod.x".into(), zeros(&[1])), ("a.x".into(), zeros(&[1]))]);
        assert!(normalize_names(duplicate).unwrap_err().contains("two tensors for a.x"));
    }

    /// Normalizes the names of a sequence whose stages begin with the layer `first`.
    fn normalized_sequence(first: usize) -> Result<Arrays, String> {
        let mut arrays = Arrays::from([
            ("backbone.0.weight".to_string(), zeros(&[4, 3, 3, 3])),
            ("backbone.1.running_mean".to_string(), zeros(&[4])),
        ]);
        for stage in first..first + 4 {
            arrays.insert(format!("backbone.{stage}.0.conv1.weight"), zeros(&[1, 1, 1, 1]));
        }
        normalize_names(arrays)
    }

    /// In lightly's own ResNet the numbers of the stages are smaller by two: two operations before
    /// them are not layers there, and the activation among them is lost in a sequence.
    #[test]
    fn sequence_without_its_activation_is_rejected() {
        let arrays = normalized_sequence(4).unwrap();
        assert!(arrays.contains_key("backbone.layer4.0.conv1.weight"));
        assert!(normalized_sequence(2).unwrap_err().contains("ResNetGenerator"));
    }

    /// Names of VISSL's RegNets, as timm lists them for its conversion.
    #[test]
    fn names_of_vissl_are_converted_to_torchvision() {
        let trunk = "classy_state_dict.base_model.model.trunk._feature_blocks";
        for (vissl, torchvision) in [
            ("conv1.stem.0.weight", "stem.0.weight"),
            ("conv1.stem.1.running_var", "stem.1.running_var"),
            ("res2.block1-0.proj.weight", "trunk_output.block1.block1-0.proj.0.weight"),
            ("res2.block1-0.bn.bias", "trunk_output.block1.block1-0.proj.1.bias"),
            ("res4.block3-11.f.a.0.weight", "trunk_output.block3.block3-11.f.a.0.weight"),
            ("res4.block3-11.f.se.excitation.2.bias", "trunk_output.block3.block3-11.f.se.fc2.bias"),
            ("res5.block4-0.f.c.weight", "trunk_output.block4.block4-0.f.c.0.weight"),
            ("res5.block4-0.f.final_bn.weight", "trunk_output.block4.block4-0.f.c.1.weight"),
            ("layer1.0.conv1.weight", "layer1.0.conv1.weight"),
        ] {
            assert_eq!(vissl_to_torchvision(&format!("{trunk}.{vissl}")), format!("{trunk}.{torchvision}"));
        }
    }
}
