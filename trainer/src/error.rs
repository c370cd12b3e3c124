//! Everything that can stop a run.

use std::path::{Path, PathBuf};

use augment::AugmentError;
use networks::NetworkError;
use pipeline::PipelineError;
use ranks::EngineError;

/// An error of the trainer. Variants name the file, key or value they are about.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A recipe that cannot be read or makes no sense.
    #[error("recipe {recipe}: {reason}")]
    Recipe {
        /// File or built-in name of the recipe.
        recipe: String,
        /// The key and what is wrong with it.
        reason: String,
    },
    /// The work directory belongs to another recipe.
    #[error(
        "work directory {} was made by another recipe: {key} is {there} there and {here} here; \
         choose another --workdir, or set {key} back", workdir.display()
    )]
    OtherRecipe {
        /// The work directory.
        workdir: PathBuf,
        /// First key that differs.
        key: String,
        /// Its value in the work directory.
        there: String,
        /// Its value now.
        here: String,
    },
    /// The shards are not those that a run began with.
    #[error(
        "the shards are not those that the run in {} began with: as many samples, but other keys, lengths or order; give \
         those shards, or choose another --workdir", workdir.display()
    )]
    OtherData {
        /// The work directory.
        workdir: PathBuf,
    },
    /// A run that another release began, whose views were other ones.
    #[error(
        "the run in {} was begun by a release that decodes JPEG or blurs in another way: finish it with that release, or \
         choose another --workdir", workdir.display()
    )]
    OtherViews {
        /// The work directory.
        workdir: PathBuf,
    },
    /// A run's folder is not there any more.
    #[error(
        "the work directory {} was moved, deleted or replaced while its run went on: nothing was written since", workdir.display()
    )]
    WorkdirGone {
        /// The work directory.
        workdir: PathBuf,
    },
    /// The data path failed.
    #[error(transparent)]
    Data(#[from] PipelineError),
    /// Ranks have lost one another.
    #[error(transparent)]
    Ranks(#[from] EngineError),
    /// Ranks do not agree on what they run.
    #[error("rank {rank} differs from rank 0 in {what}: {theirs} there, {ours} on rank 0")]
    RanksDiffer {
        /// The rank.
        rank: usize,
        /// What differs.
        what: String,
        /// Its value on that rank.
        theirs: String,
        /// Its value on rank 0.
        ours: String,
    },
    /// A weight is missing from what was gathered.
    #[error("the network has no unit {unit}; this is a bug in ocelli")]
    NoUnit {
        /// Name of the unit.
        unit: String,
    },
    /// A folder is no work directory.
    #[error("there is no run in {}: it has no plan.toml", workdir.display())]
    NoRun {
        /// The folder.
        workdir: PathBuf,
    },
    /// Another run works in the same folder.
    #[error("another run is at work in {}", workdir.display())]
    Busy {
        /// The work directory.
        workdir: PathBuf,
    },
    /// Another rank cannot go on, and has said why itself.
    #[error("{n_ranks} of the other ranks cannot go on; see their messages")]
    PeersFailed {
        /// How many.
        n_ranks: usize,
    },
    /// A multi-crop makes no sense.
    #[error(transparent)]
    Augment(#[from] AugmentError),
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was being done, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A checkpoint could not be written; the ones before it are untouched.
    #[error(
        "cannot write checkpoint {}: {source}; earlier checkpoints are untouched: make room and start the \
         same command again", path.display()
    )]
    CheckpointWrite {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A checkpoint cannot be used.
    #[error("checkpoint {} cannot be used: {reason}", path.display())]
    CheckpointRead {
        /// The checkpoint's folder or file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Weights do not fit a network.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// Loss or gradients were not finite too often.
    #[error(
        "loss or gradient was not finite in {n_steps} steps in a row, the last at step {step}; the last \
         checkpoint is untouched: lower optim.lr or optim.clip_norm, or raise the teacher temperature"
    )]
    NotFinite {
        /// The last such step.
        step: u64,
        /// How many in a row.
        n_steps: u32,
    },
    /// A probe failed during training.
    #[error("probe {name} failed: {reason}")]
    Probe {
        /// Name of the probe.
        name: String,
        /// Its own words.
        reason: String,
    },
    /// The data stream ended, which an endless stream does only when its threads died.
    #[error("the data threads ended without an error; this is a bug in ocelli")]
    DataEnded,
}

impl TrainError {
    /// An I/O error on `path` while doing `action`.
    pub fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }
}
