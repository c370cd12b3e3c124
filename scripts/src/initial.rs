//! What a run starts from, if not from nothing: weights, or the checkpoint of another run.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use networks::NamedTensor;
use trainer::Recipe;
use trainer::checkpoint::{Checkpoint, steps};
use trainer::recipe::InitConfig;
use trainer::run::status::Status;
use weights::fitted;

use crate::backbone::{Backbone, WeightFlags};
use crate::console::say;

/// The file that says whose checkpoint a fork began with.
const FORKED_FROM: &str = "forked-from.txt";

/// What a run starts from.
#[derive(Clone, Default, clap::Args)]
#[group(id = "initial")]
pub(crate) struct Flags {
    /// Weights that the backbone starts from, in place of the recipe's init.weights: a file or folder of DINO, DINOv2,
    /// timm, torchvision, transformers or `ocelli export`, or a run. Heads start at random.
    #[arg(long, value_name = "WEIGHTS", conflicts_with = "fork")]
    init: Option<PathBuf>,
    #[command(flatten)]
    weights: WeightFlags,
    /// Go on from the newest checkpoint of another run, or from the one that is named, with its optimizer, in the new
    /// --workdir; the recipe may be another one for the same networks.
    #[arg(long, value_name = "RUN")]
    fork: Option<PathBuf>,
    /// Go on with a run whose optim.length is more than it was. Rates that follow the length of the run jump.
    #[arg(long)]
    pub(crate) lengthen: bool,
}

/// The step of the checkpoint that the run in `workdir` was forked from, if it was.
pub(crate) fn forked_step(workdir: &Path) -> Option<u64> {
    let note = std::fs::read_to_string(workdir.join(FORKED_FROM)).ok()?;
    let noted = note.lines().find_map(|line| line.strip_prefix("step ")?.parse().ok());
    // Notes of older releases do not say it: it is the first that was there.
    noted.or_else(|| steps(&workdir.join("checkpoints")).first().map(|(step, _)| *step))
}

/// Makes the fork that `flags` ask for, on rank 0, and opens the weights that they or `recipe` name.
pub(crate) fn prepare(
    recipe: &mut Recipe,
    workdir: &Path,
    flags: &Flags,
    rank: usize,
) -> anyhow::Result<Option<Vec<NamedTensor>>> {
    if let Some(path) = &flags.init {
        recipe.init = Some(InitConfig { weights: path.display().to_string(), fingerprint: String::new() });
    }
    match (&flags.fork, rank) {
        (Some(from), 0) => fork(from, workdir)?,
        (None, 0) if workdir.join(FORKED_FROM).exists() && !workdir.join("plan.toml").exists() => {
            bail!(
                "{} was forked and has not begun: give --fork again, or another --workdir",
                workdir.display()
            );
        }
        _ => {}
    }
    weights(recipe, workdir, &flags.weights)
}

/// The weights that `recipe` starts from, whose fingerprint goes into it. A run that has a checkpoint in `workdir` goes on
/// from that; its weights are not opened again.
fn weights(
    recipe: &mut Recipe,
    workdir: &Path,
    flags: &WeightFlags,
) -> anyhow::Result<Option<Vec<NamedTensor>>> {
    let Some(init) = &recipe.init else {
        // Without them it would be another run.
        if let Some(before) = begun(workdir) {
            bail!(
                "the run in {} began with weights: give --init {} as before, whether or not they are still there",
                workdir.display(),
                before.weights
            );
        }
        return Ok(None);
    };
    if let Some(before) = begun(workdir).filter(|before| before.weights == init.weights) {
        recipe.init = Some(before);
        return Ok(None);
    }
    let path = PathBuf::from(&init.weights);
    let backbone = Backbone::open(&path, flags, None)?;
    let tensors = fitted(&backbone.model, backbone.tensors, &recipe.model).map_err(|reason| {
        anyhow::anyhow!("{} does not fit recipe {}: {reason}", path.display(), recipe.name)
    })?;
    if backbone.preprocessing.normalization != recipe.data.normalization {
        let theirs = backbone.preprocessing.normalization;
        say(format!(
            "warning: {} was trained on other colors: --set 'data.normalization={{mean={:?},std={:?}}}' has them",
            path.display(),
            theirs.mean,
            theirs.std
        ));
    }
    let fingerprint = format!("{:016x}", weights::fingerprint(&tensors));
    if !init.fingerprint.is_empty() && init.fingerprint != fingerprint {
        bail!("{} holds other weights than the recipe's init.fingerprint says", path.display());
    }
    recipe.init = Some(InitConfig { weights: init.weights.clone(), fingerprint });
    Ok(Some(tensors))
}

/// What the run in `workdir` started from, if it has a checkpoint already.
fn begun(workdir: &Path) -> Option<InitConfig> {
    let has_checkpoint = !steps(&workdir.join("checkpoints")).is_empty();
    has_checkpoint.then(|| Status::of(workdir).ok()).flatten()?.plan.recipe.init
}

/// Makes `workdir` with the checkpoint of `from`, from which a new run goes on with a recipe of its own; nothing where it
/// has one already.
fn fork(from: &Path, workdir: &Path) -> anyhow::Result<()> {
    let (folder, note) = (workdir.join("checkpoints"), workdir.join(FORKED_FROM));
    if workdir.join("plan.toml").exists() {
        return Ok(());
    }
    if !steps(&folder).is_empty() {
        let before = std::fs::read_to_string(&note).unwrap_or_default();
        return match before.lines().next() == Some(&from.display().to_string()) {
            true => Ok(()),
            false => {
                bail!("{} holds checkpoints of another run; choose another --workdir", workdir.display())
            }
        };
    }
    let checkpoint = Checkpoint::open(from)?;
    let name = checkpoint.path().file_name().context("a checkpoint has a name")?;
    let copy = || -> std::io::Result<()> {
        std::fs::create_dir_all(&folder)?;
        // What a killed start leaves is swept away with other unfinished checkpoints.
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
