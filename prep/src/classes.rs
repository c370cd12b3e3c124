//! Class names and their numbers.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

use pipeline::shard::MAX_CLASS_BYTES;
use pipeline::shard::classes::{Columns, UNKNOWN_CLASS, states_classes};
use pipeline::url::ShardUrl;
use pipeline::{Dataset, PipelineError, SampleId, Source};

use crate::error::PrepError;

/// Name of the list of class names beside shards.
const LIST: &str = "classes.txt";

/// Usual names of the parts of a data set.
const PARTS: [&str; 9] =
    ["train", "training", "val", "valid", "validation", "test", "testing", "dev", "holdout"];

/// Names of the classes of shards, from the list beside them.
pub struct ClassNames {
    /// The names, by number; empty if there is no list.
    pub names: Vec<String>,
    /// The list, if there is one.
    list: Option<PathBuf>,
}

impl ClassNames {
    /// Reads the list of class names beside the shards `sources`. Lists beside shards in several
    /// folders have to be the same, because classes are merged by number; a folder without one is
    /// warned of.
    ///
    /// # Errors
    /// [`PrepError::ClassLists`] if two lists differ, [`PrepError::Io`].
    pub fn read(sources: &[Source]) -> Result<Self, PrepError> {
        let mut names = Vec::new();
        let mut list: Option<PathBuf> = None;
        let mut missing: Option<PathBuf> = None;
        let mut paths = HashSet::new();
        for source in sources {
            let ShardUrl::File(shard) = &source.url else { continue };
            let path = shard.with_file_name(LIST);
            // Classes in a Parquet file have their names there.
            if source.url.is_parquet() || !paths.insert(path.clone()) {
                continue;
            }
            if !path.exists() {
                missing.get_or_insert(path);
                continue;
            }
            let others = read_list(&path)?;
            match &list {
                None => {
                    names = others;
                    list = Some(path);
                }
                Some(_) if names == others => {}
                Some(first) => {
                    let class = names.iter().zip(&others).take_while(|(a, b)| a == b).count();
                    return Err(PrepError::ClassLists {
                        first: first.clone(),
                        second: path,
                        class,
                        first_name: names.get(class).cloned(),
                        second_name: others.get(class).cloned(),
                    });
                }
            }
        }
        if let (Some(list), Some(missing)) = (&list, &missing) {
            tracing::warn!(
                "there is no {}: numbers of classes there are taken for those of {}",
                missing.display(),
                list.display()
            );
        }
        Ok(Self { names, list })
    }

    /// Copies the list, if there is one, into the folder `out`, where a list with other names is
    /// replaced only if `overwrite` is set.
    ///
    /// # Errors
    /// [`PrepError::OtherClassList`], or [`PrepError::Io`].
    pub fn copy(&self, out: &Path, overwrite: bool) -> Result<(), PrepError> {
        let Some(list) = &self.list else { return Ok(()) };
        let target = out.join(LIST);
        if target.exists() {
            if read_list(&target)? == self.names {
                return Ok(());
            }
            if !overwrite {
                return Err(PrepError::OtherClassList { path: target, list: list.clone() });
            }
        }
        std::fs::create_dir_all(out).map_err(|error| PrepError::io("create", out, error))?;
        write_classes(out, &self.names)
    }
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

/// Warns if the `classes` of the images of `name` are the names of parts of a data set, such as
/// train and val: then the folder above them was given.
pub fn warn_of_parts(classes: &[String], name: &str) {
    let are_parts = classes.iter().all(|class| PARTS.contains(&class.to_lowercase().as_str()));
    if are_parts && let [first, ..] = classes {
        tracing::warn!(
            "the classes of {name} are {}, which are usually parts of a data set: to learn the folders in \
             them as classes, give each part by itself, such as the folder {first}",
            classes.join(", ")
        );
    }
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
    /// Numbers the classes of images, `stated`, by the list of names at `list`, if given. `out` is
    /// the folder of the shards, which may hold other classes only if `overwrite` is set.
    ///
    /// # Errors
    /// [`PrepError::OtherClasses`], or [`PrepError::Io`] when a list cannot be read.
    pub fn new<'a>(
        list: Option<&Path>,
        out: &Path,
        overwrite: bool,
        stated: impl Iterator<Item = &'a String>,
    ) -> Result<Self, PrepError> {
        let classes: BTreeSet<&str> = stated.map(String::as_str).collect();
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

    /// Returns the text of the class member of an image: the numbers of its `classes`, one a line.
    /// An image without known classes has no member, unless the folder in its `key` or its
    /// `columns` would state classes, or that there are none: then it says that they are not known.
    ///
    /// # Errors
    /// As [`Classes::number`], and [`PrepError::TooManyClasses`] for more than such a member may
    /// hold.
    pub fn member_text(
        &self,
        classes: Option<&[String]>,
        key: &str,
        columns: &Columns,
    ) -> Result<Option<String>, PrepError> {
        let Some(classes) = classes else {
            let would_have_some = key.contains('/') || states_classes(columns);
            return Ok(would_have_some.then(|| UNKNOWN_CLASS.to_string()));
        };
        let mut numbers = Vec::with_capacity(classes.len());
        for class in classes {
            numbers.push(self.number(class)?.to_string());
        }
        let text = numbers.join("\n");
        if text.len() as u64 > MAX_CLASS_BYTES {
            return Err(PrepError::TooManyClasses { n: classes.len() });
        }
        Ok(Some(text))
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
