//! Flags of features and their images, and of the images to compare with: queries, or an evaluation
//! set.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::bail;
use curate::Metric;
use curate::io::{Input, read_features};
use eval::image_sets::{set_name, with_names};
use eval::{FeatureKind, ImageSet, Source, features};
use pipeline::Dataset;
use prep::open::{is_file, open_dataset, open_with_files};
use prep::parts::Work;
use session::EvaluatedNetwork;

use super::call::Call;
use crate::cluster::compute;
use crate::evaluation_flags::CacheFlags;
use crate::network_flags::NetworkFlags;
use crate::parts::PartFlags;
use crate::progress::StageBar;

/// Flags for features and their images.
#[derive(clap::Args)]
pub(crate) struct InputFlags {
    /// Feature files from `ocelli embed`. They are .npy, .parquet or .safetensors; several files
    /// form one set.
    #[arg(long, num_args = 1.., value_name = "FILE", required_unless_present = "checkpoint",
        conflicts_with = "checkpoint")]
    features: Vec<PathBuf>,
    /// Network to compute the features with. It is a run, a checkpoint or weights, as for `ocelli
    /// embed`.
    #[arg(long, requires = "shards", value_name = "PATH")]
    checkpoint: Option<PathBuf>,
    /// Images that the features belong to. They are shards or folders, and required for
    /// --checkpoint, --pack, pictures, and picking the best of several copies.
    #[arg(long, num_args = 1.., value_name = "SHARDS")]
    shards: Vec<String>,
    #[command(flatten)]
    network: NetworkFlags,
    #[command(flatten)]
    cache: CacheFlags,
    #[command(flatten)]
    pub(crate) compute: compute::ComputeFlags,
}

/// Flags for the other images.
#[derive(clap::Args)]
pub(crate) struct OtherFlags {
    /// Images to compare with, such as queries or an evaluation set: shards, folders or image
    /// files. Their features are computed with --checkpoint.
    #[arg(long, num_args = 1.., value_name = "IMAGES", requires = "checkpoint",
        required_unless_present = "like_features", conflicts_with = "like_features")]
    like: Vec<String>,
    /// Feature files of the images to compare with, from the same network, instead of --like.
    #[arg(long, num_args = 1.., value_name = "FILE", hide_short_help = true)]
    like_features: Vec<PathBuf>,
}

impl InputFlags {
    /// Returns the share of the work that `parts` asks for. Parts need features in files, and one
    /// process each.
    pub(crate) fn work(&self, parts: PartFlags, call: &Call<'_>) -> anyhow::Result<Work> {
        let work = parts.work_alone(&call.launch)?;
        if work != Work::Whole && self.checkpoint.is_some() {
            bail!(
                "--part and --join need --features and --like-features: compute them with `ocelli embed`, \
                 which can also run in parts"
            );
        }
        Ok(work)
    }

    /// Opens features and images.
    pub(crate) fn open(&self, metric: Metric, call: &Call<'_>) -> anyhow::Result<Input> {
        match &self.checkpoint {
            Some(checkpoint) => {
                let dataset = open_dataset(&self.shards, call.storage)?;
                self.compute_features(checkpoint, &self.shards, dataset, metric, call)
            }
            None => Ok(Input::read(&self.features, &self.shards, metric, call.storage)?),
        }
    }

    /// Computes the features of the images of `dataset`, which `specs` name, by the network in
    /// `checkpoint`, or takes them from the cache.
    fn compute_features(
        &self,
        checkpoint: &Path,
        specs: &[String],
        dataset: Dataset,
        metric: Metric,
        call: &Call<'_>,
    ) -> anyhow::Result<Input> {
        let dataset = Arc::new(dataset);
        if call.launch.world_size > 1 {
            bail!(
                "--features is required with several ranks: compute them with `ocelli embed`, which can \
                 also run on several ranks"
            );
        }
        let device = self.compute.open(&call.launch)?.device;
        let open = EvaluatedNetwork::open(checkpoint, &self.network.settings(), &device)?;
        let source = Source::Shards(Arc::clone(&dataset));
        let images = ImageSet::open(source, open.transform, open.rules, set_name(specs))?;
        // The name of an image file is not one of shards, which may have braces.
        let sets: Vec<String> = specs.iter().filter(|spec| !is_file(spec)).cloned().collect();
        let images = with_names(images, &sets, call.storage)?;
        let kind = FeatureKind::LAST_LEVEL;
        let cache = self.cache.open(call.folder);
        let table = features(cache.as_ref(), &open.network, &images, kind, &StageBar::new())?;
        let weights = open.network.fingerprint();
        Ok(Input::computed(&table, &images, dataset, specs, weights, kind, metric)?)
    }
}

impl OtherFlags {
    /// Opens the other images, whose features must come from the same network as the features of
    /// `input`.
    pub(crate) fn open(&self, flags: &InputFlags, input: &Input, call: &Call<'_>) -> anyhow::Result<Input> {
        let others = match (self.like.as_slice(), &flags.checkpoint) {
            ([], _) => read_features(&self.like_features, Metric::Cosine)?,
            (_, None) => bail!("--like needs --checkpoint; otherwise, pass --like-features"),
            (specs, Some(checkpoint)) => {
                let dataset = open_with_files(specs, call.storage)?;
                flags.compute_features(checkpoint, specs, dataset, Metric::Cosine, call)?
            }
        };
        input.check_comparable(&others)?;
        Ok(others)
    }
}
