//! Reading of checkpoints: all of them for evaluation, the byte ranges of a rank for training.

use std::cell::RefCell;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn_tensor::{Device, Tensor, TensorData};
use networks::NamedTensor;
use networks::backbone::Readout;
use networks::layout::{ALIGNMENT, ParamSlot, UnitLayout};
use networks::tensor::joined;

use super::folder::{self, checkpoints_folder};
use super::param_index::{ParamIndex, UnitRange};
use super::shard_file::ShardFile;
use super::{LATEST, MANIFEST, Manifest, ParamEntry, UnitEntry, VERSION, pieces, read_error};
use crate::error::TrainError;
use crate::recipe::check::check;
use crate::recipe::plan::Plan;
use crate::step::{NetworkState, TrainState};

/// Extensions of files of weights.
const WEIGHT_EXTENSIONS: [&str; 6] = ["safetensors", "pth", "pt", "bin", "ckpt", "onnx"];

/// Describes `path`, in which there is no checkpoint, with advice on what to give instead.
fn describe_folder(path: &Path) -> String {
    if Plan::path_in(path).exists() {
        return "its run has not written a checkpoint yet".into();
    }
    if path.join(".metadata").exists() {
        return "it is a checkpoint of torch.distributed: `python -m \
                torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER weights.pth` converts it to a \
                file that ocelli reads"
            .into();
    }
    let mut entries: Vec<PathBuf> =
        fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort();
    if let Some(run) = entries.iter().find(|entry| Plan::path_in(entry).exists()) {
        return format!("it is a folder of runs: give one of them, such as {}", run.display());
    }
    match entries.iter().find(|entry| is_weights_file(entry)) {
        Some(file) => {
            format!("it is neither a run nor a checkpoint; give a file in it, such as {}", file.display())
        }
        None => "it is neither a run nor a checkpoint, and contains none".into(),
    }
}

/// Returns whether `path` has the name of a file of weights.
fn is_weights_file(path: &Path) -> bool {
    let extension = path.extension().unwrap_or_default();
    WEIGHT_EXTENSIONS.iter().any(|known| extension == *known)
}

/// A checkpoint on disk.
pub struct Checkpoint {
    /// Folder of the checkpoint.
    pub path: PathBuf,
    /// Manifest of the checkpoint.
    pub manifest: Manifest,
    /// Index of the parameters in its units.
    param_index: ParamIndex,
    /// The file that was read last: consecutive reads are often of one file.
    open: RefCell<Option<(usize, ShardFile)>>,
}

impl Checkpoint {
    /// Opens the checkpoint in `path`: the folder of a step, the newest intact checkpoint of a
    /// folder of checkpoints or of a work directory, or the one that a file `latest` names.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`].
    pub fn open(path: &Path) -> Result<Self, TrainError> {
        if path.is_file() && path.file_name().is_some_and(|name| name == LATEST) {
            let step = fs::read_to_string(path).map_err(|error| read_error(path, error))?;
            return Self::read_verified(&path.with_file_name(step.trim()));
        }
        if path.join(MANIFEST).exists() {
            return Self::read_verified(path);
        }
        for folder in [path.to_path_buf(), checkpoints_folder(path)] {
            if let Some(checkpoint) = Self::newest(&folder)? {
                return Ok(checkpoint);
            }
        }
        Err(read_error(path, describe_folder(path)))
    }

    /// Returns the newest intact checkpoint under `folder`; skips damaged ones with a warning.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`] when there are checkpoints and none is intact.
    pub fn newest(folder: &Path) -> Result<Option<Self>, TrainError> {
        let mut last_error = None;
        for path in folder::steps_in(folder).into_iter().rev() {
            match Self::read_verified(&path) {
                Ok(checkpoint) => return Ok(Some(checkpoint)),
                Err(error) => {
                    tracing::warn!("{error}; trying the previous checkpoint");
                    last_error = Some(error);
                }
            }
        }
        last_error.map_or(Ok(None), Err)
    }

    /// Reads the manifest in `path`, the folder of a step. Files are opened and verified when they
    /// are read.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`].
    pub fn read(path: &Path) -> Result<Self, TrainError> {
        let file = path.join(MANIFEST);
        if !fs::metadata(&file).map_err(|error| read_error(path, error))?.is_file() {
            return Err(read_error(path, format!("{MANIFEST} is not a regular file")));
        }
        let text = fs::read(file).map_err(|error| read_error(path, error))?;
        let version: Option<u32> = serde_json::from_slice::<serde_json::Value>(&text)
            .ok()
            .and_then(|manifest| manifest.get("version")?.as_u64()?.try_into().ok());
        if let Some(version) = version.filter(|version| *version != VERSION) {
            let reason = format!(
                "it has version {version}, but this release reads version {VERSION}: finish the run with \
                 the release that started it, or start a new run in another folder"
            );
            return Err(read_error(path, reason));
        }
        let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| read_error(path, error))?;
        if !manifest.has_valid_checksum(&String::from_utf8_lossy(&text)) {
            return Err(read_error(path, "manifest.json has been changed since it was written"));
        }
        let total_steps = manifest.plan.total_steps;
        if manifest.step > total_steps {
            return Err(read_error(
                path,
                format!("its step, {}, is beyond the last step ({total_steps})", manifest.step),
            ));
        }
        check(&manifest.plan).map_err(|error| read_error(path, error))?;
        if manifest.files.is_empty() {
            return Err(read_error(path, "its manifest lists no files"));
        }
        for file in &manifest.files {
            if file.name.contains(['/', '\\']) || file.name == ".." {
                return Err(read_error(
                    path,
                    format!("{:?} in its manifest is not a plain file name", file.name),
                ));
            }
        }
        let n_files = manifest.files.len();
        for unit in &manifest.units {
            if unit.padded == 0 || !unit.padded.is_multiple_of(n_files) || unit.numel > unit.padded {
                return Err(read_error(path, format!("{} does not divide into {n_files} files", unit.name)));
            }
        }
        let param_index = ParamIndex::new(&manifest.units);
        Ok(Self { path: path.to_path_buf(), manifest, param_index, open: RefCell::new(None) })
    }

    /// Reads the manifest in `path`, and verifies all files.
    fn read_verified(path: &Path) -> Result<Self, TrainError> {
        let checkpoint = Self::read(path)?;
        checkpoint.verify()?;
        Ok(checkpoint)
    }

    /// Returns the error of this checkpoint, for `reason`.
    fn error(&self, reason: impl ToString) -> TrainError {
        read_error(&self.path, reason)
    }

    /// Calls `f` with file `index`.
    fn with_file<R>(
        &self,
        index: usize,
        f: impl FnOnce(&ShardFile) -> Result<R, String>,
    ) -> Result<R, String> {
        let mut open = self.open.borrow_mut();
        if open.as_ref().is_none_or(|(last, _)| *last != index) {
            let entry = self.manifest.files.get(index).ok_or("the manifest lists too few files")?;
            *open = None;
            *open = Some((index, ShardFile::open(&self.path, entry.clone())?));
        }
        match open.as_ref() {
            Some((_, file)) => f(file),
            None => Err("no file is open".into()),
        }
    }

    /// Checks that every block of every file matches its checksum.
    fn verify(&self) -> Result<(), TrainError> {
        for index in 0..self.manifest.files.len() {
            self.with_file(index, |file| file.check()).map_err(|reason| self.error(reason))?;
        }
        Ok(())
    }

    /// Reads the parameters of the backbone of the network `name`, by default the evaluated one;
    /// returns them with the name of the network. Adapters are added to their weights.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`], also when there is no such network; [`TrainError::Network`]
    /// if a parameter is not finite.
    pub fn backbone(&self, name: Option<&str>) -> Result<(Vec<NamedTensor>, String), TrainError> {
        let name = self.evaluated(name)?;
        let recipe = &self.manifest.plan.recipe;
        let mut tensors = Vec::new();
        for unit in recipe.model.units(Readout::All) {
            let layout = unit.layout(1);
            tensors.extend(layout.tensors(&self.parameters(&name, &layout)?));
            if let Some(layout) = recipe.optim.adapter.and_then(|adapter| adapter.layout(unit.as_ref(), 1)) {
                tensors.extend(layout.tensors(&self.parameters(&name, &layout)?));
            }
        }
        let tensors = self.merged(tensors)?;
        tensors.iter().try_for_each(NamedTensor::check_finite)?;
        Ok((tensors, name))
    }

    /// Adds the adapters among `tensors` to their weights, if the run has any.
    fn merged(&self, tensors: Vec<NamedTensor>) -> Result<Vec<NamedTensor>, TrainError> {
        match self.manifest.plan.recipe.optim.adapter {
            Some(adapter) => Ok(adapter.merge(tensors)?),
            None => Ok(tensors),
        }
    }

    /// Reads all parameters of the network `name`, by default the evaluated one, with its heads;
    /// returns them with the name of the network. Adapters are added to their weights.
    ///
    /// # Errors
    /// As [`Checkpoint::backbone`]; also where repeated entries have more elements than the files.
    pub fn network(&self, name: Option<&str>) -> Result<(Vec<NamedTensor>, String), TrainError> {
        let name = self.evaluated(name)?;
        let mut tensors = Vec::new();
        let mut n_left = self.manifest.files.iter().map(|file| file.bytes as usize / 4).sum::<usize>();
        for unit in self.manifest.units.iter().filter(|unit| unit.network == name) {
            for ParamEntry { name: param, shape, offset, first, .. } in &unit.params {
                let numel = shape.iter().copied().fold(1, usize::saturating_mul);
                let range = *offset..offset.saturating_add(numel);
                if range.end > unit.numel || numel > n_left {
                    return Err(self.error(format!("{param} is longer than its unit {}", unit.name)));
                }
                n_left -= numel;
                let rows = tensors.iter().filter(|tensor: &&NamedTensor| tensor.name == *param);
                if rows.map(|tensor| tensor.values.len()).sum::<usize>() != *first {
                    return Err(self.error(format!(
                        "{param} in unit {} does not continue the rows before it",
                        unit.name
                    )));
                }
                let values = self.elements(&name, unit, range).map_err(|reason| self.error(reason))?;
                tensors.push(NamedTensor { name: param.clone(), shape: shape.clone(), values });
            }
        }
        let tensors = self.merged(joined(tensors))?;
        tensors.iter().try_for_each(NamedTensor::check_finite)?;
        Ok((tensors, name))
    }

    /// Reads the elements `range` of the buffer `buffer` of `unit`; padding is zero.
    fn elements(&self, buffer: &str, unit: &UnitEntry, range: Range<usize>) -> Result<Vec<f32>, String> {
        let file_len = unit.padded / self.manifest.files.len();
        // A manifest is not trusted: no more memory is allocated than the files can fill.
        let stored_bytes: u64 = self.manifest.files.iter().map(|file| file.bytes).sum();
        if range.len() as u64 > stored_bytes / 4 + ALIGNMENT as u64 {
            return Err(format!("unit {} has more elements than its files", unit.name));
        }
        let key = format!("{buffer}/{}", unit.name);
        let mut values = vec![0.0; range.len()];
        for piece in pieces(range, unit.numel, file_len) {
            let bytes = self.with_file(piece.file, |file| file.tensor(&key, file_len, piece.source))?;
            values[piece.target].copy_from_slice(&from_le_bytes(&bytes));
        }
        Ok(values)
    }

    /// Fills `state`, whose shards may be those of any rank of any number of ranks.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`] when values are missing, damaged or of another length.
    pub fn restore(&self, state: &mut TrainState, device: &Device) -> Result<(), TrainError> {
        let mut restored = state.networks.clone();
        let mut shards = Vec::new();
        for network in &mut restored {
            if network.is_frozen || self.lacks_copy(network) {
                continue;
            }
            for shard in network.shards.iter_mut().chain(network.bases.values_mut()) {
                shards.push((network.name, shard));
            }
        }
        let n_stored = self.manifest.units.iter().map(|unit| unit.numel).fold(0, usize::saturating_add);
        let n_expected: usize = shards.iter().map(|(_, shard)| shard.layout.numel).sum();
        if n_expected != n_stored {
            let reason = format!("it has {n_stored} parameters, but the networks have {n_expected}");
            return Err(self.error(reason));
        }
        for (network, shard) in shards {
            let mut n_updates = Vec::new();
            for slot in &shard.layout.params {
                let sources = self.find(network, &shard.layout, slot, 0..slot.spec.numel())?;
                n_updates.push(sources.first().map_or(0, |source| source.n_updates));
            }
            shard.n_updates = n_updates;
            let range = shard.start..shard.start + shard.len();
            let values = self.shard_values(network, network, &shard.layout, range.clone())?;
            *shard.weights.values_mut() = to_device(values, device);
            for moment in &mut shard.moments {
                let values = self.shard_values(network, moment.name, &shard.layout, range.clone())?;
                moment.values = to_device(values, device);
            }
        }
        restored = self.with_copies(restored);
        let mut method_state = Vec::with_capacity(self.manifest.method.len());
        for (name, len) in &self.manifest.method {
            let key = format!("method/{name}");
            let bytes = self.with_file(0, |file| file.tensor(&key, *len, 0..*len));
            let bytes = bytes.map_err(|reason| self.error(reason))?;
            method_state.push((name.clone(), from_le_bytes(&bytes)));
        }
        state.method.load_state(&method_state).map_err(|reason| self.error(reason))?;
        state.networks = restored;
        state.step = self.manifest.step;
        state.skipped_batches = self.manifest.skipped_batches;
        state.bad_steps = self.manifest.bad_steps;
        Ok(())
    }

    /// Returns whether `network` is a copy of another one that was added when the run was forked
    /// from this checkpoint.
    fn lacks_copy(&self, network: &NetworkState) -> bool {
        network.copies.is_some() && self.manifest.units.iter().all(|unit| unit.network != network.name)
    }

    /// Fills the copies that this checkpoint lacks from the networks that they copy.
    fn with_copies(&self, mut networks: Vec<NetworkState>) -> Vec<NetworkState> {
        let originals = networks.clone();
        for network in networks.iter_mut().filter(|network| self.lacks_copy(network)) {
            if let Some(original) = originals.iter().find(|original| Some(original.name) == network.copies) {
                network.copy_from(original);
            }
        }
        networks
    }

    /// Returns `name` if the checkpoint has that network; for `None`, the name of the evaluated
    /// network.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`] when there is no such network; [`TrainError::Recipe`] when
    /// the plan's method cannot be built.
    pub fn evaluated(&self, name: Option<&str>) -> Result<String, TrainError> {
        let Some(name) = name else { return Ok(self.manifest.plan.evaluated()?.to_string()) };
        let mut names: Vec<&str> = self.manifest.units.iter().map(|unit| unit.network.as_str()).collect();
        names.dedup();
        if names.contains(&name) {
            Ok(name.to_string())
        } else {
            Err(self.error(format!("it has no network {name}; it has {}", names.join(" and "))))
        }
    }

    /// Reads the parameters of the unit with `layout` from `network`, whose unit may have more
    /// parameters, such as a token for masked patches. Adapters are not added to their weights.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`] when one is missing or has another shape.
    pub fn parameters(&self, network: &str, layout: &UnitLayout) -> Result<Vec<f32>, TrainError> {
        self.shard_values(network, network, layout, 0..layout.padded)
    }

    /// Reads the elements `range` of a buffer of a unit: of the weights, which have the name of the
    /// network, or of moments, which have their own.
    fn shard_values(
        &self,
        network: &str,
        buffer: &str,
        layout: &UnitLayout,
        range: Range<usize>,
    ) -> Result<Vec<f32>, TrainError> {
        let mut values = vec![0.0; range.len()];
        for slot in &layout.params {
            let param = slot.range();
            let start = param.start.max(range.start);
            let end = param.end.min(range.end);
            if start < end {
                let sources = self.find(network, layout, slot, start - param.start..end - param.start)?;
                self.copy(buffer, sources, &mut values[start - range.start..end - range.start])?;
            }
        }
        Ok(values)
    }

    /// Finds the elements `range` of the part of a parameter that is in the unit with `layout`.
    fn find(
        &self,
        network: &str,
        layout: &UnitLayout,
        slot: &ParamSlot,
        range: Range<usize>,
    ) -> Result<Vec<UnitRange<'_>>, TrainError> {
        let name = layout.full_name(slot);
        let first = slot.spec.first_element();
        let range = first + range.start..first + range.end;
        let shape = slot.spec.whole_shape();
        let sources = self.param_index.find(&self.manifest.units, network, &name, &shape, range);
        sources.ok_or_else(|| {
            let reason = format!(
                "its network {network} does not match the recipe's: it has no parameter {name} of shape \
                 {shape:?}"
            );
            self.error(reason)
        })
    }

    /// Copies the ranges `sources` of the buffer `buffer` into `target`, one after another.
    fn copy(&self, buffer: &str, sources: Vec<UnitRange<'_>>, target: &mut [f32]) -> Result<(), TrainError> {
        let mut offset = 0;
        for UnitRange { unit, source, .. } in sources {
            let values = self.elements(buffer, unit, source).map_err(|reason| self.error(reason))?;
            target[offset..offset + values.len()].copy_from_slice(&values);
            offset += values.len();
        }
        Ok(())
    }

    /// Reads all parameters of the unit `name` of `network`, in the order of its layout, which
    /// depends on how columns were divided.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`] when there is no such unit or it cannot be read.
    pub fn buffer(&self, network: &str, name: &str) -> Result<Vec<f32>, TrainError> {
        let unit = self.unit(network, name)?;
        self.elements(network, unit, 0..unit.numel).map_err(|reason| self.error(reason))
    }

    fn unit(&self, network: &str, name: &str) -> Result<&UnitEntry, TrainError> {
        let mut units = self.manifest.units.iter();
        let entry = units.find(|entry| entry.network == network && entry.name == name);
        entry.ok_or_else(|| self.error(format!("its network {network} has no unit {name}")))
    }
}

/// Moves `values` to `device`.
fn to_device(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), device)
}

/// Converts little-endian bytes into f32 values.
fn from_le_bytes(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
