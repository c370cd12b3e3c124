//! Writing of checkpoints while training continues: a thread of each rank writes a snapshot, and
//! the ranks vote on whether all of them have finished.
//!
//! A snapshot shares the memory of the tensors; the optimizer copies those that it changes, so that
//! memory grows by at most one copy of the state while a file is being written. One checkpoint is
//! written at a time.

use std::borrow::Cow;
use std::fs;
use std::fs::File;
use std::io;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use ::safetensors::tensor::{Dtype, View, serialize_to_file};
use burn_tensor::{Device, Tensor};
use kernels::device::host::with_slice;
use pipeline::file;
use ranks::topology::Topology;
use xxhash_rust::xxh3::xxh3_64;

use super::{FileEntry, LATEST, MANIFEST, Manifest, UnitEntry, VERSION, folder, rank_file};
use crate::error::TrainError;
use crate::recipe::plan::Plan;
use crate::step::TrainState;

/// Bytes of a block, each of which has a checksum.
const BLOCK_BYTES: usize = 4 << 20;

/// Part of one rank in a checkpoint, at one step.
pub struct Snapshot {
    tensors: Vec<(String, Tensor<1>)>,
    method: Vec<(String, Vec<f32>)>,
    manifest: Manifest,
}

impl Snapshot {
    /// Takes a snapshot of `state`.
    pub fn new(state: &TrainState, plan: &Plan) -> Self {
        let mut tensors = Vec::new();
        let mut units = Vec::new();
        // A frozen network is read from the file of its weights at every start.
        for network in state.networks.iter().filter(|network| !network.is_frozen) {
            for shard in network.buffers() {
                units.push(UnitEntry::new(network.name, &shard.layout, &shard.n_updates));
                let unit = &shard.layout.name;
                tensors.push((format!("{}/{unit}", network.name), shard.weights.values().clone()));
                for moment in &shard.moments {
                    tensors.push((format!("{}/{unit}", moment.name), moment.values.clone()));
                }
            }
        }
        let method = state.method.state();
        let manifest = Manifest {
            version: VERSION,
            step: state.step,
            skipped_batches: state.skipped_batches,
            bad_steps: state.bad_steps,
            world_size: plan.world_size,
            plan: plan.clone(),
            units,
            method: method.iter().map(|(name, values)| (name.clone(), values.len())).collect(),
            files: Vec::new(),
            checksum: String::new(),
        };
        Self { tensors, method, manifest }
    }

    /// Writes the file of this rank, and its entry for the manifest to another file.
    fn write(self, temporary: &Path, topology: Topology) -> io::Result<()> {
        fs::create_dir_all(temporary)?;
        let name = rank_file(topology.shard());
        let path = temporary.join(&name);
        let mut views: Vec<(String, StoredTensor)> =
            self.tensors.into_iter().map(|(name, tensor)| (name, StoredTensor::new(tensor))).collect();
        if topology.shard() == 0 {
            for (name, values) in self.method {
                let tensor = Tensor::from_floats(values.as_slice(), &Device::flex());
                views.push((format!("method/{name}"), StoredTensor::new(tensor)));
            }
        }
        serialize_to_file(views, None, &path).map_err(|error| match error {
            ::safetensors::SafeTensorError::IoError(error) => error,
            other => io::Error::other(other.to_string()),
        })?;
        let written = File::open(&path)?;
        written.sync_all()?;
        let entry = checksums(written, name)?;
        let entry_path = entry_path(temporary, topology.shard());
        file::write_synced(&entry_path, &serde_json::to_vec(&entry)?)?;
        // The library creates files that only their owner can read.
        fs::set_permissions(&path, fs::metadata(&entry_path)?.permissions())
    }
}

/// A tensor to be written to a file.
struct StoredTensor {
    tensor: Tensor<1>,
    shape: [usize; 1],
}

impl StoredTensor {
    fn new(tensor: Tensor<1>) -> Self {
        let shape = tensor.dims();
        Self { tensor, shape }
    }
}

impl View for StoredTensor {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        with_slice(&self.tensor, |values| bytemuck::cast_slice(values).to_vec()).into()
    }

    fn data_len(&self) -> usize {
        4 * self.shape[0]
    }
}

/// Reads a file again, and computes its length and its checksums.
fn checksums(mut file: File, name: String) -> io::Result<FileEntry> {
    let mut entry = FileEntry { name, bytes: 0, block_bytes: BLOCK_BYTES as u64, xxh3: Vec::new() };
    let mut block = vec![0; BLOCK_BYTES];
    loop {
        let mut len = 0;
        while len < BLOCK_BYTES {
            match file.read(&mut block[len..])? {
                0 => break,
                n => len += n,
            }
        }
        if len == 0 {
            return Ok(entry);
        }
        entry.bytes += len as u64;
        entry.xxh3.push(xxh3_64(&block[..len]));
    }
}

fn entry_path(folder: &Path, shard: usize) -> PathBuf {
    folder.join(format!("rank-{shard:05}.json"))
}

/// Writes the checkpoints of a run, one at a time.
pub struct Saver {
    folder: PathBuf,
    topology: Topology,
    n_keep: usize,
    /// Step whose checkpoint is kept beside the newest ones, once the next one is complete.
    kept_step: Option<u64>,
    in_flight: Option<InFlight>,
}

struct InFlight {
    step: u64,
    /// Step whose checkpoint is kept when this one is complete.
    kept_step: Option<u64>,
    manifest: Manifest,
    writing: Option<JoinHandle<io::Result<()>>>,
    outcome: Option<io::Result<()>>,
}

impl InFlight {
    fn join(&mut self) {
        if let Some(writing) = self.writing.take() {
            let outcome = writing.join();
            self.outcome =
                Some(outcome.unwrap_or_else(|_| Err(io::Error::other("the writing thread has panicked"))));
        }
    }
}

impl Saver {
    /// Creates a saver that writes to `folder` and keeps the newest `n_keep` checkpoints. That of
    /// rank 0 removes unfinished files of a run that was killed: the ranks must synchronize before
    /// any of them saves.
    pub fn new(folder: &Path, topology: Topology, n_keep: usize) -> Self {
        if topology.rank == 0 {
            folder::sweep(folder);
        }
        Self { folder: folder.to_path_buf(), topology, n_keep, kept_step: None, in_flight: None }
    }

    /// Keeps the checkpoint of `step` beside the newest ones, in place of the one that was kept
    /// before. The latter is removed when the next checkpoint that is started is complete, so that
    /// one of the two is always there.
    pub fn keep(&mut self, step: Option<u64>) {
        self.kept_step = step;
    }

    /// Returns whether a checkpoint is being written.
    pub fn is_busy(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Starts to write `state`. All ranks call it at the same step, and not while it is busy.
    pub fn start(&mut self, state: &TrainState, plan: &Plan) {
        let snapshot = Snapshot::new(state, plan);
        let step = state.step;
        let manifest = snapshot.manifest.clone();
        let topology = self.topology;
        let temporary = folder::temporary_step_folder(&self.folder, step);
        let mut in_flight =
            InFlight { step, kept_step: self.kept_step, manifest, writing: None, outcome: None };
        if topology.replica() == 0 {
            let thread = std::thread::Builder::new().name("checkpoint".into());
            match thread.spawn(move || snapshot.write(&temporary, topology)) {
                Ok(writing) => in_flight.writing = Some(writing),
                Err(error) => in_flight.outcome = Some(Err(error)),
            }
        } else {
            // Replicas have the same state, which the first of them writes.
            in_flight.outcome = Some(Ok(()));
        }
        self.in_flight = Some(in_flight);
    }

    /// Returns the votes of this rank: 1 if its part is written, else 0, and 1 if writing has
    /// failed, else 0.
    pub fn vote(&mut self) -> (f64, f64) {
        let Some(in_flight) = &mut self.in_flight else { return (0.0, 0.0) };
        if in_flight.writing.as_ref().is_some_and(JoinHandle::is_finished) {
            in_flight.join();
        }
        match &in_flight.outcome {
            Some(Ok(())) => (1.0, 0.0),
            Some(Err(_)) => (0.0, 1.0),
            None => (0.0, 0.0),
        }
    }

    /// Takes the sums of the votes of all ranks. When all have written their parts, completes the
    /// checkpoint and returns its step.
    ///
    /// # Errors
    /// [`TrainError::CheckpointWrite`]; earlier checkpoints are unchanged.
    pub fn count_votes(&mut self, n_saved: f64, n_failed: f64) -> Result<Option<u64>, TrainError> {
        if n_failed == 0.0 && n_saved < self.topology.world_size as f64 {
            return Ok(None);
        }
        let Some(in_flight) = self.in_flight.take() else { return Ok(None) };
        let InFlight { step, kept_step, manifest, outcome, .. } = in_flight;
        let target = folder::step_folder(&self.folder, step);
        let result = match outcome {
            _ if n_failed == 0.0 && self.topology.rank == 0 => self.commit(step, kept_step, manifest),
            Some(Err(error)) => Err(error),
            _ if n_failed > 0.0 => Err(io::Error::other("another rank could not write its part")),
            _ => Ok(()),
        };
        result.map_err(|source| {
            // The disk may be full. An error of the removal is less important than `source`.
            let _ = folder::remove_if_present(&folder::temporary_step_folder(&self.folder, step));
            TrainError::CheckpointWrite { path: target, source }
        })?;
        Ok(Some(step))
    }

    /// Waits until the part of this rank is written or has failed, and returns its votes.
    pub fn wait(&mut self) -> (f64, f64) {
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.join();
        }
        self.vote()
    }

    /// Writes the manifest, renames the folder and updates `latest`, in this order; then removes
    /// old checkpoints except that of `kept_step`.
    fn commit(&self, step: u64, kept_step: Option<u64>, mut manifest: Manifest) -> io::Result<()> {
        let target = folder::step_folder(&self.folder, step);
        let temporary = folder::temporary_step_folder(&self.folder, step);
        for shard in 0..self.topology.group_size {
            let path = entry_path(&temporary, shard);
            let entry: FileEntry = serde_json::from_slice(&fs::read(&path)?)?;
            let bytes = fs::metadata(temporary.join(&entry.name))?.len();
            if bytes != entry.bytes {
                let reason = format!("{} has {bytes} bytes, but {} were written", entry.name, entry.bytes);
                return Err(io::Error::other(reason));
            }
            manifest.files.push(entry);
            fs::remove_file(&path)?;
        }
        file::write_synced(&temporary.join(MANIFEST), manifest.to_text()?.as_bytes())?;
        folder::remove_if_present(&target)?;
        fs::rename(&temporary, &target)?;
        file::replace(&self.folder.join(LATEST), format!("step-{step:010}\n").as_bytes())?;
        File::open(&self.folder)?.sync_all()?;
        folder::prune(&self.folder, step, self.n_keep, kept_step);
        Ok(())
    }
}
