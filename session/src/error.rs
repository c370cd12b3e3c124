//! Errors of a run before and while it trains, and of the evaluation of its networks.

use std::path::{Path, PathBuf};

use augment::PixelFormat;
use eval::EvalError;
use kernels::device::DeviceError;
use networks::NetworkError;
use pipeline::PipelineError;
use pipeline::words::counted;
use prep::PrepError;
use ranks::EngineError;
use ranks::conformance::ConformanceError;
use ranks::launch::LaunchError;
use trainer::TrainError;
use weights::WeightsError;

/// An error of a session. Variants name the file, run or key they are about, and advise the user.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The recipe names no shards.
    #[error("no shards: give --shards, or data.shards in the recipe")]
    NoShards,
    /// No recipe can be chosen.
    #[error("no built-in recipe suits the images and the weights: give one with --recipe")]
    NoChoice,
    /// Shards that are read only from a disk are elsewhere.
    #[error("the shards are on a server")]
    RemoteShards,
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// Operation that failed, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// Weights are named by a model or an address.
    #[error(
        "cannot open {}: {source}; names of models and addresses are not downloaded: give a file or folder \
         on this machine (docs/weights.md says how to get one)",
        path.display()
    )]
    NotDownloaded {
        /// The name or address.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// An operation of the file system failed; the text is the system's.
    #[error("{source}")]
    FileSystem {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The record of an evaluation is damaged.
    #[error("in {}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// A fact about a network cannot be expressed in JSON.
    #[error(transparent)]
    Unserializable(serde_json::Error),
    /// A checkpoint does not exist, and others do.
    #[error(
        "cannot open {}: available checkpoints: steps {}; older ones are removed (run.keep_checkpoints): \
         {source}",
        path.display(), list(steps)
    )]
    CheckpointRemoved {
        /// The checkpoint.
        path: PathBuf,
        /// Steps of the checkpoints beside it.
        steps: Vec<u64>,
        /// The cause.
        source: std::io::Error,
    },
    /// A weights file was opened for the heads, which it does not have.
    #[error("{} is a backbone without heads; only runs and checkpoints of ocelli have heads", path.display())]
    NoHeads {
        /// The file.
        path: PathBuf,
    },
    /// The recipe takes its backbone from weights that are not given.
    #[error(
        "model.arch = from_init takes the backbone of the initial weights: give --init WEIGHTS, or \
         --checkpoint WEIGHTS to `ocelli finetune`, or --set init.weights=WEIGHTS"
    )]
    NoBackbone,
    /// The recipe starts from weights that are not given.
    #[error(
        "recipe {recipe} starts from the weights of another run: give --init RUN, or --checkpoint RUN to \
         `ocelli finetune`"
    )]
    NoInitialWeights {
        /// Name of the recipe.
        recipe: String,
    },
    /// The run began with weights, and is resumed without naming them.
    #[error(
        "the run in {} started from weights: give --init {weights} as before (--checkpoint to `ocelli \
         finetune`), even if the weights no longer exist",
        workdir.display()
    )]
    BeganWithWeights {
        /// The work directory.
        workdir: PathBuf,
        /// The weights.
        weights: String,
    },
    /// The run began with another setting of `init.heads`.
    #[error("the run in {} started with init.heads={heads}: set it as before", workdir.display())]
    BeganWithHeads {
        /// The work directory.
        workdir: PathBuf,
        /// The setting with which it began.
        heads: bool,
    },
    /// The run began with another network of its weights.
    #[error(
        "the run in {} started from another network of its weights, {network}: choose another --workdir",
        workdir.display()
    )]
    BeganWithNetwork {
        /// The work directory.
        workdir: PathBuf,
        /// The network with which it began.
        network: String,
    },
    /// Weights do not fit the backbone of the recipe.
    #[error("{} does not fit recipe {recipe}: {reason}", path.display())]
    DoesNotFit {
        /// The weights.
        path: PathBuf,
        /// Name of the recipe.
        recipe: String,
        /// Description of the difference.
        reason: String,
    },
    /// The weights for `init.heads` cannot be read.
    #[error("init.heads: {source}")]
    InitialHeads {
        /// The cause.
        source: Box<SessionError>,
    },
    /// The head for `init.heads` has learned other classes than the run is to learn.
    #[error(
        "init.heads: the head of {} has learned {}, and the images have {}: each class would begin with the \
         weights of another, so remove init.heads, which begins with a new head",
        path.display(),
        listed(learned),
        listed(wanted)
    )]
    InitialClasses {
        /// The weights.
        path: PathBuf,
        /// Classes that the head has learned, in their order.
        learned: Vec<String>,
        /// Classes of the run, in their order.
        wanted: Vec<String>,
    },
    /// Weights differ from those that the recipe states.
    #[error("the weights in {} do not match the recipe's init.fingerprint", path.display())]
    OtherWeights {
        /// The weights.
        path: PathBuf,
    },
    /// The work directory was forked, and its run never began.
    #[error("{} was forked but never started: give --fork again, or another --workdir", workdir.display())]
    ForkNotStarted {
        /// The work directory.
        workdir: PathBuf,
    },
    /// A fork would take no step.
    #[error(
        "the fork in {} begins after step {step}, and optim.length is {}: it would take no step; the length \
         counts from the first step of the other run, so give a larger one",
        workdir.display(),
        counted(*total_steps, "step")
    )]
    ForkFinished {
        /// The work directory.
        workdir: PathBuf,
        /// Step of the checkpoint that the fork begins with.
        step: u64,
        /// Number of steps of the fork.
        total_steps: u64,
    },
    /// The work directory holds a run that was not forked from the given one.
    #[error(
        "{} holds a run that was not forked from {}; choose another --workdir",
        workdir.display(),
        from.display()
    )]
    ForkOccupied {
        /// The work directory.
        workdir: PathBuf,
        /// The run or checkpoint to fork from.
        from: PathBuf,
    },
    /// The run that is forked takes images of another number of channels.
    #[error("{} takes images of {n_channels} channels: a fork must keep data.channels", run.display())]
    ForkChannels {
        /// The run that is forked.
        run: PathBuf,
        /// Its number of channels.
        n_channels: usize,
    },
    /// The run that is forked has positions for images of another size.
    #[error("{} has positions for images of {image_px} px: a fork must keep model.image_px", run.display())]
    ForkPositions {
        /// The run that is forked.
        run: PathBuf,
        /// Its size of images.
        image_px: usize,
    },
    /// The checkpoint of a run that is forked cannot be copied.
    #[error("cannot copy {} into {}: {source}", run.display(), workdir.display())]
    ForkCopy {
        /// The run that is forked.
        run: PathBuf,
        /// The work directory.
        workdir: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The weights of a frozen network are not named.
    #[error("{key} is empty: give the network to distill, --set {key}=RUN")]
    FrozenUnnamed {
        /// Key of its weights.
        key: String,
    },
    /// The weights of a frozen network cannot be read.
    #[error("{key}: {reason}")]
    Frozen {
        /// Key of its weights.
        key: String,
        /// The fault, and advice to the user.
        reason: String,
    },
    /// A frozen network takes images of other bits.
    #[error("{key}: {} takes images of {theirs} bits, but data.bits is {ours}: both networks see the same \
             views", path.display())]
    FrozenDepth {
        /// Key of its weights.
        key: String,
        /// The weights.
        path: PathBuf,
        /// Bits that it takes.
        theirs: u8,
        /// Bits of the recipe.
        ours: u8,
    },
    /// A frozen network has other weights than those that the run began with.
    #[error(
        "{key}: {} no longer has the weights that the run started with: restore the file, or choose \
         another --workdir",
        path.display()
    )]
    FrozenChanged {
        /// Key of its weights.
        key: String,
        /// The weights.
        path: PathBuf,
    },
    /// The shards and shares of sources do not fit together.
    #[error("{reason}")]
    Sources {
        /// The key or the shards, their fault, and advice to the user.
        reason: String,
    },
    /// A weight of an image is not a number.
    #[error("{}: the weight of {key} is {text:?}, which is not a number", path.display())]
    ImageWeight {
        /// The list of weights.
        path: PathBuf,
        /// Key of the image.
        key: String,
        /// The text.
        text: String,
    },
    /// A list of weights names none of the images.
    #[error("{} names none of the images of --shards", path.display())]
    NoImageWeights {
        /// The list.
        path: PathBuf,
    },
    /// No image has a class, and the method learns from labels, or a classifier is scored.
    #[error(
        "none of {} of {set} has a class: put the images of each class into a folder of its own, or \
         `ocelli shards pack` a list with the columns path and label",
        counted(*n_images as u64, "image")
    )]
    NoClasses {
        /// The images.
        set: String,
        /// Number of images.
        n_images: usize,
    },
    /// An image has several classes, and the method takes one.
    #[error(
        "{shard}, {key} has the classes {}, but a classifier takes one class per image unless it learns \
         several: --set method.loss=binary_cross_entropy",
        listed(names)
    )]
    SeveralClasses {
        /// The shard.
        shard: String,
        /// Key of the image.
        key: String,
        /// Its classes.
        names: Vec<String>,
    },
    /// All images are of one class.
    #[error("all images of {set} are of the class {class}: a classifier needs images of two at least")]
    OneClass {
        /// The images.
        set: String,
        /// The class.
        class: String,
    },
    /// Images have classes that the recipe does not list.
    #[error(
        "method.classes does not list {}, of which there are images: add what is missing, or take the \
         classes of the images, --set method.classes=[]",
        listed(classes)
    )]
    UnlistedClasses {
        /// The classes.
        classes: Vec<String>,
    },
    /// The recipe lists classes that no image has.
    #[error(
        "method.classes lists {}, of which there are no images: take it out of the list, or take the \
         classes of the images, --set method.classes=[]",
        listed(classes)
    )]
    UnusedClasses {
        /// The classes.
        classes: Vec<String>,
    },
    /// Images to score a classifier on have classes that it does not know.
    #[error(
        "{set} has images of {}, which the classifier does not know: it is trained on {}",
        listed(unknown),
        listed(known)
    )]
    UnknownClasses {
        /// The images.
        set: String,
        /// Their classes that are unknown.
        unknown: Vec<String>,
        /// The classes that the classifier is trained on.
        known: Vec<String>,
    },
    /// The share of images to hold out is less than one image.
    #[error(
        "data.validation={share} holds none of {} of {set} out of training: give a larger share, or other \
         images to validate on (--val-shards of `ocelli finetune`)",
        counted(*n_images, "image")
    )]
    NothingHeldOut {
        /// The images.
        set: String,
        /// The share.
        share: f64,
        /// Number of images that have a class.
        n_images: u64,
    },
    /// Images have other labels than when the run began.
    #[error(
        "the labels of the images are not those that the run in {} started with ({difference}): restore \
         them, or choose another --workdir",
        workdir.display()
    )]
    LabelsChanged {
        /// The work directory.
        workdir: PathBuf,
        /// What differs.
        difference: &'static str,
    },
    /// A run trains no classifier.
    #[error("{} is a run of {method}, which trains no classifier: `ocelli finetune` does", path.display())]
    NotClassifier {
        /// The run or checkpoint.
        path: PathBuf,
        /// Name of its method.
        method: &'static str,
    },
    /// Weights hold no classifier.
    #[error(
        "{} holds no classifier that can be read: give a run of `ocelli finetune`, or its `ocelli export` \
         as .safetensors or .onnx", path.display()
    )]
    NoClassifier {
        /// The weights.
        path: PathBuf,
    },
    /// A mask has a class that the recipe does not list.
    #[error(
        "{shard}, {key}: the mask has pixels of class {class}, but method.classes lists {n_listed} classes, \
         counted from 0: list all, take the numbers in the masks, --set method.classes=[], or mark pixels \
         that do not count by 255"
    )]
    UnlistedPixelClass {
        /// The shard.
        shard: String,
        /// Key of the image.
        key: String,
        /// The class.
        class: u8,
        /// Number of classes that the recipe lists.
        n_listed: usize,
    },
    /// Images have other masks than when the run began.
    #[error(
        "the masks of the images are not those that the run in {} started with ({difference}): restore \
         them, or choose another --workdir",
        workdir.display()
    )]
    MasksChanged {
        /// The work directory.
        workdir: PathBuf,
        /// What differs.
        difference: &'static str,
    },
    /// A run does not learn to label pixels.
    #[error(
        "{} is a run of {method}, which does not label pixels: `ocelli finetune --recipe segment` does",
        path.display()
    )]
    NotSegmenter {
        /// The run or checkpoint.
        path: PathBuf,
        /// Name of its method.
        method: &'static str,
    },
    /// Weights hold no decoder.
    #[error(
        "{} holds no decoder that labels pixels: give a run of `ocelli finetune --recipe segment`, or its \
         `ocelli export` as .safetensors or .onnx", path.display()
    )]
    NoDecoder {
        /// The weights.
        path: PathBuf,
    },
    /// No image can be used, for another reason than its number of channels and bits.
    #[error(
        "none of {} of {} can be used: {reason}", counted(*n_images as u64, "inspected image"),
        shards.join(" ")
    )]
    UnusableImages {
        /// Number of images that were inspected.
        n_images: usize,
        /// Shards and folders, without secrets.
        shards: Vec<String>,
        /// What they have in common, or the reason of the first.
        reason: String,
    },
    /// The recipe lacks settings for the channels and the bits of the images.
    #[error("{reason}; add\n  {}{}", settings.join(" \\\n  "), note_of_measurement(*measured))]
    PixelSettings {
        /// Keys and images that do not fit together.
        reason: String,
        /// Flags to add.
        settings: Vec<String>,
        /// Number of images by which the constants of the flags were measured.
        measured: Option<usize>,
    },
    /// The device does not support a type of the plan.
    #[error("{device} does not support {dtype}: set optim.precision to another type")]
    DeviceType {
        /// Name of the device.
        device: String,
        /// Name of the type.
        dtype: &'static str,
    },
    /// Ranks were given groups of different sizes.
    #[error(
        "{key}: ranks have different values, which make groups of {least} to {most} ranks; this one's \
         makes {this_rank}"
    )]
    Groups {
        /// Keys of the sizes.
        key: &'static str,
        /// The smallest size.
        least: f64,
        /// The largest size.
        most: f64,
        /// The size on this rank.
        this_rank: f64,
    },
    /// Ranks were given different lengths of the run.
    #[error(
        "optim.length: ranks have different lengths, of {least} to {most} minutes; this one's is {this_rank} \
         (0 for a length in another unit)"
    )]
    Minutes {
        /// The smallest length.
        least: f64,
        /// The largest length.
        most: f64,
        /// The length on this rank.
        this_rank: f64,
    },
    /// Ranks have different libraries, and the recipe demands one.
    #[error(
        "run.kernels = \"cublaslt\": ranks have different versions of the library, or some have none; \
         this one's is {this_rank}: give all ranks the same library, or set it to \"auto\""
    )]
    Kernels {
        /// The library of this rank.
        this_rank: String,
    },
    /// Settings of the values of pixels are given for a run.
    #[error(
        "{} is a run, and its recipe sets how images are decoded (data.bits_used, data.no_data): \
         --bits-used and --no-data are only for weights from other programs", path.display()
    )]
    RunValues {
        /// The run.
        path: PathBuf,
    },
    /// Images of the format have no pixels without data.
    #[error("--no-data is for images with a no-data value, not for {format}")]
    NoDataFormat {
        /// The format.
        format: PixelFormat,
    },
    /// The bits that values use are given for values of floating point.
    #[error("--bits-used is only for 16-bit images; with --bits 32, values are used unchanged")]
    FloatBits,
    /// The sizes of a transform do not fit together.
    #[error("{reason}")]
    Transform {
        /// The sizes and their fault.
        reason: String,
    },
    /// The activations of one image do not fit into memory.
    #[error(
        "an image of {size_px} px needs {:.1} GB in this network, but only {:.1} GB are free: pass a \
         smaller --image-px", needed_bytes / 1e9, free_bytes / 1e9
    )]
    ImageMemory {
        /// Side of the image in pixels.
        size_px: u32,
        /// Bytes that it needs.
        needed_bytes: f64,
        /// Bytes that are free.
        free_bytes: f64,
    },
    /// No run has begun in a folder that is watched.
    #[error("no run in {}", workdir.display())]
    NoRun {
        /// The folder.
        workdir: PathBuf,
    },
    /// An operation between ranks fails.
    #[error("rank {rank}: {source}")]
    Fabric {
        /// This rank.
        rank: usize,
        /// The cause.
        source: EngineError,
    },
    /// An operation between ranks gives wrong numbers.
    #[error("rank {rank}: {source}")]
    FabricWrong {
        /// This rank.
        rank: usize,
        /// The operation.
        source: ConformanceError,
    },
    /// The thread that tests the communication between ranks has panicked.
    #[error("the fabric test panicked; see above")]
    FabricPanicked,
    /// Environment variables of launchers contradict one another.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The device cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A collective failed.
    #[error(transparent)]
    Ranks(#[from] EngineError),
    /// The data set cannot be opened.
    #[error(transparent)]
    Prep(#[from] PrepError),
    /// The data path failed.
    #[error(transparent)]
    Data(#[from] PipelineError),
    /// Weights cannot be read.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Weights do not fit their network.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// Images cannot be opened or scored, or scores cannot be recorded.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// The recipe is invalid, or training failed.
    #[error(transparent)]
    Train(#[from] TrainError),
}

impl SessionError {
    /// Returns the error of an operation on the file `path`, which `action` names.
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }

    /// Returns the error of the file system on `path`.
    pub(crate) fn file_system(path: &Path, source: std::io::Error) -> Self {
        Self::FileSystem { path: path.to_path_buf(), source }
    }

    /// Returns the error of the damaged file `path`.
    pub(crate) fn json(path: &Path, source: serde_json::Error) -> Self {
        Self::Json { path: path.to_path_buf(), source }
    }
}

/// Says by how many images constants were measured, in a line of its own; empty if they were not.
fn note_of_measurement(n_images: Option<usize>) -> String {
    match n_images {
        Some(n) => {
            let images = counted(n as u64, "image");
            format!("\n(mean and std of {images}; `ocelli shards stats` measures those of all images)")
        }
        None => String::new(),
    }
}

/// Largest number of names that a message lists.
const MAX_LISTED: usize = 8;

/// Lists names: `cat, dog and 3 more`.
fn listed(names: &[String]) -> String {
    let shown = names[..names.len().min(MAX_LISTED)].join(", ");
    match names.len().saturating_sub(MAX_LISTED) {
        0 => shown,
        n_more => format!("{shown} and {n_more} more"),
    }
}

fn list(steps: &[u64]) -> String {
    steps.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
