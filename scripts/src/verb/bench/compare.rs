//! Comparison of a benchmark's figures with those of an earlier one.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde_json::Value;

/// Flag of benchmarks that can be compared.
#[derive(clap::Args)]
pub(super) struct CompareFlag {
    /// Print the ratio of each figure to an earlier run's, from a file with the output of that run
    /// with --json.
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
}

/// Settings that must be equal for figures to be comparable.
const SETTINGS: [&str; 5] = ["recipe", "batch_size", "workers", "compute", "device"];

impl CompareFlag {
    /// Reads the earlier figures, if requested. Must be called before anything is measured.
    pub(super) fn read(&self) -> anyhow::Result<Option<Value>> {
        self.compare.as_deref().map(last_line).transpose()
    }
}

/// Returns the last line of JSON in `path`.
fn last_line(path: &Path) -> anyhow::Result<Value> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut lines = text.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    match lines.find(Value::is_object) {
        Some(line) => Ok(line),
        None => bail!("{} has no line of JSON: create it with --json", path.display()),
    }
}

/// Returns lines that compare `now` with `before`.
pub(super) fn compare_figures(before: &Value, now: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    for name in SETTINGS {
        if let (Some(then), Some(this)) = (before.get(name), now.get(name))
            && then != this
        {
            lines.push(format!("warning: {name} was {then} and is {this}"));
        }
    }
    let before = figures("", before);
    let now = figures("", now);
    for (name, value) in &now {
        if let Some((_, then)) = before.iter().find(|(other, _)| other == name) {
            lines.push(format!("{name:<26} {then:9.2} -> {value:9.2}  {:.3}", value / then));
        }
    }
    lines
}

/// Returns the times and rates in `value`, recognized by their names, with their paths.
fn figures(prefix: &str, value: &Value) -> Vec<(String, f64)> {
    match value {
        Value::Object(fields) => {
            let mut all = Vec::new();
            for (name, value) in fields {
                let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                all.extend(figures(&path, value));
            }
            all
        }
        Value::Number(number) if prefix.contains("_ms") || prefix.ends_with("_s") => {
            number.as_f64().map(|number| vec![(prefix.to_string(), number)]).unwrap_or_default()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn figures_of_both_runs_are_compared_and_different_settings_named() {
        let before =
            json!({ "recipe": "a", "step_ms": 200.0, "phases_ms": { "update": 10.0 }, "memory_bytes": 5 });
        let now = json!({ "recipe": "b", "step_ms": 100.0, "phases_ms": { "update": 15.0, "new": 1.0 },
            "memory_bytes": 6 });
        let lines = compare_figures(&before, &now);
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert_eq!(lines[0], "warning: recipe was \"a\" and is \"b\"");
        assert!(lines.iter().any(|line| line.starts_with("step_ms") && line.ends_with("0.500")), "{lines:?}");
        assert!(
            lines.iter().any(|line| line.starts_with("phases_ms.update") && line.ends_with("1.500")),
            "{lines:?}"
        );
    }

    #[test]
    fn a_file_without_json_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("before.txt");
        std::fs::write(&path, "step 5 ms\n{\"step_ms\":1.0}\nnothing\n").unwrap();
        assert_eq!(last_line(&path).unwrap(), json!({ "step_ms": 1.0 }));
        std::fs::write(&path, "step 5 ms\n").unwrap();
        assert!(last_line(&path).unwrap_err().to_string().contains("--json"));
    }
}
