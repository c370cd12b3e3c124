//! What people are told beside the output: lines, and progress in a terminal.

use std::io::Write;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use trainer::run::{Observer, Progress};

use crate::exit::OUTPUT_LOST;

/// Seconds between lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(15);

/// Writes a line to standard error in one piece, so that what ranks say at the same time stays in lines. A log that has
/// gone, as with a reader that died or a full disk, is no reason to stop a run.
pub(crate) fn say(line: impl Into<String>) {
    let mut line = printable(line.into());
    line.push('\n');
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// `text` with what would steer a terminal written out: names of files and members come from anywhere.
fn printable(text: String) -> String {
    let steers = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(steers) {
        return text;
    }
    text.chars().map(|c| if steers(c) { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// What went wrong and why, each cause once: many errors have their cause's text in their own.
pub(crate) fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

/// Writes a line to standard output, as `println!` does; see [`print_line`].
macro_rules! out {
    ($($arg:tt)*) => {
        $crate::console::print_line(format_args!($($arg)*))
    };
}

/// Writes a line to standard output. Where it cannot be written the program ends, so that no list that was cut looks whole.
pub(crate) fn print_line(line: std::fmt::Arguments<'_>) {
    let mut stdout = std::io::stdout().lock();
    // Standard output is flushed at the end of each line.
    if let Err(error) = stdout.write_fmt(line).and_then(|()| stdout.write_all(b"\n")) {
        output_lost(&error);
    }
}

/// Ends the program, because standard output cannot be written.
pub(crate) fn output_lost(error: &std::io::Error) -> ! {
    // A reader that has seen enough, such as `head`, is no news.
    if error.kind() != std::io::ErrorKind::BrokenPipe {
        say(format!("error: standard output cannot be written: {error}"));
    }
    std::process::exit(i32::from(OUTPUT_LOST));
}

/// A bar of `total` items called `what`; hidden where standard error is no terminal.
pub(crate) fn bar(total: u64, what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} [{bar:32}] {pos}/{len} {per_sec} eta {eta} {msg}");
    let bar = ProgressBar::new(total).with_prefix(what.to_string());
    match style {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

/// Shows a run.
pub(crate) struct RunProgress {
    bar: ProgressBar,
    images_per_s: f64,
    waiting: f64,
    last_line: Instant,
    warned: std::collections::HashSet<String>,
    rank: usize,
    prefix: String,
    /// Called once the run has begun, on rank 0.
    on_start: Option<Box<dyn FnOnce()>>,
    /// Called once the run has begun, on every rank.
    on_training: Option<Box<dyn FnOnce()>>,
}

impl RunProgress {
    /// Nothing is shown before the run starts. Rank 0 shows what the run does; the others speak up only for
    /// what is theirs.
    pub(crate) fn new(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            prefix: if world_size > 1 { format!("rank {rank}: ") } else { String::new() },
            bar: ProgressBar::hidden(),
            images_per_s: 0.0,
            waiting: 0.0,
            last_line: Instant::now(),
            warned: std::collections::HashSet::new(),
            on_start: None,
            on_training: None,
        }
    }

    /// Has rank 0 call `f` when the work directory is the run's and before its first step.
    pub(crate) fn on_start(self, f: impl FnOnce() + 'static) -> Self {
        Self { on_start: Some(Box::new(f)), ..self }
    }

    /// Has every rank call `f` before its first step.
    pub(crate) fn on_training(self, f: impl FnOnce() + 'static) -> Self {
        Self { on_training: Some(Box::new(f)), ..self }
    }

    fn say(&self, line: &str) {
        match self.bar.is_hidden() {
            true => say(line),
            false => self.bar.println(line),
        }
    }
}

/// Numbers change from one warning to the next that means the same.
fn is_word(c: &char) -> bool {
    !c.is_ascii_digit() && *c != '.'
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
            say(format!("continuing at step {step} of {total_steps}"));
        }
        self.bar = bar(total_steps, "pretrain");
        self.bar.set_position(step);
        self.bar.reset_eta();
    }

    fn stepped(&mut self, p: Progress) {
        if self.rank > 0 {
            return;
        }
        let smooth = |old: f64, new: f64| if old == 0.0 { new } else { 0.95 * old + 0.05 * new };
        self.images_per_s = smooth(self.images_per_s, p.images_per_s);
        self.waiting = smooth(self.waiting, p.data_wait_ms);
        let digits = usize::from(self.images_per_s < 10.0);
        let text = format!(
            "{:.digits$} images/s  loss {:.4}  data wait {:.0} ms",
            self.images_per_s, p.loss, self.waiting
        );
        self.bar.set_position(p.step);
        self.bar.set_message(text.clone());
        if self.bar.is_hidden() && (self.last_line.elapsed() > LINE_EVERY || p.step == p.total_steps) {
            self.last_line = Instant::now();
            say(format!("step {}/{}  {text}", p.step, p.total_steps));
        }
        if p.step == p.total_steps {
            self.bar.finish();
        }
    }

    fn warned(&mut self, message: &str) {
        // A warning that stays true is said once, whatever step it names.
        let what: String = message
            .split_once(": ")
            .map_or(message, |(_, rest)| rest)
            .chars()
            .filter(is_word)
            .take(24)
            .collect();
        if self.warned.insert(what) {
            self.say(&format!("warning: {}{message}", self.prefix));
        }
    }

    fn happened(&mut self, message: &str) {
        self.say(&format!("warning: {}{message}", self.prefix));
    }

    fn probed(&mut self, step: u64, name: &str, numbers: &[(String, f64)]) {
        let numbers: Vec<String> = numbers.iter().map(|(key, value)| format!("{key} {value:.2}")).collect();
        self.say(&format!("step {step}: {name}: {}", numbers.join("  ")));
    }
}
