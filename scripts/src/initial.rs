//! Flags about the initial state of a run.

use std::path::PathBuf;

use anyhow::bail;
use session::Initial;

use crate::backbone::WeightFlags;

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
    lengthen: bool,
}

impl InitialFlags {
    /// Returns the initial state that the flags describe.
    pub(crate) fn initial(&self) -> anyhow::Result<Initial> {
        if self.weights.values.is_given() {
            bail!(
                "--bits-used and --no-data are keys of a recipe here: --set data.bits_used=12, --set data.no_data={{value=-9999}}"
            );
        }
        Ok(Initial {
            weights: self.init.clone(),
            hints: self.weights.hints(None),
            fork: self.fork.clone(),
            lengthen: self.lengthen,
        })
    }
}
