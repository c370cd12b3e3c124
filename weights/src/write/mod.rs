//! Writing a network as a file or folder for other libraries.

mod band_program;
mod card;
mod entries;
mod format;
mod loading;
mod onnx;
mod program;
mod timm;
mod transformers;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use networks::RGB_CHANNELS;

use crate::backbone::{exchange_of, ocelli_arrays, timm_model};
use crate::error::WeightsError;
use crate::export::Export;
use crate::file::{Arrays, pytorch, safetensors};
use crate::library::Library;
use crate::metadata::MODEL;
use crate::precision::Precision;

pub use format::Format;

/// Files to be written: the path and bytes of each.
type Files = Vec<(PathBuf, Vec<u8>)>;

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
        let reason = "8 bits and their scales can only be written as ONNX".into();
        return Err(WeightsError::Unsupported { format: format.name(), reason });
    }
    if let (Precision::F16, Some(tensor)) = (
        export.precision,
        export.tensors.iter().find(|tensor| tensor.values.iter().any(|v| v.abs() > MAX_F16)),
    ) {
        let reason = format!("{} has values that 16 bits cannot hold; bf16 can", tensor.name);
        return Err(WeightsError::Unsupported { format: format.name(), reason });
    }
    let is_folder = format.is_folder(path);
    let mut files = files_of(path, format, export, is_folder)?;
    let card = if is_folder { path.join("README.md") } else { beside(path) };
    // Weights come last, as `files_of` has them.
    files.insert(0, (card, card::text(path, format, export).into_bytes()));
    if let Some((there, _)) = files.iter().find(|(file, _)| file.exists() && !overwrite) {
        return Err(WeightsError::Exists { path: there.clone() });
    }
    if is_folder {
        std::fs::create_dir_all(path).map_err(|error| WeightsError::io("create folder", path, error))?;
    }
    if let Some(other) = other_part(path, &files).filter(|_| is_folder) {
        return Err(WeightsError::Unsupported {
            format: format.name(),
            reason: format!(
                "{} of another export would be read as part of this export; remove it, or choose another folder",
                other.display()
            ),
        });
    }
    if is_folder {
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

/// Finds weights or a configuration in the folder `path` that are not among `files`, and that
/// readers would load with them or in their place.
fn other_part(path: &Path, files: &Files) -> Option<PathBuf> {
    let known = crate::source::WEIGHT_FILES.iter().chain(&crate::source::CONFIGURATION_FILES);
    let mut there = known.map(|name| path.join(name)).filter(|file| file.exists());
    there.find(|file| files.iter().all(|(written, _)| written != file))
}

/// Path of the card beside a file: `vits16.onnx.md`.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".md");
    PathBuf::from(name)
}

fn files_of(
    path: &Path,
    format: Format,
    export: &Export<'_>,
    is_folder: bool,
) -> Result<Files, WeightsError> {
    let unsupported = |reason: String| WeightsError::Unsupported { format: format.name(), reason };
    let one = |arrays: Arrays| Ok(vec![(path.to_path_buf(), in_file(path, &arrays, format, export)?)]);
    let exchange = exchange_of(export.model);
    let arrays = |library| exchange.arrays(library, export).map_err(unsupported);
    match format {
        Format::Safetensors => one(ocelli_arrays(export)),
        Format::Torchvision if export.model.n_channels() != RGB_CHANNELS => {
            Err(unsupported("torchvision's networks take images of three channels".into()))
        }
        Format::Torchvision => one(arrays(Library::Torchvision)?),
        Format::Dinov2 => one(arrays(Library::Dinov2)?),
        Format::Dinov3 => one(arrays(Library::Dinov3)?),
        Format::Timm if !is_folder => one(arrays(Library::Timm)?),
        Format::Timm => {
            let config = timm::config(&timm_model(export).map_err(unsupported)?, export);
            let weights = path.join("model.safetensors");
            let bytes = in_file(&weights, &arrays(Library::Timm)?, format, export)?;
            Ok(vec![(path.join("config.json"), pretty(&config)), (weights, bytes)])
        }
        Format::Transformers => {
            let config = exchange.transformers().map_err(unsupported)?;
            let weights = path.join("model.safetensors");
            let bytes = in_file(&weights, &arrays(Library::Transformers)?, format, export)?;
            let preprocessor = pretty(&transformers::preprocessor(export));
            let preprocessor = (path.join("preprocessor_config.json"), preprocessor);
            Ok(vec![(path.join("config.json"), pretty(&config)), preprocessor, (weights, bytes)])
        }
        Format::Onnx => Ok(vec![(path.to_path_buf(), onnx::encode(export).map_err(unsupported)?)]),
    }
}

/// Encodes `arrays` as the file `path`, in the format of its extension.
fn in_file(
    path: &Path,
    arrays: &Arrays,
    format: Format,
    export: &Export<'_>,
) -> Result<Vec<u8>, WeightsError> {
    let bytes = if path.extension().is_some_and(|extension| extension == "safetensors") {
        let mut entries: HashMap<String, String> = entries::entries(export);
        if format != Format::Safetensors {
            // With it, the file would be read as one with Ocelli's names.
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
