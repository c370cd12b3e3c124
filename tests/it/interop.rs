//! Weights from and for other libraries, checked with these libraries
//! (`tests/interop/libraries.py`).
//!
//! `OCELLI_PYTHON` names the Python that has them; tests of missing libraries are skipped with a
//! message.

use std::path::Path;
use std::process::Command;

use networks::ModelConfig;
use networks::NamedTensor;
use networks::Normalization;
use networks::head::pixels::PixelDecoder;
use serde_json::Value;
use weights::{Card, Export, Format, Hints, Precision, Preprocessing};

use crate::bands::npy_u16;
use crate::finetune::{finetune_on, prepare};
use crate::libraries::{Bench, python, random_parameters, script};
use crate::python::Module;
use crate::support::{fails, ok, program};

/// Small networks of every kind: name and configuration.
const MODELS: [(&str, &str); 12] = [
    ("vit", "arch='vit'\nimage_px=32\npatch_px=8\nwidth=64\ndepth=2\nheads=2"),
    (
        "registers",
        "arch='vit'\nimage_px=32\npatch_px=8\nwidth=64\ndepth=2\nheads=2\nlayer_scale=0.1\nregisters=3",
    ),
    (
        "gated",
        "arch='vit'\nimage_px=32\npatch_px=8\nwidth=64\ndepth=2\nheads=2\nmlp='swiglu'\nlayer_scale=0.1",
    ),
    (
        "rotary",
        "arch='vit'\nimage_px=32\npatch_px=8\nwidth=64\ndepth=2\nheads=2\nlayer_scale=0.1\nregisters=2\npositions='rope'\n\
         qkv_bias='without_keys'\nnorm_epsilon=1e-5",
    ),
    (
        "rotary-gated",
        "arch='vit'\nimage_px=32\npatch_px=8\nwidth=64\ndepth=2\nheads=2\nlayer_scale=0.1\nregisters=2\npositions='rope'\n\
         qkv_bias='none'\nnorm_epsilon=1e-5\nmlp='swiglu'\nmlp_multiple=64",
    ),
    ("resnet", "arch='resnet'\nimage_px=32\ndepth=18\nwidth=64"),
    ("small-stem", "arch='resnet'\nimage_px=32\ndepth=14\nwidth=16\nstem='small'"),
    ("small-stem-wide", "arch='resnet'\nimage_px=32\ndepth=18\nwidth=64\nstem='small'"),
    ("regnet", "arch='regnet_y'\nimage_px=32\nsize='200mf'"),
    ("regnet-800", "arch='regnet_y'\nimage_px=32\nsize='800mf'"),
    ("convnext", "arch='convnext'\nimage_px=32\ndepths=[1,1,2,1]\nwidth=16\nlayer_scale=0.5"),
    (
        "convnext-fine",
        "arch='convnext'\nimage_px=32\ndepths=[1,1,2,1]\nwidth=16\nlayer_scale=0.5\npatch_px=1",
    ),
];

/// Every kind of backbone as an ONNX graph, in every precision, with several batch sizes.
#[test]
fn graphs_run_in_onnxruntime() {
    let Some(python) = python("onnxruntime, numpy") else { return };
    let bench = Bench::new(python);
    let images = bench.text("images");
    for (name, model) in MODELS {
        let weights = bench.network(name, model);
        let features = bench.embed(&weights, name, &[]);
        for (precision, tolerance) in [("f32", "1e-4"), ("f16", "1e-2"), ("bf16", "5e-2"), ("int8", "2e-1")] {
            let out = format!("{name}-{precision}.onnx");
            let out = bench.export(&weights, &out, &["--precision", precision]);
            bench.script(&["onnx", &out, &features, &images, tolerance]);
            let again = bench.embed(&out, &format!("{name}-{precision}"), &[]);
            // onnxruntime may compute products of 8-bit weights in 8 bits.
            let tolerance = if precision == "int8" { "2e-2" } else { "2e-5" };
            bench.script(&["onnx", &out, &again, &images, tolerance]);
        }
    }
}

/// The unchanged program in the card of every export computes the same feature as `ocelli embed`.
#[test]
fn programs_of_cards_run() {
    let Some(python) = python("torch, torchvision, timm, transformers, onnxruntime, PIL") else { return };
    let bench = Bench::new(python);
    bench.copy_photo();
    let n_run = bench.run_cards(&MODELS, "one");
    // Eleven of them are those of Ocelli's own files.
    assert!(n_run >= 51, "{n_run} programs");
}

/// The same of transformers whose positions are resampled, in libraries that do it in the same way.
#[test]
fn programs_of_cards_resample_positions() {
    let Some(python) = python("torch, torchvision, timm, transformers, onnxruntime, PIL") else { return };
    let bench = Bench::new(python);
    bench.copy_photo();
    let sizes = "arch='vit'\nimage_px=48\npatch_px=8\nwidth=64\ndepth=2\nheads=2";
    let antialiased = format!("{sizes}\npos_antialias=true");
    let with_registers = format!("{antialiased}\nlayer_scale=0.1\nregisters=3");
    // In transformers and onnxruntime, and here and below in DINOv2's code if it is installed.
    assert!(bench.run_cards(&[("plain", sizes)], "one") >= 2);
    // In timm by three files, and in onnxruntime.
    assert!(bench.run_cards(&[("antialiased", &antialiased)], "one") >= 4);
    // In all three.
    assert!(bench.run_cards(&[("with-registers", &with_registers)], "one") >= 5);
}

/// Small networks of every kind for images of 1, 4, 5 and 13 channels.
const MULTIBAND_MODELS: [(&str, &str); 5] = [
    ("vit-13", "arch='vit'\nimage_px=32\npatch_px=8\nwidth=64\ndepth=2\nheads=2\nchannels=13"),
    (
        "rotary-13",
        "arch='vit'\nimage_px=32\npatch_px=8\nwidth=64\ndepth=2\nheads=2\nlayer_scale=0.1\nregisters=2\npositions='rope'\n\
         qkv_bias='without_keys'\nnorm_epsilon=1e-5\nchannels=13",
    ),
    ("resnet-1", "arch='resnet'\nimage_px=32\ndepth=18\nwidth=64\nchannels=1"),
    ("regnet-4", "arch='regnet_y'\nimage_px=32\nsize='200mf'\nchannels=4"),
    ("convnext-5", "arch='convnext'\nimage_px=32\ndepths=[1,1,2,1]\nwidth=16\nlayer_scale=0.5\nchannels=5"),
];

/// The same for images of 16 bits whose number of channels is not three.
#[test]
fn programs_of_cards_run_on_bands() {
    let Some(python) = python("torch, torchvision, timm, transformers, onnxruntime, PIL") else { return };
    let bench = Bench::new(python);
    let mut n_run = 0;
    for network @ (name, model) in MULTIBAND_MODELS {
        let channels = toml::from_str::<ModelConfig>(model).unwrap().n_channels();
        let mut values: Vec<u16> = Vec::new();
        for i in 0..channels * 40 * 36 {
            let wave = (i as f32 * 0.37).sin() * (i as f32 * 0.0013).cos();
            values.push((32_000.0 + 30_000.0 * wave) as u16);
        }
        let image = npy_u16([channels, 40, 36], &values);
        std::fs::create_dir(bench.text(name)).unwrap();
        std::fs::write(bench.text(&format!("{name}/image.npy")), &image).unwrap();
        std::fs::write(bench.text("image.npy"), &image).unwrap();
        n_run += bench.run_cards(&[network], name);
    }
    assert!(n_run >= 19, "{n_run} programs");
}

/// Returns the names and the numbers of values of tensors.
fn names_and_sizes(tensors: &[NamedTensor]) -> Vec<(String, usize)> {
    tensors.iter().map(|tensor| (tensor.name.clone(), tensor.values.len())).collect()
}

/// Exports in every format that supports the network can be read again.
#[test]
fn exports_are_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let card = Card::default();
    for (name, model) in MODELS {
        let model: ModelConfig = toml::from_str(model).unwrap();
        let tensors = random_parameters(&model);
        let preprocessing =
            Preprocessing::with_size(32, Normalization { mean: vec![0.5; 3], std: vec![0.25; 3] });
        let export = Export {
            model: &model,
            tensors: &tensors,
            classifier: None,
            decoder: None,
            preprocessing: preprocessing.clone(),
            network_name: "student",
            precision: Precision::F32,
            card: &card,
        };
        let mut n_read = 0;
        for (format, extension) in [
            (Format::Safetensors, ".safetensors"),
            (Format::Timm, ""),
            (Format::Transformers, ""),
            (Format::Torchvision, ".pth"),
            (Format::Dinov2, ".pth"),
            (Format::Dinov3, ".pth"),
        ] {
            let path = folder.path().join(format!("{name}-{}{extension}", format.name()));
            match weights::write(&path, format, &export, false) {
                Ok(_) => {}
                Err(weights::WeightsError::Unsupported { .. }) => continue,
                Err(error) => panic!("{name} as {}: {error}", format.name()),
            }
            let imported = weights::read(&path, &Hints { heads: Some(2), ..Hints::default() }).unwrap();
            // There may be more: a LayerScale of one is written if the format requires one.
            let imported_tensors = names_and_sizes(&imported.tensors);
            for tensor in names_and_sizes(&tensors) {
                assert!(imported_tensors.contains(&tensor), "{} in {}", tensor.0, path.display());
            }
            if extension != ".pth" {
                assert_eq!(imported.preprocessing.pixels, preprocessing.pixels, "{}", path.display());
                assert_eq!(imported.preprocessing.transform.size_px, 32);
            }
            assert!(weights::write(&path, format, &export, false).is_err(), "overwritten without the flag");
            n_read += 1;
        }
        assert!(n_read >= 2, "{name} was read {n_read} times");
    }
}

/// Random networks of timm, torchvision, transformers, DINO and DINOv2 have the same features in
/// Ocelli, and Ocelli's networks have the same features in these libraries.
#[test]
fn libraries_give_the_same_features() {
    let Some(python) = python("torch, torchvision, timm, transformers, safetensors") else { return };
    let bench = Bench::new(python);
    let folder = bench.text("");
    bench.script(&["make", &folder]);
    let networks: Value =
        serde_json::from_str(&std::fs::read_to_string(bench.text("said.json")).unwrap()).unwrap();
    let networks = networks.as_object().unwrap();
    assert!(networks.len() >= 20, "{} networks", networks.len());
    // Each entry has the weights file and the flags for `ocelli embed`.
    for (name, entry) in networks {
        let flags = entry[1].as_array().unwrap();
        let flags: Vec<&str> = flags.iter().map(|flag| flag.as_str().unwrap()).collect();
        let ours = bench.embed(entry[0].as_str().unwrap(), &format!("ours-{name}"), &flags);
        bench.script(&["compare", name, &ours, &bench.text(&format!("{name}.npy"))]);
    }
    let images = bench.text("images");
    for (name, model) in MODELS {
        let weights = bench.network(name, model);
        let features = bench.embed(&weights, name, &[]);
        for format in ["timm", "transformers"] {
            let refusal = match (name, format) {
                ("small-stem" | "small-stem-wide", _) => Some("3×3 stem"),
                ("convnext-fine", "transformers") => Some("patches of 4 px"),
                _ => None,
            };
            if let Some(refusal) = refusal {
                let out = bench.text("refused");
                let args = ["export", "--checkpoint", &weights, "--out", &out, "--format", format];
                let refused = fails(&program().args(args).output().unwrap(), 2);
                assert!(refused.contains(refusal), "{refused}");
                continue;
            }
            let out = bench.export(&weights, &format!("{name}-{format}"), &["--format", format]);
            bench.script(&["check", format, &out, &features, &images]);
        }
    }
    // A network for larger images, exported for smaller ones.
    let larger = bench.network("larger", &MODELS[0].1.replace("image_px=32", "image_px=48"));
    let features = bench.embed(&larger, "larger", &[]);
    let out = bench.export(&larger, "smaller", &["--format", "timm", "--image-px", "32"]);
    bench.script(&["check", "timm", &out, &features, &images]);
}

/// Exported classifiers have the same scores and classes in these libraries as their heads on the
/// features of `ocelli embed`.
#[test]
fn libraries_give_the_same_scores() {
    let Some(python) = python("torch, torchvision, timm, transformers, onnxruntime") else { return };
    let bench = Bench::new(python);
    let images = bench.text("images");
    let exports: [(&str, &str, &[&str]); 4] = [
        ("timm", "", &[]),
        ("transformers", "", &[]),
        ("onnx", ".onnx", &[]),
        ("onnx", "-softmax.onnx", &["--softmax"]),
    ];
    let mut n_checked = 0;
    for (name, model) in MODELS {
        let weights = bench.classifier(name, model);
        let features = bench.embed(&weights, name, &[]);
        let scores = bench.scores(&weights, &features);
        for (format, extension, more) in exports {
            let out = bench.text(&format!("{name}-{format}{extension}"));
            let args = ["export", "--checkpoint", &weights, "--out", &out, "--format", format];
            let output = program().args(args).args(more).output().unwrap();
            let is_small_stem = name.starts_with("small-stem") && format != "onnx";
            let is_of_dinov3 = name.starts_with("rotary") || name.starts_with("convnext");
            if is_small_stem || (is_of_dinov3 && format == "transformers") {
                fails(&output, 2);
                continue;
            }
            ok(&output);
            bench.script(&["classify", format, &out, &scores, &weights, &images]);
            n_checked += 1;
        }
    }
    assert_eq!(n_checked, 40);
}

/// A classifier that was trained predicts the same classes, with the same probabilities, in
/// transformers and in onnxruntime.
#[test]
fn trained_classifiers_predict_the_same() {
    let Some(python) = python("torch, transformers, onnxruntime, PIL") else { return };
    let world = prepare();
    let sets = ["sets/train", "sets/val"];
    ok(&finetune_on(&world, "alone.toml", sets, "run", &[]));
    let run = world.text("run");
    let folder = world.text("folder");
    let graph = world.text("graph.onnx");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &folder, "--format", "transformers"]));
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &graph, "--probabilities"]));
    let evaluations = world.text("run/evaluations.jsonl");
    script(&python, &["predict", &folder, &graph, &world.text("sets/val"), &evaluations]);
}

/// Graphs that label pixels give the scores of their decoders, and so do the programs of their
/// cards.
#[test]
fn decoders_run_in_onnxruntime() {
    let Some(python) = python("torch, onnxruntime, numpy, PIL") else { return };
    let bench = Bench::new(python);
    std::fs::copy(bench.text("images/0.png"), bench.text("photo.jpg")).unwrap();
    let images = bench.text("images");
    for (model_name, model) in MODELS {
        for (decoder_name, decoder) in
            [("linear", PixelDecoder::Linear), ("conv", PixelDecoder::Conv { width: 24 })]
        {
            let name = format!("{model_name}-{decoder_name}");
            let weights = bench.decoder(&name, model, decoder);
            let graph = bench.export(&weights, &format!("{name}.onnx"), &[]);
            let backbone = bench.export(&weights, &format!("{name}-backbone.onnx"), &["--backbone-only"]);
            let scores = bench.text("scores.npy");
            bench.script(&["decode", &graph, &backbone, &weights, &images, &scores]);
            let computed = bench.run_card(&format!("{name}.onnx.md"), "scores").unwrap();
            bench.script(&["compare", &name, &scores, &computed, "1e-3"]);
        }
    }
}

/// The unchanged program in the card of every exported classifier computes the same scores.
#[test]
fn programs_of_cards_classify() {
    let Some(python) = python("torch, torchvision, timm, transformers, onnxruntime, PIL") else { return };
    let bench = Bench::new(python);
    bench.copy_photo();
    let n_run = bench.run_classifier_cards(&MODELS, "one");
    assert!(n_run >= 40, "{n_run} programs");
}

/// Runs the unchanged program on the page about Python.
#[test]
fn the_page_about_python_runs() {
    let Some(python) = python("torch, timm, numpy, safetensors") else { return };
    let Some(module) = Module::new() else { return };
    let bench = Bench::new(python);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    std::fs::rename(bench.text("images"), bench.text("photos")).unwrap();
    let page = std::fs::read_to_string(root.join("docs/python.md")).unwrap();
    let code = page.split("```python\n").nth(1).unwrap().split("```").next().unwrap();
    let output = Command::new(&bench.python)
        .current_dir(bench.folder.path())
        .args([
            "-c",
            &format!("{code}\nassert features.shape == (5, 128), features.shape\nassert len(table) == 1\n"),
        ])
        .env("PYTHONPATH", module.folder.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
