//! Images as single files: a folder, or a list of paths.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use pipeline::ColumnNames;
use pipeline::shard::classes::{canonical_class, classes_of, stated_class, states_no_class};
use pipeline::shard::files::MaskFile;
use pipeline::shard::{IMAGE_EXTENSIONS, MASK_EXTENSIONS};
use pipeline::words::counted;
use serde_json::{Map, Value};

use crate::error::PrepError;
use crate::list;

/// Extensions of images that are converted to PNG when they are packed: few other programs read
/// them in shards.
pub const CONVERTED: [&str; 10] = ["bmp", "dib", "gif", "pbm", "pgm", "pnm", "ppm", "tga", "tif", "tiff"];

/// Extensions of files that belong to the image of the same name: its class, its columns, its
/// caption.
pub const SIDECAR_EXTENSIONS: [&str; 4] = ["cls", "cls.txt", "json", "txt"];

/// An image in a file.
pub struct SampleFile {
    /// The file.
    pub path: PathBuf,
    /// Path for the user: relative to the folder, or as written in the list.
    pub name: String,
    /// Classes of the image, `None` if nothing is known; empty if a list says that it is of none.
    pub classes: Option<Vec<String>>,
    /// Other columns of the list or of the image's sidecar file.
    pub columns: Map<String, Value>,
    /// Mask beside the image, if there is one.
    pub mask: Option<MaskFile>,
}

/// Images, and the other files that were found.
#[derive(Default)]
pub struct FoundFiles {
    /// The images.
    pub entries: Vec<SampleFile>,
    /// Numbers of skipped files, by extension, and of skipped folders, by name with a trailing
    /// slash.
    pub skipped: BTreeMap<String, usize>,
}

/// Extensions of images that cannot be decoded.
const UNREAD: [&str; 11] = ["arw", "avif", "cr2", "dng", "heic", "heif", "jp2", "jxl", "nef", "psd", "svg"];

/// Reports how many files were skipped, by extension.
pub fn report_skipped(skipped: &BTreeMap<String, usize>) {
    let mut unread = Vec::new();
    let mut folders = Vec::new();
    let mut others = Vec::new();
    for (name, n) in skipped {
        if UNREAD.contains(&name.as_str()) {
            unread.push(files_in_words(name, *n));
        } else if name.ends_with('/') {
            folders.push(format!("{n} {name}"));
        } else {
            others.push(files_in_words(name, *n));
        }
    }
    if !unread.is_empty() {
        tracing::warn!("skipped images in unsupported formats: {}; convert them first", unread.join(", "));
    }
    if !others.is_empty() {
        tracing::info!("skipped files that are not images: {}", others.join(", "));
    }
    if !folders.is_empty() {
        tracing::info!("skipped hidden folders: {}", folders.join(", "));
    }
}

/// Formats a count of files: `1 .txt`, `3 without extension`.
fn files_in_words(extension: &str, n: usize) -> String {
    if extension.is_empty() { format!("{n} without extension") } else { format!("{n} .{extension}") }
}

/// Finds the images that `input` names.
///
/// # Errors
/// [`PrepError`] when the folder or the list cannot be read.
pub fn find_images(input: &Path, columns: &ColumnNames) -> Result<FoundFiles, PrepError> {
    if input.is_dir() {
        columns.warn_unused(&input.display().to_string());
        return find_images_below(input);
    }
    if !input.exists() {
        return Err(PrepError::Missing { path: input.to_path_buf() });
    }
    if !list::is_list(input) {
        return Err(PrepError::NotImages { path: input.to_path_buf() });
    }
    let folder = input.parent().unwrap_or(Path::new(""));
    let mut files = FoundFiles::default();
    for row in list::read(input, list::Target::File, columns)? {
        files.entries.push(SampleFile {
            path: folder.join(&row.target),
            name: row.target,
            classes: row.classes,
            columns: row.columns,
            mask: None,
        });
    }
    Ok(files)
}

/// Reports that the images of the link `path` are taken, if it leads to a folder outside of
/// `within`.
fn report_outside_link(path: &Path, within: &Path) {
    if let Ok(target) = path.canonicalize()
        && !target.starts_with(within)
    {
        tracing::info!("{} is a link to {}; its images are included", path.display(), target.display());
    }
}

/// Finds the images below `root`, in the order of their paths. An image has the class in the .cls
/// file of its name, or under `label` or `labels` in its .json; else, in a sub-folder, the name of
/// the first folder below `root`. A mask beside an image, such as `a.seg.png` beside `a.jpg`, is no
/// image.
fn find_images_below(root: &Path) -> Result<FoundFiles, PrepError> {
    let mut files = FoundFiles::default();
    let walk = walkdir::WalkDir::new(root).follow_links(true).sort_by_file_name().into_iter();
    let mut hidden: BTreeMap<String, usize> = BTreeMap::new();
    let visited = walk.filter_entry(|entry| {
        if entry.depth() == 0 {
            return true;
        }
        if entry.file_type().is_dir() && is_hidden(entry.path()) {
            *hidden.entry(format!("{}/", name_of(Path::new(entry.file_name())))).or_default() += 1;
            return false;
        }
        !is_workdir(entry.path())
    });
    let within = root.canonicalize().unwrap_or_else(|_| root.to_path_buf());
    // By the path of the image without its extension.
    let mut masks: HashMap<PathBuf, MaskFile> = HashMap::new();
    for file in visited {
        let path = match file {
            Ok(file) => {
                if file.depth() > 0 && file.path_is_symlink() && file.file_type().is_dir() {
                    report_outside_link(file.path(), &within);
                }
                file.into_path()
            }
            // A broken link, or a folder that may not be read.
            Err(error) if error.depth() > 0 => {
                tracing::warn!("skipped: {error}");
                continue;
            }
            Err(source) => return Err(PrepError::Walk { path: root.to_path_buf(), source }),
        };
        if !path.is_file() {
            continue;
        }
        if !is_image(&path) || is_hidden(&path) {
            if !is_sidecar(&path) {
                *files.skipped.entry(extension(&path).unwrap_or_default()).or_default() += 1;
            }
            continue;
        }
        if let Some(mask) = mask_of_image(&path) {
            let extension = mask.extension;
            let image = path.with_extension("").with_extension("");
            if masks.insert(image, mask).is_some() {
                // An image has one.
                *files.skipped.entry(extension.to_string()).or_default() += 1;
            }
            continue;
        }
        let below = path.strip_prefix(root).unwrap_or(&path);
        let mut components = below.components();
        let first = components.next();
        let class_folder = first.filter(|_| components.next().is_some());
        let class = class_folder.and_then(|part| canonical_class(&name_of(Path::new(part.as_os_str()))));
        let name = name_of(below);
        let Sidecars { class: stated, columns, has_large_json } = read_sidecars(&path)?;
        if has_large_json {
            *files.skipped.entry(format!("json of more than {} KB", MAX_JSON_BYTES >> 10)).or_default() += 1;
        }
        let classes = stated.or(class.map(|class| vec![class]));
        files.entries.push(SampleFile { classes, name, path, columns, mask: None });
    }
    if !masks.is_empty() {
        report_masks(masks.len(), root);
    }
    for entry in &mut files.entries {
        entry.mask = masks.remove(&entry.path.with_extension(""));
    }
    files.skipped.extend(hidden);
    Ok(files)
}

/// Returns the extension of a mask, such as `seg.png`, with which the name of the file at `path`
/// ends, if it does.
pub(crate) fn mask_extension(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_string_lossy().to_lowercase();
    MASK_EXTENSIONS.into_iter().find(|extension| name.ends_with(&format!(".{extension}")))
}

/// Reports that `n` files in `folder`, or in a list, are masks of images.
pub(crate) fn report_masks(n: usize, folder: &Path) {
    let files = counted(n as u64, "file");
    let names = MASK_EXTENSIONS.join(", .");
    tracing::info!("{}: {files} beside images read as their masks (.{names})", folder.display());
}

/// Returns the file at `path` as a mask, if it has the name of one and there is an image of the
/// same name.
fn mask_of_image(path: &Path) -> Option<MaskFile> {
    let extension = mask_extension(path)?;
    // With `.seg`, say, in place of the extension of the image.
    let stem = path.with_extension("");
    let has_image = extensions().any(|extension| {
        stem.with_extension(extension).is_file() || stem.with_extension(extension.to_uppercase()).is_file()
    });
    has_image.then(|| MaskFile { path: path.to_path_buf(), extension })
}

/// Returns whether `path` is the work directory of a run, which contains its own pictures.
fn is_workdir(path: &Path) -> bool {
    path.join("plan.toml").is_file() || path.join("starts.jsonl").is_file()
}

/// Returns `path` as text, with a byte that is not UTF-8 written as `%E9`: such names remain
/// distinct, and can be restored.
pub fn name_of(path: &Path) -> String {
    pipeline::shard::text_of_name(path.as_os_str().as_encoded_bytes())
}

/// Class and columns in the sidecar files of an image.
pub struct Sidecars {
    /// Class that they state.
    pub class: StatedClass,
    /// Other columns.
    pub columns: Map<String, Value>,
    /// Whether a `.json` was left out for its size.
    pub has_large_json: bool,
}

/// Class that the sidecar files of an image state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatedClass {
    /// Nothing is stated.
    Nothing,
    /// The class is not known: a negative number, or null.
    Unknown,
    /// Numbers or names of the classes, one or several; empty for an image of none.
    Named(Vec<String>),
}

impl StatedClass {
    /// Creates the value for the stated `classes`.
    fn new(classes: Vec<String>) -> Self {
        if classes.is_empty() { Self::Unknown } else { Self::Named(classes) }
    }

    /// Returns the classes, `None` if they are not known, and `default` if nothing is stated.
    pub fn or(self, default: Option<Vec<String>>) -> Option<Vec<String>> {
        match self {
            Self::Named(classes) => Some(classes),
            Self::Unknown => None,
            Self::Nothing => default,
        }
    }
}

/// Largest `.json` beside an image that is read. Tools such as labelme put the image itself into
/// it.
const MAX_JSON_BYTES: u64 = 64 << 10;

/// Reads the class and the columns from the files with the name of the image at `path`, as `shards
/// extract` writes them.
///
/// # Errors
/// [`PrepError::Io`].
pub fn read_sidecars(path: &Path) -> Result<Sidecars, PrepError> {
    let class_file = text_if_present(&path.with_extension("cls"))?;
    let json = path.with_extension("json");
    let has_large_json = std::fs::metadata(&json).is_ok_and(|metadata| metadata.len() > MAX_JSON_BYTES);
    let json = if has_large_json { None } else { text_if_present(&json)? };
    let mut columns = match json.map(|text| serde_json::from_str(&text)) {
        Some(Ok(Value::Object(columns))) => columns,
        // The file of another program, without columns.
        _ => Map::new(),
    };
    let class = match class_file {
        Some(text) if text.is_empty() => StatedClass::Named(Vec::new()),
        Some(text) => StatedClass::new(text.lines().filter_map(canonical_class).collect()),
        None if states_no_class(&columns) => StatedClass::Named(Vec::new()),
        None if stated_class(&columns).is_some() => StatedClass::new(classes_of(&columns)),
        None => StatedClass::Nothing,
    };
    if let Some(caption) = text_if_present(&path.with_extension("txt"))? {
        columns.entry("caption").or_insert(caption.into());
    }
    Ok(Sidecars { class, columns, has_large_json })
}

/// Reads the text of a file and replaces invalid UTF-8; `None` if the file does not exist.
fn text_if_present(path: &Path) -> Result<Option<String>, PrepError> {
    if !path.is_file() {
        return Ok(None);
    }
    let bytes = std::fs::read(path).map_err(|error| PrepError::io("read", path, error))?;
    Ok(Some(String::from_utf8_lossy(&bytes).trim().to_string()))
}

/// Returns `true` if `path` belongs to an image of the same name.
fn is_sidecar(path: &Path) -> bool {
    let known = extension(path).is_some_and(|extension| SIDECAR_EXTENSIONS.contains(&extension.as_str()));
    known && extensions().map(|extension| path.with_extension(extension)).any(|image| image.is_file())
}

/// Returns `true` if `path` is hidden, as files that systems create beside images, such as
/// `._photo.jpg`.
pub fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'))
}

/// Returns `true` if `path` has the name of an image that can be packed. An array beside an image
/// of its name, or beside the rows that `ocelli embed` writes, holds features.
pub fn is_image(path: &Path) -> bool {
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

/// Returns the extensions of images that can be packed.
pub fn extensions() -> impl Iterator<Item = &'static str> {
    let others = CONVERTED.iter().filter(|extension| !IMAGE_EXTENSIONS.contains(extension));
    IMAGE_EXTENSIONS.iter().chain(others).copied().filter(|extension| !extension.contains('.'))
}

/// Returns the extension of `path` in lower case.
pub fn extension(path: &Path) -> Option<String> {
    path.extension().map(|extension| extension.to_string_lossy().to_lowercase())
}
