//! Class names and their numbers.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use augment::{DecodeRules, Transform};
use eval::ImageSet;
use pipeline::url::ShardUrl;
use pipeline::{Dataset, SampleId, Source, Storage};

use crate::console::say;
use crate::evaluation::scores::set_name;
use prep::open::{is_folder_of_images, open_dataset};

/// Name of the list of class names beside shards.
const LIST: &str = "classes.txt";

/// Reads the list of class names beside the shards `sources`, by number; empty if there is none.
pub(crate) fn read_class_names(sources: &[Source]) -> Vec<String> {
    let Some(ShardUrl::File(path)) = sources.first().map(|source| &source.url) else { return Vec::new() };
    let text = std::fs::read_to_string(path.with_file_name(LIST)).unwrap_or_default();
    text.lines().map(str::to_string).collect()
}

/// Returns the name of `class`, if it is the number of one of `names`; otherwise `class`.
pub(crate) fn class_name<'a>(names: &'a [String], class: &'a str) -> &'a str {
    let number = class.parse::<usize>().ok();
    number.and_then(|number| names.get(number)).map_or(class, String::as_str)
}

/// Names the classes of `images`, which are those of the shards `specs`, by the list beside the
/// first shard.
pub(crate) fn with_names(images: ImageSet, specs: &[String], storage: &Storage) -> anyhow::Result<ImageSet> {
    // The classes of a folder of images are names.
    match specs.iter().find(|spec| !is_folder_of_images(spec).unwrap_or(false)) {
        Some(first) => Ok(images.named(&read_class_names(&storage.sources(std::slice::from_ref(first))?))),
        None => Ok(images),
    }
}

/// Opens the images of the shards `specs`, with the names of their classes.
pub(crate) fn open_images(
    specs: &[String],
    transform: Transform,
    rules: DecodeRules,
    storage: &Storage,
) -> anyhow::Result<ImageSet> {
    let source = eval::Source::Shards(Arc::new(open_dataset(specs, storage)?));
    with_names(ImageSet::open(source, transform, rules, set_name(specs))?, specs, storage)
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
        Ok(existing) if existing == text => return Ok(()),
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
    pub(crate) fn from_labels<'a>(
        list: Option<&Path>,
        out: &Path,
        overwrite: bool,
        labels: impl Iterator<Item = &'a String>,
    ) -> anyhow::Result<Self> {
        // An image may have several classes, one a line.
        let classes: BTreeSet<&str> = labels.flat_map(|label| label.lines()).collect();
        let path = out.join(LIST);
        let names = match list {
            Some(list) => read_list(list)?,
            None if classes.iter().all(|class| class.parse::<u32>().is_ok()) => return Ok(Self::Numbers),
            None => classes.into_iter().map(str::to_string).collect(),
        };
        if path.exists() && !overwrite && read_list(&path)? != names {
            bail!(
                "{} holds other classes; give --classes {} to number by it, or another --out",
                path.display(),
                path.display()
            );
        }
        Ok(Self::Named(names))
    }

    /// Returns the names in the order of their numbers, if classes have names.
    pub(crate) fn names(&self) -> Option<&Vec<String>> {
        match self {
            Self::Numbers => None,
            Self::Named(names) => Some(names),
        }
    }

    /// Returns the number of `class`.
    pub(crate) fn number(&self, class: &str) -> anyhow::Result<usize> {
        match self {
            Self::Numbers => Ok(class.parse()?),
            Self::Named(names) => names.iter().position(|name| name == class).with_context(|| {
                format!("class {class:?} is not in the list of classes ({} names)", names.len())
            }),
        }
    }
}

/// Reads a list of class names.
fn read_list(path: &Path) -> anyhow::Result<Vec<String>> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read the classes in {}", path.display()))?;
    Ok(text.lines().map(str::to_string).collect())
}

/// Writes `classes.txt`, one name per line in the order of the class numbers.
pub(crate) fn write_classes(folder: &Path, names: &[String]) -> anyhow::Result<()> {
    let path = folder.join(LIST);
    let text: String = names.iter().flat_map(|name| [name.as_str(), "\n"]).collect();
    // The file is replaced atomically, because parts of a job write the same list.
    pipeline::file::replace(&path, text.as_bytes())
        .with_context(|| format!("cannot write {}", path.display()))
}
