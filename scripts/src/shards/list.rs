//! Lists of images: one per line, CSV, TSV or JSON lines.

use std::path::Path;

use anyhow::{Context, bail};
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

/// Reads the list at `path`. Its column `target` names the images; `label` and `caption` are read
/// if present, in upper or lower case; a `.txt` list has only the target.
pub(crate) fn read(path: &Path, target: &str) -> anyhow::Result<Vec<ListRow>> {
    match extension(path).as_deref() {
        Some("csv") => table(path, b',', target),
        Some("tsv") => table(path, b'\t', target),
        Some("jsonl") => json_lines(path, target),
        _ => {
            let lines = text(path)?;
            let rows = lines.lines().map(str::trim).filter(|line| !line.is_empty());
            Ok(rows.map(|line| ListRow { target: line.to_string(), ..ListRow::default() }).collect())
        }
    }
}

fn extension(path: &Path) -> Option<String> {
    path.extension().map(|extension| extension.to_string_lossy().to_lowercase())
}

fn text(path: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    // Some editors put a byte order mark in front.
    Ok(text.strip_prefix('\u{feff}').map(str::to_string).unwrap_or(text))
}

fn table(path: &Path, delimiter: u8, target: &str) -> anyhow::Result<Vec<ListRow>> {
    let mut reader = csv::ReaderBuilder::new()
        .delimiter(delimiter)
        .from_path(path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let headers = reader.headers()?.clone();
    let column = |name: &str| headers.iter().position(|header| header.trim().eq_ignore_ascii_case(name));
    let Some(target_column) = column(target) else {
        let there: Vec<&str> = headers.iter().collect();
        bail!("{} has no column `{target}`; it has {}", path.display(), there.join(", "));
    };
    let (label, caption) = (column("label"), column("caption"));
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
            Ok(ListRow { target, label: cell(label), caption: cell(caption), columns })
        })
        .collect()
}

fn json_lines(path: &Path, target: &str) -> anyhow::Result<Vec<ListRow>> {
    let lines = text(path)?;
    let rows = lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    rows.map(|(number, line)| {
        let place = || format!("{}, line {}", path.display(), number + 1);
        let mut columns: Map<String, Value> = serde_json::from_str(line).with_context(place)?;
        let key = |name: &str| columns.keys().find(|key| key.eq_ignore_ascii_case(name)).cloned();
        let (image, label, caption) = (key(target), key("label"), key("caption"));
        let image = image.and_then(|key| columns.remove(&key));
        let Some(image) = image.as_ref().and_then(Value::as_str) else {
            bail!("{}: no text under `{target}`", place())
        };
        let cell = |key: Option<String>| match columns.get(&key?)? {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        };
        let (label, caption) = (cell(label), cell(caption));
        Ok(ListRow { target: image.to_string(), label, caption, columns })
    })
    .collect()
}
