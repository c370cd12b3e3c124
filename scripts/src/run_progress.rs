//! Progress of a run while it trains.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pipeline::words::thousands;
use trainer::run::{Alert, Observer, Pace, Progress};

use crate::console::{draws, line_every, say, say_progress, shows_progress};
use crate::progress::{format_duration, format_time};

/// Characters for a point of the curve, by height.
const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Number of steps of a process after which the estimate of their time is corrected.
const STEPS_BEFORE_CORRECTION: u64 = 3;

/// Share by which an estimate must be wrong to be corrected.
const LEAST_ERROR: f64 = 0.15;

/// Shows the progress of a run.
pub(crate) struct RunProgress {
    bar: ProgressBar,
    running: RunningStep,
    pace: Pace,
    /// Steps taken, by this process and before.
    step: u64,
    /// Steps that this process has taken.
    n_taken: u64,
    /// Seconds of a step as estimated before the first, if they were.
    estimated_step_s: Option<f64>,
    last_line: Instant,
    newest_score: Option<String>,
    /// Subjects of the alerts that have been shown.
    alerted: HashSet<String>,
    rank: usize,
    prefix: String,
    /// Function to call once the run has begun, on rank 0.
    on_start: Option<Box<dyn FnOnce()>>,
    /// Function to call once the run has begun, on every rank.
    on_training: Option<Box<dyn FnOnce()>>,
}

/// Current step of a run, and its bar, for the answer to an interrupt.
#[derive(Clone, Default)]
struct RunningStep(Arc<Mutex<Running>>);

#[derive(Default)]
struct Running {
    step: u64,
    bar: Option<ProgressBar>,
}

impl RunningStep {
    fn answer(&self, is_first: bool) {
        let running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let line = if is_first && running.bar.is_none() {
            "stopping before the first step; there is nothing to save".into()
        } else if is_first {
            format!(
                "finishing step {} and at most one more, then saving; press Ctrl-C again to stop without \
                 saving",
                running.step + 1
            )
        } else {
            "stopped without saving: run the same command to resume from the newest checkpoint".into()
        };
        match &running.bar {
            Some(bar) if draws() => bar.suspend(|| say(&line)),
            _ => say(&line),
        }
    }

    fn set(&self, step: u64, bar: Option<&ProgressBar>) {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        running.step = step;
        if let Some(bar) = bar {
            running.bar = Some(bar.clone());
        }
    }
}

impl RunProgress {
    /// Creates the progress of a run, hidden until it starts. Rank 0 shows the run; other ranks
    /// print only warnings of their own.
    pub(crate) fn new(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            prefix: if world_size > 1 { format!("rank {rank}: ") } else { String::new() },
            bar: ProgressBar::hidden(),
            running: RunningStep::default(),
            pace: Pace::default(),
            step: 0,
            n_taken: 0,
            estimated_step_s: None,
            last_line: Instant::now(),
            newest_score: None,
            alerted: HashSet::new(),
            on_start: None,
            on_training: None,
        }
    }

    /// Returns the function that answers interrupts: the first ends the run after its step, the
    /// second at once. Only rank 0 answers.
    pub(crate) fn answer(&self) -> impl Fn(bool) + Send + 'static {
        let running = self.running.clone();
        let speaks = self.rank == 0;
        move |is_first| {
            if speaks {
                running.answer(is_first);
            }
        }
    }

    /// Sets the seconds of a step as they were estimated, which are corrected if they are wrong.
    pub(crate) fn with_estimate(self, step_s: Option<f64>) -> Self {
        Self { estimated_step_s: step_s, ..self }
    }

    /// Has rank 0 call `f` after the run has claimed its work directory and before its first step.
    pub(crate) fn on_start(self, f: impl FnOnce() + 'static) -> Self {
        Self { on_start: Some(Box::new(f)), ..self }
    }

    /// Has every rank call `f` before its first step.
    pub(crate) fn on_training(self, f: impl FnOnce() + 'static) -> Self {
        Self { on_training: Some(Box::new(f)), ..self }
    }

    fn say(&self, line: &str) {
        if draws() { self.bar.suspend(|| say(line)) } else { say(line) }
    }

    /// Corrects the estimate of a step's time after a few steps, if it is wrong.
    fn correct_estimate(&mut self, p: Progress) {
        self.n_taken += 1;
        if self.n_taken < STEPS_BEFORE_CORRECTION {
            return;
        }
        let Some(estimated_s) = self.estimated_step_s.take() else { return };
        if let Some(line) = correction(estimated_s, self.pace.step_s(), p.total_steps - p.step) {
            self.say(&line);
        }
    }

    /// Formats loss, newest score, speed, data wait and epoch, the most important first, because a
    /// long line is cut off.
    fn numbers(&self, p: Progress) -> String {
        let images_per_s = self.pace.images_per_s(p.batch_size);
        let digits = usize::from(images_per_s < 10.0);
        let score = self.newest_score.as_ref().map_or_else(String::new, |score| format!("  {score}"));
        format!(
            "loss {:.4}{score}  {images_per_s:.digits$} images/s  data wait {}  epoch {:.2}",
            p.loss,
            format_time(1e-3 * self.pace.waiting_ms()),
            p.epoch
        )
    }
}

/// Returns a note that a step takes `measured_s`, not `estimated_s`, with the time of the
/// `n_left` steps that are left; `None` if the estimate was about right.
fn correction(estimated_s: f64, measured_s: f64, n_left: u64) -> Option<String> {
    let ratio = measured_s / estimated_s;
    if n_left == 0 || ((1.0 - LEAST_ERROR)..=(1.0 + LEAST_ERROR)).contains(&ratio) {
        return None;
    }
    Some(format!(
        "note: a step takes about {}: about {} for the steps that are left",
        format_time(measured_s),
        format_duration(measured_s * n_left as f64)
    ))
}

/// Draws `values` as a line of blocks, scaled from their lowest to their highest.
fn sparkline<'a>(values: impl Iterator<Item = &'a f64> + Clone) -> String {
    let low = values.clone().fold(f64::INFINITY, |low, value| low.min(*value));
    let high = values.clone().fold(f64::NEG_INFINITY, |high, value| high.max(*value));
    values
        .map(|value| {
            let share = if high > low { (value - low) / (high - low) } else { 0.5 };
            LEVELS[((share * LEVELS.len() as f64) as usize).min(LEVELS.len() - 1)]
        })
        .collect()
}

/// Returns the bar of a run: two lines in a terminal of any width.
fn run_bar(total_steps: u64, step: u64) -> ProgressBar {
    let target = if draws() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(total_steps), target).with_position(step);
    let style =
        ProgressStyle::with_template("pretrain [{wide_bar}] {human_pos}/{human_len}  {prefix}\n{wide_msg}");
    // The template is valid.
    match style {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

impl Observer for RunProgress {
    fn started(&mut self, step: u64, total_steps: u64) {
        if let Some(f) = self.on_training.take() {
            f();
        }
        if self.rank > 0 {
            return;
        }
        if let Some(f) = self.on_start.take() {
            f();
        }
        if step > 0 {
            say(format!("resuming at step {} of {}", thousands(step), thousands(total_steps)));
        }
        self.bar = run_bar(total_steps, step);
        self.running.set(step, Some(&self.bar));
        self.bar.set_message("first batch and first step …");
        self.step = step;
    }

    fn stepped(&mut self, p: Progress) {
        if self.rank > 0 {
            return;
        }
        self.running.set(p.step, None);
        self.step = p.step;
        self.pace.update(p);
        self.correct_estimate(p);
        let numbers = self.numbers(p);
        let left = format_duration(self.pace.seconds_left(p));
        let is_last = p.step == p.total_steps;
        if draws() {
            self.bar.set_position(p.step);
            self.bar.set_prefix(format!("{left} left"));
            self.bar.set_message(format!("{numbers}  {}", sparkline(self.pace.curve.iter())));
        } else if shows_progress() && (self.last_line.elapsed() >= line_every() || is_last) {
            self.last_line = Instant::now();
            let step = thousands(p.step);
            let line = format!("step {step}/{}  {numbers}  {left} left", thousands(p.total_steps));
            say_progress(&line, self.pace.to_json(p));
        }
        if is_last {
            self.bar.finish();
        }
    }

    fn warned(&mut self, message: &str) {
        self.say(&format!("warning: {}{message}", self.prefix));
    }

    fn alerted(&mut self, alert: &Alert) {
        if self.alerted.insert(alert.subject.clone()) {
            self.warned(&alert.text);
        }
    }

    fn probing(&mut self, _step: u64) {
        // A probe has a bar of its own.
        self.bar.finish_and_clear();
    }

    fn probed(&mut self, step: u64, name: &str, numbers: &[(String, f64)]) {
        self.newest_score = numbers.first().map(|(key, value)| format!("{key} {value:.2}"));
        let numbers: Vec<String> = numbers.iter().map(|(key, value)| format!("{key} {value:.2}")).collect();
        self.say(&format!("step {}: {name}: {}", thousands(step), numbers.join("  ")));
    }

    fn probes_ended(&mut self) {
        // A bar that is reset is drawn at 0 once more.
        let bar = run_bar(self.bar.length().unwrap_or_default(), self.step);
        bar.set_prefix(self.bar.prefix());
        bar.set_message(self.bar.message());
        if bar.length() == Some(self.step) {
            bar.finish();
        }
        self.running.set(self.step, Some(&bar));
        self.bar = bar;
    }
}

#[cfg(test)]
mod tests {
    use trainer::run::Concern;

    use super::*;

    #[test]
    fn a_curve_is_scaled_from_its_lowest_to_its_highest_value() {
        assert_eq!(sparkline([3.0, 1.0, 2.0].iter()), "█▁▅");
        assert_eq!(sparkline([1.0, 1.0].iter()), "▅▅");
        assert_eq!(sparkline([].iter()), "");
    }

    /// The line of numbers fits into 80 columns, without the curve.
    #[test]
    fn numbers_fit_eighty_columns() {
        let mut progress = RunProgress::new(0, 1);
        progress.newest_score = Some("knn_20 45.30".into());
        let p = Progress {
            step: 9,
            total_steps: 99,
            loss: 7.1234,
            batch_size: 347,
            step_s: 1.0,
            data_wait_ms: 115_289.0,
            epoch: 99.99,
            probes_left_s: 0.0,
        };
        progress.pace.update(p);
        let numbers = progress.numbers(p);
        assert!(numbers.chars().count() <= 80, "{numbers}");
        assert!(numbers.contains("347 images/s  data wait 1 min 55 s  epoch"), "{numbers}");
    }

    /// Of the alerts about a rank, one is shown, whatever other ranks do.
    #[test]
    fn alerts_are_shown_once_for_each_subject() {
        let mut progress = RunProgress::new(0, 4);
        for (step, rank) in [(10, 1), (20, 2), (30, 1)] {
            let text = format!("step {step}: rank {rank} slows the others down");
            let subject = format!("rank {rank}");
            progress.alerted(&Alert { concern: Concern::SlowRank, subject, text });
        }
        let mut shown: Vec<&String> = progress.alerted.iter().collect();
        shown.sort();
        assert_eq!(shown, ["rank 1", "rank 2"]);
    }

    #[test]
    fn estimates_are_corrected_if_they_are_wrong() {
        for (estimated_s, measured_s) in [(1.0, 1.1), (1.0, 0.9), (1.0, 1.0)] {
            assert_eq!(correction(estimated_s, measured_s, 100), None);
        }
        assert_eq!(correction(1.0, 5.0, 0), None, "nothing is left");
        let line = "note: a step takes about 27 s: about 1 h 30 min for the steps that are left";
        assert_eq!(correction(1.8, 27.0, 200).as_deref(), Some(line));
        assert!(correction(1.0, 0.5, 100).is_some());
    }
}
