//! Checkpoints: `checkpoints/step-0000001000/{manifest.json, rank-00000.safetensors, …}`.
//!
//! Every rank writes its own shards ([`write`](mod@write)) into a temporary folder; when all have,
//! the manifest is written, the folder renamed and `latest` updated. If anything interrupts that,
//! earlier checkpoints are unchanged. The manifest contains the layouts, and length and checksums
//! of every file, so that any number of ranks can read only the byte ranges that they need
//! ([`read`]).

mod folder;
mod param_index;
mod read;
mod reshard;
mod resume;
mod shard_file;
mod simulate;
mod write;

pub use folder::{Hold, checkpoints_folder, prune, steps, steps_of_run};
pub use read::Checkpoint;
pub use reshard::{Piece, pieces};
pub use resume::resume;
pub use simulate::{Simulation, simulate};
pub use write::{Saver, Snapshot};

use std::path::Path;

use networks::layout::UnitLayout;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::TrainError;
use crate::recipe::plan::Plan;

/// Version of the checkpoints that this program writes and reads.
const VERSION: u32 = 4;

const MANIFEST: &str = "manifest.json";
const LATEST: &str = "latest";

/// Manifest of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the checkpoint.
    pub version: u32,
    /// Number of steps taken.
    pub step: u64,
    /// Number of batches skipped; the next global batch is `step + skipped_batches`.
    #[serde(default)]
    pub skipped_batches: u64,
    /// Number of steps skipped in a row just before.
    #[serde(default)]
    pub bad_steps: u32,
    /// Number of ranks of the run that wrote the checkpoint.
    pub world_size: usize,
    /// Plan of the run.
    pub plan: Plan,
    /// Units of all networks except frozen ones, in order.
    pub units: Vec<UnitEntry>,
    /// Names and lengths of the state of the method, which is in the first file.
    pub method: Vec<(String, usize)>,
    /// Files in order, one per shard.
    pub files: Vec<FileEntry>,
    /// XXH3 of the manifest's text with zeros in place of this checksum; empty in manifests of
    /// older releases.
    #[serde(default)]
    pub checksum: String,
}

impl Manifest {
    /// Returns the manifest as text, with its checksum.
    fn to_text(&self) -> serde_json::Result<String> {
        let zeros = Self { checksum: NO_CHECKSUM.into(), ..self.clone() };
        let text = serde_json::to_string_pretty(&zeros)?;
        let sum = format!("{:016x}", xxh3_64(text.as_bytes()));
        Ok(text.replacen(&checksum_entry(NO_CHECKSUM), &checksum_entry(&sum), 1))
    }

    /// Returns whether the checksum matches `text`, from which the manifest was read.
    fn has_valid_checksum(&self, text: &str) -> bool {
        let zeros = text.replacen(&checksum_entry(&self.checksum), &checksum_entry(NO_CHECKSUM), 1);
        self.checksum.is_empty() || self.checksum == format!("{:016x}", xxh3_64(zeros.as_bytes()))
    }
}

/// Placeholder for the checksum in the text from which it is computed.
const NO_CHECKSUM: &str = "0000000000000000";

/// Returns the entry of the checksum in the text of a manifest.
fn checksum_entry(sum: &str) -> String {
    format!("\"checksum\": \"{sum}\"")
}

/// A unit of a network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnitEntry {
    /// Name of the network.
    pub network: String,
    /// Name of the unit.
    pub name: String,
    /// Number of elements of its parameters.
    pub numel: usize,
    /// Number of elements of its buffer; every file holds an equal part.
    pub padded: usize,
    /// Parameters of the unit.
    pub params: Vec<ParamEntry>,
}

/// A parameter and its position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamEntry {
    /// Name in exports.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// First element in the unit's buffer.
    pub offset: usize,
    /// First element within the whole parameter, of which a part of a divided unit has some rows.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub first: usize,
    /// Number of updates of its moments.
    pub n_updates: u64,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Name of the file in the folder.
    pub name: String,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// Length of a block in bytes; the last one may be shorter.
    pub block_bytes: u64,
    /// XXH3 of every block, so that blocks can be verified separately.
    pub xxh3: Vec<u64>,
}

impl UnitEntry {
    /// Creates the entry of a unit of `network`, given the number of updates of each parameter; 0
    /// where `n_updates` is too short.
    pub fn new(network: &str, layout: &UnitLayout, n_updates: &[u64]) -> Self {
        Self {
            network: network.to_string(),
            name: layout.name.clone(),
            numel: layout.numel,
            padded: layout.padded,
            params: layout
                .params
                .iter()
                .enumerate()
                .map(|(index, slot)| ParamEntry {
                    name: layout.full_name(slot),
                    shape: slot.spec.shape.clone(),
                    offset: slot.offset,
                    first: slot.spec.first_element(),
                    n_updates: n_updates.get(index).copied().unwrap_or_default(),
                })
                .collect(),
        }
    }
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

fn rank_file(shard: usize) -> String {
    format!("rank-{shard:05}.safetensors")
}

/// Returns the error of the checkpoint in `path`, for `reason`.
fn read_error(path: &Path, reason: impl ToString) -> TrainError {
    TrainError::CheckpointRead { path: path.to_path_buf(), reason: reason.to_string() }
}
