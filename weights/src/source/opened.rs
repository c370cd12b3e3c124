//! Files on a disk: tensors, and the configurations in the same folder.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use pipeline::magic::{FileFormat, FileKind, START_BYTES, recognize};
use serde_json::Value;

use super::layouts::normalize_names;
use crate::error::WeightsError;
use crate::file::{Arrays, pytorch, safetensors};
use crate::onnx;

/// Weights files that a folder may contain; the first that exists is read.
pub(crate) const WEIGHT_FILES: [&str; 3] =
    ["model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"];

/// Configurations that a folder may contain.
pub(crate) const CONFIGURATION_FILES: [&str; 2] = ["config.json", "preprocessor_config.json"];

/// Model card that a folder may contain.
const README: &str = "README.md";

/// Longest beginning of a model card that is read, in bytes.
const README_BYTES: u64 = 1 << 16;

/// Tensors and configurations that were found at a path.
pub(crate) struct Source {
    pub(crate) path: PathBuf,
    pub(crate) arrays: Arrays,
    /// Metadata of a safetensors file.
    pub(crate) metadata: HashMap<String, String>,
    /// Contents of `config.json`.
    pub(crate) config: Option<Value>,
    /// Contents of `preprocessor_config.json`.
    pub(crate) preprocessor: Option<Value>,
    /// Beginning of `README.md`, a model card.
    pub(crate) readme: Option<String>,
    /// Whether the file was written by `torch.save`.
    pub(crate) is_pickle: bool,
    /// Whether the file is an ONNX graph.
    pub(crate) is_graph: bool,
}

/// Returns `true` if `path` is a weights file or a folder that another library has written; a
/// checkpoint is neither.
pub fn is_weights(path: &Path) -> bool {
    if path.is_dir() {
        WEIGHT_FILES.iter().any(|name| path.join(name).is_file())
    } else {
        path.is_file() && path.file_name().is_none_or(|name| name != "latest")
    }
}

impl Source {
    /// Reads the tensors of `path`.
    pub(crate) fn open(path: &Path) -> Result<Self, WeightsError> {
        let file = if path.is_dir() {
            WEIGHT_FILES.iter().map(|name| path.join(name)).find(|file| file.is_file()).ok_or_else(|| {
                WeightsError::unknown(path, format!("it has none of {}", WEIGHT_FILES.join(", ")))
            })?
        } else {
            path.to_path_buf()
        };
        // The path may name a file in such a folder. The configurations of the folder are used if
        // libraries give files this name.
        let has_known_name =
            file.file_name().is_some_and(|name| WEIGHT_FILES.iter().any(|known| name == *known));
        let folder = file.parent().filter(|_| has_known_name);
        let [config_file, preprocessor_file] = CONFIGURATION_FILES;
        let config = read_json(folder, config_file)?;
        let preprocessor = read_json(folder, preprocessor_file)?;
        let readme = folder.and_then(read_readme);
        let kind = detect_kind(&file)?;
        let (arrays, metadata) = match kind {
            Kind::Index => (read_indexed(&file)?, HashMap::new()),
            Kind::Safetensors => safetensors::read(&file)?,
            Kind::Graph => onnx::read(&file)?,
            Kind::Pickle => (pytorch::read(&file)?, HashMap::new()),
        };
        let arrays = normalize_names(arrays).map_err(|reason| WeightsError::malformed(&file, reason))?;
        let is_pickle = kind == Kind::Pickle;
        let is_graph = kind == Kind::Graph;
        let path = path.to_path_buf();
        Ok(Self { path, arrays, metadata, config, preprocessor, readme, is_pickle, is_graph })
    }
}

/// Kind of a weights file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Safetensors,
    /// File of `torch.save`.
    Pickle,
    /// An ONNX graph.
    Graph,
    /// A list of safetensors files.
    Index,
}

/// Returns the kind of `file` by its first bytes, because names such as `model.ckpt` and
/// `model.pth.tar` do not determine it.
///
/// # Errors
/// [`WeightsError::Unknown`] for another file, and [`WeightsError::Io`].
fn detect_kind(file: &Path) -> Result<Kind, WeightsError> {
    let (start, len_bytes) = read_start(file).map_err(|error| WeightsError::io("read", file, error))?;
    if start.starts_with(b"PK\x03\x04") {
        return Ok(Kind::Pickle);
    }
    if let [0x80, 2..=5, ..] = start[..] {
        return Ok(Kind::Pickle);
    }
    if let Some((len, rest)) = start.split_first_chunk::<8>()
        && u64::from_le_bytes(*len) < len_bytes
        && rest.starts_with(b"{")
    {
        return Ok(Kind::Safetensors);
    }
    if start.trim_ascii_start().starts_with(b"{") {
        return Ok(Kind::Index);
    }
    // The first field of a graph is its version, a number.
    if start.first() == Some(&0x08) || file.extension().is_some_and(|extension| extension == "onnx") {
        return Ok(Kind::Graph);
    }
    let description: String = match recognize(&start) {
        _ if start.is_empty() => "it is empty".into(),
        Some(format) => describe_other_format(format),
        None => "it does not begin like a weights file".into(),
    };
    let reason = format!("{description}; expected safetensors, torch.save or ONNX, under any name");
    Err(WeightsError::unknown(file, reason))
}

/// Describes a file that is no weights file, with its remedy if there is one.
fn describe_other_format(format: FileFormat) -> String {
    let remedy = match format.kind {
        FileKind::Gzip | FileKind::Compressed(_) => ": unpack it first",
        FileKind::Page => ": check the address that it was downloaded from",
        FileKind::Pointer => ": fetch the file with `git lfs pull`",
        FileKind::Image => ": images are given with --images or --shards",
        _ if format.name == "an HDF5 file" => ", such as Keras writes",
        _ => "",
    };
    format!("it is {}{remedy}", format.name)
}

/// Reads the beginning of `file`; returns it and the length of the file.
fn read_start(file: &Path) -> std::io::Result<(Vec<u8>, u64)> {
    let mut file = File::open(file)?;
    let len_bytes = file.metadata()?.len();
    let mut start = Vec::new();
    file.by_ref().take(START_BYTES as u64).read_to_end(&mut start)?;
    Ok((start, len_bytes))
}

/// Reads the beginning of the model card in `folder`; `None` if there is none that can be read.
fn read_readme(folder: &Path) -> Option<String> {
    let path = folder.join(README);
    if !path.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(README_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Reads the JSON file `name` in `folder`, if both exist.
fn read_json(folder: Option<&Path>, name: &str) -> Result<Option<Value>, WeightsError> {
    let Some(path) = folder.map(|folder| folder.join(name)).filter(|path| path.is_file()) else {
        return Ok(None);
    };
    let text = std::fs::read_to_string(&path).map_err(|error| WeightsError::io("read", &path, error))?;
    let value = serde_json::from_str(&text);
    value.map(Some).map_err(|error| WeightsError::malformed(&path, error.to_string()))
}

/// Reads the tensors of all files that `index` names, which are in its folder.
fn read_indexed(index: &Path) -> Result<Arrays, WeightsError> {
    let folder = index.parent();
    let value = read_json(folder, WEIGHT_FILES[0])?.unwrap_or_default();
    let map = value["weight_map"].as_object();
    let map = map.ok_or_else(|| WeightsError::malformed(index, "it has no weight_map"))?;
    let mut names: Vec<&str> = map.values().filter_map(Value::as_str).collect();
    names.sort_unstable();
    names.dedup();
    let mut arrays = Arrays::new();
    for name in names {
        // Only file names are accepted: an index must not refer to files outside of its folder.
        if Path::new(name).components().count() != 1 || name.contains("..") {
            return Err(WeightsError::malformed(index, format!("{name} is not a file in the same folder")));
        }
        arrays.extend(safetensors::read(&folder.unwrap_or(Path::new(".")).join(name))?.0);
    }
    Ok(arrays)
}
