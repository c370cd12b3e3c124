//! Class names and their numbers.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use pipeline::shard::MAX_CLASS_BYTES;
use pipeline::url::ShardUrl;
use pipeline::{Dataset, PipelineError, SampleId, Source};

use crate::error::PrepError;

/// Name of the list of class names beside shards.
const LIST: &str = "classes.txt";

/// Reads the list of class names beside the shards `sources`, by number; empty if there is none.
pub fn read_class_names(sources: &[Source]) -> Vec<String> {
    let Some(ShardUrl::File(path)) = sources.first().map(|source| &source.url) else { return Vec::new() };
    let text = std::fs::read_to_string(path.with_file_name(LIST)).unwrap_or_default();
    text.lines().map(str::to_string).collect()
}

/// Returns the name of `class`, if it is the number of one of `names`; otherwise `class`.
pub fn class_name<'a>(names: &'a [String], class: &'a str) -> &'a str {
    let number = class.parse::<usize>().ok();
    number.and_then(|number| names.get(number)).map_or(class, String::as_str)
}

/// Reports if the class of the first image of `dataset`, the set `name`, is the folder of its key:
/// in shards of other tools such folders may number parts of a data set.
///
/// # Errors
/// [`PipelineError`] when the image's classes cannot be read.
pub fn report_class_folders(dataset: &Dataset, name: &str) -> Result<(), PipelineError> {
    if dataset.n_samples() == 0 {
        return Ok(());
    }
    let (shard, index) = dataset.locate(SampleId(0));
    if shard.has_class_of_folder(index)? {
        tracing::info!(
            "images of {name} take the outermost folder of their names as class, for example {}",
            shard.key(index)
        );
    }
    Ok(())
}

/// Copies the list of class names beside the first of the shards `sources` into the folder `out`,
/// where a list with other names is replaced only if `overwrite` is set.
///
/// # Errors
/// [`PrepError::OtherClassList`], or [`PrepError::Io`].
pub fn copy_classes(sources: &[Source], out: &Path, overwrite: bool) -> Result<(), PrepError> {
    let Some(ShardUrl::File(shard)) = sources.first().map(|source| &source.url) else { return Ok(()) };
    let list = shard.with_file_name(LIST);
    let target = out.join(LIST);
    let Ok(text) = std::fs::read(&list) else { return Ok(()) };
    match std::fs::read(&target) {
        Ok(existing) if existing == text => return Ok(()),
        Ok(_) if !overwrite => return Err(PrepError::OtherClassList { path: target, list }),
        _ => {}
    }
    std::fs::create_dir_all(out).map_err(|error| PrepError::io("create", out, error))?;
    pipeline::file::replace(&target, &text).map_err(|error| PrepError::io("write", &target, error))
}

/// Mapping from labels to numbers.
pub enum Classes {
    /// Labels that are numbers.
    Numbers,
    /// Labels numbered by their position in a list of names.
    Named(ClassList),
}

/// Names of classes, in the order of their numbers.
pub struct ClassList {
    names: Vec<String>,
    numbers: HashMap<String, usize>,
}

impl ClassList {
    fn new(names: Vec<String>) -> Self {
        let mut numbers = HashMap::with_capacity(names.len());
        for (number, name) in names.iter().enumerate() {
            // Of equal names, the first counts.
            numbers.entry(name.clone()).or_insert(number);
        }
        Self { names, numbers }
    }
}

impl Classes {
    /// Returns the classes of `labels`, numbered by the list of names at `list`, if given. `out` is
    /// the folder of the shards, which may hold other classes only if `overwrite` is set.
    ///
    /// # Errors
    /// [`PrepError::OtherClasses`], or [`PrepError::Io`] when a list cannot be read.
    pub fn from_labels<'a>(
        list: Option<&Path>,
        out: &Path,
        overwrite: bool,
        labels: impl Iterator<Item = &'a String>,
    ) -> Result<Self, PrepError> {
        // An image may have several classes, one a line.
        let classes: BTreeSet<&str> = labels.flat_map(|label| label.lines()).collect();
        let path = out.join(LIST);
        let names = match list {
            Some(list) => read_list(list)?,
            None if classes.iter().all(|class| class.parse::<u32>().is_ok()) => return Ok(Self::Numbers),
            None => classes.into_iter().map(str::to_string).collect(),
        };
        if path.exists() && !overwrite && read_list(&path)? != names {
            return Err(PrepError::OtherClasses { path });
        }
        Ok(Self::Named(ClassList::new(names)))
    }

    /// Returns the names in the order of their numbers, if classes have names.
    pub fn names(&self) -> Option<&Vec<String>> {
        match self {
            Self::Numbers => None,
            Self::Named(list) => Some(&list.names),
        }
    }

    /// Returns the number of `class`.
    ///
    /// # Errors
    /// [`PrepError::NotNumber`], or [`PrepError::UnknownClass`].
    pub fn number(&self, class: &str) -> Result<usize, PrepError> {
        match self {
            Self::Numbers => {
                class.parse().map_err(|source| PrepError::NotNumber { class: class.to_string(), source })
            }
            Self::Named(list) => match list.numbers.get(class) {
                Some(number) => Ok(*number),
                None => Err(PrepError::UnknownClass { class: class.to_string(), n_names: list.names.len() }),
            },
        }
    }

    /// Returns the numbers of the classes in the lines of `text`, one a line, as in a class member.
    ///
    /// # Errors
    /// As [`Classes::number`], and [`PrepError::TooManyClasses`] for more than such a member may
    /// hold.
    pub fn numbers(&self, text: &str) -> Result<String, PrepError> {
        let mut numbers = Vec::new();
        for class in text.lines() {
            numbers.push(self.number(class)?.to_string());
        }
        let n = numbers.len();
        let member = numbers.join("\n");
        if member.len() as u64 > MAX_CLASS_BYTES {
            return Err(PrepError::TooManyClasses { n });
        }
        Ok(member)
    }
}

/// Reads a list of class names.
fn read_list(path: &Path) -> Result<Vec<String>, PrepError> {
    let text =
        std::fs::read_to_string(path).map_err(|error| PrepError::io("read the classes in", path, error))?;
    Ok(text.lines().map(str::to_string).collect())
}

/// Writes `classes.txt`, one name per line in the order of the class numbers.
///
/// # Errors
/// [`PrepError::Io`].
pub fn write_classes(folder: &Path, names: &[String]) -> Result<(), PrepError> {
    let path = folder.join(LIST);
    let text: String = names.iter().flat_map(|name| [name.as_str(), "\n"]).collect();
    // The file is replaced atomically, because parts of a job write the same list.
    pipeline::file::replace(&path, text.as_bytes()).map_err(|error| PrepError::io("write", &path, error))
}
