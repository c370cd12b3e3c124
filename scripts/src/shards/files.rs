//! Images as single files: a folder, or a list of paths.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use pipeline::ColumnNames;
use pipeline::shard::{IMAGE_EXTENSIONS, canonical_class, classes_of};
use serde_json::{Map, Value};

use super::list;
use crate::console::say;

/// Extensions of images that are converted to PNG when they are packed: few other programs read
/// them in shards.
pub(crate) const CONVERTED: [&str; 10] =
    ["bmp", "dib", "gif", "pbm", "pgm", "pnm", "ppm", "tga", "tif", "tiff"];

/// Extensions of files that belong to the image of the same name: its class, its columns, its
/// caption.
pub(super) const SIDECAR_EXTENSIONS: [&str; 4] = ["cls", "cls.txt", "json", "txt"];

/// An image in a file.
pub(crate) struct SampleFile {
    pub(crate) path: PathBuf,
    /// Path as the user knows it: relative to the folder, or as written in the list.
    pub(crate) name: String,
    pub(crate) class: Option<String>,
    /// Other columns of the list or of a file beside the image.
    pub(crate) columns: Map<String, Value>,
}

/// Images, and the other files that were found beside them.
#[derive(Default)]
pub(crate) struct FoundFiles {
    pub(crate) entries: Vec<SampleFile>,
    /// Numbers of skipped files, by extension, and of skipped folders, by name with a slash behind
    /// it.
    pub(crate) skipped: BTreeMap<String, usize>,
}

/// Extensions of images that cannot be decoded.
const UNREAD: [&str; 11] = ["arw", "avif", "cr2", "dng", "heic", "heif", "jp2", "jxl", "nef", "psd", "svg"];

/// Prints how many files were skipped, by extension.
pub(crate) fn print_skipped(skipped: &BTreeMap<String, usize>) {
    let (unread, others): (Vec<_>, Vec<_>) =
        skipped.iter().partition(|(extension, _)| UNREAD.contains(&extension.as_str()));
    if !unread.is_empty() {
        let kinds = in_words(&unread);
        say(format!("warning: skipped images in formats that are not read: {kinds}; convert them first"));
    }
    let (folders, others): (Vec<_>, Vec<_>) = others.into_iter().partition(|(name, _)| name.ends_with('/'));
    if !others.is_empty() {
        say(format!("note: skipped files that are not images: {}", in_words(&others)));
    }
    if !folders.is_empty() {
        let names: Vec<String> = folders.iter().map(|(name, n)| format!("{n} {name}")).collect();
        say(format!("note: skipped hidden folders: {}", names.join(", ")));
    }
}

/// Formats counts by extension: `1 .txt, 3 without extension`.
fn in_words(skipped: &[(&String, &usize)]) -> String {
    let kinds = skipped.iter().map(|(extension, n)| match extension.as_str() {
        "" => format!("{n} without extension"),
        extension => format!("{n} .{extension}"),
    });
    kinds.collect::<Vec<_>>().join(", ")
}

/// Finds the images that `input` names.
pub(crate) fn entries(input: &Path, columns: &ColumnNames) -> anyhow::Result<FoundFiles> {
    if input.is_dir() {
        return folder(input);
    }
    if !input.exists() {
        bail!("{} does not exist", input.display());
    }
    if !list::is_list(input) {
        bail!("{} is neither a folder nor a .txt, .csv, .tsv or .jsonl list", input.display());
    }
    Ok(FoundFiles {
        entries: list::read(input, list::Target::File, columns)?
            .into_iter()
            .map(|row| SampleFile {
                path: input.parent().unwrap_or(Path::new("")).join(&row.target),
                name: row.target,
                class: row.label,
                columns: row.columns,
            })
            .collect(),
        ..FoundFiles::default()
    })
}

/// Prints a note if the link `path` leads to a folder outside of `within`, whose images are taken
/// as well.
fn note_outside(path: &Path, within: &Path) {
    if let Ok(target) = path.canonicalize()
        && !target.starts_with(within)
    {
        say(format!("note: {} is a link to {}, whose images are taken", path.display(), target.display()));
    }
}

/// Finds the images below `root`, in the order of their paths. An image has the class in the .cls
/// file of its name, or under `label` or `labels` in its .json; else, in a sub-folder, the name of
/// the first folder below `root`.
fn folder(root: &Path) -> anyhow::Result<FoundFiles> {
    let mut found = FoundFiles::default();
    // The work directory of a run has pictures of its own.
    let is_run = |path: &Path| path.join("plan.toml").is_file() || path.join("starts.jsonl").is_file();
    let files = walkdir::WalkDir::new(root).follow_links(true).sort_by_file_name().into_iter();
    let mut hidden: BTreeMap<String, usize> = BTreeMap::new();
    let mut is_wanted = |entry: &walkdir::DirEntry| {
        if entry.depth() == 0 {
            return true;
        }
        if entry.file_type().is_dir() && is_hidden(entry.path()) {
            *hidden.entry(format!("{}/", name_of(Path::new(entry.file_name())))).or_default() += 1;
            return false;
        }
        !is_run(entry.path())
    };
    let within = root.canonicalize().unwrap_or_else(|_| root.to_path_buf());
    for file in files.filter_entry(&mut is_wanted) {
        let path = match file {
            Ok(file) => {
                if file.depth() > 0 && file.path_is_symlink() && file.file_type().is_dir() {
                    note_outside(file.path(), &within);
                }
                file.into_path()
            }
            // A broken link, or a folder that may not be read.
            Err(error) if error.depth() > 0 => {
                say(format!("warning: {error}: skipped"));
                continue;
            }
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read folder {}", root.display()));
            }
        };
        if !path.is_file() {
            continue;
        }
        if !is_image(&path) || is_hidden(&path) {
            if !is_beside(&path) {
                *found.skipped.entry(extension(&path).unwrap_or_default()).or_default() += 1;
            }
            continue;
        }
        let below = path.strip_prefix(root)?;
        let in_folder = below.components().count() > 1;
        let class = below.components().next().filter(|_| in_folder);
        let class = class.and_then(|part| canonical_class(&name_of(Path::new(part.as_os_str()))));
        let name = name_of(below);
        let Beside { class: own_class, columns, has_large_json } = beside(&path)?;
        if has_large_json {
            *found.skipped.entry(format!("json of more than {} KB", MAX_JSON_BYTES >> 10)).or_default() += 1;
        }
        found.entries.push(SampleFile { class: own_class.or(class), name, path, columns });
    }
    found.skipped.extend(hidden);
    Ok(found)
}

/// Returns the text of `path`, in which a byte that is not UTF-8 stands as `%E9`: such names stay
/// different, and can be restored.
pub(crate) fn name_of(path: &Path) -> String {
    pipeline::shard::text_of_name(path.as_os_str().as_encoded_bytes())
}

/// Class and columns in the files beside an image.
pub(super) struct Beside {
    pub(super) class: OwnClass,
    pub(super) columns: Map<String, Value>,
    /// Whether a `.json` was left out for its size.
    pub(super) has_large_json: bool,
}

/// Class that the files beside an image state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OwnClass {
    /// Nothing is said of it.
    Unknown,
    /// None: a negative number, or an empty file.
    No,
    /// Its number or name; several are one a line.
    Named(String),
}

impl OwnClass {
    /// Wraps the classes that are stated.
    fn of(classes: Vec<String>) -> Self {
        if classes.is_empty() { Self::No } else { Self::Named(classes.join("\n")) }
    }

    /// Returns the class, which is `otherwise` where nothing is said of it.
    pub(super) fn or(self, otherwise: Option<String>) -> Option<String> {
        match self {
            Self::Named(class) => Some(class),
            Self::No => None,
            Self::Unknown => otherwise,
        }
    }
}

/// Largest `.json` beside an image that is read. Tools such as labelme put the image itself into
/// it.
const MAX_JSON_BYTES: u64 = 64 << 10;

/// Reads the class and the columns from the files with the name of the image at `path`, as `shards
/// extract` writes them.
pub(super) fn beside(path: &Path) -> anyhow::Result<Beside> {
    let text = |extension: &str| -> anyhow::Result<Option<String>> {
        let path = path.with_extension(extension);
        match path.is_file() {
            // Invalid UTF-8 is replaced.
            true => std::fs::read(&path)
                .map(|bytes| Some(String::from_utf8_lossy(&bytes).trim().to_string()))
                .with_context(|| format!("cannot read {}", path.display())),
            false => Ok(None),
        }
    };
    let file = text("cls")?;
    let json = path.with_extension("json");
    let has_large_json = std::fs::metadata(&json).is_ok_and(|about| about.len() > MAX_JSON_BYTES);
    let json = if has_large_json { None } else { text("json")? };
    let mut columns = match json.map(|text| serde_json::from_str(&text)) {
        Some(Ok(Value::Object(columns))) => columns,
        // A file of another program: it holds nothing that could be kept as columns.
        _ => Map::new(),
    };
    let class = match file {
        Some(text) => OwnClass::of(text.lines().filter_map(canonical_class).collect()),
        None if columns.contains_key("label") || columns.contains_key("labels") => {
            OwnClass::of(classes_of(&columns))
        }
        None => OwnClass::Unknown,
    };
    if let Some(caption) = text("txt")? {
        columns.entry("caption").or_insert(caption.into());
    }
    Ok(Beside { class, columns, has_large_json })
}

/// Returns `true` if `path` belongs to an image of the same name.
fn is_beside(path: &Path) -> bool {
    let known = extension(path).is_some_and(|extension| SIDECAR_EXTENSIONS.contains(&extension.as_str()));
    known && extensions().map(|extension| path.with_extension(extension)).any(|image| image.is_file())
}

/// Returns `true` if `path` is hidden, as files that systems create beside images, such as
/// `._photo.jpg`.
pub(crate) fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'))
}

/// Returns `true` if `path` has the name of an image that can be packed. An array beside an image
/// of its name, or beside the rows that `ocelli embed` writes, holds features.
pub(crate) fn is_image(path: &Path) -> bool {
    match extension(path).as_deref() {
        Some("npy") => {
            let rows = format!("{}.rows.jsonl", path.display());
            let mut images = extensions().filter(|extension| *extension != "npy");
            !Path::new(&rows).exists() && !images.any(|extension| path.with_extension(extension).is_file())
        }
        Some(extension) => extensions().any(|known| known == extension),
        None => false,
    }
}

/// Extensions of images that can be packed.
pub(crate) fn extensions() -> impl Iterator<Item = &'static str> {
    let others = CONVERTED.iter().filter(|extension| !IMAGE_EXTENSIONS.contains(extension));
    IMAGE_EXTENSIONS.iter().chain(others).copied().filter(|extension| !extension.contains('.'))
}

/// Extension of `path` in lower case.
pub(crate) fn extension(path: &Path) -> Option<String> {
    path.extension().map(|extension| extension.to_string_lossy().to_lowercase())
}
