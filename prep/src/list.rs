//! Lists of images: one per line, CSV, TSV or JSON lines.

use std::path::Path;

use pipeline::ColumnNames;
use pipeline::shard::{canonical_class, classes_of_value};
use serde_json::{Map, Value};

use crate::error::PrepError;

/// A line of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ListRow {
    /// Path or URL.
    pub(crate) target: String,
    /// Classes of the image, one a line; empty if it states that it is of none, `None` if it states
    /// nothing.
    pub(crate) label: Option<String>,
    /// Caption of the image, if it has one.
    pub(crate) caption: Option<String>,
    /// All columns but the target's.
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
/// list is a file, or a file and its class, separated by a space.
///
/// # Errors
/// [`PrepError`] when the list cannot be read or has no such column.
pub(crate) fn read(path: &Path, target: Target, columns: &ColumnNames) -> Result<Vec<ListRow>, PrepError> {
    let metadata = std::fs::metadata(path).map_err(|error| PrepError::io("read", path, error))?;
    if !metadata.is_file() {
        // Reading a pipe would wait for a writer, and a device may have no end.
        return Err(PrepError::NotRegular { path: path.to_path_buf() });
    }
    match extension(path).as_deref() {
        Some("csv") => read_table(path, b',', target, columns),
        Some("tsv") => read_table(path, b'\t', target, columns),
        Some("jsonl") => read_json_lines(path, target, columns),
        _ => {
            let lines = read_text(path)?;
            let lines = lines.lines().map(str::trim).filter(|line| !line.is_empty());
            Ok(lines.map(|line| parse_line(path, target, line)).collect())
        }
    }
}

/// Parses a line of the `.txt` list at `path`.
fn parse_line(path: &Path, target: Target, line: &str) -> ListRow {
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

/// Returns the index of the column `named` by the user, or of the first of `usual`, in `columns`.
///
/// # Errors
/// [`PrepError::NoColumn`] if the user named a column that the list does not have.
fn find_column(
    path: &Path,
    named: Option<&str>,
    usual: &[&str],
    columns: &[String],
) -> Result<Option<usize>, PrepError> {
    let Some(name) = named else { return Ok(usual.iter().find_map(|name| index_of(columns, name))) };
    match index_of(columns, name) {
        Some(index) => Ok(Some(index)),
        None => Err(PrepError::NoColumn {
            path: path.to_path_buf(),
            column: name.to_string(),
            columns: columns.to_vec(),
        }),
    }
}

/// Returns the index of the column `name`, in upper or lower case.
fn index_of(columns: &[String], name: &str) -> Option<usize> {
    columns.iter().position(|column| column.trim().eq_ignore_ascii_case(name))
}

/// Returns the error for a list in which nothing names the images.
fn no_image_column(path: &Path, target: Target, columns: &[String]) -> PrepError {
    PrepError::NoImageColumn {
        path: path.to_path_buf(),
        wanted: target.columns().join(", "),
        columns: columns.to_vec(),
        hint: if target == Target::File { "; name another with --image-column" } else { "" },
    }
}

fn extension(path: &Path) -> Option<String> {
    path.extension().map(|extension| extension.to_string_lossy().to_lowercase())
}

fn read_text(path: &Path) -> Result<String, PrepError> {
    let text = std::fs::read_to_string(path).map_err(|error| PrepError::io("read", path, error))?;
    // Some editors put a byte order mark in front.
    Ok(text.strip_prefix('\u{feff}').map(str::to_string).unwrap_or(text))
}

fn read_table(
    path: &Path,
    delimiter: u8,
    target: Target,
    columns: &ColumnNames,
) -> Result<Vec<ListRow>, PrepError> {
    // Opened here, so that the error of a file that cannot be opened is not one about the table.
    let file = std::fs::File::open(path).map_err(|error| PrepError::io("read", path, error))?;
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).from_reader(file);
    let headers: Vec<String> =
        reader.headers().map_err(|error| table_error(path, error))?.iter().map(str::to_string).collect();
    let image = find_column(path, columns.image.as_deref(), target.columns(), &headers)?;
    let label = find_column(path, columns.label.as_deref(), &LABEL_COLUMNS, &headers)?;
    let caption = find_column(path, None, &["caption"], &headers)?;
    let Some(image) = image else { return Err(no_image_column(path, target, &headers)) };
    let mut rows = Vec::new();
    for (index, record) in reader.records().enumerate() {
        let record = record.map_err(|error| table_error(path, error))?;
        let mut columns = Map::new();
        for (column, name) in headers.iter().enumerate() {
            if column != image
                && let Some(text) = table_cell(&record, column)
            {
                columns.insert(name.trim().to_string(), text.into());
            }
        }
        let label = match label.and_then(|column| table_cell(&record, column)) {
            // The line of the header is the first.
            Some(text) => parse_label(path, index + 1, &text)?,
            None => None,
        };
        rows.push(ListRow {
            target: table_cell(&record, image).unwrap_or_default(),
            label,
            caption: caption.and_then(|column| table_cell(&record, column)),
            columns,
        });
    }
    Ok(rows)
}

fn table_error(path: &Path, source: csv::Error) -> PrepError {
    PrepError::Table { path: path.to_path_buf(), source }
}

/// Returns the text of a cell of a table; `None` if it is empty.
fn table_cell(record: &csv::StringRecord, index: usize) -> Option<String> {
    let text = record.get(index)?.trim();
    if text.is_empty() { None } else { Some(text.to_string()) }
}

/// Parses the class in a cell of a table, or the classes in a JSON list. `index` is that of its
/// line, for errors.
fn parse_label(path: &Path, index: usize, text: &str) -> Result<Option<String>, PrepError> {
    if text.starts_with("['") {
        let reason = format!("{text} is a list of Python: write several classes as JSON, [\"a\", \"b\"]");
        return Err(line_error(path, index, reason));
    }
    if text.starts_with('[')
        && let Ok(list @ Value::Array(_)) = serde_json::from_str(text)
    {
        return Ok(label_of_value(&list));
    }
    Ok(canonical_class(text))
}

/// Returns the classes that a value states, one a line: empty for an empty list, and `None` if
/// nothing in it is a class.
fn label_of_value(value: &Value) -> Option<String> {
    match value {
        Value::Array(values) if values.is_empty() => Some(String::new()),
        Value::Array(_) => Some(classes_of_value(value).join("\n")).filter(|classes| !classes.is_empty()),
        Value::String(text) => canonical_class(text),
        Value::Number(_) | Value::Bool(_) => canonical_class(&value.to_string()),
        Value::Null | Value::Object(_) => None,
    }
}

fn read_json_lines(path: &Path, target: Target, columns: &ColumnNames) -> Result<Vec<ListRow>, PrepError> {
    let lines = read_text(path)?;
    let mut rows = Vec::new();
    for (index, line) in lines.lines().enumerate() {
        if !line.trim().is_empty() {
            rows.push(parse_json_line(path, target, columns, index, line)?);
        }
    }
    Ok(rows)
}

/// Parses line `index`, counted from 0, of the list at `path`.
fn parse_json_line(
    path: &Path,
    target: Target,
    columns: &ColumnNames,
    index: usize,
    line: &str,
) -> Result<ListRow, PrepError> {
    let mut cells: Map<String, Value> =
        serde_json::from_str(line).map_err(|error| line_error(path, index, error.to_string()))?;
    let names: Vec<String> = cells.keys().cloned().collect();
    let image = find_column(path, columns.image.as_deref(), target.columns(), &names)?;
    // Any line except the first may leave out the column of classes.
    let label = match columns.label.as_deref() {
        Some(named) if index > 0 && index_of(&names, named).is_none() => None,
        named => find_column(path, named, &LABEL_COLUMNS, &names)?,
    };
    let caption = find_column(path, None, &["caption"], &names)?;
    let Some(image) = image else { return Err(no_image_column(path, target, &names)) };
    let Some(Value::String(image_name)) = cells.remove(&names[image]) else {
        return Err(line_error(path, index, format!("no text under `{}`", names[image])));
    };
    let label = label.and_then(|index| label_of_value(cells.get(&names[index])?));
    Ok(ListRow {
        target: image_name,
        label,
        caption: caption.and_then(|index| json_cell(&cells, &names[index])),
        columns: cells,
    })
}

/// Creates an error about line `index`, counted from 0.
fn line_error(path: &Path, index: usize, reason: String) -> PrepError {
    PrepError::Line { path: path.to_path_buf(), line: index + 1, reason }
}

/// Returns the value of a cell of a line as text; `None` if it is null.
fn json_cell(cells: &Map<String, Value>, name: &str) -> Option<String> {
    match cells.get(name)? {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}
