//! Images in files of their own: a folder, or a list of paths.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use pipeline::shard::IMAGE_EXTENSIONS;

use super::list;

/// An image in a file.
pub(crate) struct Entry {
    pub(crate) path: PathBuf,
    pub(crate) class: Option<String>,
}

/// The images that `input` names.
pub(crate) fn entries(input: &Path) -> anyhow::Result<Vec<Entry>> {
    if input.is_dir() {
        return folder(input);
    }
    if !input.exists() {
        bail!("{} does not exist", input.display());
    }
    if !list::is_list(input) {
        bail!("{} is neither a folder nor a .txt, .csv, .tsv or .jsonl list", input.display());
    }
    let rows = list::read(input, "path")?.into_iter();
    rows.map(|row| Ok(Entry { path: beside(input, &row.target)?, class: row.label })).collect()
}

/// Images below `root`, in the order of their paths. An image in a sub-folder has the name of the
/// first folder below `root` as its class.
fn folder(root: &Path) -> anyhow::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for file in walkdir::WalkDir::new(root).follow_links(true).sort_by_file_name() {
        let path = file.with_context(|| format!("cannot read folder {}", root.display()))?.into_path();
        if !path.is_file() || !is_image(&path) {
            continue;
        }
        let below = path.strip_prefix(root)?;
        let in_folder = below.components().count() > 1;
        let class = below.components().next().filter(|_| in_folder);
        let class = class.map(|part| part.as_os_str().to_string_lossy().into_owned());
        entries.push(Entry { path, class });
    }
    Ok(entries)
}

/// A path of a list, relative to the list's folder; it must be an image.
fn beside(list: &Path, path: &str) -> anyhow::Result<PathBuf> {
    let path = list.parent().unwrap_or(Path::new("")).join(path);
    if !is_image(&path) {
        bail!("{}: {} is not a {} file", list.display(), path.display(), IMAGE_EXTENSIONS.join(", "));
    }
    Ok(path)
}

fn is_image(path: &Path) -> bool {
    extension(path).is_some_and(|extension| IMAGE_EXTENSIONS.contains(&extension.as_str()))
}

/// The extension of `path` in lower case.
pub(crate) fn extension(path: &Path) -> Option<String> {
    path.extension().map(|extension| extension.to_string_lossy().to_lowercase())
}
