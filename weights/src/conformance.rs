//! Conformance of all backbones: files written for a library are read back unchanged.

use std::collections::BTreeSet;
use std::path::Path;

use networks::head::pixels::PixelDecoder;
use networks::{ClassHead, ModelConfig, NamedTensor, Origin, PixelHead, Positions, QkvBias, Size};
use prost::Message;

use crate::backbone::exchange_of;
use crate::file::{Array, Arrays, safetensors};
use crate::{
    Card, Export, ExportedClassifier, Format, HeadKind, Hints, Precision, Preprocessing, WeightsError,
    fitted, read, resized, rounded, write,
};

/// Returns parameters of `model` with distinct values.
fn tensors(model: &ModelConfig) -> Vec<NamedTensor> {
    let mut tensors = Vec::new();
    let mut number = 0;
    for (name, shape) in model.params() {
        let n: usize = shape.iter().product();
        let mut values = Vec::with_capacity(n);
        for _ in 0..n {
            number += 1;
            values.push(0.25 + f32::from((number % 8191) as u16) / 8192.0);
        }
        tensors.push(NamedTensor { name, shape, values });
    }
    tensors
}

/// Returns the export of `model` in f32, with its usual preprocessing.
fn f32_export<'a>(model: &'a ModelConfig, tensors: &'a [NamedTensor], card: &'a Card) -> Export<'a> {
    let normalization = networks::Normalization::half(model.n_channels());
    Export {
        model,
        tensors,
        classifier: None,
        decoder: None,
        preprocessing: Preprocessing::with_size(model.image_px() as u32, normalization),
        network_name: "network",
        precision: Precision::F32,
        card,
    }
}

/// Returns a path in `folder` for a file or folder in `format`.
fn export_path(folder: &Path, format: Format) -> std::path::PathBuf {
    folder.join(match format {
        Format::Safetensors => "a.safetensors",
        Format::Torchvision | Format::Dinov2 | Format::Dinov3 => "a.pth",
        Format::Timm | Format::Transformers => "folder",
        Format::Onnx => "a.onnx",
    })
}

#[test]
fn every_backbone_is_read_back_unchanged_in_every_format() {
    let card = Card::default();
    for model in ModelConfig::examples() {
        let px = model.image_px() as u32;
        let tensors = tensors(&model);
        let export = Export {
            preprocessing: Preprocessing::new(
                networks::Normalization::half(model.n_channels()).into(),
                augment::Transform { resize_px: px, size_px: px },
            ),
            ..f32_export(&model, &tensors, &card)
        };
        let mut n_formats = 0;
        for format in Format::ALL {
            let folder = tempfile::tempdir().unwrap();
            let path = export_path(folder.path(), format);
            // Whether a format can hold a network is known without its weights.
            let checked = crate::check(format, &model, &export.preprocessing, None);
            match write(&path, format, &export, false) {
                Ok(_) => {
                    assert!(checked.is_ok(), "{model:?} as {format:?}: {checked:?}");
                    n_formats += 1;
                }
                Err(WeightsError::Unsupported { reason, .. }) => {
                    assert!(
                        checked.is_err() || reason.contains("not implemented"),
                        "{model:?} as {format:?}: {reason}"
                    );
                    continue;
                }
                Err(error) => panic!("{model:?} as {format:?}: {error}"),
            }
            // Files of other libraries state no constants for numbers of channels other than three.
            let normalization = (model.n_channels() != networks::RGB_CHANNELS)
                .then(|| networks::Normalization::half(model.n_channels()));
            let hints = Hints { heads: Some(heads(&model)), normalization, ..Hints::default() };
            match read(&path, &hints) {
                Ok(pretrained) => check(&model, &tensors, format, pretrained),
                // Shapes do not determine the rule by which such a RegNet was designed.
                Err(WeightsError::Unknown { .. }) if has_custom_design(&model) => {}
                Err(error) => panic!("{model:?} as {format:?}: {error}"),
            }
        }
        assert!(n_formats >= 2, "{model:?} has no format but this program's own");
    }
}

/// Rows of the table of the classes of [`class_head`] in a card.
const CLASS_TABLE: &str = "| 0 | cat, kitten |\n| 1 | a \"dog\" \\| \\<b> |\n| 2 | größe \\`'\\*\\\\ |\n";

/// Returns a classifier of three classes on the features of `model`.
fn class_head(model: &ModelConfig) -> ClassHead {
    let mut weight = Vec::new();
    for number in 0..3 * model.width() {
        weight.push(0.5 + f32::from((number % 97) as u16) / 128.0);
    }
    let classes = ["cat, kitten", "a \"dog\" | <b>", "größe\n`'*\\"].map(String::from).to_vec();
    ClassHead { classes, weight, bias: vec![0.5, -0.25, 0.125], is_multi_label: false }
}

/// Returns the same of classes of which an image may have several.
fn multi_label_head(model: &ModelConfig) -> ClassHead {
    ClassHead { is_multi_label: true, ..class_head(model) }
}

/// Returns the name of the kind of `model` in recipes.
fn arch(model: &ModelConfig) -> String {
    let model = serde_json::to_value(model).unwrap();
    model["arch"].as_str().unwrap().to_string()
}

/// A classifier is written in every format that can hold it, and read back from those of Ocelli;
/// the others say how to leave it out.
#[test]
fn classifiers_are_written_with_their_networks() {
    let card = Card::default();
    // Formats that hold a network, but no classifier on it.
    let mut without_classifier = BTreeSet::new();
    let mut without_graph = BTreeSet::new();
    for model in ModelConfig::examples() {
        let tensors = tensors(&model);
        let head = class_head(&model);
        let classifier = Some(ExportedClassifier { head: &head, returns_probabilities: false });
        let export = Export { classifier, ..f32_export(&model, &tensors, &card) };
        for format in Format::ALL {
            let folder = tempfile::tempdir().unwrap();
            let path = export_path(folder.path(), format);
            let kind = Some(HeadKind::Classifier);
            let checked = crate::check(format, &model, &export.preprocessing, kind);
            let files = match write(&path, format, &export, false) {
                Ok(files) => files,
                Err(WeightsError::Unsupported { reason, .. }) if reason.contains("not implemented") => {
                    without_graph.insert(arch(&model));
                    continue;
                }
                Err(WeightsError::Unsupported { reason, .. }) => {
                    assert!(checked.is_err(), "{model:?} as {format:?}: {reason}");
                    // The classifier is the reason if the backbone alone can be written.
                    if crate::check(format, &model, &export.preprocessing, None).is_ok() {
                        let says_how = reason.contains("--backbone-only");
                        assert!(says_how, "{model:?} as {format:?}: {reason}");
                        without_classifier.insert(format!("{} as {}", arch(&model), format.name()));
                    }
                    continue;
                }
                Err(error) => panic!("{model:?} as {format:?}: {error}"),
            };
            assert!(checked.is_ok(), "{model:?} as {format:?}: {checked:?}");
            let text = std::fs::read_to_string(files.last().unwrap()).unwrap();
            assert!(text.contains("A classifier of 3 classes ("), "{text}");
            assert!(text.contains(CLASS_TABLE), "{text}");
            let normalization = Some(networks::Normalization::half(model.n_channels()));
            let hints = Hints { heads: Some(heads(&model)), normalization, ..Hints::default() };
            let is_own = matches!(format, Format::Safetensors | Format::Onnx);
            match read(&path, &hints) {
                Ok(pretrained) => {
                    assert_eq!(
                        pretrained.classifier,
                        is_own.then(|| head.clone()),
                        "{model:?} as {format:?}"
                    );
                    check(&model, &tensors, format, pretrained);
                }
                // Shapes do not determine the rule by which such a RegNet was designed.
                Err(WeightsError::Unknown { .. }) if has_custom_design(&model) && !is_own => {}
                Err(error) => panic!("{model:?} as {format:?}: {error}"),
            }
        }
    }
    let expected = ["vit as dinov2", "vit as dinov3", "vit as transformers"];
    assert!(without_classifier.iter().eq(expected), "{without_classifier:?}");
    assert!(without_graph.iter().eq(["toy"]), "{without_graph:?}");
}

/// The library has classifiers on all of its vision transformers but those with rotary positions.
#[test]
fn transformers_has_no_classifier_beside_rotary_positions() {
    for model in ModelConfig::examples() {
        let ModelConfig::Vit(config) = &model else { continue };
        if exchange_of(&model).transformers().is_err() {
            continue;
        }
        let has_classifier = exchange_of(&model).transformers_classifier().is_some();
        assert_eq!(has_classifier, config.positions != Positions::Rope, "{model:?}");
    }
}

/// A graph of a classifier has one output, and its last operation makes probabilities if they are
/// requested: a softmax, or sigmoids of several classes.
#[test]
fn graphs_of_classifiers_return_scores_alone() {
    let card = Card::default();
    let mut kinds = BTreeSet::new();
    for model in ModelConfig::examples() {
        let tensors = tensors(&model);
        let single = class_head(&model);
        let several = multi_label_head(&model);
        for (head, returns_probabilities, name, operation) in [
            (&single, false, "logits", None),
            (&single, true, "probabilities", Some("Softmax")),
            (&several, false, "logits", None),
            (&several, true, "probabilities", Some("Sigmoid")),
        ] {
            let classifier = Some(ExportedClassifier { head, returns_probabilities });
            let export = Export { classifier, ..f32_export(&model, &tensors, &card) };
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a.onnx");
            match write(&path, Format::Onnx, &export, false) {
                Ok(_) => {}
                Err(WeightsError::Unsupported { reason, .. }) if reason.contains("not implemented") => {
                    continue;
                }
                Err(error) => panic!("{model:?}: {error}"),
            }
            kinds.insert(arch(&model));
            let bytes = std::fs::read(&path).unwrap();
            let graph = crate::onnx::Model::decode(bytes.as_slice()).unwrap().graph.unwrap();
            let outputs: Vec<&str> = graph.output.iter().map(|output| output.name.as_str()).collect();
            assert_eq!(outputs, [name], "{model:?}");
            // The last node names the output.
            let last = graph.node[graph.node.len() - 2].op_type.as_str();
            let made = ["Softmax", "Sigmoid"].into_iter().find(|operation| *operation == last);
            assert_eq!(made, operation, "{last}: {model:?}");
            let classifier = read(&path, &Hints::default()).unwrap().classifier;
            assert_eq!(classifier.as_ref(), Some(head), "{model:?}");
        }
    }
    assert!(kinds.iter().eq(["convnext", "regnet_y", "resnet", "vit"]), "{kinds:?}");
}

/// Files of a classifier of several classes per image say so, to this program and to others, and
/// the programs of their cards print all likely classes.
#[test]
fn classifiers_of_several_classes_are_written_as_such() {
    let model = ModelConfig::examples().remove(0);
    let tensors = tensors(&model);
    let head = multi_label_head(&model);
    let card = Card::default();
    let classifier = Some(ExportedClassifier { head: &head, returns_probabilities: false });
    let export = Export { classifier, ..f32_export(&model, &tensors, &card) };
    let mut n_formats = 0;
    for format in Format::ALL {
        let folder = tempfile::tempdir().unwrap();
        let path = export_path(folder.path(), format);
        let files = match write(&path, format, &export, false) {
            Ok(files) => files,
            Err(WeightsError::Unsupported { .. }) => continue,
            Err(error) => panic!("{format:?}: {error}"),
        };
        let text = std::fs::read_to_string(files.last().unwrap()).unwrap();
        assert!(text.contains("one score before the sigmoid per class"), "{format:?}: {text}");
        assert!(text.contains("An image may have several of them, or none."), "{format:?}: {text}");
        let (_, rest) = text.split_once("```python\n").unwrap();
        let (program, _) = rest.split_once("```").unwrap();
        let prints_all = program.contains("if probability > 0.5:");
        let is_listed = program.contains("has no constructor of this network");
        assert!(prints_all || is_listed, "{format:?}: {program}");
        if matches!(format, Format::Safetensors | Format::Onnx) {
            let pretrained = read(&path, &Hints::default()).unwrap();
            assert_eq!(pretrained.classifier.as_ref(), Some(&head), "{format:?}");
        }
        if format == Format::Transformers {
            let config = std::fs::read_to_string(path.join("config.json")).unwrap();
            assert!(config.contains("\"problem_type\": \"multi_label_classification\""), "{config}");
        }
        n_formats += 1;
    }
    assert!(n_formats >= 3, "{n_formats} formats");
}

/// Returns decoders of three classes on the features of `model`: one of each kind.
fn pixel_heads(model: &ModelConfig) -> Vec<PixelHead> {
    let d = model.width();
    let class_head = class_head(model);
    let scores = NamedTensor { name: "decoder.scores.bias".into(), shape: vec![3], values: class_head.bias };
    let mut heads = Vec::new();
    for decoder in [PixelDecoder::Linear, PixelDecoder::Conv { width: d }] {
        let mut tensors = vec![scores.clone()];
        for (name, shape) in [
            ("decoder.scores.weight", vec![3, d]),
            ("decoder.hidden.conv.weight", vec![d, d, 3, 3]),
            ("decoder.hidden.norm.weight", vec![d]),
            ("decoder.hidden.norm.bias", vec![d]),
        ] {
            let n: usize = shape.iter().product();
            let values = (0..n).map(|number| 0.5 + f32::from((number % 89) as u16) / 128.0).collect();
            tensors.push(NamedTensor { name: name.into(), shape, values });
        }
        heads.push(PixelHead::from_tensors(class_head.classes.clone(), decoder, d, &tensors).unwrap());
    }
    heads
}

/// A decoder is written in the formats of Ocelli, with graphs for other programs, and read back;
/// formats of libraries say how to leave it out.
#[test]
fn decoders_are_written_with_their_networks() {
    let card = Card::default();
    let mut with_graph = BTreeSet::new();
    // Formats that hold a network, but no decoder on it.
    let mut without_decoder = BTreeSet::new();
    for model in ModelConfig::examples() {
        let tensors = tensors(&model);
        for head in pixel_heads(&model) {
            let export = Export { decoder: Some(&head), ..f32_export(&model, &tensors, &card) };
            for format in Format::ALL {
                let folder = tempfile::tempdir().unwrap();
                let path = export_path(folder.path(), format);
                let checked = crate::check(format, &model, &export.preprocessing, Some(HeadKind::Decoder));
                let files = match write(&path, format, &export, false) {
                    Ok(files) => files,
                    Err(WeightsError::Unsupported { reason, .. }) => {
                        if format == Format::Onnx {
                            assert!(reason.contains("not implemented"), "{model:?} as {format:?}: {reason}");
                            continue;
                        }
                        assert!(checked.is_err(), "{model:?} as {format:?}: {reason}");
                        // The decoder is the reason if the backbone alone can be written.
                        let alone = crate::check(format, &model, &export.preprocessing, None);
                        let says_how = reason.contains("--backbone-only");
                        assert_eq!(says_how, alone.is_ok(), "{model:?} as {format:?}: {reason}");
                        if says_how {
                            without_decoder.insert(format.name());
                        }
                        continue;
                    }
                    Err(error) => panic!("{model:?} as {format:?}: {error}"),
                };
                assert!(checked.is_ok(), "{model:?} as {format:?}: {checked:?}");
                assert!(matches!(format, Format::Safetensors | Format::Onnx), "{model:?} as {format:?}");
                if format == Format::Onnx {
                    with_graph.insert(arch(&model));
                }
                let text = std::fs::read_to_string(files.last().unwrap()).unwrap();
                assert!(text.contains("a decoder of pixels of 3 classes ("), "{text}");
                assert!(text.contains(CLASS_TABLE), "{text}");
                let pretrained = read(&path, &Hints::default()).unwrap();
                assert_eq!(pretrained.decoder.as_ref(), Some(&head), "{model:?} as {format:?}");
                check(&model, &tensors, format, pretrained);
            }
        }
    }
    assert!(with_graph.iter().eq(["convnext", "regnet_y", "resnet", "vit"]), "{with_graph:?}");
    let expected = ["dinov2", "dinov3", "timm", "torchvision", "transformers"];
    assert!(without_decoder.iter().copied().eq(expected), "{without_decoder:?}");
}

/// A mask has a byte for the class of a pixel, and 255 is none.
#[test]
fn decoders_of_more_classes_than_masks_have_are_refused() {
    let model = ModelConfig::examples().remove(0);
    let tensors = tensors(&model);
    let card = Card::default();
    for n_classes in [255, 256] {
        let classes: Vec<String> = (0..n_classes).map(|class| class.to_string()).collect();
        let head = PixelHead::zeros(classes, PixelDecoder::Linear, model.width());
        let export = Export { decoder: Some(&head), ..f32_export(&model, &tensors, &card) };
        let folder = tempfile::tempdir().unwrap();
        let path = export_path(folder.path(), Format::Safetensors);
        write(&path, Format::Safetensors, &export, false).unwrap();
        match read(&path, &Hints::default()) {
            Ok(pretrained) => assert_eq!((n_classes, pretrained.decoder.as_ref()), (255, Some(&head))),
            Err(WeightsError::Malformed { reason, .. }) => {
                assert_eq!(n_classes, 256);
                assert!(reason.contains("256 classes"), "{reason}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A graph of a decoder has one output: scores of every pixel.
#[test]
fn graphs_of_decoders_return_scores_of_pixels() {
    for model in ModelConfig::examples() {
        let tensors = tensors(&model);
        let card = Card::default();
        for head in pixel_heads(&model) {
            let export = Export { decoder: Some(&head), ..f32_export(&model, &tensors, &card) };
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a.onnx");
            match write(&path, Format::Onnx, &export, false) {
                Ok(_) => {}
                Err(WeightsError::Unsupported { .. }) => continue,
                Err(error) => panic!("{model:?}: {error}"),
            }
            let bytes = std::fs::read(&path).unwrap();
            let graph = crate::onnx::Model::decode(bytes.as_slice()).unwrap().graph.unwrap();
            let [output] = graph.output.as_slice() else { panic!("{:?}", graph.output) };
            assert_eq!(output.name, "logits");
            let shape = output.kind.as_ref().unwrap().tensor.as_ref().unwrap().shape.as_ref().unwrap();
            assert_eq!((shape.dim.len(), shape.dim[1].value), (4, Some(3)));
            // The last node names the output.
            assert_eq!(graph.node[graph.node.len() - 2].op_type, "Resize");
            let n_norms = graph
                .node
                .iter()
                .filter(|node| node.input.iter().any(|input| input.contains("decoder.hidden.norm")));
            assert_eq!(n_norms.count(), usize::from(head.decoder != PixelDecoder::Linear), "{model:?}");
        }
    }
}

/// Checks that `pretrained` is the network of `tensors`, except for differences in how `format`
/// stores them.
fn check(model: &ModelConfig, tensors: &[NamedTensor], format: Format, pretrained: crate::Pretrained) {
    // timm has no position for a class token if there are registers, and graphs have none: the
    // position is added to the token, and read as zeros.
    let has_registers = tensors.iter().any(|tensor| tensor.name == "reg_token");
    let merges_position = format == Format::Onnx || (format == Format::Timm && has_registers);
    // DINOv2 has a LayerScale in every network.
    let gains_scale = pretrained.tensors.len() > tensors.len();
    if !gains_scale {
        let result = fitted(&pretrained.model, pretrained.tensors.clone(), model, None);
        assert!(result.is_ok(), "{model:?} as {format:?}: {result:?}");
    }
    for written in tensors {
        let name = &written.name;
        let read = pretrained.tensors.iter().find(|tensor| tensor.name == *name);
        let read = read.unwrap_or_else(|| panic!("{model:?} as {format:?} lacks {name}"));
        assert_eq!(read.shape, written.shape, "{name} as {format:?}");
        let is_merged = merges_position && ["cls_token", "pos_embed"].contains(&name.as_str());
        assert!(
            is_merged || read.values == written.values || read.values == used_values(model, written),
            "{name} as {format:?}"
        );
    }
    for tensor in &pretrained.tensors {
        let is_written = tensors.iter().any(|written| written.name == tensor.name);
        let is_one = tensor.values.iter().all(|value| *value == 1.0);
        assert!(is_written || is_one, "{} as {format:?}", tensor.name);
    }
}

/// Returns the values of a parameter, with zeros for those that its network does not use: biases of
/// keys in a network without them.
fn used_values(model: &ModelConfig, tensor: &NamedTensor) -> Vec<f32> {
    let mut values = tensor.values.clone();
    let has_no_key_bias =
        matches!(model, ModelConfig::Vit(config) if config.qkv_bias == QkvBias::WithoutKeys);
    if has_no_key_bias && tensor.name.ends_with("attn.qkv.bias") {
        let d = values.len() / 3;
        values[d..2 * d].fill(0.0);
    }
    values
}

fn has_custom_design(model: &ModelConfig) -> bool {
    matches!(model, ModelConfig::RegnetY(config) if !matches!(config.size, Size::Named(_)))
}

/// Returns the number of attention heads of a transformer, which only configurations state.
fn heads(model: &ModelConfig) -> usize {
    match model {
        ModelConfig::Vit(config) => config.heads,
        _ => 1,
    }
}

#[test]
fn graphs_in_every_precision_are_read_as_rounded_parameters() {
    let card = Card::default();
    for model in ModelConfig::examples() {
        let tensors = tensors(&model);
        for precision in Precision::ALL {
            let export = Export { precision, ..f32_export(&model, &tensors, &card) };
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a.onnx");
            match write(&path, Format::Onnx, &export, false) {
                Ok(_) => {}
                Err(WeightsError::Unsupported { .. }) => continue,
                Err(error) => panic!("{model:?}: {error}"),
            }
            let pretrained = read(&path, &Hints::default()).unwrap();
            for tensor in &tensors {
                // Tokens and positions are stored together; keys may have no biases.
                let is_merged = ["cls_token", "reg_token", "pos_embed"].contains(&tensor.name.as_str());
                if is_merged || used_values(&model, tensor) != tensor.values {
                    continue;
                }
                let expected = rounded(&tensor.values, &tensor.shape, precision);
                let read = pretrained.tensors.iter().find(|read| read.name == tensor.name).unwrap();
                assert_eq!(read.values, expected, "{} of {model:?} in {precision:?}", tensor.name);
            }
        }
    }
}

/// Returns the origins of a network that began with a run that began with weights of timm.
fn origins() -> Vec<Origin> {
    let weights = Origin {
        name: "fir|st.pth".into(),
        step: None,
        library: "timm".into(),
        fingerprint: "00000000000000aa".into(),
        license: Some("apache-2.0".into()),
    };
    let run = Origin { name: "mine".into(), step: Some(7), library: "ocelli".into(), ..weights.clone() };
    vec![Origin { license: None, ..run }, weights]
}

/// The card of every export states what a network began with, and files with metadata state it to
/// the next program.
#[test]
fn origins_and_licenses_are_in_cards_and_files() {
    let model = ModelConfig::examples().remove(0);
    let tensors = tensors(&model);
    let card = Card { origins: origins(), ..Card::default() };
    let export = f32_export(&model, &tensors, &card);
    let normalization = Some(networks::Normalization::half(model.n_channels()));
    let hints = Hints { heads: Some(heads(&model)), normalization, ..Hints::default() };
    let mut n_formats = 0;
    for format in Format::ALL {
        let folder = tempfile::tempdir().unwrap();
        let path = export_path(folder.path(), format);
        let files = match write(&path, format, &export, false) {
            Ok(files) => files,
            Err(WeightsError::Unsupported { .. }) => continue,
            Err(error) => panic!("{format:?}: {error}"),
        };
        let text = std::fs::read_to_string(files.last().unwrap()).unwrap();
        let run = "| mine, step 7 | ocelli | 00000000000000aa | none stated |";
        assert!(text.contains(run), "{format:?}: {text}");
        let weights = "| fir\\|st.pth | timm | 00000000000000aa | apache-2.0 |";
        assert!(text.contains(weights), "{format:?}: {text}");
        let read = read(&path, &hints).unwrap();
        if path.extension().is_none_or(|extension| extension != "pth") {
            assert_eq!(read.began_with, origins(), "{format:?}");
            assert_eq!(read.license.as_deref(), Some("apache-2.0"), "{format:?}");
        }
        n_formats += 1;
    }
    assert!(n_formats >= 4, "{n_formats} formats");
}

/// A file of parameters by Ocelli's names has a program that loads it, as files for other libraries
/// have: with a constructor, except for networks that no library has.
#[test]
fn cards_of_files_have_a_program_in_python() {
    let card = Card::default();
    let mut n_built = 0;
    let mut n_listed = 0;
    for model in ModelConfig::examples() {
        let tensors = tensors(&model);
        let export = f32_export(&model, &tensors, &card);
        let folder = tempfile::tempdir().unwrap();
        let path = export_path(folder.path(), Format::Safetensors);
        let files = write(&path, Format::Safetensors, &export, false).unwrap();
        let text = std::fs::read_to_string(files.last().unwrap()).unwrap();
        let (_, rest) = text.split_once("```python\n").unwrap();
        let (program, rest) = rest.split_once("```").unwrap();
        assert!(program.contains("load_file(\"a.safetensors\")"), "{model:?}: {program}");
        assert!(rest.contains("ocelli embed --checkpoint \"a.safetensors\""), "{model:?}: {rest}");
        if program.contains("has no constructor of this network") {
            n_listed += 1;
        } else {
            assert!(program.contains("model.load_state_dict("), "{model:?}: {program}");
            n_built += 1;
        }
    }
    assert!(n_built >= 6 && n_listed >= 1, "{n_built} built, {n_listed} listed");
}

/// Licenses as timm and Hugging Face state them, beside the weights.
#[test]
fn licenses_are_read_from_the_folder_of_weights() {
    let model = ModelConfig::examples().remove(0);
    let tensors = tensors(&model);
    let card = Card::default();
    let export = f32_export(&model, &tensors, &card);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("timm");
    write(&path, Format::Timm, &export, false).unwrap();
    let hints = Hints { heads: Some(heads(&model)), ..Hints::default() };
    assert_eq!(read(&path, &hints).unwrap().license, None);
    let readme = path.join("README.md");
    std::fs::write(&readme, "---\nlicense: other\nlicense_name: dinov3-license\n---\n# A network\n").unwrap();
    assert_eq!(read(&path, &hints).unwrap().license.as_deref(), Some("dinov3-license"));
    let config = path.join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replacen('{', "{\n  \"license\": \"cc-by-nc-4.0\",", 1)).unwrap();
    // timm writes a license of its own choice: both are named.
    assert_eq!(read(&path, &hints).unwrap().license.as_deref(), Some("cc-by-nc-4.0, dinov3-license"));
    std::fs::remove_file(&readme).unwrap();
    assert_eq!(read(&path, &hints).unwrap().license.as_deref(), Some("cc-by-nc-4.0"));
}

/// The program of a card scales values of which a part of the bits is used, as the network's images
/// were scaled.
#[test]
fn programs_scale_the_bits_in_use() {
    let model = ModelConfig::examples().remove(0);
    let tensors = tensors(&model);
    let card = Card::default();
    let normalization = networks::Normalization::half(model.n_channels());
    let mut preprocessing = Preprocessing::with_size(model.image_px() as u32, normalization);
    preprocessing.pixels.depth = augment::Depth::Sixteen;
    for (bits_used, expected) in [(Some(14), true), (None, false)] {
        preprocessing.decoding.bits_used = bits_used;
        let export = Export { preprocessing: preprocessing.clone(), ..f32_export(&model, &tensors, &card) };
        let folder = tempfile::tempdir().unwrap();
        let files = write(&folder.path().join("timm"), Format::Timm, &export, false).unwrap();
        let text = std::fs::read_to_string(files.last().unwrap()).unwrap();
        assert_eq!(text.contains("pixels = pixels * (65535 / 16383)"), expected, "{text}");
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

/// Writes `arrays` to `path`; returns the reason for which they are not read as `model`.
fn refusal(path: &Path, model: &ModelConfig, arrays: &Arrays) -> String {
    let bytes = safetensors::encode(arrays, Precision::F32, Default::default()).unwrap();
    std::fs::write(path, bytes).unwrap();
    match read(path, &Hints { heads: Some(heads(model)), ..Hints::default() }) {
        Err(WeightsError::Malformed { reason, .. } | WeightsError::Unknown { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn files_with_wrong_shapes_or_duplicate_tensors_are_rejected() {
    let model = ModelConfig::examples().remove(0);
    let tensors = tensors(&model);
    let card = Card::default();
    let export = f32_export(&model, &tensors, &card);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    write(&path, Format::Timm, &export, false).unwrap();
    let (arrays, _) = safetensors::read(&path).unwrap();
    let mut transposed = arrays.clone();
    transposed.get_mut("blocks.0.attn.qkv.weight").unwrap().shape.reverse();
    let reason = refusal(&path, &model, &transposed);
    assert!(reason.contains("blocks.0.attn.qkv.weight"), "{reason}");
    let mut duplicate = arrays.clone();
    duplicate.insert("blocks.0.0.norm1.weight".into(), arrays["blocks.0.norm1.weight"].clone());
    let reason = refusal(&path, &model, &duplicate);
    assert!(reason.contains("blocks.0.norm1.weight"), "{reason}");
    // Nothing of this size is allocated.
    let mut absurd = arrays.clone();
    absurd.insert("reg_token".into(), Array { shape: vec![1, 1 << 40, 0], values: Vec::new() });
    let reason = refusal(&path, &model, &absurd);
    assert!(reason.contains("model.registers"), "{reason}");
}

/// Returns whether a network may lack the tensor `name`, or a file may have it beside the network.
fn is_optional(name: &str) -> bool {
    let optional =
        ["mask_token", "reg_token", "register_tokens", "storage_tokens", "rope_embed.periods", "bias_mask"];
    optional.iter().any(|part| name.ends_with(part))
}

/// A transformer's file that lacks a tensor is refused, and is not taken for another network: one
/// without a class token, with fewer blocks or with fewer biases.
#[test]
fn files_that_lack_a_tensor_are_refused() {
    let card = Card::default();
    let formats = [Format::Timm, Format::Torchvision, Format::Dinov2, Format::Dinov3, Format::Transformers];
    let mut without_class_token = Vec::new();
    for model in ModelConfig::examples() {
        if !matches!(model, ModelConfig::Vit(_)) {
            continue;
        }
        let tensors = tensors(&model);
        let export = f32_export(&model, &tensors, &card);
        let normalization = Some(networks::Normalization::half(model.n_channels()));
        let hints = Hints { heads: Some(heads(&model)), normalization, ..Hints::default() };
        for format in formats {
            let folder = tempfile::tempdir().unwrap();
            let is_folder = matches!(format, Format::Timm | Format::Transformers);
            let path = folder.path().join(if is_folder { "folder" } else { "a.safetensors" });
            match write(&path, format, &export, false) {
                Ok(_) => {}
                Err(WeightsError::Unsupported { .. }) => continue,
                Err(error) => panic!("{model:?} as {format:?}: {error}"),
            }
            let file = if is_folder { path.join("model.safetensors") } else { path.clone() };
            let (arrays, metadata) = safetensors::read(&file).unwrap();
            let whole = read(&path, &hints);
            assert!(whole.is_ok(), "{model:?} as {format:?}: {whole:?}");
            for name in arrays.keys().filter(|name| !is_optional(name)) {
                let mut others = arrays.clone();
                others.remove(name);
                let bytes = safetensors::encode(&others, Precision::F32, metadata.clone()).unwrap();
                std::fs::write(&file, bytes).unwrap();
                let result = read(&path, &hints);
                assert!(
                    matches!(result, Err(WeightsError::Unknown { .. })),
                    "{model:?} as {format:?} without {name}: {result:?}"
                );
                if name.ends_with("cls_token") || name == "class_token" {
                    without_class_token.push(format);
                }
            }
        }
    }
    for format in formats {
        assert!(without_class_token.contains(&format), "{format:?}: no file without a class token");
    }
}
