//! What people are told beside the output, line by line.

use std::io::{IsTerminal, Write};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

use crate::exit::OUTPUT_LOST;

/// How lines are told.
#[derive(Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// As people read them; where there is no terminal, with the time of day.
    #[default]
    Text,
    /// One JSON object a line: time, level, message.
    Json,
}

/// How much is told.
#[derive(Clone, Copy, Default, clap::Args)]
#[group(id = "messages")]
pub(crate) struct Flags {
    /// Tell warnings and errors alone: no progress, no notes.
    #[arg(short, long, global = true, help_heading = "Messages", hide_short_help = true)]
    quiet: bool,
    /// Tell more of what happens: what is fetched, and what is passed over.
    #[arg(
        short,
        long,
        global = true,
        conflicts_with = "quiet",
        help_heading = "Messages",
        hide_short_help = true
    )]
    pub(crate) verbose: bool,
    /// Form of the lines on standard error: text, or json.
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        value_name = "FORM",
        help_heading = "Messages",
        hide_short_help = true
    )]
    log_format: LogFormat,
}

static FLAGS: OnceLock<Flags> = OnceLock::new();

/// Has all lines told as `flags` say.
pub(crate) fn speak(flags: Flags) {
    // Once, at the start of the program.
    let _ = FLAGS.set(flags);
}

fn flags() -> Flags {
    FLAGS.get().copied().unwrap_or_default()
}

/// Whether progress is drawn: standard error is a terminal, and nobody asked for less.
pub(crate) fn draws() -> bool {
    shows_progress() && flags().log_format == LogFormat::Text && std::io::stderr().is_terminal()
}

/// Whether progress is told at all.
pub(crate) fn shows_progress() -> bool {
    !flags().quiet
}

/// Writes a line to standard error in one piece, so that what ranks say at the same time stays in lines. A log that has
/// gone, as with a reader that died or a full disk, is no reason to stop a run.
pub(crate) fn say(line: impl Into<String>) {
    let line = printable(line.into());
    let flags = flags();
    let (level, message) = level_of(&line);
    if flags.quiet && level == "info" {
        return;
    }
    let line = match flags.log_format {
        LogFormat::Json => json!({ "time": now_s(), "level": level, "message": message }).to_string(),
        LogFormat::Text => line,
    };
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Writes a line about how far something is: with the time of day, for whoever reads it later in a log.
pub(crate) fn say_progress(line: &str) {
    match flags() {
        Flags { quiet: true, .. } => {}
        Flags { log_format: LogFormat::Json, .. } => say(line),
        _ => say(format!("{} {line}", time_of_day(now_s() as u64))),
    }
}

/// The level that a line says of itself, and the rest.
fn level_of(line: &str) -> (&'static str, &str) {
    for level in ["error", "warning"] {
        if let Some(message) = line.strip_prefix(level).and_then(|rest| rest.strip_prefix(": ")) {
            return (level, message);
        }
    }
    ("info", line.strip_prefix("note: ").unwrap_or(line))
}

/// Seconds since 1970.
fn now_s() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    (since * 1e3).round() / 1e3
}

/// Hours, minutes and seconds of the day in UTC, which needs no table of time zones.
fn time_of_day(now_s: u64) -> String {
    let (h, m, s) = (now_s / 3600 % 24, now_s / 60 % 60, now_s % 60);
    format!("{h:02}:{m:02}:{s:02}Z")
}

/// `text` with what would steer a terminal written out: names of files and members come from anywhere.
fn printable(text: String) -> String {
    let steers = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(steers) {
        return text;
    }
    text.chars().map(|c| if steers(c) { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// `text` as part of a line: what would steer a terminal, break the line or open a column is written out.
pub(crate) fn one_line(text: &str) -> String {
    let steers = |c: char| c.is_control();
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
