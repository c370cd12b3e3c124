//! Conformance of all backbones: what is written for a library is read again as it was.

use std::path::Path;

use networks::{ModelConfig, NamedTensor, QkvBias, Size};

use crate::backbone::exchange_of;
use crate::file::{Array, Arrays, safetensors};
use crate::{
    Card, Export, Format, Hints, Precision, Preprocessing, WeightsError, fitted, read, resized, rounded,
    write,
};

/// Parameters of `model` with values that all differ.
fn tensors(model: &ModelConfig) -> Vec<NamedTensor> {
    let mut next = 0;
    let mut value = || {
        next += 1;
        0.25 + f32::from((next % 8191) as u16) / 8192.0
    };
    let params = model.params().into_iter();
    params
        .map(|(name, shape)| {
            let values = (0..shape.iter().product()).map(|_| value()).collect();
            NamedTensor { name, shape, values }
        })
        .collect()
}

/// Path in `folder` for `format`.
fn place(folder: &Path, format: Format) -> std::path::PathBuf {
    folder.join(match format {
        Format::Safetensors => "a.safetensors",
        Format::Torchvision | Format::Dinov2 | Format::Dinov3 => "a.pth",
        Format::Timm | Format::Transformers => "folder",
        Format::Onnx => "a.onnx",
    })
}

#[test]
fn every_backbone_is_read_as_it_was_written() {
    let card = Card::default();
    for model in ModelConfig::examples() {
        let px = model.image_px() as u32;
        let tensors = tensors(&model);
        let export = Export {
            model: &model,
            tensors: &tensors,
            preprocessing: Preprocessing::new(
                networks::Normalization::half(model.n_channels()).into(),
                augment::Transform { resize_px: px, size_px: px },
            ),
            which: "network",
            precision: Precision::F32,
            card: &card,
        };
        let mut n_formats = 0;
        for format in Format::ALL {
            let folder = tempfile::tempdir().unwrap();
            let path = place(folder.path(), format);
            match write(&path, format, &export, false) {
                Ok(_) => n_formats += 1,
                Err(WeightsError::Unsupported { .. }) => continue,
                Err(error) => panic!("{model:?} as {format:?}: {error}"),
            }
            // Files of other libraries do not state the constants of other channels than three.
            let normalization = (model.n_channels() != networks::RGB_CHANNELS)
                .then(|| networks::Normalization::half(model.n_channels()));
            let hints = Hints { heads: Some(heads(&model)), normalization, ..Hints::default() };
            match read(&path, &hints) {
                Ok(again) => check(&model, &tensors, format, again),
                // Shapes do not determine the rule by which such a RegNet was designed.
                Err(WeightsError::Unknown { .. }) if is_designed(&model) => {}
                Err(error) => panic!("{model:?} as {format:?}: {error}"),
            }
        }
        assert!(n_formats >= 2, "{model:?} has no format but this program's own");
    }
}

/// Checks that `again` is the network of `tensors`, but for what `format` stores in another way.
fn check(model: &ModelConfig, tensors: &[NamedTensor], format: Format, again: crate::Pretrained) {
    // timm has no position for a class token beside registers, and graphs have none: it is in the
    // token, and read as zeros.
    let has_registers = tensors.iter().any(|tensor| tensor.name == "reg_token");
    let is_merged = format == Format::Onnx || (format == Format::Timm && has_registers);
    // DINOv2 has a LayerScale in every network.
    let gains_scale = again.tensors.len() > tensors.len();
    if !gains_scale {
        let there = fitted(&again.model, again.tensors.clone(), model, None);
        assert!(there.is_ok(), "{model:?} as {format:?}: {there:?}");
    }
    for ours in tensors {
        let theirs = again.tensors.iter().find(|tensor| tensor.name == ours.name);
        let theirs = theirs.unwrap_or_else(|| panic!("{model:?} as {format:?} lacks {}", ours.name));
        assert_eq!(theirs.shape, ours.shape, "{} as {format:?}", ours.name);
        let ours_read = as_read(model, ours);
        let is_moved = is_merged && ["cls_token", "pos_embed"].contains(&ours.name.as_str());
        assert!(
            is_moved || theirs.values == ours.values || theirs.values == ours_read,
            "{} as {format:?}",
            ours.name
        );
    }
    for added in again.tensors.iter().filter(|added| tensors.iter().all(|ours| ours.name != added.name)) {
        assert!(added.values.iter().all(|value| *value == 1.0), "{} as {format:?}", added.name);
    }
}

/// Values of a parameter without those that its network does not use: biases of keys, where there
/// are none.
fn as_read(model: &ModelConfig, tensor: &NamedTensor) -> Vec<f32> {
    let mut values = tensor.values.clone();
    let has_no_key_bias =
        matches!(model, ModelConfig::Vit(config) if config.qkv_bias == QkvBias::WithoutKeys);
    if has_no_key_bias && tensor.name.ends_with("attn.qkv.bias") {
        let d = values.len() / 3;
        values[d..2 * d].fill(0.0);
    }
    values
}

fn is_designed(model: &ModelConfig) -> bool {
    matches!(model, ModelConfig::RegnetY(config) if !matches!(config.size, Size::Named(_)))
}

/// Attention heads of a transformer, which no file but a configuration states.
fn heads(model: &ModelConfig) -> usize {
    match model {
        ModelConfig::Vit(config) => config.heads,
        _ => 1,
    }
}

/// The parameters of a graph are those that its precision holds, 8 bits and their scales among
/// them.
#[test]
fn graphs_of_all_precisions_are_read_as_they_were_rounded() {
    let card = Card::default();
    for model in ModelConfig::examples() {
        let tensors = tensors(&model);
        for precision in Precision::ALL {
            let preprocessing = Preprocessing::of_size(
                model.image_px() as u32,
                networks::Normalization::half(model.n_channels()),
            );
            let which = "network";
            let card = &card;
            let export = Export { model: &model, tensors: &tensors, preprocessing, which, precision, card };
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a.onnx");
            match write(&path, Format::Onnx, &export, false) {
                Ok(_) => {}
                Err(WeightsError::Unsupported { .. }) => continue,
                Err(error) => panic!("{model:?}: {error}"),
            }
            let again = read(&path, &Hints::default()).unwrap();
            let kept = tensors.iter().filter(|tensor| {
                // Tokens and positions are stored together; keys may have no biases.
                let is_merged = ["cls_token", "reg_token", "pos_embed"].contains(&tensor.name.as_str());
                !is_merged && as_read(&model, tensor) == tensor.values
            });
            for tensor in kept {
                let wanted = rounded(&tensor.values, &tensor.shape, precision);
                let values = &again.tensors.iter().find(|there| there.name == tensor.name).unwrap().values;
                assert_eq!(values, &wanted, "{} of {model:?} in {precision:?}", tensor.name);
            }
        }
    }
}

#[test]
fn resized_parameters_have_the_shapes_of_the_resized_network() {
    for model in ModelConfig::examples() {
        let px = 2 * model.image_px();
        let (adapted, tensors) = resized(&model, tensors(&model), px);
        let shapes: Vec<_> = tensors.into_iter().map(|tensor| (tensor.name, tensor.shape)).collect();
        assert_eq!(shapes, adapted.params(), "{adapted:?}");
        assert!(!exchange_of(&adapted).pooling().is_empty());
    }
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let model = ModelConfig::examples().remove(0);
    let tensors = tensors(&model);
    let card = Card::default();
    let export = Export {
        model: &model,
        tensors: &tensors,
        preprocessing: Preprocessing::of_size(
            model.image_px() as u32,
            networks::Normalization::half(model.n_channels()),
        ),
        which: "network",
        precision: Precision::F32,
        card: &card,
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    write(&path, Format::Timm, &export, false).unwrap();
    let (arrays, _) = safetensors::read(&path).unwrap();
    let refused = |change: &dyn Fn(&mut Arrays)| {
        let mut changed = arrays.clone();
        change(&mut changed);
        let bytes = safetensors::bytes_of(&changed, Precision::F32, Default::default()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        read(&path, &Hints { heads: Some(heads(&model)), ..Hints::default() }).unwrap_err().to_string()
    };
    let transposed = refused(&|arrays| arrays.get_mut("blocks.0.attn.qkv.weight").unwrap().shape.reverse());
    assert!(transposed.contains("blocks.0.attn.qkv.weight"), "{transposed}");
    let twice = refused(&|arrays| {
        let norm = arrays["blocks.0.norm1.weight"].clone();
        arrays.insert("blocks.0.0.norm1.weight".into(), norm);
    });
    assert!(twice.contains("blocks.0.norm1.weight"), "{twice}");
    // Nothing of this size is allocated.
    let empty = |n: usize| Array { shape: vec![1, n, 0], values: Vec::new() };
    let absurd = refused(&|arrays| drop(arrays.insert("reg_token".into(), empty(1 << 40))));
    assert!(absurd.contains("model.registers"), "{absurd}");
}
