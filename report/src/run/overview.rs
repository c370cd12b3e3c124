//! Summary of a run in one line.

use serde::Serialize;
use serde_json::Value;
use trainer::run::Concern;
use trainer::run::status::State;

use super::Run;

/// Entry of a run in a list of runs.
#[derive(Debug, Clone, Serialize)]
pub struct Overview {
    /// Name of the run's folder.
    pub name: String,
    /// Name of the method in recipes.
    pub method: String,
    /// Name of the backbone, and its number of parameters.
    pub backbone: String,
    /// Number of steps taken.
    pub step: u64,
    /// Number of steps of the run.
    pub total_steps: u64,
    /// The newest loss.
    pub loss: Option<f64>,
    /// The highest score.
    pub best: Option<Best>,
    /// `running`, `finished`, `stopped`, `failed`, `died`, `not started`.
    pub state: &'static str,
    /// State with its reason.
    pub why: String,
    /// True if the newest row warned of a collapse.
    pub collapsed: bool,
    /// Images per second over the newest rows.
    pub images_per_s: Option<f64>,
    /// Seconds left at the pace of the newest rows, for a run that has steps to take.
    pub seconds_left: Option<f64>,
}

/// The highest score of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Best {
    /// Name of the score: `knn_20`.
    pub metric: String,
    /// The test set; empty where it is not known.
    pub set: String,
    /// Score in percent.
    pub value: f64,
}

impl Overview {
    /// Summarizes `run`.
    pub fn of(run: &Run) -> Self {
        let (status, recipe) = (&run.status, &run.status.plan.recipe);
        let total_steps = status.plan.total_steps;
        // A logged row may be ahead of the heartbeat, or a checkpoint ahead of the logged rows.
        let logged =
            run.metrics.0.get("train/loss").and_then(|points| points.last()).map_or(0, |(step, _)| *step);
        let step = status.step.max(logged).min(total_steps);
        let seconds_a_step = run.metrics.recent("time/step_ms").map(|ms| ms / 1e3);
        let unfinished = !matches!(status.state, State::Finished);
        Self {
            name: run.name(),
            method: tag(&recipe.method, "name"),
            backbone: format!("{} ({})", tag(&recipe.model, "arch"), millions(recipe.model.n_params())),
            step,
            total_steps,
            loss: run.metrics.last("train/loss"),
            best: best(run),
            state: status.state.word(),
            why: status.state.to_string(),
            collapsed: collapsed(run),
            images_per_s: run.metrics.recent("rate/images_per_s"),
            seconds_left: seconds_a_step.filter(|_| unfinished).map(|s| s * (total_steps - step) as f64),
        }
    }
}

/// Returns true if the newest logged step has warned of a collapse.
fn collapsed(run: &Run) -> bool {
    let newest = run.metrics.0.get("train/loss").and_then(|points| points.last()).map(|(step, _)| *step);
    let mut collapses = run.warnings.iter().filter(|warning| warning.concern == Concern::Collapse);
    collapses.next_back().is_some_and(|warning| Some(warning.step + 1) >= newest)
}

/// Returns the highest score of the run's evaluations, or else of its probe. Accuracies come before other
/// percentages, and sets that were not fitted on before those that were.
fn best(run: &Run) -> Option<Best> {
    let percentages = run.evaluations.scores.iter().filter(|(kind, _)| !kind.measure.is_empty());
    let scored = percentages.flat_map(|(kind, rows)| {
        let rank = (kind.measure == "accuracy", kind.train != kind.set);
        rows.iter().map(move |row| {
            (rank, Best { metric: kind.metric.clone(), set: kind.set.clone(), value: row.value })
        })
    });
    let by_rank = |a: &((bool, bool), Best), b: &((bool, bool), Best)| {
        a.0.cmp(&b.0).then(a.1.value.total_cmp(&b.1.value))
    };
    scored.max_by(by_rank).map(|(_, best)| best).or_else(|| best_probe_score(run))
}

/// Returns the highest score of the probe in the logged rows, the only scores in runs of older releases.
fn best_probe_score(run: &Run) -> Option<Best> {
    let columns =
        run.metrics.0.iter().filter_map(|(name, points)| Some((name.strip_prefix("probe/")?, points)));
    let scored = columns.flat_map(|(name, points)| {
        points.iter().map(|(_, value)| Best { metric: name.to_string(), set: String::new(), value: *value })
    });
    scored.max_by(|a, b| a.value.total_cmp(&b.value))
}

/// Returns the value of `key` in `config`, as recipes write it.
fn tag(config: &impl Serialize, key: &str) -> String {
    let value = serde_json::to_value(config).unwrap_or_default();
    value.get(key).and_then(Value::as_str).unwrap_or_default().to_string()
}

/// Formats a number of parameters, such as `21.7 M`.
fn millions(n: usize) -> String {
    match n {
        n if n >= 1_000_000_000 => format!("{:.2} G", n as f64 / 1e9),
        n if n >= 1_000_000 => format!("{:.1} M", n as f64 / 1e6),
        n => format!("{:.0} k", n as f64 / 1e3),
    }
}
