//! Reading of checkpoints: whole ones for evaluation, and the byte ranges of a rank for training.

use std::cell::RefCell;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn_tensor::{Device, Tensor, TensorData};
use networks::NamedTensor;
use networks::backbone::Readout;
use networks::layout::{ALIGNMENT, ParamSlot, UnitLayout};
use networks::tensor::joined;

use super::places::{Place, Places};
use super::shard_file::ShardFile;
use super::{LATEST, MANIFEST, Manifest, ParamEntry, UnitEntry, VERSION, folder, pieces, unusable};
use crate::error::TrainError;
use crate::recipe::check::check;
use crate::step::{NetworkState, TrainState};

/// A checkpoint on disk.
pub struct Checkpoint {
    /// Folder of the checkpoint.
    pub path: PathBuf,
    /// Manifest of the checkpoint.
    pub manifest: Manifest,
    /// Places of the parameters in its units.
    places: Places,
    /// The file that was read last: reads of one file follow one another.
    open: RefCell<Option<(usize, ShardFile)>>,
}

impl Checkpoint {
    /// Opens the checkpoint in `path`: a step's folder, a folder of checkpoints, or a work
    /// directory; of the latter two the newest that is intact. The file `latest` stands for the
    /// step that it names.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`].
    pub fn open(path: &Path) -> Result<Self, TrainError> {
        let whole = |path: &Path| Self::read(path).and_then(Self::verified);
        if path.is_file() && path.file_name().is_some_and(|name| name == LATEST) {
            let step = fs::read_to_string(path).map_err(|error| unusable(path, error))?;
            return whole(&path.with_file_name(step.trim()));
        }
        if path.join(MANIFEST).exists() {
            return whole(path);
        }
        for folder in [path.to_path_buf(), path.join("checkpoints")] {
            if let Some(found) = Self::newest(&folder)? {
                return Ok(found);
            }
        }
        Err(unusable(
            path,
            if path.join("plan.toml").exists() {
                "its run has not written a checkpoint yet"
            } else if path.join(".metadata").exists() {
                "it is a checkpoint of torch.distributed: `python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER \
                 weights.pth` makes a file of it that is read here"
            } else {
                "it is neither a run nor a checkpoint, and holds none"
            },
        ))
    }

    /// The newest intact checkpoint under `folder`; damaged ones are skipped with a warning.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`] when there are checkpoints and none is intact.
    pub fn newest(folder: &Path) -> Result<Option<Self>, TrainError> {
        let mut last_error = None;
        for path in folder::steps_in(folder).into_iter().rev() {
            match Self::read(&path).and_then(Self::verified) {
                Ok(checkpoint) => return Ok(Some(checkpoint)),
                Err(error) => {
                    tracing::warn!("{error}; trying the one before it");
                    last_error = Some(error);
                }
            }
        }
        last_error.map_or(Ok(None), Err)
    }

    /// Opens the step's folder `path` and reads its manifest. Files are opened and checked as they
    /// are read.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`].
    pub fn read(path: &Path) -> Result<Self, TrainError> {
        let file = path.join(MANIFEST);
        if !fs::metadata(&file).map_err(|error| unusable(path, error))?.is_file() {
            return Err(unusable(path, format!("{MANIFEST} is not a regular file")));
        }
        let text = fs::read(file).map_err(|error| unusable(path, error))?;
        let version: Option<u32> = serde_json::from_slice::<serde_json::Value>(&text)
            .ok()
            .and_then(|manifest| manifest.get("version")?.as_u64()?.try_into().ok());
        if let Some(version) = version.filter(|version| *version != VERSION) {
            let reason = format!(
                "it has version {version}, and this program reads version {VERSION}: finish the run with the release \
                 that started it, or start a new run in another folder"
            );
            return Err(unusable(path, reason));
        }
        let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| unusable(path, error))?;
        if !manifest.is_of(&String::from_utf8_lossy(&text)) {
            return Err(unusable(path, "manifest.json has been changed since it was written"));
        }
        let total_steps = manifest.plan.total_steps;
        if manifest.step > total_steps {
            return Err(unusable(path, format!("it follows step {} of {total_steps}", manifest.step)));
        }
        check(&manifest.plan).map_err(|error| unusable(path, error))?;
        if manifest.files.is_empty() {
            return Err(unusable(path, "it lists no file"));
        }
        let is_name = |name: &str| !name.contains(['/', '\\']) && name != "..";
        if let Some(file) = manifest.files.iter().find(|file| !is_name(&file.name)) {
            return Err(unusable(path, format!("{:?} is not the name of a file in it", file.name)));
        }
        let n_files = manifest.files.len();
        if let Some(unit) = manifest
            .units
            .iter()
            .find(|unit| unit.padded == 0 || !unit.padded.is_multiple_of(n_files) || unit.numel > unit.padded)
        {
            return Err(unusable(path, format!("{} does not divide into {n_files} files", unit.name)));
        }
        let places = Places::of(&manifest.units);
        Ok(Self { path: path.to_path_buf(), manifest, places, open: RefCell::new(None) })
    }

    /// Folder of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `f` on file `number`.
    fn with_file<R>(
        &self,
        number: usize,
        f: impl FnOnce(&ShardFile) -> Result<R, String>,
    ) -> Result<R, String> {
        let mut open = self.open.borrow_mut();
        if open.as_ref().is_none_or(|(last, _)| *last != number) {
            let entry = self.manifest.files.get(number).ok_or("the manifest lists too few files")?;
            *open = None;
            *open = Some((number, ShardFile::open(&self.path, entry.clone())?));
        }
        match open.as_ref() {
            Some((_, file)) => f(file),
            None => Err("no file is open".into()),
        }
    }

    /// Checks every block of every file, and returns the checkpoint if all match their checksums.
    fn verified(self) -> Result<Self, TrainError> {
        for number in 0..self.manifest.files.len() {
            self.with_file(number, |file| file.check()).map_err(|reason| unusable(&self.path, reason))?;
        }
        Ok(self)
    }

    /// Reads the parameters of the backbone of the network `name`, or of the evaluated network;
    /// returns them with the name of the network.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`], also when there is no such network; [`TrainError::Network`]
    /// if a parameter is not finite.
    pub fn backbone(&self, name: Option<&str>) -> Result<(Vec<NamedTensor>, String), TrainError> {
        let name = self.evaluated(name)?;
        let mut tensors = Vec::new();
        for unit in self.manifest.plan.recipe.model.units(Readout::All) {
            let layout = unit.layout(1);
            tensors.extend(layout.tensors(&self.parameters(&name, &layout)?));
        }
        tensors.iter().try_for_each(NamedTensor::check_finite)?;
        Ok((tensors, name))
    }

    /// Reads all parameters of the network `name`, or of the evaluated network, with its heads;
    /// returns them with its name.
    ///
    /// # Errors
    /// As [`Checkpoint::backbone`]; also where repeated entries ask for more numbers than the files
    /// hold.
    pub fn network(&self, name: Option<&str>) -> Result<(Vec<NamedTensor>, String), TrainError> {
        let name = self.evaluated(name)?;
        let mut tensors = Vec::new();
        let mut n_left = self.manifest.files.iter().map(|file| file.bytes as usize / 4).sum::<usize>();
        for unit in self.manifest.units.iter().filter(|unit| unit.network == name) {
            let bad = |reason: String| unusable(&self.path, reason);
            for ParamEntry { name: param, shape, offset, first, .. } in &unit.params {
                let numel = shape.iter().copied().fold(1, usize::saturating_mul);
                let range = *offset..offset.saturating_add(numel);
                if range.end > unit.numel || numel > n_left {
                    return Err(bad(format!("{param} is longer than its unit {}", unit.name)));
                }
                n_left -= numel;
                let rows = tensors.iter().filter(|tensor: &&NamedTensor| tensor.name == *param);
                if rows.map(|tensor| tensor.values.len()).sum::<usize>() != *first {
                    return Err(bad(format!(
                        "{param} in unit {} does not continue the rows before it",
                        unit.name
                    )));
                }
                let values = self.elements(&name, unit, range).map_err(bad)?;
                tensors.push(NamedTensor { name: param.clone(), shape: shape.clone(), values });
            }
        }
        let tensors = joined(tensors);
        tensors.iter().try_for_each(NamedTensor::check_finite)?;
        Ok((tensors, name))
    }

    /// Reads the elements `wanted` of the buffer `which` of `unit`; padding is zero.
    fn elements(&self, which: &str, unit: &UnitEntry, wanted: Range<usize>) -> Result<Vec<f32>, String> {
        let file_len = unit.padded / self.manifest.files.len();
        // A manifest is not trusted: memory is allocated only for as much as the files hold.
        let stored_bytes: u64 = self.manifest.files.iter().map(|file| file.bytes).sum();
        if wanted.len() as u64 > stored_bytes / 4 + ALIGNMENT as u64 {
            return Err(format!("unit {} has more elements than its files", unit.name));
        }
        let key = format!("{which}/{}", unit.name);
        let mut values = vec![0.0; wanted.len()];
        for piece in pieces(wanted, unit.numel, file_len) {
            let bytes = self.with_file(piece.file, |file| file.tensor(&key, file_len, piece.source))?;
            values[piece.target].copy_from_slice(&from_le_bytes(&bytes));
        }
        Ok(values)
    }

    /// Fills `state`, whose shards may be those of any rank, for any number of ranks.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`] when something is missing, damaged or of another length.
    pub fn restore(&self, state: &mut TrainState, device: &Device) -> Result<(), TrainError> {
        let bad = |reason: String| unusable(&self.path, reason);
        let mut restored = state.networks.clone();
        let moving = restored.iter_mut().filter(|network| !network.is_frozen && !self.lacks_copy(network));
        let shards: Vec<_> = moving
            .flat_map(|network| {
                let name = network.name;
                network.shards.iter_mut().map(move |shard| (name, shard))
            })
            .collect();
        let n = self.manifest.units.iter().map(|unit| unit.numel).fold(0, usize::saturating_add);
        let n_here: usize = shards.iter().map(|(_, shard)| shard.layout.numel).sum();
        if n_here != n {
            return Err(bad(format!("it has {n} parameters, the networks have {n_here}")));
        }
        for (network, shard) in shards {
            let mut n_updates = Vec::new();
            for slot in &shard.layout.params {
                let places = self.find(network, &shard.layout, slot, 0..slot.spec.numel())?;
                n_updates.push(places.first().map_or(0, |place| place.n_updates));
            }
            shard.n_updates = n_updates;
            let weights = std::iter::once(network);
            let moments = shard.moments.iter().map(|moment| moment.name);
            let buffers: Result<Vec<Tensor<1>>, TrainError> = weights
                .chain(moments)
                .map(|name| {
                    let range = shard.start..shard.start + shard.len();
                    let values = self.shard([network, name], &shard.layout, range)?;
                    let len = values.len();
                    Ok(Tensor::from_data(TensorData::new(values, [len]), device))
                })
                .collect();
            let here = std::iter::once(shard.weights.values_mut())
                .chain(shard.moments.iter_mut().map(|m| &mut m.values));
            here.zip(buffers?).for_each(|(here, values)| *here = values);
        }
        restored = self.with_copies(restored);
        let values: Result<Vec<_>, String> = self
            .manifest
            .method
            .iter()
            .map(|(name, len)| {
                let key = format!("method/{name}");
                let bytes = self.with_file(0, |file| file.tensor(&key, *len, 0..*len))?;
                Ok((name.clone(), from_le_bytes(&bytes)))
            })
            .collect();
        state.method.load_state(&values.map_err(bad)?).map_err(bad)?;
        state.networks = restored;
        state.step = self.manifest.step;
        state.skipped_batches = self.manifest.skipped_batches;
        state.bad_steps = self.manifest.bad_steps;
        Ok(())
    }

    /// Returns whether `network` is a copy of another one that the run has only since it was forked
    /// from this checkpoint.
    fn lacks_copy(&self, network: &NetworkState) -> bool {
        network.copies.is_some() && self.manifest.units.iter().all(|unit| unit.network != network.name)
    }

    /// Fills the copies that this checkpoint lacks with the networks that they copy.
    fn with_copies(&self, mut networks: Vec<NetworkState>) -> Vec<NetworkState> {
        let originals = networks.clone();
        for network in networks.iter_mut().filter(|network| self.lacks_copy(network)) {
            let of = originals.iter().find(|original| Some(original.name) == network.copies);
            of.into_iter().for_each(|original| network.copy_from(original));
        }
        networks
    }

    /// Returns `name` if there is a network of that name; without one, the name of the evaluated
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
            Err(unusable(&self.path, format!("it has no network {name}, but {}", names.join(" and "))))
        }
    }

    /// Reads the parameters of the unit that is laid out as `layout`, from `network`, whose unit
    /// may have more of them, such as a token for masked patches.
    ///
    /// # Errors
    /// [`TrainError::CheckpointRead`] when one is missing or has another shape.
    pub fn parameters(&self, network: &str, layout: &UnitLayout) -> Result<Vec<f32>, TrainError> {
        self.shard([network, network], layout, 0..layout.padded)
    }

    /// Reads the elements `range` of a unit's buffer: of the weights of a network, which have its
    /// name, or of moments, which have their own.
    fn shard(
        &self,
        [network, which]: [&str; 2],
        layout: &UnitLayout,
        range: Range<usize>,
    ) -> Result<Vec<f32>, TrainError> {
        let mut values = vec![0.0; range.len()];
        for slot in &layout.params {
            let param = slot.range();
            let start = param.start.max(range.start);
            let end = param.end.min(range.end);
            if start < end {
                let places = self.find(network, layout, slot, start - param.start..end - param.start)?;
                self.copy(which, places, &mut values[start - range.start..end - range.start])?;
            }
        }
        Ok(values)
    }

    /// Finds the elements `wanted` of what the unit with `layout` has of a parameter.
    fn find(
        &self,
        network: &str,
        layout: &UnitLayout,
        slot: &ParamSlot,
        wanted: Range<usize>,
    ) -> Result<Vec<Place<'_>>, TrainError> {
        let name = layout.full_name(slot);
        let first = slot.spec.first_element();
        let wanted = first + wanted.start..first + wanted.end;
        let shape = slot.spec.whole_shape();
        let found = self.places.find(&self.manifest.units, [network, &name], &shape, wanted);
        found.ok_or_else(|| {
            let reason = format!("its network {network} has other parameters than the network here: {name} of {shape:?} is not in it");
            unusable(&self.path, reason)
        })
    }

    /// Copies what is at `places` of the buffer `which` into `target`.
    fn copy(&self, which: &str, places: Vec<Place<'_>>, target: &mut [f32]) -> Result<(), TrainError> {
        let mut at = 0;
        for Place { unit, source, .. } in places {
            let values = self.elements(which, unit, source).map_err(|reason| unusable(&self.path, reason))?;
            target[at..at + values.len()].copy_from_slice(&values);
            at += values.len();
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
        self.elements(network, unit, 0..unit.numel).map_err(|reason| unusable(&self.path, reason))
    }

    fn unit(&self, network: &str, name: &str) -> Result<&UnitEntry, TrainError> {
        let mut units = self.manifest.units.iter();
        let entry = units.find(|entry| entry.network == network && entry.name == name);
        entry.ok_or_else(|| unusable(&self.path, format!("its network {network} has no unit {name}")))
    }
}

/// Converts little-endian bytes into f32 values.
fn from_le_bytes(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
