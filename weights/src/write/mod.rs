//! Writing a network as a file or folder for other libraries.

mod band_program;
mod card;
mod classifier;
mod entries;
mod format;
mod loading;
mod onnx;
mod program;
mod timm;
mod transformers;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use networks::head::pixels::PixelDecoder;
use networks::{ClassHead, ModelConfig, NamedTensor, PixelHead, RGB_CHANNELS};

use crate::backbone::{exchange_of, ocelli_arrays, timm_model};
use crate::error::WeightsError;
use crate::export::{Card, Export, ExportedClassifier, HeadKind};
use crate::file::{Array, Arrays, pytorch, safetensors};
use crate::library::Library;
use crate::metadata::MODEL;
use crate::precision::Precision;
use crate::preprocessing::Preprocessing;

pub use format::Format;

/// Files to be written: the path and bytes of each.
type Files = Vec<(PathBuf, Vec<u8>)>;

/// Reason that a library cannot hold a decoder, and what to do.
const NO_DECODER: &str =
    "it has no decoder that labels pixels; `ocelli export --backbone-only` leaves the decoder out";

/// Largest number of [`Precision::F16`].
const MAX_F16: f32 = 65_504.0;

/// Writes `export` to `path`; returns the files. Existing files are replaced only if `overwrite` is
/// set.
///
/// # Errors
/// [`WeightsError::Exists`], [`WeightsError::Unsupported`], [`WeightsError::Io`].
pub fn write(
    path: &Path,
    format: Format,
    export: &Export<'_>,
    overwrite: bool,
) -> Result<Vec<PathBuf>, WeightsError> {
    if export.precision == Precision::Int8 && format != Format::Onnx {
        let reason = "8-bit weights and their scales can only be written as ONNX".into();
        return Err(unsupported(format, reason));
    }
    if export.precision == Precision::F16 {
        let head = export.head_tensors();
        let mut tensors = export.tensors.iter().chain(&head);
        let too_large = tensors.find(|tensor| tensor.values.iter().any(|v| v.abs() > MAX_F16));
        if let Some(tensor) = too_large {
            let reason = format!("{} has values that f16 cannot hold; use bf16", tensor.name);
            return Err(unsupported(format, reason));
        }
    }
    let is_folder = format.is_folder(path);
    let mut files = encode_files(path, format, export, is_folder)?;
    let card = if is_folder { path.join("README.md") } else { card_path(path) };
    // Weights come last, as `encode_files` returns them.
    files.insert(0, (card, card::text(path, format, export).into_bytes()));
    if let Some((existing, _)) = files.iter().find(|(file, _)| file.exists() && !overwrite) {
        return Err(WeightsError::Exists { path: existing.clone() });
    }
    if is_folder {
        std::fs::create_dir_all(path).map_err(|error| WeightsError::io("create folder", path, error))?;
        if let Some(other) = other_part(path, &files) {
            let reason = format!(
                "{} is from another export and would be read as part of this one; remove it, or choose \
                 another folder",
                other.display()
            );
            return Err(unsupported(format, reason));
        }
        pipeline::file::replace_all(&files)
            .map_err(|(file, error)| WeightsError::io("write", &file, error))?;
    } else {
        for (file, bytes) in &files {
            pipeline::file::replace(file, bytes).map_err(|error| WeightsError::io("write", file, error))?;
        }
    }
    // The card last, for callers that list the files.
    files.rotate_left(1);
    Ok(files.into_iter().map(|(file, _)| file).collect())
}

/// Checks that `format` can hold a network with the configuration `model` and with `preprocessing`,
/// and `head` with it, whatever its weights are.
///
/// # Errors
/// [`WeightsError::Unsupported`].
pub fn check(
    format: Format,
    model: &ModelConfig,
    preprocessing: &Preprocessing,
    head: Option<HeadKind>,
) -> Result<(), WeightsError> {
    let card = Card::default();
    let class_head =
        ClassHead { classes: Vec::new(), weight: Vec::new(), bias: Vec::new(), is_multi_label: false };
    let classifier = ExportedClassifier { head: &class_head, returns_probabilities: false };
    let decoder = PixelHead { classes: Vec::new(), decoder: PixelDecoder::Linear, tensors: Vec::new() };
    let export = Export {
        model,
        tensors: &[],
        classifier: (head == Some(HeadKind::Classifier)).then_some(classifier),
        decoder: (head == Some(HeadKind::Decoder)).then_some(&decoder),
        preprocessing: preprocessing.clone(),
        network_name: "",
        precision: Precision::F32,
        card: &card,
    };
    match format {
        Format::Onnx => onnx::check(&export).map_err(|reason| unsupported(format, reason))?,
        Format::Timm => {
            timm_model(&export).map_err(|reason| unsupported(format, reason))?;
        }
        Format::Transformers => {
            transformers::config(&export).map_err(|reason| unsupported(format, reason))?;
        }
        Format::Safetensors | Format::Torchvision | Format::Dinov2 | Format::Dinov3 => {}
    }
    if let Some(library) = format.library() {
        library_arrays(library, format, &export)?;
    }
    Ok(())
}

fn unsupported(format: Format, reason: String) -> WeightsError {
    WeightsError::Unsupported { format: format.name(), reason }
}

/// Finds weights or a configuration in the folder `path` that are not among `files`, and that
/// readers would load with them or in their place.
fn other_part(path: &Path, files: &Files) -> Option<PathBuf> {
    let known = crate::source::WEIGHT_FILES.iter().chain(&crate::source::CONFIGURATION_FILES);
    let mut existing = known.map(|name| path.join(name)).filter(|file| file.exists());
    existing.find(|file| files.iter().all(|(written, _)| written != file))
}

/// Returns the path of the card of a file: `vits16.onnx.md`.
fn card_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".md");
    PathBuf::from(name)
}

/// Encodes `export` as the file or folder `path`, its weights last.
fn encode_files(
    path: &Path,
    format: Format,
    export: &Export<'_>,
    is_folder: bool,
) -> Result<Files, WeightsError> {
    let arrays = match format {
        Format::Safetensors => own_arrays(export),
        Format::Torchvision => library_arrays(Library::Torchvision, format, export)?,
        Format::Dinov2 => library_arrays(Library::Dinov2, format, export)?,
        Format::Dinov3 => library_arrays(Library::Dinov3, format, export)?,
        Format::Timm if !is_folder => library_arrays(Library::Timm, format, export)?,
        Format::Timm => {
            let model = timm_model(export).map_err(|reason| unsupported(format, reason))?;
            let config = timm::config(&model, export);
            let weights = path.join("model.safetensors");
            let arrays = library_arrays(Library::Timm, format, export)?;
            let bytes = encode_file(&weights, &arrays, format, export)?;
            return Ok(vec![(path.join("config.json"), pretty(&config)), (weights, bytes)]);
        }
        Format::Transformers => {
            let config = transformers::config(export).map_err(|reason| unsupported(format, reason))?;
            let weights = path.join("model.safetensors");
            let arrays = library_arrays(Library::Transformers, format, export)?;
            let bytes = encode_file(&weights, &arrays, format, export)?;
            let preprocessor = pretty(&transformers::preprocessor(export));
            let preprocessor = (path.join("preprocessor_config.json"), preprocessor);
            return Ok(vec![(path.join("config.json"), pretty(&config)), preprocessor, (weights, bytes)]);
        }
        Format::Onnx => {
            let bytes = onnx::encode(export).map_err(|reason| unsupported(format, reason))?;
            return Ok(vec![(path.to_path_buf(), bytes)]);
        }
    };
    Ok(vec![(path.to_path_buf(), encode_file(path, &arrays, format, export)?)])
}

/// Returns the parameters of `export`, and of its classifier or decoder, under Ocelli's names.
fn own_arrays(export: &Export<'_>) -> Arrays {
    let mut arrays = ocelli_arrays(export);
    for NamedTensor { name, shape, values } in export.head_tensors() {
        arrays.insert(name, Array { shape, values });
    }
    arrays
}

/// Returns the parameters of `export` and of its classifier under the names of `library`.
fn library_arrays(library: Library, format: Format, export: &Export<'_>) -> Result<Arrays, WeightsError> {
    if library == Library::Torchvision && export.model.n_channels() != RGB_CHANNELS {
        let reason = "torchvision's networks take images of three channels".into();
        return Err(unsupported(format, reason));
    }
    let arrays =
        exchange_of(export.model).arrays(library, export).map_err(|reason| unsupported(format, reason))?;
    // Only what the library has can be written without a decoder.
    if export.decoder.is_some() {
        return Err(unsupported(format, NO_DECODER.into()));
    }
    match &export.classifier {
        Some(classifier) => classifier::add(arrays, library, export, classifier.head)
            .map_err(|reason| unsupported(format, reason)),
        None => Ok(arrays),
    }
}

/// Encodes `arrays` as the file `path`, in the format of its extension.
fn encode_file(
    path: &Path,
    arrays: &Arrays,
    format: Format,
    export: &Export<'_>,
) -> Result<Vec<u8>, WeightsError> {
    let bytes = if path.extension().is_some_and(|extension| extension == "safetensors") {
        let mut entries: HashMap<String, String> = entries::entries(export);
        if format != Format::Safetensors {
            // With this entry, the file would be read as one with Ocelli's names.
            entries.remove(MODEL);
        }
        safetensors::encode(arrays, export.precision, entries)
    } else {
        pytorch::encode(arrays, export.precision)
    };
    bytes.map_err(|error| WeightsError::io("write", path, error))
}

fn pretty(value: &serde_json::Value) -> Vec<u8> {
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    text.into_bytes()
}
