//! Checkpoints: `checkpoints/step-0000001000/{manifest.json, rank-00000.safetensors}`.
//!
//! A checkpoint is written into a temporary folder, synced and renamed; then `latest` is moved.
//! Whatever interrupts that, the checkpoints before it stay as they were. The manifest holds the
//! layouts, and length and checksum of every file.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, Tensor, TensorData};
use pipeline::file;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::TrainError;
use crate::plan::Plan;
use crate::shard::store::{UnitShard, to_host};
use crate::step::TrainState;

const MANIFEST: &str = "manifest.json";
const LATEST: &str = "latest";

/// What a checkpoint says of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Form of the checkpoint.
    pub version: u32,
    /// Steps taken; also the next global batch.
    pub step: u64,
    /// Steps skipped in a row just before.
    #[serde(default)]
    pub bad_steps: u32,
    /// Ranks that wrote it.
    pub world_size: usize,
    /// The run.
    pub plan: Plan,
    /// Units in order.
    pub units: Vec<UnitEntry>,
    /// Names and lengths of the method's values.
    pub method: Vec<(String, usize)>,
    /// Files with their length and checksum.
    pub files: Vec<FileEntry>,
}

/// A unit's buffer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnitEntry {
    /// Name of the unit.
    pub name: String,
    /// Elements of its buffer.
    pub padded: usize,
    /// Updates its moments have seen.
    pub adam_steps: u64,
    /// Its parameters.
    pub params: Vec<ParamEntry>,
}

/// A parameter's place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamEntry {
    /// Name in exports.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// First element in the unit's buffer.
    pub offset: usize,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// XXH3 of its content.
    pub xxh3: u64,
}

/// The four buffers of a unit's shard, by their names in a file.
const BUFFERS: [&str; 4] = ["student", "teacher", "exp_avg", "exp_avg_sq"];

fn buffer<'a>(shard: &'a mut UnitShard, name: &str) -> &'a mut Tensor<1> {
    match name {
        "student" => &mut shard.student,
        "teacher" => &mut shard.teacher,
        "exp_avg" => &mut shard.exp_avg,
        _ => &mut shard.exp_avg_sq,
    }
}

/// Writes `state` under `folder` and keeps the newest `n_keep` checkpoints. Returns its path.
///
/// # Errors
/// [`TrainError::CheckpointWrite`]; earlier checkpoints are untouched then.
pub fn save(
    folder: &Path,
    state: &mut TrainState,
    plan: &Plan,
    n_keep: usize,
) -> Result<PathBuf, TrainError> {
    let target = folder.join(format!("step-{:010}", state.step));
    let temporary = folder.join(format!(".writing-{:010}", state.step));
    let write = |state: &mut TrainState| -> std::io::Result<()> {
        fs::create_dir_all(folder)?;
        remove_if_there(&temporary)?;
        fs::create_dir(&temporary)?;
        let rank_file = write_rank(&temporary, state)?;
        let manifest = manifest_of(state, plan, vec![rank_file]);
        write_synced(&temporary.join(MANIFEST), &serde_json::to_vec_pretty(&manifest)?)?;
        remove_if_there(&target)?;
        fs::rename(&temporary, &target)?;
        file::replace(&folder.join(LATEST), format!("step-{:010}\n", state.step).as_bytes())?;
        File::open(folder)?.sync_all()
    };
    write(state).map_err(|source| {
        // Half a checkpoint is of no use, and the disk may be full; the error is what counts.
        let _ = remove_if_there(&temporary);
        TrainError::CheckpointWrite { path: target.clone(), source }
    })?;
    prune(folder, n_keep);
    Ok(target)
}

fn write_rank(folder: &Path, state: &mut TrainState) -> std::io::Result<FileEntry> {
    let mut tensors: Vec<(String, TensorData)> = Vec::new();
    for shard in &mut state.shards {
        for name in BUFFERS {
            let values = to_host(buffer(shard, name).clone());
            let len = values.len();
            tensors.push((format!("{name}/{}", shard.layout.name), TensorData::new(values, [len])));
        }
    }
    for (name, values) in state.method.state() {
        let len = values.len();
        tensors.push((format!("method/{name}"), TensorData::new(values, [len])));
    }
    let bytes = to_safetensors(&tensors, None)?;
    let name = "rank-00000.safetensors".to_string();
    write_synced(&folder.join(&name), &bytes)?;
    Ok(FileEntry { name, bytes: bytes.len() as u64, xxh3: xxh3_64(&bytes) })
}

/// f32 tensors as one safetensors file.
///
/// # Errors
/// When the header cannot be written.
pub fn to_safetensors(
    tensors: &[(String, TensorData)],
    metadata: Option<std::collections::HashMap<String, String>>,
) -> std::io::Result<Vec<u8>> {
    let views: Result<Vec<_>, _> = tensors
        .iter()
        .map(|(name, data)| {
            let shape = data.shape().iter().copied().collect();
            TensorView::new(Dtype::F32, shape, data.as_bytes()).map(|view| (name.clone(), view))
        })
        .collect();
    let invalid = |error: safetensors::SafeTensorError| std::io::Error::other(error.to_string());
    let has_metadata = metadata.is_some();
    let bytes = serialize(views.map_err(invalid)?, metadata).map_err(invalid)?;
    if has_metadata { with_sorted_header(&bytes) } else { Ok(bytes) }
}

/// The library writes metadata in the order of a hash map, another one each time. The same weights are to
/// be the same bytes.
fn with_sorted_header(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let invalid = || std::io::Error::other("the header cannot be read again");
    let (len, rest) = bytes.split_first_chunk::<8>().ok_or_else(invalid)?;
    let (header, data) = rest.split_at_checked(u64::from_le_bytes(*len) as usize).ok_or_else(invalid)?;
    let mut header: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header)?;
    if let Some(metadata) = header.get_mut("__metadata__") {
        metadata.sort_all_objects();
    }
    let mut header = serde_json::to_vec(&header)?;
    // Data starts at a multiple of eight, after spaces, as the format recommends.
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok([&(header.len() as u64).to_le_bytes()[..], &header, data].concat())
}

fn manifest_of(state: &TrainState, plan: &Plan, files: Vec<FileEntry>) -> Manifest {
    let unit = |shard: &UnitShard| UnitEntry {
        name: shard.layout.name.clone(),
        padded: shard.layout.padded,
        adam_steps: shard.adam_steps,
        params: shard
            .layout
            .params
            .iter()
            .map(|slot| ParamEntry {
                name: shard.layout.full_name(slot),
                shape: slot.spec.shape.clone(),
                offset: slot.offset,
            })
            .collect(),
    };
    Manifest {
        version: 1,
        step: state.step,
        bad_steps: state.bad_steps,
        world_size: 1,
        plan: plan.clone(),
        units: state.shards.iter().map(unit).collect(),
        method: state.method.state().into_iter().map(|(name, values)| (name, values.len())).collect(),
        files,
    }
}

/// A checkpoint on disk whose files were checked.
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// What it says of itself.
    pub manifest: Manifest,
    bytes: Vec<u8>,
}

impl Checkpoint {
    /// Opens the checkpoint in `path`: a step's folder, a folder of checkpoints, or a work
    /// directory; of the latter two the newest that is whole. The file `latest` stands for the
    /// step that it names.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`].
    pub fn open(path: &Path) -> Result<Self, TrainError> {
        if path.is_file() && path.file_name().is_some_and(|name| name == LATEST) {
            let step = fs::read_to_string(path).map_err(|error| unusable(path, error))?;
            return Self::read(&path.with_file_name(step.trim()));
        }
        if path.join(MANIFEST).exists() {
            return Self::read(path);
        }
        for folder in [path.to_path_buf(), path.join("checkpoints")] {
            if let Some(found) = Self::newest(&folder)? {
                return Ok(found);
            }
        }
        Err(unusable(path, "there is no checkpoint in it"))
    }

    /// The newest whole checkpoint under `folder`; damaged ones are passed over with a warning.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`] when there are checkpoints and none is whole.
    pub fn newest(folder: &Path) -> Result<Option<Self>, TrainError> {
        let mut last_error = None;
        for path in steps_in(folder).into_iter().rev() {
            match Self::read(&path) {
                Ok(checkpoint) => return Ok(Some(checkpoint)),
                Err(error) => {
                    tracing::warn!("{error}; trying the one before it");
                    last_error = Some(error);
                }
            }
        }
        last_error.map_or(Ok(None), Err)
    }

    fn read(path: &Path) -> Result<Self, TrainError> {
        let text = fs::read(path.join(MANIFEST)).map_err(|error| unusable(path, error))?;
        let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| unusable(path, error))?;
        let [file] = manifest.files.as_slice() else {
            return Err(unusable(path, format!("it has {} files, not one", manifest.files.len())));
        };
        let bytes = fs::read(path.join(&file.name)).map_err(|error| unusable(path, error))?;
        if bytes.len() as u64 != file.bytes {
            let reason = format!("{} has {} bytes, the manifest says {}", file.name, bytes.len(), file.bytes);
            return Err(unusable(path, reason));
        }
        if xxh3_64(&bytes) != file.xxh3 {
            return Err(unusable(path, format!("the checksum of {} does not fit", file.name)));
        }
        Ok(Self { path: path.to_path_buf(), manifest, bytes })
    }

    /// Fills `state` from the checkpoint.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`] when a buffer is missing or of another length.
    pub fn restore(&self, state: &mut TrainState, device: &Device) -> Result<(), TrainError> {
        let bad = |reason: String| unusable(&self.path, reason);
        let tensors = SafeTensors::deserialize(&self.bytes).map_err(|error| bad(error.to_string()))?;
        let n = self.manifest.units.len();
        if state.shards.len() != n {
            return Err(bad(format!("it has {n} units, the network has {}", state.shards.len())));
        }
        for (shard, entry) in state.shards.iter_mut().zip(&self.manifest.units) {
            for name in BUFFERS {
                let key = format!("{name}/{}", shard.layout.name);
                let values = values_of(&tensors, &key).map_err(bad)?;
                if values.len() != shard.len() {
                    return Err(bad(format!("{key} has {} elements, not {}", values.len(), shard.len())));
                }
                let len = values.len();
                *buffer(shard, name) = Tensor::from_data(TensorData::new(values, [len]), device);
            }
            shard.adam_steps = entry.adam_steps;
        }
        let values: Result<Vec<_>, String> = self
            .manifest
            .method
            .iter()
            .map(|(name, _)| values_of(&tensors, &format!("method/{name}")).map(|v| (name.clone(), v)))
            .collect();
        state.method.load_state(&values.map_err(bad)?).map_err(bad)?;
        state.step = self.manifest.step;
        state.bad_steps = self.manifest.bad_steps;
        Ok(())
    }

    /// The buffer `which` (`teacher` or `student`) of unit `unit`, `[padded]`.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`] when there is none.
    pub fn buffer(&self, which: &str, unit: &str) -> Result<Vec<f32>, TrainError> {
        let bad = |reason: String| unusable(&self.path, reason);
        let tensors = SafeTensors::deserialize(&self.bytes).map_err(|error| bad(error.to_string()))?;
        values_of(&tensors, &format!("{which}/{unit}")).map_err(bad)
    }
}

/// Values of a little-endian f32 tensor.
pub(crate) fn values_of(tensors: &SafeTensors<'_>, key: &str) -> Result<Vec<f32>, String> {
    let view = tensors.tensor(key).map_err(|error| format!("{key}: {error}"))?;
    if view.dtype() != Dtype::F32 {
        return Err(format!("{key} is {:?}, not F32", view.dtype()));
    }
    let word = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    Ok(view.data().chunks_exact(4).map(word).collect())
}

fn unusable(path: &Path, reason: impl ToString) -> TrainError {
    TrainError::CheckpointRead { path: path.to_path_buf(), reason: reason.to_string() }
}

/// Folders of finished checkpoints, oldest first.
fn steps_in(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut steps: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.file_name().is_some_and(|name| is_step(&name.to_string_lossy())))
        .collect();
    steps.sort();
    steps
}

/// `step-` and ten digits: a folder that a user has renamed is the user's.
fn is_step(name: &str) -> bool {
    name.strip_prefix("step-").is_some_and(|n| n.len() == 10 && n.bytes().all(|b| b.is_ascii_digit()))
}

fn prune(folder: &Path, n_keep: usize) {
    let steps = steps_in(folder);
    for path in &steps[..steps.len().saturating_sub(n_keep.max(1))] {
        if let Err(error) = fs::remove_dir_all(path) {
            tracing::warn!("cannot remove the old checkpoint {}: {error}", path.display());
        }
    }
}

fn remove_if_there(path: &Path) -> std::io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn write_synced(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}
