//! Figures of a benchmark as a line of JSON, compared with those of an earlier run.

use std::path::Path;

use serde_json::Value;

use crate::error::TrainError;

/// Settings that must be equal for figures to be comparable.
const SETTINGS: [&str; 5] = ["recipe", "batch_size", "workers", "compute", "device"];

/// Differences between the figures of two runs of a benchmark.
#[derive(Debug, Clone, PartialEq)]
pub struct FigureChanges {
    /// Settings that are not the same.
    pub settings: Vec<SettingChange>,
    /// Times and rates of both runs.
    pub figures: Vec<FigureChange>,
}

/// Setting that two runs do not share.
#[derive(Debug, Clone, PartialEq)]
pub struct SettingChange {
    /// Name of the setting.
    pub name: &'static str,
    /// Value in the earlier run.
    pub before: Value,
    /// Value in this run.
    pub now: Value,
}

/// Figure of two runs.
#[derive(Debug, Clone, PartialEq)]
pub struct FigureChange {
    /// Path of the figure, such as `phases_ms.update`.
    pub name: String,
    /// Value in the earlier run.
    pub before: f64,
    /// Value in this run.
    pub now: f64,
}

/// Reads the last line of JSON in `path`, the output of a benchmark.
///
/// # Errors
/// [`TrainError::Io`], [`TrainError::NoFigures`].
pub fn read_figures(path: &Path) -> Result<Value, TrainError> {
    let text = std::fs::read_to_string(path).map_err(|error| TrainError::io("read", path, error))?;
    let mut lines = text.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.find(Value::is_object).ok_or_else(|| TrainError::NoFigures { path: path.to_path_buf() })
}

/// Compares `now` with `before`.
pub fn compare_figures(before: &Value, now: &Value) -> FigureChanges {
    let mut settings = Vec::new();
    for name in SETTINGS {
        if let (Some(then), Some(this)) = (before.get(name), now.get(name))
            && then != this
        {
            settings.push(SettingChange { name, before: then.clone(), now: this.clone() });
        }
    }
    let before = figures("", before);
    let mut changes = Vec::new();
    for (name, now) in figures("", now) {
        if let Some((_, before)) = before.iter().find(|(other, _)| *other == name) {
            changes.push(FigureChange { name, before: *before, now });
        }
    }
    FigureChanges { settings, figures: changes }
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
        let FigureChanges { settings, figures } = compare_figures(&before, &now);
        assert_eq!(settings, [SettingChange { name: "recipe", before: json!("a"), now: json!("b") }]);
        let update = FigureChange { name: "phases_ms.update".into(), before: 10.0, now: 15.0 };
        let step = FigureChange { name: "step_ms".into(), before: 200.0, now: 100.0 };
        assert_eq!(figures, [update, step]);
    }

    #[test]
    fn a_file_without_json_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("before.txt");
        std::fs::write(&path, "step 5 ms\n{\"step_ms\":1.0}\nnothing\n").unwrap();
        assert_eq!(read_figures(&path).unwrap(), json!({ "step_ms": 1.0 }));
        std::fs::write(&path, "step 5 ms\n").unwrap();
        assert!(read_figures(&path).unwrap_err().to_string().contains("--json"));
    }
}
