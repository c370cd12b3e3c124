//! Fitting weights to the backbone of a recipe.

use networks::{FirstLayer, ModelConfig, NamedTensor};
use serde_json::{Map, Value};

use crate::backbone::exchange_of;
use crate::resized::resized;

/// Keys of every backbone that do not change what given weights compute.
const FREE_KEYS: [&str; 2] = ["drop_path", "image_px"];

/// Fits `tensors` of `from` to the backbone `to`, which must be the same but for settings of
/// training; a position embedding is resampled as the code of `from` does it, and `first_layer`
/// converts the first layer if `to` takes images of other channels.
///
/// # Errors
/// A message with the keys that differ and both values of each.
pub fn fitted(
    from: &ModelConfig,
    tensors: Vec<NamedTensor>,
    to: &ModelConfig,
    first_layer: Option<FirstLayer>,
) -> Result<Vec<NamedTensor>, String> {
    let (from, tensors) = match first_layer {
        Some(rule) if from.n_channels() != to.n_channels() => rule.convert(from, tensors, to.n_channels()),
        _ => (from.clone(), tensors),
    };
    if from.n_channels() != to.n_channels() {
        return Err(format!(
            "it takes images of {} channels, and data.channels is {}: --set init.first_layer=repeat gives each channel the kernel of \
             red, green or blue in turn, init.first_layer=mean their mean",
            from.n_channels(),
            to.n_channels()
        ));
    }
    let here = keys(to);
    let there = keys(&from);
    let mut names: Vec<&String> = here.keys().chain(there.keys()).collect();
    names.sort_unstable();
    names.dedup();
    names.retain(|name| here.get(*name) != there.get(*name));
    let said: Vec<String> = names
        .iter()
        .map(|name| {
            let of = |keys: &Map<String, Value>| keys.get(*name).map_or("absent".into(), Value::to_string);
            format!("model.{name} is {} in the recipe and {} in the weights", of(&here), of(&there))
        })
        .collect();
    if said.is_empty() {
        Ok(resized(&from, tensors, to.image_px()).1)
    } else {
        Err(format!("{}; {}", said.join("; "), remedy(&from, &names)))
    }
}

/// Says which overrides make a recipe fit weights of `from`, from which it differs in these keys.
fn remedy(from: &ModelConfig, differing: &[&String]) -> String {
    let theirs = serde_json::to_value(from).unwrap_or_default();
    let whole = "--set model=from_init takes the backbone of the weights";
    match differing
        .iter()
        .map(|name| match theirs.get(*name)? {
            Value::String(word) => Some(format!("--set model.{name}={word}")),
            Value::Number(value) => Some(format!("--set model.{name}={value}")),
            Value::Bool(value) => Some(format!("--set model.{name}={value}")),
            Value::Array(values) => Some(format!("--set 'model.{name}={}'", Value::from(values.clone()))),
            // A key that weights lack cannot be taken from the recipe by an override.
            Value::Null | Value::Object(_) => None,
        })
        .collect::<Option<Vec<_>>>()
    {
        Some(all) => format!("{} fits it, or {whole}", all.join(" ")),
        None => whole.into(),
    }
}

/// Returns the keys of a backbone on which the meaning of its weights depends.
fn keys(model: &ModelConfig) -> Map<String, Value> {
    let mut keys = match serde_json::to_value(model) {
        Ok(Value::Object(keys)) => keys,
        _ => Map::new(),
    };
    keys.retain(|name, _| !FREE_KEYS.contains(&name.as_str()));
    exchange_of(model).comparable(&mut keys);
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vit(text: &str) -> ModelConfig {
        toml::from_str(&format!("arch='vit'\npatch_px=4\nwidth=12\ndepth=1\n{text}")).unwrap()
    }

    #[test]
    fn what_differs_is_named() {
        let there = vit("image_px=16\nheads=2");
        assert!(fitted(&there, Vec::new(), &vit("image_px=16\nheads=2\ndrop_path=0.1"), None).is_ok());
        let error =
            fitted(&there, Vec::new(), &vit("image_px=16\nheads=3\nlayer_scale=0.1"), None).unwrap_err();
        assert!(error.contains("model.heads is 3 in the recipe and 2 in the weights"), "{error}");
        assert!(error.contains("model.layer_scale is \"some\" in the recipe and absent"), "{error}");
        assert!(error.ends_with("; --set model=from_init takes the backbone of the weights"), "{error}");
        let scaled = vit("image_px=16\nheads=2\nlayer_scale=0.5\npositions='rope'");
        let error = fitted(&scaled, Vec::new(), &vit("image_px=16\nheads=2"), None).unwrap_err();
        let fits = "; --set model.layer_scale=0.5 --set model.positions=rope --set model.rope_base=100.0 fits it, or";
        assert!(error.contains(fits), "{error}");
    }

    #[test]
    fn positions_are_resampled_for_the_recipes_images() {
        let there = vit("image_px=16\nheads=2");
        let embedding = NamedTensor {
            name: "pos_embed".into(),
            shape: vec![1, 17, 12],
            values: (0..17 * 12).map(|i| i as f32).collect(),
        };
        let found =
            fitted(&there, vec![embedding.clone()], &vit("image_px=8\nheads=2"), None).unwrap().remove(0);
        assert_eq!(found.shape, [1, 5, 12]);
        assert_eq!(found.values[..12], embedding.values[..12], "the class token's stays");
    }

    #[test]
    fn other_channels_need_a_rule_for_the_first_layer() {
        let there = vit("image_px=16\nheads=2");
        let here = vit("image_px=16\nheads=2\nchannels=5");
        let kernels = NamedTensor {
            name: "patch_embed.proj.weight".into(),
            shape: vec![12, 3, 4, 4],
            values: vec![0.5; 12 * 3 * 16],
        };
        let error = fitted(&there, vec![kernels.clone()], &here, None).unwrap_err();
        assert!(error.contains("data.channels is 5: --set init.first_layer=repeat"), "{error}");
        let found = fitted(&there, vec![kernels], &here, Some(FirstLayer::Mean)).unwrap().remove(0);
        assert_eq!((found.shape, found.values[0]), (vec![12, 5, 4, 4], 0.3));
    }
}
