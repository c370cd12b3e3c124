//! Lists of images: one per line, CSV, TSV or JSON lines.

use std::path::Path;

use pipeline::ColumnNames;
use pipeline::shard::classes::{ClassColumn, canonical_class};
use serde_json::{Map, Value};

use crate::error::PrepError;

/// A line of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ListRow {
    /// Path or URL.
    pub(crate) target: String,
    /// Classes of the image; empty if it states that it is of none, `None` if it states nothing.
    pub(crate) classes: Option<Vec<String>>,
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

/// Usual names of the column of classes: that of an image is the first of these that is not empty.
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
/// the class and a column `caption` are read if present, in upper or lower case. Several classes
/// are a JSON list. A line of a `.txt` list is a file, or a file and its class, separated by a
/// space.
///
/// # Errors
/// [`PrepError`] when the list cannot be read or has no such column, and for classes that cannot be
/// told apart.
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
        let classes = canonical_class(label).map(|class| vec![class]);
        return ListRow { target, classes, ..ListRow::default() };
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

/// Returns the indices of the columns in which the class of an image may be: that of the column
/// `named` by the user, or those of the usual names.
///
/// # Errors
/// As [`find_column`].
fn find_label_columns(path: &Path, named: Option<&str>, columns: &[String]) -> Result<Vec<usize>, PrepError> {
    if named.is_some() {
        return Ok(find_column(path, named, &[], columns)?.into_iter().collect());
    }
    Ok(LABEL_COLUMNS.iter().filter_map(|name| index_of(columns, name)).collect())
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
    let label_columns = find_label_columns(path, columns.label.as_deref(), &headers)?;
    let caption = find_column(path, None, &["caption"], &headers)?;
    let Some(image) = image else { return Err(no_image_column(path, target, &headers)) };
    let mut class_column = ClassColumn::default();
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| table_error(path, error))?;
        let line = record.position().map_or(0, |position| position.line() as usize);
        let mut columns = Map::new();
        for (index, name) in headers.iter().enumerate() {
            if index != image
                && let Some(text) = table_cell(&record, index)
            {
                columns.insert(name.trim().to_string(), text.into());
            }
        }
        let mut classes = None;
        let stated = label_columns.iter().find_map(|index| Some((*index, table_cell(&record, *index)?)));
        if let Some((index, text)) = stated {
            let value = value_of_cell(text).map_err(|reason| line_error(path, line, reason))?;
            let read = read_classes(&mut class_column, &number_with_point(&value));
            classes = read.map_err(|reason| line_error(path, line, reason))?;
            columns.insert(headers[index].trim().to_string(), value);
        }
        rows.push(ListRow {
            target: table_cell(&record, image).unwrap_or_default(),
            classes,
            caption: caption.and_then(|index| table_cell(&record, index)),
            columns,
        });
    }
    class_column.report(&path.display().to_string());
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

/// Returns the value of a cell of a table: a JSON list, or its text.
///
/// # Errors
/// Returns the reason as text, for a list in another notation.
fn value_of_cell(text: String) -> Result<Value, String> {
    if !(text.starts_with('[') && text.ends_with(']')) {
        return Ok(text.into());
    }
    match serde_json::from_str(&text) {
        Ok(list @ Value::Array(_)) => Ok(list),
        _ if text.contains([',', '\'', '"']) => {
            Err(format!("{text} is no JSON: write several classes as [\"a\", \"b\"]"))
        }
        _ => Ok(text.into()),
    }
}

/// Returns the number in a cell such as `3.0`, which programs write beside empty cells, or else
/// `value`.
fn number_with_point(value: &Value) -> Value {
    let number = value.as_str().filter(|text| text.ends_with(".0")).and_then(|text| text.parse::<f64>().ok());
    number.map_or_else(|| value.clone(), Value::from)
}

/// Returns the classes that `value`, in `column`, states; `None` if nothing in it is a class.
///
/// # Errors
/// Returns the reason as text, for a class with a line break: several may have been meant.
fn read_classes(column: &mut ClassColumn, value: &Value) -> Result<Option<Vec<String>>, String> {
    let values = match value {
        Value::Array(values) => values.as_slice(),
        value => std::slice::from_ref(value),
    };
    for value in values {
        if let Value::String(text) = value
            && text.trim().contains(['\n', '\r'])
        {
            return Err(format!("the class {text:?} has a line break: write several as a list"));
        }
    }
    Ok(column.read(value))
}

fn read_json_lines(path: &Path, target: Target, columns: &ColumnNames) -> Result<Vec<ListRow>, PrepError> {
    let lines = read_text(path)?;
    let mut class_column = ClassColumn::default();
    let mut rows = Vec::new();
    for (index, line) in lines.lines().enumerate() {
        if !line.trim().is_empty() {
            rows.push(parse_json_line(path, target, columns, index, line, &mut class_column)?);
        }
    }
    class_column.report(&path.display().to_string());
    Ok(rows)
}

/// Parses line `index`, counted from 0, of the list at `path`.
fn parse_json_line(
    path: &Path,
    target: Target,
    columns: &ColumnNames,
    index: usize,
    line: &str,
    class_column: &mut ClassColumn,
) -> Result<ListRow, PrepError> {
    let mut cells: Map<String, Value> =
        serde_json::from_str(line).map_err(|error| line_error(path, index + 1, error.to_string()))?;
    let names: Vec<String> = cells.keys().cloned().collect();
    let image = find_column(path, columns.image.as_deref(), target.columns(), &names)?;
    // Any line except the first may leave out the column of classes.
    let label_columns = match columns.label.as_deref() {
        Some(named) if index > 0 && index_of(&names, named).is_none() => Vec::new(),
        named => find_label_columns(path, named, &names)?,
    };
    let caption = find_column(path, None, &["caption"], &names)?;
    let Some(image) = image else { return Err(no_image_column(path, target, &names)) };
    let Some(Value::String(image_name)) = cells.remove(&names[image]) else {
        return Err(line_error(path, index + 1, format!("no text under `{}`", names[image])));
    };
    let mut stated = label_columns.iter().filter_map(|index| cells.get(&names[*index]));
    let classes = match stated.find(|value| !value.is_null()) {
        Some(value) => {
            read_classes(class_column, value).map_err(|reason| line_error(path, index + 1, reason))?
        }
        None => None,
    };
    Ok(ListRow {
        target: image_name,
        classes,
        caption: caption.and_then(|index| json_cell(&cells, &names[index])),
        columns: cells,
    })
}

/// Creates an error about line `line` of the list at `path`, counted from 1.
fn line_error(path: &Path, line: usize, reason: String) -> PrepError {
    PrepError::Line { path: path.to_path_buf(), line, reason }
}

/// Returns the value of a cell of a line as text; `None` if it is null.
fn json_cell(cells: &Map<String, Value>, name: &str) -> Option<String> {
    match cells.get(name)? {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}
