//! Lists of images: one per line, CSV, TSV or JSON lines.

use std::path::Path;

use anyhow::{Context, bail};
use pipeline::ColumnNames;
use pipeline::shard::canonical_class;
use serde_json::{Map, Value};

/// A line of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ListRow {
    /// Path or URL.
    pub(crate) target: String,
    /// Class, if there is one.
    pub(crate) label: Option<String>,
    /// Caption of the image, if there is one.
    pub(crate) caption: Option<String>,
    /// All columns but that of the target.
    pub(crate) columns: Map<String, Value>,
}

/// Returns `true` if `path` has the name of a list.
pub(crate) fn is_list(path: &Path) -> bool {
    matches!(extension(path).as_deref(), Some("txt" | "csv" | "tsv" | "jsonl"))
}

/// Kind of name in each line of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// A file, relative to the folder of the list.
    File,
    /// An address on a server.
    Url,
    /// The key of a sample.
    Key,
}

/// Usual names of the column of classes, the first of which that a list has is used.
const LABEL_COLUMNS: [&str; 5] = ["label", "labels", "class", "class_name", "category"];

impl Target {
    /// Usual names of the column, the first of which that a list has is used.
    fn columns(self) -> &'static [&'static str] {
        match self {
            Self::File => &[
                "path",
                "file_name",
                "filename",
                "file",
                "image",
                "image_path",
                "img",
                "img_path",
                "file_path",
                "filepath",
            ],
            Self::Url => &["url", "image_url"],
            Self::Key => &["key"],
        }
    }
}

/// Reads the list at `path`. A column of `columns`, or else of the usual names, names the images;
/// the class and a column `caption` are read if present, in upper or lower case. A line of a `.txt`
/// list is a file, or a file and its class behind a space.
pub(crate) fn read(path: &Path, target: Target, columns: &ColumnNames) -> anyhow::Result<Vec<ListRow>> {
    let about = std::fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
    if !about.is_file() {
        // Reading a pipe would wait for a writer, and a device may have no end.
        bail!("{} is no regular file", path.display());
    }
    match extension(path).as_deref() {
        Some("csv") => table(path, b',', target, columns),
        Some("tsv") => table(path, b'\t', target, columns),
        Some("jsonl") => json_lines(path, target, columns),
        _ => {
            let lines = text(path)?;
            let lines = lines.lines().map(str::trim).filter(|line| !line.is_empty());
            Ok(lines.map(|line| row_of_line(path, target, line)).collect())
        }
    }
}

/// Returns the row of a line of the `.txt` list at `path`.
fn row_of_line(path: &Path, target: Target, line: &str) -> ListRow {
    let folder = path.parent().unwrap_or(Path::new(""));
    if target == Target::File
        && let Some((file, label)) = line.rsplit_once(char::is_whitespace)
        && !folder.join(line).exists()
        && folder.join(file.trim_end()).exists()
    {
        let target = file.trim_end().to_string();
        return ListRow { target, label: canonical_class(label), ..ListRow::default() };
    }
    ListRow { target: line.to_string(), ..ListRow::default() }
}

/// Returns the place of the column `named` by the user, or of the first of `usual`, among `there`.
///
/// # Errors
/// If the user named a column that is not there.
fn find_column(
    path: &Path,
    named: Option<&str>,
    usual: &[&str],
    there: &[String],
) -> anyhow::Result<Option<usize>> {
    let place = |name: &str| there.iter().position(|column| column.trim().eq_ignore_ascii_case(name));
    match named {
        Some(name) => match place(name) {
            Some(found) => Ok(Some(found)),
            None => bail!("{} has no column `{name}`; it has {}", path.display(), there.join(", ")),
        },
        None => Ok(usual.iter().find_map(|name| place(name))),
    }
}

/// Returns the error for a list in which nothing names the images.
fn no_target(path: &Path, target: Target, there: &[String]) -> anyhow::Error {
    let usual = target.columns().join(", ");
    let hint = if target == Target::File { "; --image-column names another" } else { "" };
    anyhow::anyhow!("{} has none of the columns {usual}; it has {}{hint}", path.display(), there.join(", "))
}

fn extension(path: &Path) -> Option<String> {
    path.extension().map(|extension| extension.to_string_lossy().to_lowercase())
}

fn text(path: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    // Some editors put a byte order mark in front.
    Ok(text.strip_prefix('\u{feff}').map(str::to_string).unwrap_or(text))
}

fn table(path: &Path, delimiter: u8, target: Target, columns: &ColumnNames) -> anyhow::Result<Vec<ListRow>> {
    let mut reader = csv::ReaderBuilder::new()
        .delimiter(delimiter)
        .from_path(path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let headers: Vec<String> = reader.headers()?.iter().map(str::to_string).collect();
    let image = find_column(path, columns.image.as_deref(), target.columns(), &headers)?;
    let label = find_column(path, columns.label.as_deref(), &LABEL_COLUMNS, &headers)?;
    let caption = find_column(path, None, &["caption"], &headers)?;
    let Some(target_column) = image else { return Err(no_target(path, target, &headers)) };
    reader
        .records()
        .map(|record| {
            let record = record.with_context(|| format!("in {}", path.display()))?;
            let cell = |column: Option<usize>| {
                let cell = column.and_then(|at| record.get(at)).map(str::trim);
                cell.filter(|cell| !cell.is_empty()).map(str::to_string)
            };
            let target = cell(Some(target_column)).unwrap_or_default();
            let others = headers.iter().enumerate().filter(|(at, _)| *at != target_column);
            let columns =
                others.filter_map(|(at, name)| Some((name.trim().to_string(), cell(Some(at))?.into())));
            let columns = columns.collect();
            let label = cell(label).as_deref().and_then(canonical_class);
            Ok(ListRow { target, label, caption: cell(caption), columns })
        })
        .collect()
}

fn json_lines(path: &Path, target: Target, columns: &ColumnNames) -> anyhow::Result<Vec<ListRow>> {
    let lines = text(path)?;
    let rows = lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    rows.map(|(number, line)| {
        let place = || format!("{}, line {}", path.display(), number + 1);
        let mut cells: Map<String, Value> = serde_json::from_str(line).with_context(place)?;
        let there: Vec<String> = cells.keys().cloned().collect();
        let image = find_column(path, columns.image.as_deref(), target.columns(), &there)?;
        // A line may leave out what it does not know.
        let named = columns.label.as_deref().filter(|named| {
            there.iter().any(|column| column.trim().eq_ignore_ascii_case(named)) || number == 0
        });
        let label = match (&columns.label, named) {
            (Some(_), None) => None,
            _ => find_column(path, named, &LABEL_COLUMNS, &there).with_context(place)?,
        };
        let caption = find_column(path, None, &["caption"], &there)?;
        let Some(image) = image else { return Err(no_target(path, target, &there)) };
        let Some(Value::String(image)) = cells.remove(&there[image]) else {
            bail!("{}: no text under `{}`", place(), there[image])
        };
        let cell = |column: Option<usize>| match cells.get(&there[column?])? {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        };
        let label = cell(label).as_deref().and_then(canonical_class);
        let caption = cell(caption);
        Ok(ListRow { target: image, label, caption, columns: cells })
    })
    .collect()
}
