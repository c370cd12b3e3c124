//! Fitting weights to the backbone of a recipe.

use networks::{FirstLayer, ModelConfig, NamedTensor};
use serde_json::{Map, Value};

use crate::backbone::exchange_of;
use crate::resized::resized;

/// Advice for weights that do not fit.
const FROM_INIT: &str = "use the backbone of the weights with --set model=from_init";

/// Keys of every backbone that do not change the features that given weights compute.
const FREE_KEYS: [&str; 2] = ["drop_path", "image_px"];

/// Fits `tensors` of the backbone `from` to the backbone `to`, which may differ only in settings
/// of training. A position embedding is resampled as the code of `from` does it, and `first_layer`
/// converts the first layer if `to` takes images with another number of channels.
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
            "it takes images of {} channels, but data.channels is {}: --set init.first_layer=repeat gives \
             channels the red, green and blue kernels in turn, --set init.first_layer=mean gives each their \
             mean",
            from.n_channels(),
            to.n_channels()
        ));
    }
    let recipe_keys = keys(to);
    let weights_keys = keys(&from);
    let mut differing: Vec<&String> = recipe_keys.keys().chain(weights_keys.keys()).collect();
    differing.sort_unstable();
    differing.dedup();
    differing.retain(|name| recipe_keys.get(*name) != weights_keys.get(*name));
    if differing.is_empty() {
        return Ok(resized(&from, tensors, to.image_px()).1);
    }
    // All other keys are those of another kind of network.
    if differing.iter().any(|name| *name == "arch") {
        return Err(format!(
            "model.arch is {} in the recipe, but {} in the weights; {FROM_INIT}",
            value_text(&recipe_keys, "arch"),
            value_text(&weights_keys, "arch")
        ));
    }
    let mut differences = Vec::with_capacity(differing.len());
    for name in &differing {
        let in_recipe = value_text(&recipe_keys, name);
        let in_weights = value_text(&weights_keys, name);
        differences
            .push(format!("model.{name} is {in_recipe} in the recipe, but {in_weights} in the weights"));
    }
    Err(format!("{}; {}", differences.join("; "), remedy(&from, &differing)))
}

/// Returns the text of a key's value, for messages.
fn value_text(keys: &Map<String, Value>, name: &str) -> String {
    keys.get(name).map_or("absent".into(), Value::to_string)
}

/// Describes the overrides that make a recipe fit weights of `from`, from which it differs in the
/// keys `differing`.
fn remedy(from: &ModelConfig, differing: &[&String]) -> String {
    match overrides(from, differing) {
        Some(overrides) => format!("fit it with {}, or {FROM_INIT}", overrides.join(" ")),
        None => FROM_INIT.into(),
    }
}

/// Returns the overrides that set the keys `names` to their values in `model`; `None` if an
/// override cannot set one of them.
fn overrides(model: &ModelConfig, names: &[&String]) -> Option<Vec<String>> {
    let values = serde_json::to_value(model).unwrap_or_default();
    let mut overrides = Vec::with_capacity(names.len());
    for name in names {
        overrides.push(match values.get(name.as_str())? {
            Value::String(word) => format!("--set model.{name}={word}"),
            Value::Number(value) => format!("--set model.{name}={value}"),
            Value::Bool(value) => format!("--set model.{name}={value}"),
            array @ Value::Array(_) => format!("--set 'model.{name}={array}'"),
            // A key that the weights lack cannot be removed from the recipe by an override.
            Value::Null | Value::Object(_) => return None,
        });
    }
    Some(overrides)
}

/// Returns the keys of a backbone that determine the meaning of its weights.
fn keys(model: &ModelConfig) -> Map<String, Value> {
    let mut keys = match serde_json::to_value(model) {
        Ok(Value::Object(keys)) => keys,
        _ => Map::new(),
    };
    keys.retain(|name, _| !FREE_KEYS.contains(&name.as_str()));
    exchange_of(model).canonicalize_keys(&mut keys);
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vit(text: &str) -> ModelConfig {
        toml::from_str(&format!("arch='vit'\npatch_px=4\nwidth=12\ndepth=1\n{text}")).unwrap()
    }

    #[test]
    fn errors_name_the_keys_that_differ() {
        let model = vit("image_px=16\nheads=2");
        assert!(fitted(&model, Vec::new(), &vit("image_px=16\nheads=2\ndrop_path=0.1"), None).is_ok());
        let error =
            fitted(&model, Vec::new(), &vit("image_px=16\nheads=3\nlayer_scale=0.1"), None).unwrap_err();
        let parts: Vec<&str> = error.split("; ").collect();
        assert_eq!(parts[0], "model.heads is 3 in the recipe, but 2 in the weights");
        assert_eq!(parts[1], "model.layer_scale is \"some\" in the recipe, but absent in the weights");
        assert!(parts[2].starts_with("use ") && parts[2].ends_with("--set model=from_init"), "{error}");
        let scaled = vit("image_px=16\nheads=2\nlayer_scale=0.5\npositions='rope'");
        let error = fitted(&scaled, Vec::new(), &vit("image_px=16\nheads=2"), None).unwrap_err();
        let fits = "; fit it with --set model.layer_scale=0.5 --set model.positions=rope --set \
            model.rope_base=100.0, or";
        assert!(error.contains(fits), "{error}");
    }

    #[test]
    fn position_embedding_is_resampled_for_the_image_size_of_the_recipe() {
        let model = vit("image_px=16\nheads=2");
        let embedding = NamedTensor {
            name: "pos_embed".into(),
            shape: vec![1, 17, 12],
            values: (0..17 * 12).map(|i| i as f32).collect(),
        };
        let resampled =
            fitted(&model, vec![embedding.clone()], &vit("image_px=8\nheads=2"), None).unwrap().remove(0);
        assert_eq!(resampled.shape, [1, 5, 12]);
        assert_eq!(resampled.values[..12], embedding.values[..12], "the class token's stays");
    }

    #[test]
    fn other_channels_require_a_rule_for_the_first_layer() {
        let from = vit("image_px=16\nheads=2");
        let to = vit("image_px=16\nheads=2\nchannels=5");
        let kernels = NamedTensor {
            name: "patch_embed.proj.weight".into(),
            shape: vec![12, 3, 4, 4],
            values: vec![0.5; 12 * 3 * 16],
        };
        let error = fitted(&from, vec![kernels.clone()], &to, None).unwrap_err();
        assert!(error.contains('5') && error.contains("--set init.first_layer=repeat"), "{error}");
        let converted = fitted(&from, vec![kernels], &to, Some(FirstLayer::Mean)).unwrap().remove(0);
        assert_eq!((converted.shape, converted.values[0]), (vec![12, 5, 4, 4], 0.3));
    }
}
