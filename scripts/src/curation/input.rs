//! Features to curate by, and their images.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use curate::{FeatureRows, Metric, Numbers};
use eval::features::file::{ImageName, read};
use eval::image_sets::{set_name, with_names};
use eval::{FeatureKind, ImageSet, Source, Table, features};
use pipeline::secrets::redact_list;
use pipeline::shard::image::EncodedImage;
use pipeline::{Dataset, SampleId, Shard, Storage};
use serde_json::{Value, json};

use super::match_images::match_images;
use crate::cluster::compute;
use crate::evaluation_flags::CacheFlags;
use crate::network_flags::NetworkFlags;
use crate::progress::StageBar;
use prep::open::open_dataset;
use prep::parts::file_identity;
use ranks::launch::Launch;

/// Flags for features and their images.
#[derive(clap::Args)]
pub(crate) struct InputFlags {
    /// Feature files from `ocelli embed`: .npy, .parquet or .safetensors. Several files form one
    /// set.
    #[arg(long, num_args = 1.., value_name = "FILE", required_unless_present = "checkpoint",
        conflicts_with = "checkpoint")]
    features: Vec<PathBuf>,
    /// Network to compute the features with: a run, a checkpoint or weights, as for `ocelli embed`.
    #[arg(long, requires = "shards")]
    checkpoint: Option<PathBuf>,
    /// Images that the features belong to: shards or folders. Required for --checkpoint, --pack,
    /// pictures, and picking the best of several copies.
    #[arg(long, num_args = 1.., value_name = "SHARDS|FOLDER")]
    shards: Vec<String>,
    #[command(flatten)]
    network: NetworkFlags,
    #[command(flatten)]
    cache: CacheFlags,
    #[command(flatten)]
    pub(crate) compute: compute::ComputeFlags,
}

/// Features with their images.
pub(crate) struct Input {
    /// The features.
    pub(crate) rows: FeatureRows,
    /// Image of each row.
    pub(crate) names: Vec<ImageName>,
    /// The images, if shards are given.
    pub(crate) images: Option<Images>,
    /// Identity of the input: a fingerprint of the features, or weights and images.
    pub(crate) identity: Vec<Value>,
    /// Path, length and modification time of each file of features; empty if a network computed
    /// them.
    pub(crate) files: Vec<Value>,
    /// Fingerprint of the weights that computed the features, if known.
    pub(crate) weights: Option<String>,
}

/// The images of rows.
pub(crate) struct Images {
    pub(crate) dataset: Arc<Dataset>,
    /// Shards as the user named them.
    pub(crate) specs: Vec<String>,
    /// Sample of each row.
    samples: Vec<SampleId>,
}

impl Images {
    /// Returns the sample of row `row`: its shard and its number there.
    pub(crate) fn locate(&self, row: usize) -> (&Shard, usize) {
        self.dataset.locate(self.samples[row])
    }

    /// Returns the encoded image of row `row`.
    pub(crate) fn encoded(&self, row: usize) -> Result<EncodedImage, pipeline::PipelineError> {
        let (shard, number) = self.locate(row);
        shard.image(number)
    }
}

/// Rows of a table, in the form that `curate` takes.
struct TableRows(Table);

impl AsRef<[f32]> for TableRows {
    fn as_ref(&self) -> &[f32] {
        self.0.rows()
    }
}

impl InputFlags {
    /// Returns whether a network computes the features.
    pub(crate) fn computes_features(&self) -> bool {
        self.checkpoint.is_some()
    }

    /// Opens features and images. `folder` is that of the cache.
    pub(crate) fn open(
        &self,
        metric: Metric,
        launch: &Launch,
        storage: &Storage,
        folder: &Path,
    ) -> anyhow::Result<Input> {
        let dataset = match self.shards.as_slice() {
            [] => None,
            specs => Some(Arc::new(open_dataset(specs, storage)?)),
        };
        match (&self.checkpoint, dataset) {
            (Some(_), Some(_)) if launch.world_size > 1 => {
                bail!(
                    "--features is required with several ranks: compute them with `ocelli embed`, which \
                     can also run on several ranks"
                )
            }
            (Some(checkpoint), Some(dataset)) => {
                self.compute_features(checkpoint, dataset, &self.shards, metric, launch, storage, folder)
            }
            (_, dataset) => self.read(dataset, metric),
        }
    }

    /// Computes the features of other images, `specs`, by the network of the flags.
    pub(crate) fn open_others(
        &self,
        specs: &[String],
        metric: Metric,
        launch: &Launch,
        storage: &Storage,
        folder: &Path,
    ) -> anyhow::Result<Input> {
        let Some(checkpoint) = &self.checkpoint else {
            bail!("--like needs --checkpoint; otherwise, pass --like-features")
        };
        let dataset = Arc::new(open_dataset(specs, storage)?);
        self.compute_features(checkpoint, dataset, specs, metric, launch, storage, folder)
    }

    /// Computes the features of `dataset` by the network in `checkpoint`, or takes them from the
    /// cache.
    fn compute_features(
        &self,
        checkpoint: &Path,
        dataset: Arc<Dataset>,
        specs: &[String],
        metric: Metric,
        launch: &Launch,
        storage: &Storage,
        folder: &Path,
    ) -> anyhow::Result<Input> {
        let device = self.compute.open(launch)?.device;
        let open = self.network.open(checkpoint, &device)?;
        let source = Source::Shards(Arc::clone(&dataset));
        let images = ImageSet::open(source, open.transform, open.rules, set_name(specs))?;
        let images = with_names(images, specs, storage)?;
        let kind = FeatureKind::Vectors { n_levels: 1, average: false };
        let table = {
            let progress = StageBar::new();
            features(self.cache.open(folder).as_ref(), &open.network, &images, kind, &progress)?
        };
        let mut samples = Vec::new();
        let mut names = Vec::new();
        for image in &table.images {
            samples.push(SampleId(u64::from(*image)));
            let (shard, key) = images.describe(*image as usize);
            let label = images.label(*image as usize);
            let class = label.map(|label| images.classes()[label as usize].clone());
            names.push(ImageName { shard, key, label, class });
        }
        let n_bad = images.len() - table.len();
        if n_bad > 0 {
            crate::console::say(format!(
                "warning: {n_bad} unusable images are skipped; run `ocelli shards verify` to see why"
            ));
        }
        let weights = format!("{:016x}", open.network.fingerprint());
        let identity = vec![json!({
            "weights": weights, "transform": open.transform.to_string(),
            "images": format!("{:016x}", dataset.fingerprint()?),
        })];
        let width = table.columns.width();
        let parts: Vec<Numbers> = vec![Arc::new(TableRows((*table).clone()))];
        let rows = FeatureRows::new(width, parts, metric)?;
        let images = Images { dataset, specs: specs.to_vec(), samples };
        let files = Vec::new();
        Ok(Input { rows, names, images: Some(images), identity, files, weights: Some(weights) })
    }

    /// Reads the files of features.
    fn read(&self, dataset: Option<Arc<Dataset>>, metric: Metric) -> anyhow::Result<Input> {
        let mut input = read_features(&self.features, metric)?;
        if let Some(dataset) = dataset {
            let samples = match_images(&dataset, &input.names)
                .with_context(|| format!("--shards {}", redact_list(&self.shards.join(" "))))?;
            input.images = Some(Images { dataset, specs: self.shards.clone(), samples });
        }
        Ok(input)
    }
}

/// Reads files of features as one set, without images.
pub(crate) fn read_features(paths: &[PathBuf], metric: Metric) -> anyhow::Result<Input> {
    // Files are identified before they are read: one that is replaced in between must not be taken
    // for the one that was read.
    let files = paths.iter().map(|path| file_identity(path)).collect();
    let mut parts = Vec::<Numbers>::new();
    let mut names = Vec::new();
    let mut first: Option<(usize, Option<String>)> = None;
    for path in paths {
        let file = read(path)?;
        let width = file.table.columns.width();
        let weights = file.about["weights"].as_str().map(str::to_string);
        match &first {
            None => first = Some((width, weights)),
            Some((other, _)) if *other != width => {
                bail!("{} has rows of width {width}, but {} has {other}", path.display(), paths[0].display())
            }
            Some((_, other)) if *other != weights => {
                bail!("{} and {} were computed with different weights", path.display(), paths[0].display())
            }
            Some(_) => {}
        }
        let start = names.len();
        match file.images {
            Some(images) => names.extend(images),
            // Images without names are numbered.
            None => names.extend((start..start + file.table.len()).map(|row| ImageName {
                shard: None,
                key: row.to_string(),
                label: None,
                class: None,
            })),
        }
        parts.push(Arc::new(TableRows(file.table)));
    }
    let Some((width, weights)) = first else { bail!("--features matches no file") };
    if u32::try_from(names.len()).is_err() {
        bail!("{} feature rows: at most 2^32 can be curated at once", names.len());
    }
    let rows = FeatureRows::new(width, parts, metric)?;
    let identity = vec![json!({ "features": format!("{:016x}", rows.fingerprint()), "weights": weights })];
    Ok(Input { rows, names, images: None, identity, files, weights })
}
