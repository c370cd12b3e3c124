//! A network of any library on one self-contained HTML page, with its pictures as files.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::json;

use crate::ReportError;
use crate::gallery::Gallery;
use crate::template::Page;

/// Name of the page.
const PAGE: &str = "report.html";

/// A network that need not belong to a run.
#[derive(Debug, Serialize)]
pub struct NetworkReport {
    /// Name of the file, of the folder or of the run that it comes from.
    pub name: String,
    /// What is known about it: a name and a value each.
    pub facts: Vec<(&'static str, String)>,
    /// Pictures of its features.
    pub gallery: Gallery,
}

/// Returns the files that [`write_network`] writes into `folder`, the page first.
pub fn network_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = vec![folder.join(PAGE)];
    files.extend(Gallery::FILES.map(|name| folder.join(name)));
    files
}

/// Writes the page of `report` and its pictures into `folder`, which is created if it is missing.
/// Existing files of these names are replaced. Returns the files, the page first.
///
/// # Errors
/// [`ReportError::Write`], [`ReportError::Picture`].
pub fn write_network(folder: &Path, report: &NetworkReport) -> Result<Vec<PathBuf>, ReportError> {
    std::fs::create_dir_all(folder)
        .map_err(|source| ReportError::Write { path: folder.to_path_buf(), source })?;
    let path = folder.join(PAGE);
    let mut files = vec![path.clone()];
    files.extend(report.gallery.draw(folder)?);
    let made_at_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    pipeline::file::replace(&path, html(report, made_at_s).as_bytes())
        .map_err(|source| ReportError::Write { path, source })?;
    Ok(files)
}

/// Renders the page of `report`, made at `made_at_s` seconds since 1970.
fn html(report: &NetworkReport, made_at_s: u64) -> String {
    let data = json!({
        "made_at_s": made_at_s,
        "version": env!("CARGO_PKG_VERSION"),
        "network": report,
    });
    let page = Page {
        title: "Ocelli network",
        style: "#network .words { max-width: 60rem; }\n",
        tools: "",
        scripts: &[include_str!("../page/sheets.js"), include_str!("network.js")],
    };
    page.render(&data)
}
