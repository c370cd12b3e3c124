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
    /// The highest of the usual scores.
    pub best: Option<Best>,
    /// `running`, `finished`, `stopped`, `failed`, `died`, `not started`.
    pub state: &'static str,
    /// State with its reason.
    pub why: String,
    /// True if the newest row warned of a collapse.
    pub collapsed: bool,
    /// Images per second over the newest rows.
    pub images_per_s: Option<f64>,
    /// Seconds left at the pace of the newest rows, for a run that has steps to take; probes count
    /// once one has run.
    pub seconds_left: Option<f64>,
}

/// The highest score of a run, among its scores of one kind.
#[derive(Debug, Clone, Serialize)]
pub struct Best {
    /// Name of the score: `knn_20`.
    pub metric: String,
    /// The test set; empty where it is not known.
    pub set: String,
    /// Test set, training set and images, in words.
    pub about: String,
    /// Score in percent.
    pub value: f64,
}

/// Score that runs are compared by, where they have it: the one that DINO and DINOv2 quote.
const USUAL: &str = "knn_20";

impl Overview {
    /// Summarizes `run`.
    pub fn from_run(run: &Run) -> Self {
        let status = &run.status;
        let recipe = &run.status.plan.recipe;
        let total_steps = status.plan.total_steps;
        // A logged row may be ahead of the heartbeat, or a checkpoint ahead of the logged rows.
        let logged =
            run.metrics.0.get("train/loss").and_then(|points| points.last()).map_or(0, |(step, _)| *step);
        let step = status.step.max(logged).min(total_steps);
        let seconds_a_step = run.metrics.recent("time/step_ms").map(|ms| ms / 1e3);
        let probes_s = run.metrics.last("time/probe_ms").map_or(0.0, |ms| ms / 1e3);
        let probes_left_s = status.plan.n_probes_after(step) as f64 * probes_s;
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
            seconds_left: seconds_a_step
                .filter(|_| unfinished)
                .map(|step_s| step_s * (total_steps - step) as f64 + probes_left_s),
        }
    }
}

/// Returns true if the newest logged step has warned of a collapse.
fn collapsed(run: &Run) -> bool {
    let newest = run.metrics.0.get("train/loss").and_then(|points| points.last()).map(|(step, _)| *step);
    let mut collapses = run.warnings.iter().filter(|warning| warning.concern == Concern::Collapse);
    collapses.next_back().is_some_and(|warning| Some(warning.step + 1) >= newest)
}

/// Returns the highest score of one kind of the run's evaluations, or else of its probe: of
/// [`USUAL`], or else of an accuracy, fitted on other images than those it is measured on, on the
/// most images; the kind that was scored most often if there are several.
fn best(run: &Run) -> Option<Best> {
    let percentages = run.evaluations.scores.iter().filter(|(kind, _)| !kind.measure.is_empty());
    let highest = percentages.max_by_key(|(kind, scores)| {
        (
            kind.metric == USUAL,
            kind.measure == "accuracy",
            kind.train != kind.set,
            kind.train_images,
            kind.test_images,
            scores.len(),
        )
    });
    let Some((kind, scores)) = highest else {
        return best_probe_score(run);
    };
    let value = scores.iter().map(|scored| scored.value).max_by(f64::total_cmp)?;
    let fitted = match kind.train_images {
        Some(images) => format!(", fitted on {images} images of {}", kind.train),
        None if kind.train.is_empty() => String::new(),
        None => format!(", fitted on {}", kind.train),
    };
    let about = format!("{}{fitted}; {}", kind.set, kind.transform);
    Some(Best { metric: kind.metric.clone(), set: kind.set.clone(), about, value })
}

/// Returns the highest score of the probe in the logged rows, the only scores in runs of older
/// releases: of [`USUAL`], or else of the first column.
fn best_probe_score(run: &Run) -> Option<Best> {
    let columns =
        run.metrics.0.iter().filter_map(|(name, points)| Some((name.strip_prefix("probe/")?, points)));
    let (metric, points) = columns.min_by_key(|(name, _)| *name != USUAL)?;
    let value = points.iter().map(|(_, value)| *value).max_by(f64::total_cmp)?;
    Some(Best { metric: metric.into(), set: String::new(), about: "the probe within the run".into(), value })
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
