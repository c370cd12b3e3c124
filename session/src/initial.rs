//! Initial state of a run, if not random: weights, or the checkpoint of another run.

use std::path::{Path, PathBuf};

use augment::{Decoding, Transform};
use eval::row::NetworkInfo;
use kernels::device::Device;
use networks::{ModelConfig, NamedTensor, Network, Origin, Pixels};
use trainer::checkpoint::{Checkpoint, checkpoints_folder, steps, steps_of_run};
use trainer::recipe::{DataConfig, InitConfig};
use trainer::run::status::Status;
use trainer::{Plan, Recipe, TrainError};
use weights::{HeadKind, Hints, Preprocessing, fitted};

use crate::error::SessionError;
use crate::evaluated_network;
use crate::head::trained_head;
use crate::network::{Backbone, check_exists, model_of, preprocessing_of, preprocessing_of_recipe};
use crate::provenance::Provenance;

/// File that names the run and the step that a fork began with.
const FORKED_FROM: &str = "forked-from.txt";

/// Initial state of a run.
#[derive(Debug, Clone, Default)]
pub struct Initial {
    /// Weights of the backbone, in place of the recipe's `init.weights`: a file or folder of
    /// another library, or a run.
    pub weights: Option<PathBuf>,
    /// Facts that the weights file may not state.
    pub hints: Hints,
    /// Run or checkpoint to continue from, with its optimizer, in another work directory.
    pub fork: Option<PathBuf>,
    /// Whether the run may become longer than it was when it began.
    pub lengthen: bool,
}

/// Weights that a run begins with.
#[derive(Debug, Default)]
pub(crate) struct Beginning {
    /// Parameters of the backbone, and of heads if they are taken, too; `None` for random weights,
    /// and for a run that is resumed or forked.
    pub(crate) weights: Option<Vec<NamedTensor>>,
    /// Origins of the weights, the latest first; empty for a run that is resumed, whose plan has
    /// them.
    pub(crate) origins: Vec<Origin>,
}

/// Returns the step of the checkpoint that the run in `workdir` was forked from, if it is a fork.
pub(crate) fn forked_step(workdir: &Path) -> Option<u64> {
    let note = std::fs::read_to_string(workdir.join(FORKED_FROM)).ok()?;
    let recorded = note.lines().find_map(|line| line.strip_prefix("step ")?.parse().ok());
    // Earlier versions did not record the step: it is the step of the first checkpoint.
    recorded.or_else(|| steps_of_run(workdir).first().map(|(step, _)| *step))
}

/// Returns the plan of the run in `workdir`, by its file; `None` if there is none.
///
/// # Errors
/// [`SessionError::Train`] for a plan that cannot be read.
pub(crate) fn begun_plan(workdir: &Path) -> Result<Option<Plan>, SessionError> {
    match Status::read(workdir) {
        Ok(run) => Ok(Some(run.plan)),
        Err(TrainError::NoRun { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Checks that the weights and the run that `initial` or `recipe` name for a new run in `workdir`
/// exist.
///
/// # Errors
/// [`SessionError::Io`], [`SessionError::NotDownloaded`], [`SessionError::CheckpointRemoved`].
pub(crate) fn check_paths(recipe: &Recipe, workdir: &Path, initial: &Initial) -> Result<(), SessionError> {
    if Plan::path_in(workdir).exists() {
        return Ok(());
    }
    let stated = recipe.init.as_ref().map(|init| init.weights.as_str());
    if let Some(path) = weights_path(initial, stated) {
        check_exists(path)?;
    }
    if let Some(path) = &initial.fork {
        check_exists(path)?;
    }
    Ok(())
}

/// Returns the file, folder or run of the weights that a run is to start with: those of `initial`,
/// or else `stated`, which a recipe names; `None` for random weights.
pub(crate) fn weights_path<'a>(initial: &'a Initial, stated: Option<&'a str>) -> Option<&'a Path> {
    // A recipe that leaves its weights to the command has an empty name.
    let stated = stated.filter(|weights| !weights.is_empty()).map(Path::new);
    initial.weights.as_deref().or(stated)
}

/// Creates the fork that `initial` requests, on rank 0, and opens the weights that `initial` or
/// `recipe` name.
///
/// # Errors
/// [`SessionError`] when the weights or the fork do not fit the recipe, or cannot be read.
pub(crate) fn prepare(
    recipe: &mut Recipe,
    workdir: &Path,
    initial: &Initial,
    rank: usize,
) -> Result<Beginning, SessionError> {
    if let Some(path) = &initial.weights {
        let before = recipe.init.as_ref();
        recipe.init = Some(InitConfig {
            weights: path.display().to_string(),
            fingerprint: String::new(),
            network: initial.hints.network.clone().or(before.and_then(|init| init.network.clone())),
            heads: before.is_some_and(|init| init.heads),
            first_layer: before.and_then(|init| init.first_layer),
        });
    } else if let Some(network) = &initial.hints.network
        && let Some(init) = &mut recipe.init
    {
        init.network = Some(network.clone());
    }
    // A fork has the networks of its checkpoint.
    if initial.fork.is_some() && recipe.init.as_ref().is_some_and(|init| init.weights.is_empty()) {
        recipe.init = None;
    }
    let has_begun = Plan::path_in(workdir).exists();
    if has_begun && let Some(from) = &initial.fork {
        check_fork(workdir, from)?;
    }
    let mut forked_origins = None;
    if rank == 0 && !has_begun {
        // A run that has begun no longer needs its origin.
        match &initial.fork {
            Some(from) => {
                fork(&open_fork(recipe, from)?, from, workdir)?;
                // The copy may be older than the newest checkpoint of the run that it comes from.
                forked_origins = Some(origins_of_fork(&Checkpoint::open(workdir)?, from)?);
            }
            None if workdir.join(FORKED_FROM).exists() => {
                return Err(SessionError::ForkNotStarted { workdir: workdir.to_path_buf() });
            }
            None => {}
        }
    }
    let beginning = open_weights(recipe, workdir, &initial.hints)?;
    let origins = forked_origins.unwrap_or(beginning.origins);
    Ok(Beginning { weights: beginning.weights, origins })
}

/// Checks that the run in `workdir` may start with the weights that [`prepare`] returned, or with
/// random ones.
///
/// # Errors
/// [`SessionError::Train`], and [`SessionError::ForkFinished`] for a fork that would take no step.
pub(crate) fn check(
    plan: &Plan,
    workdir: &Path,
    initial: &Initial,
    weights: Option<&[NamedTensor]>,
) -> Result<(), SessionError> {
    if let Some(weights) = weights {
        plan.check_initial_heads(weights)?;
    }
    let saved = steps_of_run(workdir);
    let newest = saved.last().map(|(step, _)| *step);
    if let Some(step) = forked_step(workdir)
        && newest == Some(step)
        && plan.total_steps <= step
    {
        let total_steps = plan.total_steps;
        return Err(SessionError::ForkFinished { workdir: workdir.to_path_buf(), step, total_steps });
    }
    let is_new = initial.fork.is_none() && saved.is_empty();
    if is_new && plan.recipe.init.is_none() {
        plan.check_random_start()?;
    }
    Ok(())
}

/// Opens the checkpoint of the run `from`, whose backbone must be that of `recipe`, by the keys on
/// which the meaning of weights depends.
fn open_fork(recipe: &Recipe, from: &Path) -> Result<Checkpoint, SessionError> {
    check_exists(from)?;
    let checkpoint = Checkpoint::open(from)?;
    let forked = &checkpoint.manifest.plan.recipe;
    if forked.model.n_channels() != recipe.model.n_channels() {
        return Err(SessionError::ForkChannels {
            run: from.to_path_buf(),
            n_channels: forked.model.n_channels(),
        });
    }
    if forked.optim.adapter != recipe.optim.adapter {
        let reason = "its run has other adapters: keep optim.adapter, or start from its weights with --init";
        return Err(does_not_fit(from, recipe, reason.into()));
    }
    match fitted(&forked.model, Vec::new(), &recipe.model, None) {
        Ok(_) if forked.model.params() == recipe.model.params() => Ok(checkpoint),
        // Initial weights are resampled; the state of a run is not.
        Ok(_) => {
            Err(SessionError::ForkPositions { run: from.to_path_buf(), image_px: forked.model.image_px() })
        }
        Err(reason) => Err(does_not_fit(from, recipe, reason.to_string())),
    }
}

/// Returns the origins of a run that is forked from `checkpoint`, the newest or the given one of
/// the run `from`.
fn origins_of_fork(checkpoint: &Checkpoint, from: &Path) -> Result<Vec<Origin>, SessionError> {
    let (tensors, _) = checkpoint.backbone(None)?;
    Ok(Provenance::from_checkpoint(&checkpoint.manifest).origins(from, &tensors))
}

/// Returns the backbone of the weights that the run in `workdir` started with, or that a run is to
/// start with: the weights of `initial`, or `weights`, which its recipe names.
///
/// # Errors
/// [`SessionError::NoBackbone`] where none are named, [`SessionError::Train`] for a run whose plan
/// cannot be read, and errors of reading the weights.
pub fn model(
    initial: &Initial,
    workdir: Option<&Path>,
    weights: Option<&str>,
) -> Result<ModelConfig, SessionError> {
    if let Some(workdir) = workdir
        && let Some(plan) = begun_plan(workdir)?
    {
        return Ok(plan.recipe.model);
    }
    if let Some(from) = &initial.fork {
        return Ok(Checkpoint::open(from)?.manifest.plan.recipe.model);
    }
    let path = weights_path(initial, weights).ok_or(SessionError::NoBackbone)?;
    model_of(path, &initial.hints)
}

/// Returns the preprocessing of the images of the weights that a run is to start with: the weights
/// of `initial`, or `weights`, which its recipe names; `None` for random weights. If the run in
/// `workdir` has begun, returns that of its own images, so that it is resumed without the weights.
///
/// # Errors
/// [`SessionError::Train`] for a run whose plan cannot be read, and errors of reading the weights.
pub fn preprocessing(
    initial: &Initial,
    workdir: &Path,
    weights: Option<&str>,
) -> Result<Option<Preprocessing>, SessionError> {
    if let Some(plan) = begun_plan(workdir)? {
        return Ok(Some(preprocessing_of_recipe(&plan.recipe)));
    }
    match weights_path(initial, weights) {
        Some(path) => Ok(Some(preprocessing_of(path, &initial.hints)?)),
        None => Ok(None),
    }
}

/// Checks that the backbone of the weights that `initial` names fits that of `recipe`, as far as
/// their configurations show.
///
/// # Errors
/// [`SessionError::DoesNotFit`], and errors of reading the weights.
pub fn check_weights(recipe: &Recipe, initial: &Initial) -> Result<(), SessionError> {
    let Some(path) = &initial.weights else { return Ok(()) };
    let backbone = model_of(path, &initial.hints)?;
    let first_layer = recipe.init.as_ref().and_then(|init| init.first_layer);
    match fitted(&backbone, Vec::new(), &recipe.model, first_layer) {
        Ok(_) => Ok(()),
        Err(reason) => Err(does_not_fit(path, recipe, reason)),
    }
}

/// Opens the initial weights of `recipe`, and records their fingerprint in it. A run with a
/// checkpoint in `workdir` is resumed from it; its initial weights are not opened again.
fn open_weights(recipe: &mut Recipe, workdir: &Path, hints: &Hints) -> Result<Beginning, SessionError> {
    let Some(init) = &recipe.init else {
        // Without the weights it would be another run.
        return match recorded_init(workdir)? {
            Some(recorded) => Err(SessionError::BeganWithWeights {
                workdir: workdir.to_path_buf(),
                weights: recorded.weights,
            }),
            None => Ok(Beginning::default()),
        };
    };
    if let Some(recorded) = recorded_init(workdir)?
        && (init.weights.is_empty() || recorded.weights == init.weights)
    {
        if recorded.heads != init.heads {
            return Err(SessionError::BeganWithHeads {
                workdir: workdir.to_path_buf(),
                heads: recorded.heads,
            });
        }
        if init.network.is_some() && recorded.network != init.network {
            return Err(SessionError::BeganWithNetwork {
                workdir: workdir.to_path_buf(),
                network: recorded.network.unwrap_or_else(|| "the one that their method evaluates".into()),
            });
        }
        recipe.init = Some(recorded);
        return Ok(Beginning::default());
    }
    if init.weights.is_empty() {
        return Err(SessionError::NoInitialWeights { recipe: recipe.name.clone() });
    }
    let path = PathBuf::from(&init.weights);
    let read = read_fitted(&path, init, recipe, hints)?;
    warn_of_pixels(&path, &read.preprocessing.pixels, &recipe.data);
    warn_of_decoding(&path, read.preprocessing.decoding, &recipe.data);
    if let (Some(trained), Some(unused)) = (trained_head(recipe), &read.unused_head) {
        unused.report(&path, trained);
    }
    // The choice is recorded only if it had an effect.
    let first_layer = init.first_layer.filter(|_| read.n_channels != recipe.data.channels);
    recipe.init = Some(InitConfig { fingerprint: read.fingerprint, first_layer, ..init.clone() });
    Ok(Beginning { weights: Some(read.tensors), origins: read.origins })
}

/// Weights of a file or run, fitted to the backbone of a recipe.
struct FittedWeights {
    /// Parameters of the backbone, and of heads if they are taken, too.
    tensors: Vec<NamedTensor>,
    /// Hash of the parameters, as recipes state it.
    fingerprint: String,
    /// Origins of the weights, the latest first.
    origins: Vec<Origin>,
    /// Preprocessing of the images that they were trained on.
    preprocessing: Preprocessing,
    /// Number of channels of these images.
    n_channels: usize,
    /// Head for labels that is left out, if there is one.
    unused_head: Option<UnusedHead>,
}

/// Reads the weights in `path` for the backbone of `recipe`, as `init` describes them.
fn read_fitted(
    path: &Path,
    init: &InitConfig,
    recipe: &Recipe,
    hints: &Hints,
) -> Result<FittedWeights, SessionError> {
    let backbone = if init.heads {
        let backbone = Backbone::open_with_heads(path, init.network.as_deref())
            .map_err(|source| SessionError::InitialHeads { source: Box::new(source) })?;
        check_classes(&backbone, path, recipe)?;
        backbone
    } else {
        Backbone::open(path, &Hints { network: init.network.clone(), ..hints.clone() })?
    };
    let head_shapes = backbone.head_shapes();
    let unused_head = if init.heads { None } else { UnusedHead::find(&backbone) };
    let mut heads = Vec::new();
    let mut tensors = Vec::new();
    for tensor in backbone.tensors {
        if head_shapes.contains_key(&tensor.name) {
            heads.push(tensor);
        } else {
            tensors.push(tensor);
        }
    }
    let origins = backbone.provenance.origins(path, &tensors);
    let mut tensors = fitted(&backbone.model, tensors, &recipe.model, init.first_layer)
        .map_err(|reason| does_not_fit(path, recipe, reason.to_string()))?;
    tensors.extend(heads);
    let fingerprint = format!("{:016x}", weights::fingerprint(&tensors));
    if !init.fingerprint.is_empty() && init.fingerprint != fingerprint {
        return Err(SessionError::OtherWeights { path: path.to_path_buf() });
    }
    let n_channels = backbone.model.n_channels();
    let preprocessing = backbone.preprocessing;
    Ok(FittedWeights { tensors, fingerprint, origins, preprocessing, n_channels, unused_head })
}

/// Checks that the head of `backbone`, the weights in `path`, has learned the classes of `recipe`,
/// in their order, if both have classes.
///
/// # Errors
/// [`SessionError::InitialClasses`].
fn check_classes(backbone: &Backbone, path: &Path, recipe: &Recipe) -> Result<(), SessionError> {
    let (learned, wanted) = match (&backbone.classifier, &backbone.decoder) {
        (Some(classifier), _) => (&classifier.classes, recipe.method.classes()),
        (None, Some(decoder)) => (&decoder.classes, recipe.method.pixel_classes()),
        (None, None) => return Ok(()),
    };
    match wanted {
        Some(wanted) if wanted != learned.as_slice() => Err(SessionError::InitialClasses {
            path: path.to_path_buf(),
            learned: learned.clone(),
            wanted: wanted.to_vec(),
        }),
        _ => Ok(()),
    }
}

/// Head for labels that weights have and a run does not begin with.
struct UnusedHead {
    kind: HeadKind,
    /// Whether a run can begin with it: that of an exported file is for inference alone.
    can_be_kept: bool,
}

impl UnusedHead {
    /// Returns the head of `backbone`, if it has one.
    fn find(backbone: &Backbone) -> Option<Self> {
        let kind = backbone.head_kind()?;
        Some(Self { kind, can_be_kept: backbone.manifest.is_some() })
    }

    /// Reports that the head of the weights in `path` is left out by a run that trains one of the
    /// kind `trained`.
    fn report(&self, path: &Path, trained: HeadKind) {
        let way = if self.can_be_kept && self.kind == trained {
            "; --set init.heads=true keeps it, if the classes are the same"
        } else {
            ""
        };
        tracing::info!(
            "a new {} is trained: the {} of {} is left out{way}",
            head_name(trained),
            head_name(self.kind),
            path.display()
        );
    }
}

/// Returns the word for a head.
fn head_name(kind: HeadKind) -> &'static str {
    match kind {
        HeadKind::Classifier => "classifier",
        HeadKind::Decoder => "decoder",
    }
}

/// Network with the weights that a run began with.
pub struct InitialNetwork {
    /// The network.
    pub network: Network,
    /// File, folder or run of the weights; `None` for random weights.
    pub weights: Option<PathBuf>,
}

impl InitialNetwork {
    /// Opens the backbone of the run of `plan` with the weights that it began with, on `device`.
    /// The weights are those of `initial`, or else those that the plan names; without either, the
    /// random weights of its seed.
    ///
    /// # Errors
    /// [`SessionError::OtherWeights`] if the weights have changed, [`SessionError::DoesNotFit`],
    /// and errors of reading them.
    pub fn open(plan: &Plan, initial: &Initial, device: &Device) -> Result<Self, SessionError> {
        let recipe = &plan.recipe;
        let pixels = recipe.data.pixels();
        let Some(init) = &recipe.init else {
            let network = Network::random(&recipe.model, pixels, recipe.seed, 0, device);
            return Ok(Self { network, weights: None });
        };
        let path = initial.weights.clone().unwrap_or_else(|| PathBuf::from(&init.weights));
        let read = read_fitted(&path, init, recipe, &initial.hints)?;
        let network = Network::new(&recipe.model, pixels, &read.tensors, 0, device)?;
        Ok(Self { network, weights: Some(path) })
    }

    /// Returns the metadata that accompanies the scores of the network in the run of `plan`, after
    /// 0 steps.
    ///
    /// # Errors
    /// [`SessionError::Train`] if the method of the plan cannot be built,
    /// [`SessionError::Unserializable`].
    pub fn info(&self, plan: &Plan) -> Result<NetworkInfo, SessionError> {
        let scored = evaluated_network::Origin {
            network_name: plan.evaluated()?,
            step: Some(0),
            recipe: Some(&plan.recipe.name),
            transform: Transform::new(plan.recipe.evaluated_px() as u32),
            checkpoint: self.weights.as_deref(),
        };
        scored.describe(&self.network)
    }
}

fn does_not_fit(path: &Path, recipe: &Recipe, reason: String) -> SessionError {
    SessionError::DoesNotFit { path: path.to_path_buf(), recipe: recipe.name.clone(), reason }
}

/// Warns if the weights in `path` were trained on images that were decoded by other rules than the
/// rules of `data`.
pub(crate) fn warn_of_decoding(path: &Path, theirs: Decoding, data: &DataConfig) {
    let ours = data.rules().decoding();
    if theirs != ours {
        let keys = "data.apply_exif, data.background, data.bits_used, data.no_data";
        tracing::warn!(
            "{} was trained on images that were decoded differently ({keys}): {theirs:?}, here {ours:?}",
            path.display()
        );
    }
}

/// Warns if the weights in `path` were trained on `pixels` with another normalization or number of
/// bits than `data` has.
fn warn_of_pixels(path: &Path, pixels: &Pixels, data: &DataConfig) {
    let theirs = &pixels.normalization;
    let is_comparable = theirs.n_channels() == data.channels;
    if is_comparable && *theirs != data.normalization {
        tracing::warn!(
            "{} was trained with another normalization: to use it, --set \
             'data.normalization={{mean={:?},std={:?}}}'",
            path.display(),
            theirs.mean,
            theirs.std
        );
    }
    if pixels.depth != data.depth {
        tracing::warn!(
            "{} was trained on images of {} bits, but data.bits is {}",
            path.display(),
            pixels.depth.bits(),
            data.depth.bits()
        );
    }
}

/// Returns the initial weights of the run in `workdir`, if it has a checkpoint.
///
/// # Errors
/// [`SessionError::Train`] for a plan that cannot be read.
fn recorded_init(workdir: &Path) -> Result<Option<InitConfig>, SessionError> {
    if steps_of_run(workdir).is_empty() {
        return Ok(None);
    }
    Ok(begun_plan(workdir)?.and_then(|plan| plan.recipe.init))
}

/// Creates `workdir` with `checkpoint` of the run `from`, from which a new run starts with its own
/// recipe; does nothing if it has a checkpoint of that run already.
fn fork(checkpoint: &Checkpoint, from: &Path, workdir: &Path) -> Result<(), SessionError> {
    let folder = checkpoints_folder(workdir);
    let note = workdir.join(FORKED_FROM);
    if !steps(&folder).is_empty() {
        return check_fork(workdir, from);
    }
    copy_checkpoint(checkpoint, from, &folder, &note).map_err(|source| SessionError::ForkCopy {
        run: from.to_path_buf(),
        workdir: workdir.to_path_buf(),
        source,
    })?;
    tracing::info!(
        "forked from step {} of {}; the run in {} is independent from here on",
        checkpoint.manifest.step,
        from.display(),
        workdir.display()
    );
    Ok(())
}

/// Checks that what is in `workdir` was forked from `from`.
///
/// # Errors
/// [`SessionError::ForkOccupied`].
fn check_fork(workdir: &Path, from: &Path) -> Result<(), SessionError> {
    let note = std::fs::read_to_string(workdir.join(FORKED_FROM)).unwrap_or_default();
    let origin = Path::new(note.lines().next().unwrap_or_default());
    // The origin may have been removed since, and a path may be relative to another folder.
    let is_same_folder = match (origin.canonicalize(), from.canonicalize()) {
        (Ok(origin), Ok(from)) => origin == from,
        _ => false,
    };
    if is_same_folder || origin.as_os_str() == from.as_os_str() {
        return Ok(());
    }
    Err(SessionError::ForkOccupied { workdir: workdir.to_path_buf(), from: from.to_path_buf() })
}

/// Copies the checkpoint of the run `from` into `folder`, atomically, and writes its origin into
/// `note`.
fn copy_checkpoint(checkpoint: &Checkpoint, from: &Path, folder: &Path, note: &Path) -> std::io::Result<()> {
    let name = checkpoint.path.file_name().unwrap_or_default();
    std::fs::create_dir_all(folder)?;
    // Remains of a killed start are removed with other unfinished checkpoints.
    let unfinished = folder.join(format!(".writing-fork-{}", name.to_string_lossy()));
    if unfinished.exists() {
        std::fs::remove_dir_all(&unfinished)?;
    }
    std::fs::create_dir(&unfinished)?;
    for entry in std::fs::read_dir(&checkpoint.path)? {
        let entry = entry?;
        std::fs::copy(entry.path(), unfinished.join(entry.file_name()))?;
    }
    std::fs::write(note, format!("{}\nstep {}\n", from.display(), checkpoint.manifest.step))?;
    std::fs::rename(&unfinished, folder.join(name))
}
