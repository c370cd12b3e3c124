//! The rows that a run logs, column by column.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};
use trainer::run::telemetry::METRICS;

use super::jsonl;
use crate::ReportError;

/// Number of newest rows that recent means are taken over.
const N_RECENT_ROWS: usize = 20;

/// Number of steps taken, and a value.
pub(crate) type Point = (u64, f64);

/// Columns by name, each in the order of the steps.
#[derive(Debug, Clone, Default)]
pub(crate) struct Metrics(pub(crate) BTreeMap<String, Vec<Point>>);

impl Metrics {
    /// Reads the metrics of the run in `workdir`.
    pub(crate) fn read(workdir: &Path) -> Result<Self, ReportError> {
        let mut columns = BTreeMap::<String, Vec<Point>>::new();
        for row in jsonl::rows::<Map<String, Value>>(&workdir.join(METRICS))? {
            let Some(step) = row.get("step").and_then(Value::as_u64) else { continue };
            for (name, value) in row.iter().filter(|(name, _)| *name != "step") {
                if let Some(value) = value.as_f64() {
                    // Rows count steps from 0; checkpoints and people count steps taken.
                    columns.entry(name.clone()).or_default().push((step + 1, value));
                }
            }
        }
        Ok(Self(columns))
    }

    /// Returns the newest value of a column.
    pub(crate) fn last(&self, name: &str) -> Option<f64> {
        Some(self.0.get(name)?.last()?.1)
    }

    /// Returns the mean of the newest values of a column. The first step, which compiles kernels
    /// and fills caches, does not count beside others.
    pub(crate) fn recent(&self, name: &str) -> Option<f64> {
        let points = match self.0.get(name)?.as_slice() {
            [(1, _), others @ ..] if !others.is_empty() => others,
            points => points,
        };
        let newest = &points[points.len().saturating_sub(N_RECENT_ROWS)..];
        if newest.is_empty() {
            return None;
        }
        Some(newest.iter().map(|(_, value)| value).sum::<f64>() / newest.len() as f64)
    }
}

/// Selects at most about `n` of `points`: the lowest and the highest of each stretch of steps, so
/// that no peak is lost, and the first and last of all.
pub(crate) fn downsample(points: &[Point], n: usize) -> Vec<Point> {
    if points.len() <= n {
        return points.to_vec();
    }
    let per_stretch = points.len().div_ceil((n / 2).max(1));
    let mut kept = Vec::with_capacity(n + 2);
    for stretch in points.chunks(per_stretch) {
        let lowest = stretch.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        let highest = stretch.iter().max_by(|a, b| a.1.total_cmp(&b.1));
        let mut ends: Vec<Point> = lowest.into_iter().chain(highest).copied().collect();
        ends.sort_by_key(|(step, _)| *step);
        kept.extend(ends);
    }
    kept.extend([points[0], points[points.len() - 1]]);
    kept.sort_by_key(|(step, _)| *step);
    kept.dedup();
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_indexed_by_steps_taken() {
        let folder = tempfile::tempdir().unwrap();
        let text = "{\"step\":19,\"train/loss\":2.5,\"health/x\":null}\nbroken\n{\"step\":39,\"train/loss\":2.0}\n{\"st";
        std::fs::write(folder.path().join(METRICS), text).unwrap();
        let metrics = Metrics::read(folder.path()).unwrap();
        assert_eq!(metrics.0["train/loss"], [(20, 2.5), (40, 2.0)]);
        assert_eq!((metrics.last("train/loss"), metrics.recent("train/loss")), (Some(2.0), Some(2.25)));
        assert_eq!(metrics.last("health/x"), None);
        assert!(Metrics::read(&folder.path().join("none")).unwrap().0.is_empty());
    }

    #[test]
    fn downsampling_keeps_peaks() {
        let mut points: Vec<Point> = (0..10_000).map(|step| (step, (step as f64 / 300.0).sin())).collect();
        points[6_543].1 = 50.0;
        let thin = downsample(&points, 500);
        assert!(thin.len() <= 502, "{}", thin.len());
        assert!(thin.contains(&(6_543, 50.0)));
        assert_eq!((thin[0], thin[thin.len() - 1]), (points[0], points[9_999]));
        assert!(thin.windows(2).all(|pair| pair[0].0 < pair[1].0), "in the order of the steps, each once");
    }
}
