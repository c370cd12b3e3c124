//! The page and the pictures of weights of any library, on any images.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::bail;
use eval::image_sets::{report_bits, set_name, with_names};
use eval::{FeatureKind, ImageSet, Source, features};
use kernels::device::Device;
use networks::{ModelConfig, Origin};
use pipeline::Storage;
use pipeline::words::{counted, thousands};
use prep::open::open_dataset;
use report::{Gallery, GalleryOptions, NetworkReport, network_files, write_network};
use session::{EvaluatedNetwork, NetworkSettings, find_workdir};

use crate::console::say;
use crate::progress::StageBar;

/// What to report on, and where to.
pub(crate) struct WeightsReport<'a> {
    /// Weights, a run or a checkpoint.
    pub(crate) checkpoint: &'a Path,
    /// Choice of the network, and of the preprocessing of its images.
    pub(crate) settings: NetworkSettings,
    /// Folders or shards of images.
    pub(crate) images: &'a [String],
    /// Number of images of each picture.
    pub(crate) n_images: usize,
    /// Number of images among which neighbors are searched.
    pub(crate) n_candidates: u64,
    /// Folder for the page and the pictures.
    pub(crate) out: Option<&'a Path>,
    /// Whether files of an earlier report are replaced.
    pub(crate) overwrite: bool,
}

impl WeightsReport<'_> {
    /// Writes the page and the pictures; returns the files, the page first.
    pub(crate) fn write(&self, storage: &Storage, device: &Device) -> anyhow::Result<Vec<PathBuf>> {
        let folder = self.out.map_or_else(|| default_folder(self.checkpoint), Path::to_path_buf);
        if folder.exists() && !folder.is_dir() {
            bail!("--out {} is a file; with --checkpoint, give a folder", folder.display());
        }
        let existing = network_files(&folder).into_iter().find(|file| file.exists());
        if let Some(existing) = existing.filter(|_| !self.overwrite) {
            bail!(
                "{} already exists; choose another --out, or replace it with --overwrite",
                existing.display()
            );
        }
        let open = EvaluatedNetwork::open(self.checkpoint, &self.settings, device)?;
        for warning in open.warnings() {
            say(format!("warning: {warning}"));
        }
        let source = Source::Shards(Arc::new(open_dataset(self.images, storage)?));
        let n = self.n_candidates.max(self.n_images as u64);
        let name = set_name(self.images);
        let images = ImageSet::open_some(source, open.transform, open.rules, name, n)?;
        report_bits(&images)?;
        let images = with_names(images, self.images, storage)?;
        let table = features(None, &open.network, &images, FeatureKind::LAST_LEVEL, &StageBar::new())?;
        let options = GalleryOptions { n_images: self.n_images, multicrop: None, seed: 0 };
        let mut gallery = Gallery::new(&open.network, &images, table, options)?;
        let origins = open.provenance.origins(self.checkpoint, &open.network.tensors());
        // These weights come first, and then those that they began with.
        let Some((weights, began_with)) = origins.split_first() else {
            bail!("{} has no weights", self.checkpoint.display());
        };
        gallery.network_description =
            format!("the {} of {}, with {}", open.network_name, weights.name, open.transform);
        let report = NetworkReport {
            name: weights.name.clone(),
            facts: self.facts(&open, weights, began_with, &images),
            gallery,
        };
        Ok(write_network(&folder, &report)?)
    }

    /// Returns what the page says about the network.
    fn facts(
        &self,
        open: &EvaluatedNetwork,
        weights: &Origin,
        began_with: &[Origin],
        images: &ImageSet,
    ) -> Vec<(&'static str, String)> {
        let mut facts = vec![
            ("weights", self.checkpoint.display().to_string()),
            ("network", describe(&open.network.model)),
            ("made by", made_by(weights)),
            ("fingerprint", weights.fingerprint.clone()),
            ("license", weights.license_in_words().to_string()),
        ];
        for origin in began_with {
            let license = origin.license_in_words();
            facts.push((
                "began with",
                format!(
                    "{}, {}, fingerprint {}, license {license}",
                    origin.name,
                    made_by(origin),
                    origin.fingerprint
                ),
            ));
        }
        let colors = &open.network.pixels.normalization;
        facts.push((
            "images",
            format!(
                "{} of {}, {}",
                thousands(images.len() as u64),
                images.name,
                open.network.pixels.format()
            ),
        ));
        facts.push(("transform", open.transform.to_string()));
        facts.push(("normalization", format!("mean {:?}, standard deviation {:?}", colors.mean, colors.std)));
        facts
    }
}

/// Describes a backbone: its kind and its sizes.
fn describe(model: &ModelConfig) -> String {
    let keys = serde_json::to_value(model).unwrap_or_default();
    let arch = keys["arch"].as_str().unwrap_or("network").to_string();
    format!(
        "{arch}: {:.1} M parameters, {} features, cells of {} px",
        model.n_params() as f64 / 1e6,
        model.width(),
        model.stride_px()
    )
}

/// Describes the library or the run that made weights.
fn made_by(origin: &Origin) -> String {
    match origin.step {
        Some(step) => format!("a run of {}, after {}", origin.library, counted(step, "step")),
        None if origin.library.is_empty() => "an unknown library".into(),
        None => origin.library.clone(),
    }
}

/// Returns the folder for the report on `checkpoint`, named after the weights file, the folder or
/// the run, in the current folder.
fn default_folder(checkpoint: &Path) -> PathBuf {
    let named = if weights::is_weights(checkpoint) {
        checkpoint
    } else {
        find_workdir(checkpoint).unwrap_or(checkpoint)
    };
    // A path such as `.` has no name.
    let absolute = named.canonicalize().unwrap_or_else(|_| named.to_path_buf());
    let named = if named.file_name().is_some() { named } else { &absolute };
    let name = if named.is_file() { named.file_stem() } else { named.file_name() };
    let name = name.map_or_else(|| "weights".into(), |name| name.to_string_lossy().into_owned());
    PathBuf::from(format!("{name}-report"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_named_after_the_file_the_folder_or_the_run() {
        let folder = std::env::temp_dir().join(format!("ocelli-names-{}", std::process::id()));
        let checkpoint = folder.join("mine/checkpoints/step-0000000004");
        std::fs::create_dir_all(&checkpoint).unwrap();
        std::fs::create_dir_all(folder.join("backbone.v2")).unwrap();
        std::fs::write(folder.join("mine/plan.toml"), "").unwrap();
        std::fs::write(folder.join("small.v2.pth"), "").unwrap();
        std::fs::write(folder.join("backbone.v2/model.safetensors"), "").unwrap();
        for (path, name) in [
            (folder.join("small.v2.pth"), "small.v2-report"),
            (folder.join("backbone.v2"), "backbone.v2-report"),
            (folder.join("backbone.v2/."), "backbone.v2-report"),
            (checkpoint, "mine-report"),
            (folder.join("mine"), "mine-report"),
        ] {
            assert_eq!(default_folder(&path), Path::new(name), "{}", path.display());
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
