//! Summary of a run in one line.

use std::cmp::Reverse;

use eval::{MAIN_METRICS, MEAN_IOU, TOP_1};
use pipeline::words::thousands;
use serde::Serialize;
use serde_json::Value;
use trainer::run::Concern;
use trainer::run::status::State;

use super::Run;
use super::learning::Learning;
use super::metrics::Point;
use super::scores::course;

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
    /// Number of steps after which the weights are the result of the run: all of them, unless it
    /// keeps its best weights.
    pub result_step: u64,
    /// The newest loss.
    pub loss: Option<f64>,
    /// The highest of the usual scores, with the first and the last of them.
    pub best: Option<Best>,
    /// What the search of views says about the run.
    pub learning: Option<Learning>,
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

/// The highest score of a run, among its scores of one kind, with the first and the last of them.
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
    /// Number of steps after which it was first reached.
    pub step: u64,
    /// The first score of the kind.
    pub first: StepScore,
    /// The last score of the kind.
    pub last: StepScore,
    /// The three values: `18.5 → 48.4 → 47.9`; one value if there is one score.
    pub course: String,
    /// The three in words: `k-NN (20) 18.5 % at the start, best 48.4 % at step 800, last 47.9 % at
    /// step 1,000`.
    pub words: String,
}

/// A score after a number of steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepScore {
    /// Number of steps taken.
    pub step: u64,
    /// Score in percent.
    pub value: f64,
}

impl Best {
    /// Creates the best of `points`, the scores `metric` of one kind in the order of the steps;
    /// `None` if there are none.
    fn from_points(metric: &str, set: &str, about: String, points: &[Point]) -> Option<Self> {
        let (first_step, first_value) = *points.first()?;
        let (last_step, last_value) = *points.last()?;
        let first = StepScore { step: first_step, value: first_value };
        let last = StepScore { step: last_step, value: last_value };
        let mut best = first;
        for (step, value) in points {
            if *value > best.value {
                best = StepScore { step: *step, value: *value };
            }
        }
        let course = course(points.len(), first.value, best.value, last.value);
        Some(Self {
            metric: metric.into(),
            set: set.into(),
            about,
            value: best.value,
            step: best.step,
            first,
            last,
            course,
            words: describe_course(metric, first, best, last),
        })
    }
}

/// Describes the first, the best and the last score `metric` of a run.
fn describe_course(metric: &str, first: StepScore, best: StepScore, last: StepScore) -> String {
    let name = score_name(metric);
    let beginning = format!("{name} {:.1} % {}", first.value, describe_step(first.step));
    let end = format!("{:.1} % {}", last.value, describe_step(last.step));
    if first.step == last.step {
        beginning
    } else if best.step == first.step {
        format!("{beginning}, which is the best, last {end}")
    } else if best.step == last.step {
        format!("{beginning}, best and last {end}")
    } else {
        format!("{beginning}, best {:.1} % {}, last {end}", best.value, describe_step(best.step))
    }
}

/// Returns the name of the score `metric` for readers: `k-NN (20)`.
fn score_name(metric: &str) -> String {
    if metric == TOP_1 {
        return "top-1".into();
    }
    if metric == MEAN_IOU {
        return "mIoU".into();
    }
    if let Some(k) = metric.strip_prefix("knn_loo_") {
        return format!("leave-one-out k-NN ({k})");
    }
    match metric.strip_prefix("knn_") {
        Some(k) => format!("k-NN ({k})"),
        None => metric.replace('_', " "),
    }
}

fn describe_step(step: u64) -> String {
    if step == 0 { "at the start".into() } else { format!("at step {}", thousands(step)) }
}

/// Columns with the milliseconds of probes: of scores of features, and of what a run itself trains.
const PROBE_TIMES: [&str; 2] = ["time/probe_ms", "time/val_ms"];

/// Measures of scores that need labels.
const SCORES: [&str; 3] = ["accuracy", "mAP", "mIoU"];

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
        let probes_left_s = probes_left_s(run, step);
        let unfinished = !matches!(status.state, State::Finished);
        let why = match &status.early_end {
            Some(words) => format!("{}: {words}", status.state),
            None => status.state.to_string(),
        };
        Self {
            name: run.name(),
            method: tag(&recipe.method, "name"),
            backbone: format!("{} ({})", tag(&recipe.model, "arch"), millions(recipe.model.n_params())),
            step,
            total_steps,
            result_step: status.result_step(),
            loss: run.metrics.last("train/loss"),
            best: best(run),
            learning: Learning::from_evaluations(&run.evaluations, recipe.init.is_some()),
            state: status.state.word(),
            why,
            collapsed: collapsed(run),
            images_per_s: run.metrics.recent("rate/images_per_s"),
            seconds_left: seconds_a_step
                .filter(|_| unfinished)
                .map(|step_s| step_s * (total_steps - step) as f64 + probes_left_s),
        }
    }
}

/// Estimates the seconds of the probes of `run` after more than `step` steps, from the last of each
/// kind that ran.
fn probes_left_s(run: &Run, step: u64) -> f64 {
    let plan = &run.status.plan;
    let mut left_s = 0.0;
    for column in PROBE_TIMES {
        let Some(points) = run.metrics.0.get(column) else { continue };
        let Some((last_step, last_ms)) = points.last() else { continue };
        let mut every = plan.recipe.run.probe_every_steps;
        if every == 0 {
            // Validations have an interval of their own, which the logged ones show.
            every = last_step / points.len() as u64;
        }
        left_s += plan.n_due(every, step) as f64 * last_ms / 1e3;
    }
    left_s
}

/// Returns true if the newest logged step has warned of a collapse.
fn collapsed(run: &Run) -> bool {
    let newest = run.metrics.0.get("train/loss").and_then(|points| points.last()).map(|(step, _)| *step);
    let mut collapses = run.warnings.iter().filter(|warning| warning.concern == Concern::Collapse);
    collapses.next_back().is_some_and(|warning| Some(warning.step + 1) >= newest)
}

/// Returns the highest score of one kind of the run's evaluations, or else of its probe, with the
/// first and the last of the kind: of the network that is evaluated, of what the run trains beside
/// its backbone, of [`USUAL`], or else of an accuracy, fitted on other images than those it is
/// measured on, on the most images; the kind that was scored most often if there are several, and
/// the one with the lowest seed.
fn best(run: &Run) -> Option<Best> {
    // What needs no labels is not compared with what does.
    let percentages = run.evaluations.scores.iter().filter(|(kind, _)| SCORES.contains(&kind.measure));
    let highest = percentages.max_by_key(|(kind, scores)| {
        (
            kind.network.is_empty(),
            MAIN_METRICS.contains(&kind.metric.as_str()),
            kind.metric == USUAL,
            kind.measure == "accuracy",
            kind.train != kind.set,
            kind.train_images,
            kind.test_images,
            scores.len(),
            Reverse(kind.seed),
        )
    });
    let Some((kind, scores)) = highest else {
        return best_probe_score(run);
    };
    let points: Vec<Point> = scores.iter().map(|scored| (scored.step, scored.value)).collect();
    let mut about = format!("{}{}; {}", kind.set, kind.fitted(), kind.transform);
    if !kind.network.is_empty() {
        about.push_str(&format!("; network {}", kind.network));
    }
    Best::from_points(&kind.metric, &kind.set, about, &points)
}

/// Returns the highest score of the probe in the logged rows, the only scores in runs of older
/// releases: of [`USUAL`], or else of the first column.
fn best_probe_score(run: &Run) -> Option<Best> {
    let columns =
        run.metrics.0.iter().filter_map(|(name, points)| Some((name.strip_prefix("probe/")?, points)));
    let (metric, points) = columns.min_by_key(|(name, _)| *name != USUAL)?;
    Best::from_points(metric, "", "the probe within the run".into(), points)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn best(points: &[Point]) -> Best {
        Best::from_points("knn_20", "cifar", String::new(), points).unwrap()
    }

    #[test]
    fn scores_are_described_from_the_first_to_the_last() {
        let risen = best(&[(0, 18.5), (800, 48.4), (1000, 47.9)]);
        assert_eq!(
            risen.words,
            "k-NN (20) 18.5 % at the start, best 48.4 % at step 800, last 47.9 % at step 1,000"
        );
        assert_eq!((risen.course.as_str(), risen.value, risen.step), ("18.5 → 48.4 → 47.9", 48.4, 800));
        assert_eq!(
            best(&[(100, 30.0), (200, 31.0)]).words,
            "k-NN (20) 30.0 % at step 100, best and last 31.0 % at step 200"
        );
        // The first of equal scores is the best: training has not helped.
        assert_eq!(
            best(&[(0, 31.6), (300, 31.6), (600, 30.0)]).words,
            "k-NN (20) 31.6 % at the start, which is the best, last 30.0 % at step 600"
        );
        let single = best(&[(0, 18.5)]);
        assert_eq!(
            (single.words.as_str(), single.course.as_str()),
            ("k-NN (20) 18.5 % at the start", "18.5")
        );
        assert!(Best::from_points("knn_20", "cifar", String::new(), &[]).is_none());
        assert_eq!(score_name("knn_loo_10"), "leave-one-out k-NN (10)");
        assert_eq!([score_name("top1"), score_name("miou")], ["top-1", "mIoU"]);
        let linear = Best::from_points("linear_honest", "", String::new(), &[(5, 50.0)]).unwrap();
        assert_eq!(linear.words, "linear honest 50.0 % at step 5");
    }
}
