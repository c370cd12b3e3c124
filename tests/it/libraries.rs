//! Python libraries on the same networks and images (`tests/interop/libraries.py`).

use std::path::{Path, PathBuf};
use std::process::Command;

use augment::Depth;
use burn_tensor::Device;
use networks::head::pixels::PixelDecoder;
use networks::{ClassHead, ModelConfig, NamedTensor, Network, Normalization, PixelHead, Pixels};
use tempfile::TempDir;
use weights::{Card, Export, ExportedClassifier, Format, Precision, Preprocessing};

use crate::support::{left_out, ok, program};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/interop/libraries.py");

/// Returns `true` if `python` can import `modules`.
fn can_import(python: &Path, modules: &str) -> bool {
    let output = Command::new(python).args(["-c", &format!("import {modules}")]).output();
    output.is_ok_and(|output| output.status.success())
}

/// Returns the Python if it has `modules`; otherwise prints that the test is skipped.
pub(crate) fn python(modules: &str) -> Option<PathBuf> {
    let python = std::env::var_os("OCELLI_PYTHON").map_or_else(|| PathBuf::from("python3"), PathBuf::from);
    if !can_import(&python, modules) {
        left_out(&format!("{} cannot import {modules} (OCELLI_PYTHON)", python.display()));
        return None;
    }
    Some(python)
}

/// Runs the script, and asserts that it succeeds.
pub(crate) fn script(python: &Path, args: &[&str]) {
    let output = Command::new(python).arg(SCRIPT).args(args).output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}\n{out}\n{err}");
}

/// A folder with images and exported networks.
pub(crate) struct Bench {
    pub(crate) folder: TempDir,
    pub(crate) python: PathBuf,
}

impl Bench {
    pub(crate) fn new(python: PathBuf) -> Self {
        let bench = Self { folder: tempfile::tempdir().unwrap(), python };
        script(&bench.python, &["images", &bench.text("images")]);
        bench
    }

    /// Copies the first image to the folder `one`, and to `photo.jpg`, which programs of model
    /// cards read.
    pub(crate) fn copy_photo(&self) {
        std::fs::create_dir(self.text("one")).unwrap();
        for copy in ["one/0.png", "photo.jpg"] {
            std::fs::copy(self.text("images/0.png"), self.text(copy)).unwrap();
        }
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Exports a random network of `model`, in which no parameter is constantly zero or one;
    /// returns the path.
    pub(crate) fn network(&self, name: &str, model: &str) -> String {
        self.export_random(name, &toml::from_str(model).unwrap(), None, None)
    }

    /// The same with a random classifier of three classes.
    pub(crate) fn classifier(&self, name: &str, model: &str) -> String {
        let model: ModelConfig = toml::from_str(model).unwrap();
        let mut state = 2u64;
        let mut weight = Vec::new();
        for _ in 0..3 * model.width() {
            weight.push(next_uniform(&mut state));
        }
        let classes = ["cat, kitten", "a \"dog\" | <b>", "größe\n`'*\\"].map(String::from).to_vec();
        let head = ClassHead { classes, weight, bias: vec![0.5, -0.25, 0.125], is_multi_label: false };
        self.export_random(name, &model, Some(&head), None)
    }

    /// The same with a random decoder of pixels of three classes.
    pub(crate) fn decoder(&self, name: &str, model: &str, decoder: PixelDecoder) -> String {
        let model: ModelConfig = toml::from_str(model).unwrap();
        let d = model.width();
        let hidden = match decoder {
            PixelDecoder::Linear => d,
            PixelDecoder::Conv { width } => width,
        };
        let mut state = 3u64;
        let mut tensors = Vec::new();
        for (name, shape) in [
            ("decoder.hidden.conv.weight", vec![hidden, d, 3, 3]),
            ("decoder.hidden.norm.weight", vec![hidden]),
            ("decoder.hidden.norm.bias", vec![hidden]),
            ("decoder.scores.weight", vec![3, hidden]),
            ("decoder.scores.bias", vec![3]),
        ] {
            let mut values = Vec::new();
            for _ in 0..shape.iter().product::<usize>() {
                values.push(next_uniform(&mut state));
            }
            tensors.push(NamedTensor { name: name.into(), shape, values });
        }
        let classes = ["sky", "a \"sea\"", "größe"].map(String::from).to_vec();
        let head = PixelHead::from_tensors(classes, decoder, d, &tensors).unwrap();
        self.export_random(name, &model, None, Some(&head))
    }

    /// Exports a random network of `model` with the classifier `head` or with `decoder`; returns
    /// the path.
    fn export_random(
        &self,
        name: &str,
        model: &ModelConfig,
        head: Option<&ClassHead>,
        decoder: Option<&PixelHead>,
    ) -> String {
        let tensors = random_parameters(model);
        let export = Export {
            model,
            tensors: &tensors,
            classifier: head.map(|head| ExportedClassifier { head, returns_probabilities: false }),
            decoder,
            preprocessing: Preprocessing::with_size(32, pixels(model)),
            network_name: "teacher",
            precision: Precision::F32,
            card: &Card::default(),
        };
        let path = self.text(&format!("{name}.safetensors"));
        weights::write(Path::new(&path), Format::Safetensors, &export, false).unwrap();
        path
    }

    /// Writes the features of the images to a file; returns its path.
    pub(crate) fn embed(&self, weights: &str, name: &str, more: &[&str]) -> String {
        let out = self.text(&format!("{name}.npy"));
        let images = self.text("images");
        let args = [
            "embed",
            "--checkpoint",
            weights,
            "--images",
            &images,
            "--image-px",
            "32",
            "--resize-px",
            "32",
            "--out",
            &out,
        ];
        ok(&program().args(args).args(more).output().unwrap());
        out
    }

    /// Writes the scores of the classifier in `weights`, a file of Ocelli, for `features`; returns
    /// the path.
    pub(crate) fn scores(&self, weights: &str, features: &str) -> String {
        let out = format!("{features}.scores.npy");
        self.script(&["scores", features, weights, &out]);
        out
    }

    /// Exports `weights` into the folder; returns the path.
    pub(crate) fn export(&self, weights: &str, out: &str, more: &[&str]) -> String {
        let out = self.text(out);
        ok(&program().args(["export", "--checkpoint", weights, "--out", &out]).args(more).output().unwrap());
        out
    }

    /// Runs the program in the model card `card`; returns the file with its variable `result`, or
    /// `None` if the library cannot build the network.
    pub(crate) fn run_card(&self, card: &str, result: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.text(card)).unwrap();
        let (_, rest) = text.split_once("```python\n").unwrap();
        let (code, _) = rest.split_once("```").unwrap();
        if code.contains("has no constructor of this network") {
            return None;
        }
        let out = self.text("feature.npy");
        let code = format!("{code}import numpy\nnumpy.save({out:?}, numpy.asarray({result}))\n");
        let output = Command::new(&self.python)
            .current_dir(self.folder.path())
            .args(["-c", &code])
            .env("HF_HUB_OFFLINE", "1")
            .output()
            .unwrap();
        assert!(output.status.success(), "{card}\n{code}\n{}", String::from_utf8_lossy(&output.stderr));
        Some(out)
    }

    /// Exports `models` for every library, runs the programs in their cards, and compares their
    /// feature of the image in the folder `images` with that of `ocelli embed`; returns the number
    /// of programs.
    pub(crate) fn run_cards(&self, models: &[(&str, &str)], images: &str) -> usize {
        let mut n_run = 0;
        for (name, model) in models {
            let weights = self.network(name, model);
            let expected = self.embed_as_stored(&weights, name, images);
            n_run += self.run_cards_of(name, &weights, &expected, "feature");
        }
        n_run
    }

    /// The same for classifiers, whose scores are compared.
    pub(crate) fn run_classifier_cards(&self, models: &[(&str, &str)], images: &str) -> usize {
        let mut n_run = 0;
        for (name, model) in models {
            let weights = self.classifier(name, model);
            let features = self.embed_as_stored(&weights, name, images);
            let expected = self.scores(&weights, &features);
            n_run += self.run_cards_of(name, &weights, &expected, "scores");
        }
        n_run
    }

    /// Writes the features of the images in the folder `images`, with the preprocessing of
    /// `weights`; returns the path.
    fn embed_as_stored(&self, weights: &str, name: &str, images: &str) -> String {
        let out = self.text(&format!("{name}-one.npy"));
        let args = ["embed", "--checkpoint", weights, "--images", &self.text(images), "--out", &out];
        ok(&program().args(args).output().unwrap());
        out
    }

    /// Exports `weights` for every library, runs the programs in their cards, and compares their
    /// variable `result` with the file `expected`; returns the number of programs.
    fn run_cards_of(&self, name: &str, weights: &str, expected: &str, result: &str) -> usize {
        let mut formats = vec![("timm", ""), ("timm", ".pth"), ("torchvision", ".pth")];
        formats.extend([("torchvision", ".safetensors"), ("transformers", ""), ("onnx", ".onnx")]);
        formats.push(("safetensors", ".safetensors"));
        for module in ["dinov2", "dinov3"] {
            if can_import(&self.python, module) {
                formats.push((module, ".pth"));
            }
        }
        let mut n_run = 0;
        for (format, extension) in formats {
            let out = format!("{name}-{format}{extension}");
            let path = self.text(&out);
            let args = ["export", "--checkpoint", weights, "--out", &path, "--format", format];
            let output = program().args(args).output().unwrap();
            if output.status.code() == Some(2) {
                continue;
            }
            ok(&output);
            let card = if extension.is_empty() { format!("{out}/README.md") } else { format!("{out}.md") };
            // Some libraries resample positions in another way, or not at all; the card says so.
            if std::fs::read_to_string(self.text(&card)).unwrap().contains("its positions are for images of")
            {
                continue;
            }
            let Some(computed) = self.run_card(&card, result) else { continue };
            // The processors of transformers resize tensors, not images.
            let tolerance = if format == "transformers" { "5e-2" } else { "1e-3" };
            self.script(&["compare", &out, expected, &computed, tolerance]);
            n_run += 1;
        }
        n_run
    }

    pub(crate) fn script(&self, args: &[&str]) {
        script(&self.python, args);
    }
}

/// Returns the pixels of 8-bit RGB, or of 16 bits if the number of channels is not three.
pub(crate) fn pixels(model: &ModelConfig) -> Pixels {
    match model.n_channels() {
        3 => Pixels::default(),
        n => Pixels {
            normalization: Normalization { mean: vec![0.4; n], std: vec![0.3; n] },
            depth: Depth::Sixteen,
        },
    }
}

/// Returns the next number in -0.5..0.5 of a linear congruential generator.
fn next_uniform(state: &mut u64) -> f32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
}

/// Returns random parameters, none of which is constantly zero or one.
pub(crate) fn random_parameters(model: &ModelConfig) -> Vec<NamedTensor> {
    let network = Network::random(model, pixels(model), 1, 1, &Device::flex());
    let mut state = 1u64;
    let mut tensors = network.tensors();
    for tensor in &mut tensors {
        let is_matrix = tensor.shape.len() >= 2;
        let gain: f32 = if is_matrix { tensor.shape[1..].iter().product::<usize>() as f32 } else { 9.0 };
        for value in &mut tensor.values {
            *value += 2.0 * next_uniform(&mut state) / gain.sqrt();
            if tensor.name.ends_with("running_var") {
                *value = value.abs() + 0.1;
            }
        }
    }
    tensors
}
