//! Errors that stop a run.

use std::path::{Path, PathBuf};

use augment::AugmentError;
use networks::NetworkError;
use pipeline::PipelineError;
use pipeline::words::counted;
use ranks::EngineError;

/// An error of the trainer. Variants name the file, key or value they are about.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The recipe cannot be read or is invalid.
    #[error("recipe {recipe}: {reason}")]
    Recipe {
        /// File or built-in name of the recipe.
        recipe: String,
        /// The key and what is wrong with it.
        reason: String,
    },
    /// The work directory belongs to another recipe.
    #[error(
        "work directory {} belongs to another recipe: {key} is {there} there but {here} here; choose \
         another --workdir, or change {key} back", workdir.display()
    )]
    RecipeMismatch {
        /// The work directory.
        workdir: PathBuf,
        /// First key that differs.
        key: String,
        /// Value of the key in the work directory.
        there: String,
        /// Value of the key in the recipe of this start.
        here: String,
    },
    /// The work directory belongs to a run of another method.
    #[error(
        "work directory {} belongs to another run: that run is {there} (recipe {recipe}), but this recipe \
         is {here}; choose another --workdir", workdir.display()
    )]
    OtherMethod {
        /// The work directory.
        workdir: PathBuf,
        /// Method of the run in the work directory, as publications write it.
        there: &'static str,
        /// Name of the recipe of that run.
        recipe: String,
        /// Method of the recipe of this start.
        here: &'static str,
    },
    /// The shards are not those that a run began with.
    #[error(
        "the images differ from those that the run in {} started with: {difference}; give the original \
         images, or choose another --workdir and start from this run's weights with `--init {}`", workdir.display(), workdir.display()
    )]
    DataMismatch {
        /// The work directory.
        workdir: PathBuf,
        /// How they differ.
        difference: String,
    },
    /// The run was begun by a release that makes other views of the same images.
    #[error(
        "the run in {} was started by a release that decodes JPEG or blurs differently: finish it with \
         that release, or choose another --workdir", workdir.display()
    )]
    ViewsMismatch {
        /// The work directory.
        workdir: PathBuf,
    },
    /// The work directory no longer exists.
    #[error(
        "the work directory {} was moved, deleted or replaced during the run: nothing has been written \
         since", workdir.display()
    )]
    WorkdirMissing {
        /// The work directory.
        workdir: PathBuf,
    },
    /// The data path failed.
    #[error(transparent)]
    Data(#[from] PipelineError),
    /// A collective or a device failed.
    #[error(transparent)]
    Ranks(#[from] EngineError),
    /// Ranks were started with different recipes or data.
    #[error("rank {rank} differs from rank 0 in {what}: {theirs} there, {ours} on rank 0")]
    RanksDiffer {
        /// Rank that differs from rank 0.
        rank: usize,
        /// Key in which the plans differ.
        what: String,
        /// Value on that rank.
        theirs: String,
        /// Value on rank 0.
        ours: String,
    },
    /// A unit of the network is missing from the gathered weights.
    #[error("the network has no unit {unit}; this is a bug in ocelli")]
    NoUnit {
        /// Name of the unit.
        unit: String,
    },
    /// The folder is not a work directory.
    #[error("no run in {}: plan.toml not found", workdir.display())]
    NoRun {
        /// The folder.
        workdir: PathBuf,
    },
    /// Another run uses the same work directory.
    #[error("another run is using {}", workdir.display())]
    Busy {
        /// The work directory.
        workdir: PathBuf,
    },
    /// Other ranks cannot continue, and have reported the reason themselves.
    #[error("{n_ranks} of the other ranks cannot continue; see their messages")]
    PeersFailed {
        /// Number of these ranks.
        n_ranks: usize,
    },
    /// The multi-crop is invalid.
    #[error(transparent)]
    Augment(#[from] AugmentError),
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// Action that failed, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A checkpoint could not be written; the ones before it are untouched.
    #[error(
        "cannot write checkpoint {}: {source}; earlier checkpoints are untouched: free disk space and run \
         the same command again", path.display()
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
        /// Reason for which it cannot be used.
        reason: String,
    },
    /// Weights do not fit the network.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// Loss or gradients were not finite in too many steps in a row.
    #[error(
        "loss or gradient was not finite for {} in a row, the last at step {step}; the last checkpoint \
         is untouched: lower optim.lr or optim.clip_norm, or make the targets softer",
        counted(u64::from(*n_steps), "step")
    )]
    NotFinite {
        /// The last such step.
        step: u64,
        /// Number of such steps in a row.
        n_steps: u32,
    },
    /// A matrix product became wrong during training.
    #[error(
        "step {step}: {what}; weights computed after step {last_right} may be wrong, so none were saved: \
         {}, and run the same command again, with --set run.kernels=cubecl if it happens again",
        match good {
            Some(good) => format!("remove the checkpoints after step {good}, the last good one"),
            None => "there is no older checkpoint; start over in another folder".into(),
        }
    )]
    WrongProduct {
        /// The step in which it was found.
        step: u64,
        /// The last step before which products were right.
        last_right: u64,
        /// Step of the newest checkpoint that is not younger than that.
        good: Option<u64>,
        /// The fault, in words.
        what: String,
    },
    /// A probe failed during training.
    #[error("probe {name} failed: {reason}")]
    Probe {
        /// Name of the probe.
        name: String,
        /// Message of the probe.
        reason: String,
    },
    /// No key of a recipe begins with the prefix.
    #[error("no key starts with {prefix}; closest: {closest}")]
    NoKey {
        /// The prefix.
        prefix: String,
        /// The most similar key.
        closest: String,
    },
    /// No shipped recipe has the value of a flag, to make a new recipe from.
    #[error("{flag} {value}: expected one of {known}")]
    NoTemplate {
        /// The flag.
        flag: &'static str,
        /// Its value.
        value: String,
        /// Values of the shipped recipes.
        known: String,
    },
    /// The section `model` of a new recipe is not one of its backbone.
    #[error("model: {reason}")]
    ModelSection {
        /// The key and what is wrong with it.
        reason: String,
    },
    /// No published model has the name.
    #[error("unknown preset {preset}: expected one of {known}")]
    UnknownPreset {
        /// The name.
        preset: String,
        /// Names of all presets.
        known: String,
    },
    /// The units of a published model cannot be divided as far as requested.
    #[error(
        "run.max_unit_parameters = {most} is too small: units cannot be split below {largest} parameters; \
         set it to at least that"
    )]
    PresetUnits {
        /// Largest number of parameters that is requested.
        most: usize,
        /// Number of parameters of the largest unit.
        largest: usize,
    },
    /// The output of a benchmark has no figures.
    #[error("{} has no line of JSON: create it with --json", path.display())]
    NoFigures {
        /// The file.
        path: PathBuf,
    },
    /// The endless data stream ended, which happens only if its threads have died.
    #[error("the data threads ended without an error; this is a bug in ocelli")]
    DataEnded,
}

impl TrainError {
    /// An I/O error on `path` while doing `action`.
    pub fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }
}
