//! Features to curate by, and their images.

use std::path::PathBuf;
use std::sync::Arc;

use augment::{DecodeRules, Image, Rgb8};
use eval::features::file::{ImageName, read};
use eval::{FeatureKind, ImageSet, Table};
use kernels::rows::Rows;
use pipeline::secrets::redact_list;
use pipeline::shard::image::EncodedImage;
use pipeline::{Dataset, PipelineError, SampleId, Shard, Storage};
use prep::open::open_dataset;
use prep::parts::file_identity;
use serde_json::{Value, json};

use super::match_images::match_images;
use crate::{CurateError, FeatureRows, Metric, Numbers};

/// Features with their images.
pub struct Input {
    /// The features.
    pub rows: FeatureRows,
    /// Image of each row.
    pub names: Vec<ImageName>,
    /// The images, if they are known.
    pub(super) images: Option<Images>,
    /// Identity of the input: a fingerprint of the features, or weights and images.
    pub(super) identity: Vec<Value>,
    /// Name and state of each file of features; empty if a network computed them.
    pub(super) files: Vec<Value>,
    /// How the features were computed.
    computation: Computation,
}

/// How features were computed; what is not known is null.
#[derive(Debug, Clone, PartialEq)]
struct Computation {
    /// Fingerprint of the weights.
    weights: Value,
    /// Which features: levels, averages, patches.
    kind: Value,
    /// Sizes of the images.
    transform: Value,
    /// Rules of the decoder; null for the usual ones, too.
    decoding: Value,
}

impl Computation {
    /// Reads it from the description of a file of features.
    fn read(about: &Value) -> Self {
        Self {
            weights: about["weights"].clone(),
            kind: about["features"].clone(),
            transform: about["transform"].clone(),
            decoding: about["decoding"].clone(),
        }
    }

    /// Returns what makes features of two computations incomparable, as far as both are known.
    fn difference(&self, other: &Self) -> Option<&'static str> {
        if are_different(&self.weights, &other.weights) {
            return Some("weights");
        }
        if are_different(&self.kind, &other.kind) {
            return Some("levels, averages or patches (--levels, --average, --patches)");
        }
        if are_different(&self.transform, &other.transform) {
            return Some("sizes of the images (--resize-px, --image-px)");
        }
        (self.decoding != other.decoding).then_some("decoding of the images (--bits-used, --no-data)")
    }
}

/// Returns whether two facts are known and differ.
fn are_different(a: &Value, b: &Value) -> bool {
    !a.is_null() && !b.is_null() && a != b
}

/// The images of rows.
pub(super) struct Images {
    pub(super) dataset: Arc<Dataset>,
    /// Shards and folders as the user named them.
    pub(super) specs: Vec<String>,
    /// Sample of each row.
    samples: Vec<SampleId>,
}

impl Images {
    /// Returns the sample of row `row`: its shard and its index there.
    pub(super) fn locate(&self, row: usize) -> (&Shard, usize) {
        self.dataset.locate(self.samples[row])
    }

    /// Returns the encoded image of row `row`.
    pub(super) fn encoded(&self, row: usize) -> Result<EncodedImage, PipelineError> {
        let (shard, index) = self.locate(row);
        shard.image(index)
    }
}

/// Rows of a table, as rows of features take them.
struct TableRows(Table);

impl AsRef<[f32]> for TableRows {
    fn as_ref(&self) -> &[f32] {
        self.0.rows()
    }
}

impl Input {
    /// Reads files of features as one set, with the images of the shards and folders `specs`, if
    /// there are any.
    ///
    /// # Errors
    /// [`CurateError::Prep`] if the images cannot be opened, [`CurateError::UnknownImage`],
    /// [`CurateError::AmbiguousImage`], and the errors of [`read_features`].
    pub fn read(
        paths: &[PathBuf],
        specs: &[String],
        metric: Metric,
        storage: &Storage,
    ) -> Result<Self, CurateError> {
        if specs.is_empty() {
            return read_features(paths, metric);
        }
        let dataset = Arc::new(open_dataset(specs, storage)?);
        let input = read_features(paths, metric)?;
        let samples = match_images(&dataset, specs, &input.names)?;
        let images = Images { dataset, specs: specs.to_vec(), samples };
        Ok(Self { images: Some(images), ..input })
    }

    /// Returns the features in `table`, of the kind `kind`, which a network whose weights have the
    /// fingerprint `weights` computed of `set`: the images of `dataset`, the shards and folders
    /// `specs`.
    ///
    /// # Errors
    /// [`CurateError::Data`] if the images cannot be read.
    pub fn computed(
        table: &Table,
        set: &ImageSet,
        dataset: Arc<Dataset>,
        specs: &[String],
        weights: u64,
        kind: FeatureKind,
        metric: Metric,
    ) -> Result<Self, CurateError> {
        let mut samples = Vec::new();
        let mut names = Vec::new();
        for image in &table.images {
            samples.push(SampleId(u64::from(*image)));
            let (shard, key) = set.describe(*image as usize);
            let label = set.label(*image as usize);
            let class = label.map(|label| set.classes()[label as usize].clone());
            names.push(ImageName { shard, key, label, class });
        }
        let n_bad = set.len() - table.len();
        if n_bad > 0 {
            tracing::warn!("{n_bad} unusable images are skipped; run `ocelli shards verify` to see why");
        }
        let computation = Computation {
            weights: json!(format!("{weights:016x}")),
            kind: json!(kind),
            transform: json!(set.transform),
            decoding: json!(set.unusual_decoding()),
        };
        let mut identity = json!({
            "weights": computation.weights, "transform": set.transform.to_string(),
            "images": format!("{:016x}", dataset.fingerprint()?),
        });
        if !computation.decoding.is_null() {
            identity["decoding"] = computation.decoding.clone();
        }
        let identity = vec![identity];
        let parts: Vec<Numbers> = vec![Arc::new(TableRows(table.clone()))];
        let rows = FeatureRows::new(table.columns.width(), parts, metric)?;
        let images = Images { dataset, specs: specs.to_vec(), samples };
        Ok(Self { rows, names, images: Some(images), identity, files: Vec::new(), computation })
    }

    /// Returns whether the images are known.
    pub fn has_images(&self) -> bool {
        self.images.is_some()
    }

    /// Returns the names of the shards and folders of the images, without secrets.
    pub fn sources(&self) -> Vec<String> {
        let specs = self.images.iter().flat_map(|images| &images.specs);
        specs.map(|spec| redact_list(spec)).collect()
    }

    /// Returns the key of the image of row `row`, with its class.
    pub fn caption(&self, row: usize) -> String {
        let name = &self.names[row];
        match &name.class {
            Some(class) => format!("{}, class {class:?}", name.key),
            None => name.key.clone(),
        }
    }

    /// Returns the image of row `row`; `None` if it is not known or cannot be read.
    pub fn picture(&self, row: usize) -> Option<Rgb8> {
        let encoded = self.images.as_ref()?.encoded(row).ok()?;
        Image::decode_any(&encoded.files(), &DecodeRules::default()).ok().map(Image::picture)
    }

    /// Checks that the features of `others` were computed in the same way, as far as that is known.
    ///
    /// # Errors
    /// [`CurateError::OtherComputation`] and [`CurateError::Widths`].
    pub fn check_comparable(&self, others: &Self) -> Result<(), CurateError> {
        if let Some(what) = self.computation.difference(&others.computation) {
            return Err(CurateError::OtherComputation { what });
        }
        if others.rows.width() != self.rows.width() {
            let width = others.rows.width();
            let other = self.rows.width();
            return Err(CurateError::Widths { width, other });
        }
        Ok(())
    }
}

/// Reads files of features as one set, without images.
///
/// # Errors
/// [`CurateError::Eval`], and [`CurateError`] if the files do not form a set.
pub fn read_features(paths: &[PathBuf], metric: Metric) -> Result<Input, CurateError> {
    // Files are identified before they are read: one that is replaced in between must not be taken
    // for the one that was read.
    let files = paths.iter().map(|path| file_identity(path)).collect();
    let mut parts = Vec::<Numbers>::new();
    let mut names = Vec::new();
    let mut first: Option<(usize, Computation)> = None;
    for path in paths {
        let file = read(path)?;
        let width = file.table.columns.width();
        let computation = Computation::read(&file.about);
        match &first {
            None => first = Some((width, computation)),
            Some((other, _)) if *other != width => {
                let other = *other;
                let first = paths[0].clone();
                return Err(CurateError::FileWidths { path: path.clone(), width, first, other });
            }
            Some((_, other)) => {
                // One of them may not state its weights.
                let has_other_weights = other.weights != computation.weights;
                let difference =
                    if has_other_weights { Some("weights") } else { other.difference(&computation) };
                if let Some(what) = difference {
                    let first = paths[0].clone();
                    return Err(CurateError::FileComputation { path: path.clone(), first, what });
                }
            }
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
    let Some((width, computation)) = first else { return Err(CurateError::NoFeatures) };
    if u32::try_from(names.len()).is_err() {
        return Err(CurateError::TooManyRows { n_rows: names.len() });
    }
    let rows = FeatureRows::new(width, parts, metric)?;
    let identity =
        vec![json!({ "features": format!("{:016x}", rows.fingerprint()), "weights": computation.weights })];
    Ok(Input { rows, names, images: None, identity, files, computation })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_that_were_computed_differently_are_told_apart() {
        let about = json!({
            "weights": "a",
            "features": FeatureKind::LAST_LEVEL,
            "transform": { "resize_px": 32, "size_px": 32 },
        });
        let computation = Computation::read(&about);
        assert_eq!(computation.difference(&computation), None);
        assert_eq!(computation.difference(&Computation::read(&Value::Null)), None, "nothing is known");
        for (key, value) in [
            ("weights", json!("b")),
            ("features", json!(FeatureKind::Vectors { n_levels: 2, average: false })),
            ("transform", json!({ "resize_px": 37, "size_px": 32 })),
            ("decoding", json!({ "bits_used": 12 })),
        ] {
            let mut other = about.clone();
            other[key] = value;
            assert!(computation.difference(&Computation::read(&other)).is_some(), "{key}");
        }
    }
}
