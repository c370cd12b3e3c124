//! Flags about the initial state of a run.

use std::path::PathBuf;

use anyhow::bail;
use session::Initial;
use weights::Hints;

use crate::network_flags::WeightFlags;

/// Flags about the initial state of a run.
#[derive(Clone, Default, clap::Args)]
#[group(id = "initial")]
pub(crate) struct InitialFlags {
    /// Initial weights of the backbone, instead of the recipe's init.weights. They are a file or
    /// folder from DINO, DINOv2, DINOv3, timm, torchvision, transformers or `ocelli export`, or a
    /// run. Heads are initialized randomly unless the recipe sets init.heads.
    #[arg(long, value_name = "WEIGHTS", conflicts_with = "fork")]
    init: Option<PathBuf>,
    #[command(flatten)]
    weights: WeightFlags,
    /// Start from a checkpoint of another run, with its optimizer state. RUN is the run's folder,
    /// for its newest checkpoint, or a checkpoint; --workdir is new. The recipe can differ, except
    /// for the networks; a Gram teacher can be added.
    #[arg(long, value_name = "RUN")]
    fork: Option<PathBuf>,
    /// Resume a run even if its optim.length has increased. Schedules that depend on the length of
    /// the run jump.
    #[arg(long, hide_short_help = true)]
    lengthen: bool,
}

impl InitialFlags {
    /// Returns the initial state that the flags describe.
    pub(crate) fn initial(&self) -> anyhow::Result<Initial> {
        Ok(Initial {
            weights: self.init.clone(),
            hints: hints_for_run(&self.weights)?,
            fork: self.fork.clone(),
            lengthen: self.lengthen,
        })
    }
}

/// Returns the facts about the initial weights of a run that `flags` state. The values of pixels
/// are stated by the recipe.
pub(crate) fn hints_for_run(flags: &WeightFlags) -> anyhow::Result<Hints> {
    if flags.values.is_given() {
        bail!(
            "--bits-used and --no-data do not apply here; set the recipe's keys: --set data.bits_used=12, \
             --set data.no_data={{value=-9999}}"
        );
    }
    Ok(flags.settings().hints)
}
