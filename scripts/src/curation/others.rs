//! Images to compare with: queries, or an evaluation set.

use std::path::{Path, PathBuf};

use anyhow::bail;
use curate::Metric;
use kernels::rows::Rows;
use pipeline::Storage;

use super::input::{Input, InputFlags, read_features};
use ranks::launch::Launch;

/// Flags for the other images.
#[derive(clap::Args)]
pub(crate) struct OtherFlags {
    /// Images to compare with, such as queries or an evaluation set: shards or folders. Their
    /// features are computed with --checkpoint.
    #[arg(long, num_args = 1.., value_name = "SHARDS|FOLDER", requires = "checkpoint",
        required_unless_present = "like_features", conflicts_with = "like_features")]
    like: Vec<String>,
    /// Feature files of the images to compare with, from the same network, instead of --like.
    #[arg(long, num_args = 1.., value_name = "FILE")]
    like_features: Vec<PathBuf>,
}

impl OtherFlags {
    /// Opens the other images, whose features must be of the same network as those of `input`.
    pub(crate) fn open(
        &self,
        flags: &InputFlags,
        input: &Input,
        launch: &Launch,
        storage: &Storage,
        folder: &Path,
    ) -> anyhow::Result<Input> {
        let others = match self.like.as_slice() {
            [] => read_features(&self.like_features, Metric::Cosine)?,
            specs => flags.open_others(specs, Metric::Cosine, launch, storage, folder)?,
        };
        if let (Some(weights), Some(other_weights)) = (&input.weights, &others.weights)
            && weights != other_weights
        {
            bail!("the features to compare were computed with different weights");
        }
        if others.rows.width() != input.rows.width() {
            let width = others.rows.width();
            let other = input.rows.width();
            bail!(curate::CurateError::Widths { width, other });
        }
        Ok(others)
    }
}
