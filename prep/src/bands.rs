//! Files that hold one band of an image each, such as `tile.b02.tif` and `tile.b08.tif`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use pipeline::shard::files::MaskFile;
use pipeline::shard::image::is_band;

use crate::error::PrepError;
use crate::files::{SampleFile, Sidecars, extension, mask_extension, read_sidecars, report_masks};

/// File of a sample's image, with its extension in the shard.
pub(crate) struct BandFile {
    /// Band and format, such as `b02.tif`; `None` for a file that is the whole image.
    pub(crate) extension: Option<String>,
    pub(crate) path: PathBuf,
}

/// Sample, and the files of its image.
pub(crate) struct Sample {
    /// Name, class and columns; the path is that of the first file.
    pub(crate) entry: SampleFile,
    pub(crate) files: Vec<BandFile>,
}

impl From<SampleFile> for Sample {
    fn from(entry: SampleFile) -> Self {
        let files = vec![BandFile { extension: None, path: entry.path.clone() }];
        Self { entry, files }
    }
}

/// Joins `entries`, the files of `folder`, whose names differ only in the band into samples, in the
/// order of the first file of each. Class and columns are those beside the common name, such as
/// `tile.cls` and `tile.json`, otherwise those of the first file; a mask is that of the common
/// name, such as `tile.seg.png`.
///
/// # Errors
/// [`PrepError::Io`] if a file beside the images cannot be read.
pub(crate) fn join_bands(entries: Vec<SampleFile>, folder: &Path) -> Result<Vec<Sample>, PrepError> {
    let commons: BTreeSet<String> =
        entries.iter().filter_map(|entry| split_band(&entry.name)).map(|(common, _)| common).collect();
    let mut samples: Vec<Sample> = Vec::new();
    let mut indices: BTreeMap<String, usize> = BTreeMap::new();
    let mut masks: BTreeMap<String, MaskFile> = BTreeMap::new();
    for entry in entries {
        if let Some(extension) = mask_extension(&entry.path)
            && let Some(common) = without_two_extensions(&entry.name)
            && commons.contains(common)
        {
            let mask = MaskFile { path: entry.path, extension };
            if let Some(other) = masks.insert(common.to_string(), mask) {
                tracing::warn!("skipped {}: the image has another mask", other.path.display());
            }
            continue;
        }
        let Some((common, band)) = split_band(&entry.name) else {
            samples.push(entry.into());
            continue;
        };
        let file = BandFile { extension: Some(band), path: entry.path.clone() };
        if let Some(index) = indices.get(&common) {
            samples[*index].files.push(file);
            continue;
        }
        let format = extension(&entry.path).unwrap_or_default();
        let Sidecars { class, columns, .. } =
            read_sidecars(&entry.path.with_extension("").with_extension(&format))?;
        let mut entry =
            SampleFile { name: format!("{common}.{format}"), classes: class.or(entry.classes), ..entry };
        entry.columns.extend(columns);
        indices.insert(common, samples.len());
        samples.push(Sample { entry, files: vec![file] });
    }
    if !masks.is_empty() {
        report_masks(masks.len(), folder);
    }
    for (common, mask) in masks {
        samples[indices[&common]].entry.mask = Some(mask);
    }
    Ok(samples)
}

/// Returns `folder/tile` for `folder/tile.seg.png`.
fn without_two_extensions(name: &str) -> Option<&str> {
    let (rest, _) = name.rsplit_once('.')?;
    let (stem, _) = rest.rsplit_once('.')?;
    Some(stem)
}

/// Splits `folder/tile.b02.tif` into `folder/tile` and `b02.tif`; `None` for a name without a band.
fn split_band(name: &str) -> Option<(String, String)> {
    let start = name.rfind('/').map_or(0, |slash| slash + 1);
    let (rest, format) = name[start..].rsplit_once('.')?;
    let (stem, band) = rest.rsplit_once('.')?;
    let extension = format!("{band}.{format}").to_lowercase();
    (!stem.is_empty() && is_band(&extension)).then(|| (format!("{}{stem}", &name[..start]), extension))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_at_the_band() {
        let expected = ("a.b/tile.1".to_string(), "b02.tif".to_string());
        assert_eq!(split_band("a.b/tile.1.B02.TIF"), Some(expected));
        for name in ["a.b/tile.tif", ".b02.tif", "tile.seg.png"] {
            assert_eq!(split_band(name), None);
        }
    }
}
