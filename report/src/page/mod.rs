//! Runs side by side on one self-contained HTML page.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use eval::{MEAN_AVERAGE_PRECISION, OWN_METRICS};
use pipeline::Dataset;
use pipeline::magic::PNG;
use serde_json::{Value, json};

use crate::ReportError;
use crate::data_url::data_url;
use crate::gallery::{Gallery, quarantine};
use crate::picture::workdir::{masks_name, picture_path, worst_name};
use crate::run::Run;
use crate::run::metrics::downsample;
use crate::run::overview::Overview;
use crate::template::Page;

/// Number of bytes at the beginning of a page that contain its title.
const BEGINNING: u64 = 300;

/// Largest number of points of a curve, more than a screen has columns.
const MAX_POINTS: usize = 2000;

/// Limit of the length of a picture of a run's folder that is embedded.
const MAX_PICTURE_BYTES: u64 = 16 << 20;

/// A run with its pictures and its shards.
pub struct Report {
    /// The run.
    pub run: Run,
    /// Pictures of the run, or the reason why there are none; absent if none were requested.
    pub gallery: Option<Result<Gallery, String>>,
    /// Shards of the run, where they are available.
    pub dataset: Option<Arc<Dataset>>,
}

/// Returns whether the file at `path` is an earlier page, which may be replaced.
pub fn is_page(path: &Path) -> bool {
    let mut beginning = Vec::new();
    let read = File::open(path).and_then(|file| file.take(BEGINNING).read_to_end(&mut beginning));
    read.is_ok() && String::from_utf8_lossy(&beginning).contains("<title>Ocelli report</title>")
}

/// Writes the page of `reports` to `path`; returns its length in bytes.
///
/// # Errors
/// [`ReportError::Write`].
pub fn write_page(path: &Path, reports: &[Report]) -> Result<usize, ReportError> {
    let made_at_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let page = html(reports, made_at_s);
    pipeline::file::replace(path, page.as_bytes())
        .map_err(|source| ReportError::Write { path: path.to_path_buf(), source })?;
    Ok(page.len())
}

/// Renders the page of `reports`, made at `made_at_s` seconds since 1970.
fn html(reports: &[Report], made_at_s: u64) -> String {
    let names = names(reports.iter().map(|report| report.run.workdir.as_path()));
    let runs: Vec<Value> = reports.iter().zip(names).map(|(report, name)| run_data(report, name)).collect();
    let data = json!({
        "made_at_s": made_at_s,
        "version": env!("CARGO_PKG_VERSION"),
        "own_metrics": OWN_METRICS,
        "multi_label_metric": MEAN_AVERAGE_PRECISION,
        "runs": runs,
        "settings": differing_settings(reports),
    });
    let page = Page {
        title: "Ocelli report",
        style: "",
        tools: include_str!("tools.html"),
        scripts: &[include_str!("sheets.js"), include_str!("charts.js"), include_str!("page.js")],
    };
    page.render(&data)
}

/// Returns all data that the page shows of a run.
fn run_data(report: &Report, name: String) -> Value {
    let Report { run, gallery, dataset } = report;
    let (gallery, no_gallery) = match gallery {
        Some(Ok(gallery)) => (Some(gallery), None),
        Some(Err(why)) => (None, Some(why)),
        None => (None, None),
    };
    let folder = run.start.as_ref().map(|start| start.folder.clone()).unwrap_or_default();
    let series: BTreeMap<&String, _> =
        run.metrics.0.iter().map(|(name, points)| (name, downsample(points, MAX_POINTS))).collect();
    let scores: Vec<Value> = run
        .evaluations
        .scores
        .iter()
        .map(|(kind, points)| json!({ "kind": kind, "points": points }))
        .collect();
    let recipe = &run.status.plan.recipe;
    json!({
        "overview": Overview { name, ..Overview::from_run(run) },
        "workdir": run.workdir.display().to_string(),
        "stages": stages(run),
        "recipe": recipe.name,
        "plan": run.status.plan_toml,
        "start": run.start,
        "continue": run.start.as_ref().map(|start| start.resume_command()),
        "series": series,
        "scores": scores,
        "confusions": run.evaluations.confusions,
        "classifiers": classifiers(run),
        "masks": masks(run),
        "warnings": run.warnings,
        "bad": quarantine::shown_samples(&run.bad, dataset.as_deref(), &folder),
        "n_bad": run.bad.len(),
        "gallery": gallery,
        "no_gallery": no_gallery,
    })
}

/// Returns the results of the classifier of `run`, each with the picture of its worst images.
fn classifiers(run: &Run) -> Vec<Value> {
    let mut results = Vec::with_capacity(run.evaluations.classifiers.len());
    for classifier in &run.evaluations.classifiers {
        let mut result = json!(classifier);
        let path = picture_path(&run.workdir, &worst_name(&classifier.kind.set));
        let mut picture = embedded_png(&path);
        // Earlier releases drew one picture of a run.
        if picture.is_none() && run.evaluations.classifiers.len() == 1 {
            picture = embedded_png(&picture_path(&run.workdir, "worst"));
        }
        result["worst_picture"] = json!(picture);
        results.push(result);
    }
    results
}

/// Returns the results of the decoder of `run`, each with the picture of its worst images.
fn masks(run: &Run) -> Vec<Value> {
    let mut results = Vec::with_capacity(run.evaluations.masks.len());
    for masks in &run.evaluations.masks {
        let mut result = json!(masks);
        let path = picture_path(&run.workdir, &masks_name(&masks.kind.set));
        result["mask_picture"] = json!(embedded_png(&path));
        results.push(result);
    }
    results
}

/// Returns the PNG file at `path` as a `data:` URL; `None` if there is none, or if it is too large.
fn embedded_png(path: &Path) -> Option<String> {
    let metadata = std::fs::metadata(path).ok()?;
    if !metadata.is_file() || metadata.len() > MAX_PICTURE_BYTES {
        return None;
    }
    let bytes = std::fs::read(path).ok()?;
    bytes.starts_with(PNG).then(|| data_url("png", &bytes))
}

/// Returns the shortest suffixes of `paths` that distinguish them.
fn names<'a>(paths: impl Iterator<Item = &'a Path>) -> Vec<String> {
    let absolute: Vec<PathBuf> =
        paths.map(|path| path.canonicalize().unwrap_or_else(|_| path.to_path_buf())).collect();
    let longest = absolute.iter().map(|path| path.components().count()).max().unwrap_or(1);
    for n in 1..=longest {
        let names = suffixes(&absolute, n);
        let mut sorted = names.clone();
        sorted.sort();
        if sorted.windows(2).all(|pair| pair[0] != pair[1]) {
            return names;
        }
    }
    // The same folder twice has one name.
    suffixes(&absolute, 1)
}

/// Returns the last `n` components of each path.
fn suffixes(paths: &[PathBuf], n: usize) -> Vec<String> {
    let mut suffixes = Vec::with_capacity(paths.len());
    for path in paths {
        let skipped = path.components().count().saturating_sub(n);
        suffixes.push(path.components().skip(skipped).collect::<PathBuf>().display().to_string());
    }
    suffixes
}

/// Stages of a step by the columns that time them; waiting for ranks is part of several.
const STAGES: [(&str, &str); 6] = [
    ("data wait", "time/data_wait_ms"),
    ("targets", "time/targets_ms"),
    ("forward", "time/forward_ms"),
    ("heads and loss", "time/head_ms"),
    ("backward", "time/backward_ms"),
    ("update", "time/update_ms"),
];

/// Returns milliseconds of a step, of its stages and of waiting for ranks within them: means over
/// the newest rows.
fn stages(run: &Run) -> Value {
    let parts: Vec<(&str, f64)> =
        STAGES.iter().filter_map(|(name, column)| Some((*name, run.metrics.recent(column)?))).collect();
    json!({
        "step_ms": run.metrics.recent("time/step_ms"),
        "rank_wait_ms": run.metrics.recent("time/rank_wait_ms"),
        "parts": parts,
    })
}

/// Returns settings of the recipes that are not the same in all runs: the key, and its value in
/// each.
fn differing_settings(reports: &[Report]) -> Vec<(String, Vec<Option<String>>)> {
    let mut flat: Vec<BTreeMap<String, String>> = Vec::with_capacity(reports.len());
    for report in reports {
        let values = report.run.status.plan.recipe.values();
        flat.push(values.into_iter().map(|(key, value)| (key, value.to_string())).collect());
    }
    let mut keys: Vec<&String> = flat.iter().flat_map(BTreeMap::keys).collect();
    keys.sort();
    keys.dedup();
    let mut rows = Vec::new();
    for key in keys {
        let values: Vec<Option<String>> = flat.iter().map(|settings| settings.get(key).cloned()).collect();
        if values.windows(2).any(|pair| pair[0] != pair[1]) {
            rows.push((key.clone(), values));
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path_names(paths: &[&str]) -> Vec<String> {
        names(paths.iter().map(Path::new))
    }

    /// The file is that of a run, and may be anything.
    #[test]
    fn only_png_files_are_embedded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("worst-val.png");
        assert_eq!(embedded_png(&path), None);
        std::fs::write(&path, "<b>text</b>").unwrap();
        assert_eq!(embedded_png(&path), None);
        std::fs::write(&path, PNG).unwrap();
        assert_eq!(embedded_png(&path).unwrap(), "data:image/png;base64,iVBORw0KGgo=");
        assert_eq!(embedded_png(Path::new("/dev/zero")), None);
    }

    #[test]
    fn run_names_are_shortest_distinct_suffixes() {
        assert_eq!(path_names(&["/a/x/run"]), ["run"]);
        assert_eq!(path_names(&["/a/x/run", "/a/y/run"]), ["x/run", "y/run"]);
        assert_eq!(path_names(&["/a/x", "/a/y"]), ["x", "y"]);
        assert_eq!(path_names(&["/a/x", "/a/x"]), ["x", "x"]);
    }
}
