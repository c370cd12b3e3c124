//! Class names and their numbers.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, bail};
use eval::ImageSet;
use pipeline::url::ShardUrl;
use pipeline::{Dataset, SampleId, Source, Storage};

use crate::console::say;
use prep::open::is_folder_of_images;

/// Name of the list of class names beside shards.
const LIST: &str = "classes.txt";

/// Reads the list of class names beside the shards `sources`, by number; empty if there is none.
pub(crate) fn names_beside(sources: &[Source]) -> Vec<String> {
    let Some(ShardUrl::File(path)) = sources.first().map(|source| &source.url) else { return Vec::new() };
    let text = std::fs::read_to_string(path.with_file_name(LIST)).unwrap_or_default();
    text.lines().map(str::to_string).collect()
}

/// Names the classes of `images`, which are those of the shards `specs`, by the list beside the
/// first shard.
pub(crate) fn with_names(images: ImageSet, specs: &[String], storage: &Storage) -> anyhow::Result<ImageSet> {
    // The classes of a folder of images are names already.
    match specs.iter().find(|spec| !is_folder_of_images(spec).unwrap_or(false)) {
        Some(first) => Ok(images.named(&names_beside(&storage.sources(std::slice::from_ref(first))?))),
        None => Ok(images),
    }
}

/// Prints a note if the class of the first image of `dataset`, the set `name`, is the folder of its
/// key: in shards of other tools such folders may number parts of a data set.
pub(crate) fn note_class_folders(dataset: &Dataset, name: &str) -> anyhow::Result<()> {
    if dataset.n_samples() == 0 {
        return Ok(());
    }
    let (shard, number) = dataset.locate(SampleId(0));
    if shard.has_class_of_folder(number)? {
        say(format!(
            "note: images of {name} have the outermost folders of their names as classes, such as that of {}",
            shard.key(number)
        ));
    }
    Ok(())
}

/// Copies the list of class names beside the first of the shards `sources` into the folder `out`.
pub(crate) fn copy_classes(sources: &[Source], out: &Path, overwrite: bool) -> anyhow::Result<()> {
    let Some(ShardUrl::File(shard)) = sources.first().map(|source| &source.url) else { return Ok(()) };
    let list = shard.with_file_name(LIST);
    let target = out.join(LIST);
    let Ok(text) = std::fs::read(&list) else { return Ok(()) };
    match std::fs::read(&target) {
        Ok(there) if there == text => return Ok(()),
        Ok(_) if !overwrite => {
            bail!("{} holds other classes than {}; give another --out", target.display(), list.display())
        }
        _ => {}
    }
    std::fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    pipeline::file::replace(&target, &text).with_context(|| format!("cannot write {}", target.display()))
}

/// Mapping from labels to numbers.
pub(crate) enum Classes {
    /// Labels that are numbers.
    Numbers,
    /// Labels numbered by their position in a list of names.
    Named(Vec<String>),
}

impl Classes {
    /// Returns the classes of `labels`, numbered by the list of names at `list`, if given. `out` is
    /// the folder of the shards, which may hold other classes only if `overwrite` is set.
    pub(crate) fn of<'a>(
        list: Option<&Path>,
        out: &Path,
        overwrite: bool,
        labels: impl Iterator<Item = &'a String>,
    ) -> anyhow::Result<Self> {
        // An image may have several classes, one a line.
        let found: BTreeSet<&str> = labels.flat_map(|label| label.lines()).collect();
        let path = out.join(LIST);
        let read = |path: &Path| -> anyhow::Result<Vec<String>> {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read the classes in {}", path.display()))?;
            Ok(text.lines().map(str::to_string).collect())
        };
        let names = match list {
            Some(list) => read(list)?,
            None if found.iter().all(|class| class.parse::<u32>().is_ok()) => return Ok(Self::Numbers),
            None => found.into_iter().map(str::to_string).collect(),
        };
        if path.exists() && !overwrite && read(&path)? != names {
            bail!(
                "{} holds other classes; give --classes {} to number by it, or another --out",
                path.display(),
                path.display()
            );
        }
        Ok(Self::Named(names))
    }

    /// Names in the order of their numbers, if classes have names.
    pub(crate) fn names(&self) -> Option<&Vec<String>> {
        match self {
            Self::Numbers => None,
            Self::Named(names) => Some(names),
        }
    }

    /// Number of `class`.
    pub(crate) fn number(&self, class: &str) -> anyhow::Result<usize> {
        match self {
            Self::Numbers => Ok(class.parse()?),
            Self::Named(names) => names.iter().position(|name| name == class).with_context(|| {
                format!("class {class:?} is not in the list of classes ({} names)", names.len())
            }),
        }
    }
}

/// Writes `classes.txt`, one name per line in the order of the class numbers.
pub(crate) fn write_classes(folder: &Path, names: &[String]) -> anyhow::Result<()> {
    let path = folder.join(LIST);
    let text: String = names.iter().flat_map(|name| [name.as_str(), "\n"]).collect();
    // Whole at any time: parts of a job write the same list.
    pipeline::file::replace(&path, text.as_bytes())
        .with_context(|| format!("cannot write {}", path.display()))
}
