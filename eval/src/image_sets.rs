//! Sets of images by the names of their shards, folders and lists, with the names of their classes.

use std::path::Path;
use std::sync::Arc;

use augment::{DecodeRules, Transform};
use pipeline::secrets::redact_list;
use pipeline::{ColumnNames, Storage};
use prep::bits::{BitsUsed, N_INSPECTED};
use prep::classes::{ClassNames, report_class_folders, warn_of_parts};
use prep::files::{find_images, name_of, report_skipped};
use prep::open::{open_dataset, split_folders};

use crate::EvalError;
use crate::images::ImageSet;
use crate::images::source::{ImageFile, Source};
use crate::probe::Split;
use crate::protocol::Protocol;

/// Shards of the images to fit on and to score on.
#[derive(Debug, Clone, Default)]
pub struct SplitShards {
    /// Shards to fit on.
    pub train: Vec<String>,
    /// Shards to score on.
    pub test: Vec<String>,
    /// Name of the test set, if it is not the name of its shards.
    pub test_name: Option<String>,
    /// Fits on the test images instead, each time on all others.
    pub leave_one_out: bool,
    /// Seed of shuffles, initial weights and draws.
    pub seed: u64,
    /// Makes every protocol use the same transform, even if its script has another one.
    pub overrides_transform: bool,
}

impl SplitShards {
    /// Returns the name of the test set.
    pub fn test_set(&self) -> String {
        self.test_name.clone().unwrap_or_else(|| set_name(&self.test))
    }

    /// Opens both sets as `protocols` need them. Assumptions about classes and bits are reported.
    ///
    /// # Errors
    /// Errors of [`SplitShards::open_test`] and of [`Split::for_protocols`].
    pub fn open(
        &self,
        protocols: &[Protocol],
        transform: Transform,
        rules: DecodeRules,
        storage: &Storage,
    ) -> Result<Split, EvalError> {
        let test = self.open_test(transform, rules, storage)?;
        let train = if self.leave_one_out {
            test.clone()
        } else {
            open_and_report(&self.train, set_name(&self.train), transform, rules, storage)?
        };
        let split = Split::for_protocols(protocols, train, test)?;
        Ok(Split { seed: self.seed, overrides_transform: self.overrides_transform, ..split })
    }

    /// Opens the images to score on. Assumptions about classes and bits are reported.
    ///
    /// # Errors
    /// [`EvalError`] when the images cannot be opened.
    pub fn open_test(
        &self,
        transform: Transform,
        rules: DecodeRules,
        storage: &Storage,
    ) -> Result<ImageSet, EvalError> {
        open_and_report(&self.test, self.test_set(), transform, rules, storage)
    }
}

/// Opens the images of the shards `specs` as the set `name`, and reports assumptions about them.
fn open_and_report(
    specs: &[String],
    name: String,
    transform: Transform,
    rules: DecodeRules,
    storage: &Storage,
) -> Result<ImageSet, EvalError> {
    let dataset = Arc::new(open_dataset(specs, storage)?);
    report_class_folders(&dataset, &name)?;
    let images = ImageSet::open(Source::Shards(dataset), transform, rules, name)?;
    report_bits(&images)?;
    let images = with_names(images, specs, storage)?;
    warn_of_parts(images.classes(), &images.name);
    Ok(images)
}

/// Opens the images of the shards `specs`, with the names of their classes.
///
/// # Errors
/// [`EvalError`] when the images cannot be opened.
pub fn open_images(
    specs: &[String],
    transform: Transform,
    rules: DecodeRules,
    storage: &Storage,
) -> Result<ImageSet, EvalError> {
    let source = Source::Shards(Arc::new(open_dataset(specs, storage)?));
    with_names(ImageSet::open(source, transform, rules, set_name(specs))?, specs, storage)
}

/// Opens the images of the folder or list `input`, which are single files.
///
/// # Errors
/// [`EvalError::NoFiles`], and [`EvalError::Prep`] when the folder or list cannot be read.
pub fn open_files(
    input: &Path,
    columns: &ColumnNames,
    transform: Transform,
    rules: DecodeRules,
) -> Result<ImageSet, EvalError> {
    let root = if input.is_dir() { input } else { input.parent().unwrap_or(Path::new("")) };
    let found = find_images(input, columns)?;
    report_skipped(&found.skipped);
    let mut files = Vec::new();
    for entry in found.entries {
        let name = name_of(entry.path.strip_prefix(root).unwrap_or(&entry.path));
        files.push(ImageFile { path: entry.path, name, classes: entry.classes });
    }
    if files.is_empty() {
        return Err(EvalError::NoFiles { path: input.to_path_buf() });
    }
    ImageSet::open(Source::Files(Arc::new(files)), transform, rules, input.display().to_string())
}

/// Names the classes of `images`, the images of the shards `specs`, by the list beside them. The
/// classes of folders of images are names already.
///
/// # Errors
/// [`EvalError::Data`] when the list of shards cannot be read, [`EvalError::Prep`] when a folder
/// cannot be read or lists of names differ.
pub fn with_names(images: ImageSet, specs: &[String], storage: &Storage) -> Result<ImageSet, EvalError> {
    let sources = split_folders(specs)?.sources(storage)?;
    Ok(images.named(&ClassNames::read(&sources)?.names))
}

/// Reports if some of `images`, which are inspected, use a part of 16 bits.
///
/// # Errors
/// [`EvalError::Data`] when an image cannot be read.
pub fn report_bits(images: &ImageSet) -> Result<(), EvalError> {
    let inspected = images.spread(N_INSPECTED as usize);
    let mut bits = BitsUsed::default();
    for i in 0..inspected.len() {
        if let Some(encoded) = inspected.encoded(i)? {
            bits.inspect(&encoded.files(), images.rules());
        }
    }
    let remedy = "scale them with --bits-used BITS for external weights, or with data.bits_used in the \
        recipe of a run";
    bits.report(images.rules(), remedy);
    Ok(())
}

/// Returns the default name of a set: the folder and the common prefix of its shards, such as
/// `cifar10/test`.
pub fn set_name(specs: &[String]) -> String {
    let first = specs.first().map(|spec| redact_list(spec)).unwrap_or_default();
    // A query is not part of a name; a question mark in a file name is.
    let first = first.split('?').next().filter(|_| first.contains("://")).unwrap_or(&first);
    let shard = first.trim_end_matches(".gz");
    let path = Path::new(shard.trim_end_matches(".tar"));
    let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    // Only names of shards end in numbers; the name of a folder is kept.
    let file = if shard.ends_with(".tar") {
        file.trim_end_matches(|c: char| c.is_ascii_digit() || "-_.{}*?[]".contains(c)).to_string()
    } else {
        file
    };
    let folder = path.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    match folder {
        Some(folder) => format!("{folder}/{file}"),
        None => file,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_named_by_their_folder_and_the_prefix_of_their_shards() {
        for (spec, name) in [
            ("/data/cifar10/test-{000000..000001}.tar", "cifar10/test"),
            ("https://host/b/val_0001.tar.gz", "b/val"),
            ("http://u:PW@host/a/val-{0..3}.tar?token=PW&x=1", "a/val"),
            ("held-out.tar", "held-out"),
            ("data/photos-2024/", "data/photos-2024"),
        ] {
            assert_eq!(set_name(&[spec.to_string()]), name);
        }
    }
}
