//! Runs side by side on one HTML page that needs nothing beside itself.
//!
//! The page is `page.html` with its style, its script and the data inside. Everything that comes from a run reaches the
//! page as JSON, and the script sets it as text: no name of a file or class can become markup.

use std::collections::BTreeMap;

use pipeline::Dataset;
use serde::Serialize;
use serde_json::{Value, json};

use crate::gallery::{Gallery, quarantine};
use crate::run::Run;
use crate::run::metrics::thinned;
use crate::run::overview::Overview;

/// Points of a curve: more than a screen has columns.
const MAX_POINTS: usize = 2000;

/// A run and what is drawn of it.
pub struct Report {
    /// The run.
    pub run: Run,
    /// Its pictures, or why there are none.
    pub gallery: Result<Gallery, String>,
    /// Its shards, where they are at hand.
    pub dataset: Option<Dataset>,
}

/// The page of `reports`, made at `made_at_s` seconds since 1970.
pub fn html(reports: &[Report], made_at_s: u64) -> String {
    let runs: Vec<Value> = reports.iter().map(of_run).collect();
    let data = json!({
        "made_at_s": made_at_s,
        "version": env!("CARGO_PKG_VERSION"),
        "runs": runs,
        "settings": differing_settings(reports),
    });
    // No end tag, and no comment, can begin within the data.
    let data = data.to_string().replace('<', "\\u003c");
    let mut page = include_str!("page.html").to_string();
    let parts = [
        ("/*style*/", include_str!("page.css")),
        ("/*charts*/", include_str!("charts.js")),
        ("/*script*/", include_str!("page.js")),
        // Last, so that nothing in it is taken for one of the others.
        ("/*data*/", &data),
    ];
    for (place, text) in parts {
        page = page.replacen(place, text, 1);
    }
    page
}

/// All that the page shows of a run.
fn of_run(report: &Report) -> Value {
    let Report { run, gallery, dataset } = report;
    let series: BTreeMap<&String, _> =
        run.metrics.0.iter().map(|(name, points)| (name, thinned(points, MAX_POINTS))).collect();
    let scores: Vec<Value> = run
        .evaluations
        .scores
        .iter()
        .map(|(kind, points)| json!({ "kind": kind, "points": points }))
        .collect();
    let recipe = &run.status.plan.recipe;
    json!({
        "overview": Overview::of(run),
        "workdir": run.workdir,
        "recipe": recipe.name,
        "plan": run.status.plan_toml,
        "start": run.start,
        "continue": run.start.as_ref().map(|start| start.to_continue()),
        "series": series,
        "scores": scores,
        "confusions": run.evaluations.confusions,
        "warnings": run.warnings,
        "bad": quarantine::shown(&run.bad, dataset.as_ref()),
        "n_bad": run.bad.len(),
        "gallery": gallery.as_ref().ok(),
        "no_gallery": gallery.as_ref().err(),
    })
}

/// Settings of the recipes that are not the same in all runs: the key, and its value in each.
fn differing_settings(reports: &[Report]) -> Vec<(String, Vec<Option<String>>)> {
    let flat: Vec<BTreeMap<String, String>> = reports
        .iter()
        .map(|report| {
            let mut settings = BTreeMap::new();
            flatten("", &to_value(&report.run.status.plan.recipe), &mut settings);
            settings
        })
        .collect();
    let mut keys: Vec<&String> = flat.iter().flat_map(BTreeMap::keys).collect();
    keys.sort();
    keys.dedup();
    let row = |key: &String| (key.clone(), flat.iter().map(|settings| settings.get(key).cloned()).collect());
    let rows = keys.into_iter().map(row);
    rows.filter(|(_, values): &(_, Vec<_>)| values.windows(2).any(|pair| pair[0] != pair[1])).collect()
}

/// As recipes write it.
fn to_value(value: &impl Serialize) -> toml::Value {
    // Whatever was read from a recipe can be written again.
    toml::Value::try_from(value).unwrap_or_else(|_| toml::Value::Table(toml::Table::new()))
}

/// `optim.lr = 0.1` for each value within tables.
fn flatten(prefix: &str, value: &toml::Value, into: &mut BTreeMap<String, String>) {
    match value {
        toml::Value::Table(table) => table.iter().for_each(|(key, value)| {
            let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            flatten(&name, value, into);
        }),
        value => drop(into.insert(prefix.to_string(), value.to_string())),
    }
}
