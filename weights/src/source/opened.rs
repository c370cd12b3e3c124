//! Files on a disk: tensors, and the configurations beside them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use networks::ModelConfig;
use networks::NamedTensor;
use networks::Normalization;
use serde_json::Value;

use crate::error::WeightsError;
use crate::file::{Arrays, pytorch, safetensors};
use crate::metadata;
use crate::preprocessing::Preprocessing;
use crate::pretrained::{Hints, Pretrained};

/// Files of weights that a folder may hold; the first that exists is read.
pub(crate) const IN_FOLDERS: [&str; 3] =
    ["model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"];

/// Configurations that a folder may hold.
pub(crate) const CONFIGURATIONS: [&str; 2] = ["config.json", "preprocessor_config.json"];

/// Tensors and configurations that were found at a path.
pub(crate) struct Source {
    pub(crate) path: PathBuf,
    pub(crate) arrays: Arrays,
    /// Metadata of a safetensors file.
    metadata: HashMap<String, String>,
    /// Contents of `config.json`.
    pub(crate) config: Option<Value>,
    /// Contents of `preprocessor_config.json`.
    pub(crate) preprocessor: Option<Value>,
    /// Whether the file is a pickle of PyTorch.
    pub(crate) is_pickle: bool,
}

/// Returns `true` if `path` is a file of weights or a folder that another library has written; a checkpoint is neither.
pub fn is_weights(path: &Path) -> bool {
    match path.is_dir() {
        true => IN_FOLDERS.iter().any(|name| path.join(name).is_file()),
        false => path.is_file() && path.file_name().is_none_or(|name| name != "latest"),
    }
}

impl Source {
    /// Reads the tensors of `path`.
    pub(crate) fn open(path: &Path) -> Result<Self, WeightsError> {
        let file = match path.is_dir() {
            true => IN_FOLDERS.iter().map(|name| path.join(name)).find(|file| file.is_file()).ok_or_else(
                || WeightsError::unknown(path, format!("it has none of {}", IN_FOLDERS.join(", "))),
            )?,
            false => path.to_path_buf(),
        };
        // A file may be given without its folder; its configuration is used if the file has a name that libraries give.
        let folder = file.file_name().is_some_and(|name| IN_FOLDERS.iter().any(|known| name == *known));
        let beside = file.parent().filter(|_| folder);
        let [config, preprocessor] = CONFIGURATIONS.map(|name| json(beside, name));
        let (config, preprocessor) = (config?, preprocessor?);
        let is_pickle = file.extension().is_some_and(|extension| extension == "bin" || is_torch(extension));
        let (arrays, metadata) = match file.extension().and_then(|extension| extension.to_str()) {
            Some("json") => (parts(&file)?, HashMap::new()),
            Some("safetensors") => safetensors::read(&file)?,
            _ if is_pickle => (pytorch::read(&file)?, HashMap::new()),
            _ => {
                return Err(WeightsError::unknown(
                    path,
                    "its name does not end in .safetensors, .pth, .pt or .bin",
                ));
            }
        };
        Ok(Self { path: path.to_path_buf(), arrays, metadata, config, preprocessor, is_pickle })
    }

    /// Returns the backbone, if `ocelli export` wrote the file.
    pub(crate) fn exported(&self, hints: &Hints) -> Result<Option<Pretrained>, WeightsError> {
        let Some(text) = self.metadata.get(metadata::MODEL) else { return Ok(None) };
        let which = self.metadata.get(metadata::NETWORK).map_or(metadata::UNNAMED, String::as_str);
        if let Some(wanted) = hints.network.as_deref().filter(|wanted| *wanted != which) {
            let reason = format!("an exported file holds one network, here {which}: it has no {wanted}");
            return Err(WeightsError::unknown(&self.path, reason));
        }
        let bad = |error: serde_json::Error| WeightsError::malformed(&self.path, error.to_string());
        let model: ModelConfig = serde_json::from_str(text).map_err(bad)?;
        model.validate().map_err(|reason| WeightsError::malformed(&self.path, reason))?;
        let entry = |key: &str| self.metadata.get(key);
        let preprocessing = match entry(metadata::PREPROCESSING) {
            Some(text) => serde_json::from_str(text).map_err(bad)?,
            // Older files have only the color normalization, or nothing.
            None => {
                let normalization: Option<Normalization> = entry(metadata::NORMALIZATION)
                    .map(|text| serde_json::from_str(text))
                    .transpose()
                    .map_err(bad)?;
                Preprocessing::of_size(model.image_px() as u32, normalization.unwrap_or_default())
            }
        };
        let named = |(name, shape): (String, Vec<usize>)| {
            let array = self
                .arrays
                .get(&name)
                .ok_or_else(|| WeightsError::malformed(&self.path, format!("it has no tensor {name}")))?;
            if array.shape != shape {
                let reason = format!("its tensor {name} has shape {:?}, not {shape:?}", array.shape);
                return Err(WeightsError::malformed(&self.path, reason));
            }
            Ok(NamedTensor { name, shape, values: array.values.clone() })
        };
        let tensors: Result<Vec<_>, WeightsError> = model.params().into_iter().map(named).collect();
        Ok(Some(Pretrained {
            model,
            preprocessing,
            tensors: tensors?,
            which: which.to_string(),
            origin: "ocelli",
            assumed: Vec::new(),
        }))
    }
}

fn is_torch(extension: &std::ffi::OsStr) -> bool {
    extension == "pth" || extension == "pt"
}

/// Reads the JSON file `name` in `folder`, if both exist.
fn json(folder: Option<&Path>, name: &str) -> Result<Option<Value>, WeightsError> {
    let Some(path) = folder.map(|folder| folder.join(name)).filter(|path| path.is_file()) else {
        return Ok(None);
    };
    let text = std::fs::read_to_string(&path).map_err(|error| WeightsError::io("read", &path, error))?;
    let value = serde_json::from_str(&text);
    value.map(Some).map_err(|error| WeightsError::malformed(&path, error.to_string()))
}

/// Reads the tensors of all files that `index` names, which are in its folder.
fn parts(index: &Path) -> Result<Arrays, WeightsError> {
    let folder = index.parent();
    let value = json(folder, IN_FOLDERS[0])?.unwrap_or_default();
    let map = value["weight_map"].as_object();
    let map = map.ok_or_else(|| WeightsError::malformed(index, "it has no weight_map"))?;
    let mut names: Vec<&str> = map.values().filter_map(Value::as_str).collect();
    names.sort_unstable();
    names.dedup();
    let mut arrays = Arrays::new();
    for name in names {
        // Only file names are accepted: an index must not lead out of its folder.
        if Path::new(name).components().count() != 1 || name.contains("..") {
            return Err(WeightsError::malformed(
                index,
                format!("{name} is not the name of a file beside it"),
            ));
        }
        arrays.extend(safetensors::read(&folder.unwrap_or(Path::new(".")).join(name))?.0);
    }
    Ok(arrays)
}
