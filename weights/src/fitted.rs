//! Weights for the backbone of a recipe.

use networks::{ModelConfig, NamedTensor, VitConfig};
use serde_json::{Map, Value};

use crate::resized::resized;

/// Keys of a backbone that say how it is trained, or how a position embedding is resampled, not what its weights mean.
const FREE: [&str; 9] = [
    "drop_path",
    "init_std",
    "initialization",
    "positions",
    "freeze_patches",
    "pos_offset",
    "pos_antialias",
    "image_px",
    "zero_init_residual",
];

/// `tensors` of `from` for the backbone `to`, which must be the same but for what is only about training; a position
/// embedding is resampled as the code of `from` does it.
///
/// # Errors
/// In words: the keys that differ, with both values.
pub fn fitted(
    from: &ModelConfig,
    tensors: Vec<NamedTensor>,
    to: &ModelConfig,
) -> Result<Vec<NamedTensor>, String> {
    let (here, there) = (keys(to), keys(from));
    let mut names: Vec<&String> = here.keys().chain(there.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let differs = |name: &&&String| here.get(**name) != there.get(**name);
    let said: Vec<String> = names
        .iter()
        .filter(differs)
        .map(|name| {
            let of = |keys: &Map<String, Value>| keys.get(*name).map_or("absent".into(), Value::to_string);
            format!("model.{name} is {} in the recipe and {} in the weights", of(&here), of(&there))
        })
        .collect();
    match said.is_empty() {
        true => Ok(resized(from, tensors, to.image_px()).1),
        false => Err(said.join("; ")),
    }
}

/// What of a backbone its weights depend on.
fn keys(model: &ModelConfig) -> Map<String, Value> {
    let mut keys = match serde_json::to_value(model) {
        Ok(Value::Object(keys)) => keys,
        _ => Map::new(),
    };
    keys.retain(|name, _| !FREE.contains(&name.as_str()));
    if let ModelConfig::Vit(config) = model {
        // Ratios that give the same hidden layer are the same.
        keys.insert("mlp_ratio".into(), (config.hidden() as f64 / config.width as f64).into());
        keys.insert("norm_epsilon".into(), rounding_aside(config).into());
        // It starts somewhere; where is of no matter for weights that have one.
        keys.remove("layer_scale");
        if config.layer_scale.is_some() {
            keys.insert("layer_scale".into(), "some".into());
        }
    }
    keys
}

/// What norms add to the variance: less than 1e-6 makes no difference.
fn rounding_aside(config: &VitConfig) -> f64 {
    if config.norm_epsilon <= 1e-6 { 1e-6 } else { config.norm_epsilon }
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
        assert!(fitted(&there, Vec::new(), &vit("image_px=16\nheads=2\ndrop_path=0.1")).is_ok());
        let error = fitted(&there, Vec::new(), &vit("image_px=16\nheads=3\nlayer_scale=0.1")).unwrap_err();
        assert!(error.contains("model.heads is 3 in the recipe and 2 in the weights"), "{error}");
        assert!(error.contains("model.layer_scale is \"some\" in the recipe and absent"), "{error}");
    }

    #[test]
    fn positions_are_resampled_for_the_recipes_images() {
        let there = vit("image_px=16\nheads=2");
        let embedding = NamedTensor {
            name: "pos_embed".into(),
            shape: vec![1, 17, 12],
            values: (0..17 * 12).map(|i| i as f32).collect(),
        };
        let found = fitted(&there, vec![embedding.clone()], &vit("image_px=8\nheads=2")).unwrap().remove(0);
        assert_eq!(found.shape, [1, 5, 12]);
        assert_eq!(found.values[..12], embedding.values[..12], "the class token's stays");
    }
}
