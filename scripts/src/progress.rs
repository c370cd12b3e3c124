//! Progress: a bar in a terminal, and lines in a log.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle, TermLike};
use pipeline::Progress;
use serde_json::{Map, Value};

use crate::console::{animate, draws, line_every, say, say_progress, shows_progress};

pub(crate) use trainer::run::{format_duration, format_time};

/// Returns a bar of `total` items, labeled `label`; without a terminal, it prints a line every
/// [`line_every`].
pub(crate) fn bar(total: u64, label: &str) -> ProgressBar {
    let mut target = ProgressDrawTarget::hidden();
    let mut template = "";
    if draws() {
        target = ProgressDrawTarget::stderr();
        template = "{prefix} [{wide_bar}] {human_pos}/{human_len}  {per_sec:>9}  {eta} left{msg}";
    } else if shows_progress() {
        target = ProgressDrawTarget::term_like(Box::new(Lines::default()));
        template = "{prefix}: {human_pos} of {human_len}, {per_sec}, {eta} left{msg}";
    }
    let bar = ProgressBar::with_draw_target(Some(total), target).with_prefix(label.to_string());
    // The templates above are valid.
    match ProgressStyle::with_template(template) {
        Ok(style) => {
            bar.with_style(style.progress_chars("=> ").with_key("per_sec", rate).with_key("eta", time_left))
        }
        Err(_) => bar,
    }
}

/// Bars of a long job, one for each of its stages. None is shown before the first stage begins.
pub(crate) struct StageBar {
    bar: ProgressBar,
    /// Name of the job, which precedes those of its stages; `None` if these say enough.
    job: Option<String>,
}

impl StageBar {
    /// Creates the bars.
    pub(crate) fn new() -> Self {
        Self { bar: bar(0, ""), job: None }
    }

    /// Creates the bars of `job`, whose name precedes those of its stages.
    pub(crate) fn named(job: impl Into<String>) -> Self {
        Self { bar: bar(0, ""), job: Some(job.into()) }
    }

    /// Prints a message above the bar.
    pub(crate) fn say(&self, line: &str) {
        // Before the first stage there is no bar, which `suspend` would draw.
        if self.bar.length() == Some(0) { say(line) } else { self.bar.suspend(|| say(line)) }
    }

    /// Shows `text` at the end of the bar.
    pub(crate) fn set_message(&self, text: String) {
        self.bar.set_message(text);
    }

    /// Creates bars that are not shown.
    pub(crate) fn hidden() -> Self {
        Self { bar: ProgressBar::hidden(), job: None }
    }
}

impl Progress for StageBar {
    fn begin(&self, stage: &str, n: u64) {
        // A change of the prefix draws the bar, which must not have the numbers of the stage
        // before.
        self.bar.reset();
        self.bar.set_length(n);
        let prefix = match &self.job {
            Some(job) => format!("{job}, {stage}"),
            None => stage.to_string(),
        };
        self.bar.set_prefix(prefix);
    }

    fn advance(&self, n: u64) {
        self.bar.inc(n);
    }
}

impl Drop for StageBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// An activity that is shown until it is dropped: an animated line in a terminal, and in a log a
/// line every [`line_every`].
pub(crate) struct Activity(ProgressBar);

impl Activity {
    /// Shows `message`.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        let bar = activity_bar().with_message(message.into());
        bar.enable_steady_tick(Duration::from_millis(120));
        // Lines of a log overwrite nothing.
        animate(draws().then(|| bar.clone()));
        Self(bar)
    }
}

/// Returns the bar of an activity, which has no length.
fn activity_bar() -> ProgressBar {
    if draws() {
        return ProgressBar::new_spinner();
    }
    if !shows_progress() {
        return ProgressBar::hidden();
    }
    let target = ProgressDrawTarget::term_like(Box::new(Lines::default()));
    let bar = ProgressBar::with_draw_target(None, target);
    // The template is valid.
    match ProgressStyle::with_template("{msg} {elapsed}") {
        Ok(style) => bar.with_style(style.with_key("elapsed", time_taken)),
        Err(_) => bar,
    }
}

impl Drop for Activity {
    fn drop(&mut self) {
        animate(None);
        self.0.finish_and_clear();
    }
}

/// Writes the time that is left, in its two largest units.
fn time_left(state: &ProgressState, out: &mut dyn std::fmt::Write) {
    let _ = write!(out, "{}", format_duration(state.eta().as_secs_f64()));
}

/// Writes the time that has passed, in its two largest units.
fn time_taken(state: &ProgressState, out: &mut dyn std::fmt::Write) {
    let _ = write!(out, "{}", format_duration(state.elapsed().as_secs_f64()));
}

/// Writes the rate in items per second, with at most one decimal.
fn rate(state: &ProgressState, out: &mut dyn std::fmt::Write) {
    let per_s = state.per_sec();
    let digits = if per_s < 10.0 { 1 } else { 0 };
    let _ = write!(out, "{per_s:.digits$}/s");
}

/// A terminal for logs: prints the text of the bar as a line, at most once per [`line_every`].
#[derive(Debug)]
struct Lines(Mutex<LineState>);

#[derive(Debug)]
struct LineState {
    /// Text since the last flush.
    text: String,
    printed_at: Instant,
}

impl Default for Lines {
    fn default() -> Self {
        Self(Mutex::new(LineState { text: String::new(), printed_at: Instant::now() }))
    }
}

impl Lines {
    fn lock(&self) -> MutexGuard<'_, LineState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TermLike for Lines {
    // A nominal size: no terminal is drawn to.
    fn width(&self) -> u16 {
        200
    }

    fn height(&self) -> u16 {
        20
    }

    fn move_cursor_up(&self, _: usize) -> std::io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _: usize) -> std::io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, _: usize) -> std::io::Result<()> {
        Ok(())
    }

    fn move_cursor_left(&self, _: usize) -> std::io::Result<()> {
        Ok(())
    }

    fn write_line(&self, text: &str) -> std::io::Result<()> {
        self.write_str(text)
    }

    fn write_str(&self, text: &str) -> std::io::Result<()> {
        self.lock().text.push_str(text);
        Ok(())
    }

    fn clear_line(&self) -> std::io::Result<()> {
        self.lock().text.clear();
        Ok(())
    }

    fn flush(&self) -> std::io::Result<()> {
        let mut state = self.lock();
        let text = std::mem::take(&mut state.text);
        if state.printed_at.elapsed() >= line_every() && !text.trim().is_empty() {
            state.printed_at = Instant::now();
            say_progress(text.trim(), stage_fields(text.trim()));
        }
        Ok(())
    }
}

/// Returns the stage of a line that the template of [`bar`] has made, the number of items that are
/// done and that of all, as fields of JSON; none for any other line.
fn stage_fields(line: &str) -> Map<String, Value> {
    let mut fields = Map::new();
    if let Some((stage, rest)) = line.split_once(": ")
        && let Some((done, rest)) = rest.split_once(" of ")
        && let Some((total, _)) = rest.split_once(", ")
        && let Ok(done) = done.replace(',', "").parse::<u64>()
        && let Ok(total) = total.replace(',', "").parse::<u64>()
    {
        fields.insert("stage".into(), stage.into());
        fields.insert("done".into(), done.into());
        fields.insert("total".into(), total.into());
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_stage_have_numbers() {
        let fields = stage_fields("embed: 12 of 2,400, 3/s, 13m left");
        assert_eq!(Value::Object(fields), serde_json::json!({ "stage": "embed", "done": 12, "total": 2400 }));
        assert!(stage_fields("waiting for a run").is_empty());
    }
}
