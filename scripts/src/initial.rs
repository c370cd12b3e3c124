//! Initial state of a run, if not random: weights, or the checkpoint of another run.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use augment::Decoding;
use networks::{ModelConfig, NamedTensor, Pixels};
use trainer::checkpoint::{Checkpoint, steps};
use trainer::recipe::{DataConfig, InitConfig};
use trainer::run::status::Status;
use trainer::{Plan, Recipe};
use weights::fitted;

use crate::backbone::{Backbone, WeightFlags, model_of};
use crate::console::say;

/// File that names the run and the step that a fork began with.
const FORKED_FROM: &str = "forked-from.txt";

/// Flags about the initial state of a run.
#[derive(Clone, Default, clap::Args)]
#[group(id = "initial")]
pub(crate) struct InitialFlags {
    /// Initial weights of the backbone, in place of the recipe's init.weights: a file or folder of
    /// DINO, DINOv2, DINOv3, timm, torchvision, transformers or `ocelli export`, or a run. Heads
    /// start at random, unless the recipe sets init.heads.
    #[arg(long, value_name = "WEIGHTS", conflicts_with = "fork")]
    init: Option<PathBuf>,
    #[command(flatten)]
    weights: WeightFlags,
    /// Continue from the newest checkpoint of another run, or from the checkpoint given, with its
    /// optimizer, in the new --workdir; the recipe may differ but for the networks, to which a Gram
    /// teacher may be added.
    #[arg(long, value_name = "RUN")]
    fork: Option<PathBuf>,
    /// Continue a run although its optim.length has increased. Schedules that follow the length of
    /// the run jump.
    #[arg(long)]
    pub(crate) lengthen: bool,
}

/// Returns the step of the checkpoint that the run in `workdir` was forked from, if it is a fork.
pub(crate) fn forked_step(workdir: &Path) -> Option<u64> {
    let note = std::fs::read_to_string(workdir.join(FORKED_FROM)).ok()?;
    let noted = note.lines().find_map(|line| line.strip_prefix("step ")?.parse().ok());
    // Older releases did not record the step: it is that of the first checkpoint.
    noted.or_else(|| steps(&workdir.join("checkpoints")).first().map(|(step, _)| *step))
}

/// Creates the fork that `flags` request, on rank 0, and opens the weights that `flags` or `recipe`
/// name.
pub(crate) fn prepare(
    recipe: &mut Recipe,
    workdir: &Path,
    flags: &InitialFlags,
    rank: usize,
) -> anyhow::Result<Option<Vec<NamedTensor>>> {
    if let Some(path) = &flags.init {
        let (heads, first_layer) =
            recipe.init.as_ref().map_or((false, None), |init| (init.heads, init.first_layer));
        let weights = path.display().to_string();
        recipe.init = Some(InitConfig { weights, fingerprint: String::new(), heads, first_layer });
    }
    if flags.weights.values.is_given() {
        bail!(
            "--bits-used and --no-data are keys of a recipe here: --set data.bits_used=12, --set data.no_data={{value=-9999}}"
        );
    }
    // A fork has the networks of its checkpoint.
    if flags.fork.is_some() && recipe.init.as_ref().is_some_and(|init| init.weights.is_empty()) {
        recipe.init = None;
    }
    match (&flags.fork, rank) {
        (Some(from), 0) => {
            // A run that has begun needs its origin no more.
            if !workdir.join("plan.toml").exists() {
                check_fork(recipe, from)?;
            }
            fork(from, workdir)?;
        }
        (None, 0) if workdir.join(FORKED_FROM).exists() && !workdir.join("plan.toml").exists() => {
            bail!(
                "{} was forked but never started: give --fork again, or another --workdir",
                workdir.display()
            );
        }
        _ => {}
    }
    weights(recipe, workdir, &flags.weights)
}

/// Checks that the run in `workdir` may start with the weights that [`prepare`] returned, or with
/// random ones.
pub(crate) fn check(
    plan: &Plan,
    workdir: &Path,
    flags: &InitialFlags,
    weights: Option<&[NamedTensor]>,
) -> anyhow::Result<()> {
    if let Some(weights) = weights {
        plan.check_initial_heads(weights)?;
    }
    let begins = flags.fork.is_none() && steps(&workdir.join("checkpoints")).is_empty();
    if begins && plan.recipe.init.is_none() {
        plan.check_random_start()?;
    }
    Ok(())
}

/// Checks that the run `from` has the backbone of `recipe`, by the keys on which the meaning of
/// weights depends.
fn check_fork(recipe: &Recipe, from: &Path) -> anyhow::Result<()> {
    let forked = Checkpoint::open(from)?.manifest.plan.recipe;
    if forked.model.n_channels() != recipe.model.n_channels() {
        bail!(
            "{} takes images of {} channels: a fork keeps data.channels",
            from.display(),
            forked.model.n_channels()
        );
    }
    match fitted(&forked.model, Vec::new(), &recipe.model, None) {
        Ok(_) if forked.model.params() == recipe.model.params() => Ok(()),
        // Weights that a run starts with are resampled, the state of a run is not.
        Ok(_) => bail!(
            "{} has positions for images of {} px: a fork keeps model.image_px",
            from.display(),
            forked.model.image_px()
        ),
        Err(reason) => bail!("{} does not fit recipe {}: {reason}", from.display(), recipe.name),
    }
}

/// Returns the backbone of the weights that the run in `workdir` started with, or that a run is to
/// start with: those of `flags`, or `weights`, which its recipe names.
pub(crate) fn model(
    flags: &InitialFlags,
    workdir: Option<&Path>,
    weights: Option<&str>,
) -> anyhow::Result<ModelConfig> {
    if let Some(run) = workdir.and_then(|workdir| Status::of(workdir).ok()) {
        return Ok(run.plan.recipe.model);
    }
    if let Some(from) = &flags.fork {
        return Ok(Checkpoint::open(from)?.manifest.plan.recipe.model);
    }
    let Some(path) = flags.init.as_deref().or(weights.filter(|weights| !weights.is_empty()).map(Path::new))
    else {
        bail!(
            "model.arch is from_init, the backbone of the weights that a run starts with: give --init WEIGHTS, or \
             --set init.weights=WEIGHTS"
        );
    };
    model_of(path, &flags.weights)
}

/// Opens the initial weights of `recipe`, and records their fingerprint in it. A run with a
/// checkpoint in `workdir` continues from it; its initial weights are not opened again.
fn weights(
    recipe: &mut Recipe,
    workdir: &Path,
    flags: &WeightFlags,
) -> anyhow::Result<Option<Vec<NamedTensor>>> {
    let Some(init) = &recipe.init else {
        // Without the weights it would be another run.
        if let Some(before) = begun(workdir) {
            bail!(
                "the run in {} began with weights: give --init {} as before, whether or not they are still there",
                workdir.display(),
                before.weights
            );
        }
        return Ok(None);
    };
    if let Some(before) =
        begun(workdir).filter(|before| init.weights.is_empty() || before.weights == init.weights)
    {
        if before.heads != init.heads {
            bail!(
                "the run in {} began with init.heads={}: set it as before",
                workdir.display(),
                before.heads
            );
        }
        recipe.init = Some(before);
        return Ok(None);
    }
    if init.weights.is_empty() {
        bail!("recipe {} starts from the weights of another run: give --init RUN", recipe.name);
    }
    let path = PathBuf::from(&init.weights);
    let backbone = if init.heads {
        Backbone::open_with_heads(&path).context("init.heads")?
    } else {
        Backbone::open(&path, flags, None)?
    };
    let of_heads = backbone.head_shapes();
    let (heads, tensors): (Vec<_>, Vec<_>) =
        backbone.tensors.into_iter().partition(|tensor| of_heads.contains_key(&tensor.name));
    let mut tensors =
        fitted(&backbone.model, tensors, &recipe.model, init.first_layer).map_err(|reason| {
            anyhow::anyhow!("{} does not fit recipe {}: {reason}", path.display(), recipe.name)
        })?;
    tensors.extend(heads);
    warn_of_pixels(&path, &backbone.preprocessing.pixels, &recipe.data);
    warn_of_decoding(&path, backbone.preprocessing.decoding, &recipe.data);
    let fingerprint = format!("{:016x}", weights::fingerprint(&tensors));
    if !init.fingerprint.is_empty() && init.fingerprint != fingerprint {
        bail!("{} holds other weights than the recipe's init.fingerprint says", path.display());
    }
    // What is recorded is what was done.
    let first_layer = init.first_layer.filter(|_| backbone.model.n_channels() != recipe.data.channels);
    recipe.init = Some(InitConfig { fingerprint, first_layer, ..init.clone() });
    Ok(Some(tensors))
}

/// Prints a warning if the weights in `path` were trained on images that are decoded otherwise than
/// those of `data`.
fn warn_of_decoding(path: &Path, theirs: Decoding, data: &DataConfig) {
    let ours = data.rules().decoding();
    if theirs != ours {
        let keys = "data.apply_exif, data.background, data.bits_used, data.no_data";
        say(format!(
            "warning: {} was trained on images that are decoded otherwise ({keys}): {theirs:?}, here {ours:?}",
            path.display()
        ));
    }
}

/// Prints a warning if the weights in `path` were trained on `pixels` that are normalized otherwise
/// than those of `data`, or have other bits.
fn warn_of_pixels(path: &Path, pixels: &Pixels, data: &DataConfig) {
    let theirs = &pixels.normalization;
    let is_comparable = theirs.n_channels() == data.channels;
    if is_comparable && *theirs != data.normalization {
        say(format!(
            "warning: {} was trained on other colors: --set 'data.normalization={{mean={:?},std={:?}}}' has them",
            path.display(),
            theirs.mean,
            theirs.std
        ));
    }
    if pixels.depth != data.depth {
        say(format!(
            "warning: {} was trained on images of {} bits, and data.bits is {}",
            path.display(),
            pixels.depth.bits(),
            data.depth.bits()
        ));
    }
}

/// Returns the initial weights of the run in `workdir`, if it has a checkpoint.
fn begun(workdir: &Path) -> Option<InitConfig> {
    let has_checkpoint = !steps(&workdir.join("checkpoints")).is_empty();
    has_checkpoint.then(|| Status::of(workdir).ok()).flatten()?.plan.recipe.init
}

/// Creates `workdir` with the checkpoint of `from`, from which a new run continues with its own
/// recipe; does nothing if it has a checkpoint already.
fn fork(from: &Path, workdir: &Path) -> anyhow::Result<()> {
    let folder = workdir.join("checkpoints");
    let note = workdir.join(FORKED_FROM);
    if workdir.join("plan.toml").exists() {
        return Ok(());
    }
    if !steps(&folder).is_empty() {
        let before = std::fs::read_to_string(&note).unwrap_or_default();
        return if before.lines().next() == Some(&from.display().to_string()) {
            Ok(())
        } else {
            bail!("{} holds checkpoints of another run; choose another --workdir", workdir.display())
        };
    }
    let checkpoint = Checkpoint::open(from)?;
    let name = checkpoint.path().file_name().context("a checkpoint has a name")?;
    let copy = || -> std::io::Result<()> {
        std::fs::create_dir_all(&folder)?;
        // Remains of a killed start are removed with other unfinished checkpoints.
        let begun = folder.join(format!(".writing-fork-{}", name.to_string_lossy()));
        if begun.exists() {
            std::fs::remove_dir_all(&begun)?;
        }
        std::fs::create_dir(&begun)?;
        for entry in std::fs::read_dir(checkpoint.path())? {
            let entry = entry?;
            std::fs::copy(entry.path(), begun.join(entry.file_name()))?;
        }
        std::fs::write(&note, format!("{}\nstep {}\n", from.display(), checkpoint.manifest.step))?;
        std::fs::rename(&begun, folder.join(name))
    };
    copy().with_context(|| format!("cannot copy {} into {}", from.display(), workdir.display()))?;
    say(format!(
        "forked from step {} of {}; from here on the run in {} is one of its own",
        checkpoint.manifest.step,
        from.display(),
        workdir.display()
    ));
    Ok(())
}
