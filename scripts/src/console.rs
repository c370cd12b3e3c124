//! Messages to the user on standard error, and the output on standard output, line by line.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indicatif::ProgressBar;
use serde_json::{Map, Value, json};
use textwrap::{Options, WordSeparator, WordSplitter, WrapAlgorithm, fill, termwidth};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

use crate::exit::OUTPUT_LOST;

/// Format of messages.
#[derive(Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// Plain text; progress lines include the time of day if standard error is not a terminal.
    #[default]
    Text,
    /// One JSON object per line: time, level, message.
    Json,
}

/// Default number of seconds between two lines of progress.
const LINE_EVERY_S: f64 = 30.0;

/// Flags about messages.
#[derive(Clone, Copy, clap::Args)]
#[group(id = "messages")]
pub(crate) struct ConsoleFlags {
    /// Print only warnings and errors: no progress, no notes.
    #[arg(short, long, global = true, help_heading = "Messages", hide = true)]
    quiet: bool,
    /// Print more details, such as which files are fetched or skipped.
    #[arg(short, long, global = true, conflicts_with = "quiet", help_heading = "Messages", hide = true)]
    pub(crate) verbose: bool,
    /// Format of the messages on standard error: text or json.
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        value_name = "FORM",
        help_heading = "Messages",
        hide = true
    )]
    log_format: LogFormat,
    /// Seconds between progress lines when no bar is drawn.
    #[arg(
        long,
        global = true,
        default_value_t = LINE_EVERY_S,
        value_parser = positive_seconds,
        value_name = "SECONDS",
        help_heading = "Messages",
        hide = true
    )]
    log_every: f64,
}

static FLAGS: Mutex<ConsoleFlags> = Mutex::new(ConsoleFlags {
    quiet: false,
    verbose: false,
    log_format: LogFormat::Text,
    log_every: LINE_EVERY_S,
});

/// Process that the program runs within, if it is not its own.
static HOST: RwLock<Option<Host>> = RwLock::new(None);

/// A process that the program runs within, such as a Python interpreter: receives what the program
/// would write to its standard error and output.
pub(crate) struct Host {
    /// Command line, beginning with the name of the program.
    pub(crate) command: Vec<String>,
    /// Receives each message.
    pub(crate) messages: Box<dyn Fn(&str) + Send + Sync>,
    /// Output so far.
    pub(crate) output: Mutex<String>,
}

/// Sets the process that the program runs within, or removes it; returns the one before.
pub(crate) fn set_host(host: Option<Host>) -> Option<Host> {
    std::mem::replace(&mut *HOST.write().unwrap_or_else(PoisonError::into_inner), host)
}

/// Returns whether the program runs within another process.
pub(crate) fn is_hosted() -> bool {
    HOST.read().unwrap_or_else(PoisonError::into_inner).is_some()
}

/// Returns the command line.
pub(crate) fn command_line() -> Vec<String> {
    match HOST.read().unwrap_or_else(PoisonError::into_inner).as_ref() {
        Some(host) => host.command.clone(),
        None => std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect(),
    }
}

/// Animated line that messages must not overwrite.
static ANIMATED: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Sets the animated line, or removes it.
pub(crate) fn animate(line: Option<ProgressBar>) {
    *ANIMATED.lock().unwrap_or_else(PoisonError::into_inner) = line;
}

fn positive_seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if seconds > 0.0 => Ok(seconds),
        _ => Err("expected a number of seconds above 0".into()),
    }
}

/// Sets the flags for all messages of the program. Called at its start.
pub(crate) fn set_flags(flags: ConsoleFlags) {
    *FLAGS.lock().unwrap_or_else(PoisonError::into_inner) = flags;
}

/// Returns the flags; defaults until they are set.
fn flags() -> ConsoleFlags {
    *FLAGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the time between two lines of progress, where no bar is drawn.
pub(crate) fn line_every() -> Duration {
    Duration::try_from_secs_f64(flags().log_every).unwrap_or(Duration::MAX)
}

/// Returns `true` if progress bars are drawn: standard error is a terminal, and the flags allow it.
pub(crate) fn draws() -> bool {
    let is_text = flags().log_format == LogFormat::Text;
    shows_progress() && is_text && !is_hosted() && std::io::stderr().is_terminal()
}

/// Returns `true` if progress is shown, as bars or as lines: unless `--quiet` is given.
pub(crate) fn shows_progress() -> bool {
    !flags().quiet
}

/// Writes a line to standard error in one call, so that lines of several ranks do not mix. A log
/// that cannot be written, because its reader has ended or the disk is full, does not stop a run.
pub(crate) fn say(line: impl Into<String>) {
    write_line(&line.into(), Map::new());
}

/// Writes a message as a line; `numbers` are further fields of its JSON.
fn write_line(line: &str, numbers: Map<String, Value>) {
    let line = printable(line.to_string());
    let flags = flags();
    let (level, message) = split_level(&line);
    if flags.quiet && level == "info" {
        return;
    }
    let line = match flags.log_format {
        LogFormat::Json => {
            let mut fields = json!({ "time": now_s(), "level": level, "message": message });
            if let Some(fields) = fields.as_object_mut() {
                fields.extend(numbers);
            }
            fields.to_string()
        }
        LogFormat::Text if std::io::stderr().is_terminal() && !is_hosted() => {
            wrap_message(&line, termwidth())
        }
        LogFormat::Text => line,
    };
    match ANIMATED.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
        Some(animated) => animated.suspend(|| write_stderr(&line)),
        None => write_stderr(&line),
    }
}

/// Breaks the lines of `message` between words at `width` characters, but not those that are
/// indented: these are commands to copy.
fn wrap_message(message: &str, width: usize) -> String {
    let mut lines = Vec::new();
    for line in message.split('\n') {
        if line.starts_with("  ") {
            lines.push(line.to_string());
        } else {
            lines.push(wrap_words(line, 0, width));
        }
    }
    lines.join("\n")
}

fn write_stderr(line: &str) {
    if let Some(host) = HOST.read().unwrap_or_else(PoisonError::into_inner).as_ref() {
        (host.messages)(line);
        return;
    }
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Shows the events of libraries as messages of the program.
pub(crate) struct Events;

impl<S: Subscriber> Layer<S> for Events {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let mut text = EventText(String::new());
        event.record(&mut text);
        let level = match *event.metadata().level() {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "note",
            Level::DEBUG | Level::TRACE => "detail",
        };
        say(format!("{level}: {}", text.0));
    }
}

/// Text of an event: its message and its other fields.
struct EventText(String);

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let text = match field.name() {
            "message" => format!("{value:?}"),
            name => format!(" {name}={value:?}"),
        };
        self.0.push_str(&text);
    }
}

/// Writes a line of progress, in text with the time of day, for later readers of a log; `numbers`
/// are fields of its JSON.
pub(crate) fn say_progress(line: &str, numbers: Map<String, Value>) {
    match flags() {
        ConsoleFlags { quiet: true, .. } => {}
        ConsoleFlags { log_format: LogFormat::Json, .. } => write_line(line, numbers),
        _ => say(format!("{} {line}", time_of_day(now_s() as u64))),
    }
}

/// Splits a line into its level and its message.
fn split_level(line: &str) -> (&'static str, &str) {
    for level in ["error", "warning"] {
        if let Some(message) = line.strip_prefix(level).and_then(|rest| rest.strip_prefix(": ")) {
            return (level, message);
        }
    }
    ("info", line.strip_prefix("note: ").unwrap_or(line))
}

/// Returns the seconds since 1970, rounded to milliseconds.
fn now_s() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    (since * 1e3).round() / 1e3
}

/// Formats the time of day in UTC, which needs no time zone database.
fn time_of_day(now_s: u64) -> String {
    let h = now_s / 3600 % 24;
    let m = now_s / 60 % 60;
    let s = now_s % 60;
    format!("{h:02}:{m:02}:{s:02}Z")
}

/// Returns whether `c` controls a terminal: control characters, and marks that change the direction
/// of text or end a line, by which a name could look like another one.
fn is_control(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Escapes the control characters in `text` except newlines and tabs: names of files and members
/// are not trusted.
fn printable(text: String) -> String {
    if text.contains(is_escaped) { escape(&text, is_escaped) } else { text }
}

fn is_escaped(c: char) -> bool {
    is_control(c) && c != '\n' && c != '\t'
}

/// Escapes the characters of `text` for which `is_escaped` holds.
fn escape(text: &str, is_escaped: impl Fn(char) -> bool) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        if is_escaped(c) {
            escaped.extend(c.escape_default());
        } else {
            escaped.push(c);
        }
    }
    escaped
}

/// Escapes all control characters in `text`, newlines and tabs included, so that it fits into one
/// column of a line.
pub(crate) fn one_line(text: &str) -> String {
    escape(text, is_control)
}

/// Joins the texts of an error and its causes, each once: the text of many errors includes that of
/// their cause.
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

/// Writes a line to standard output, like `println!`; see [`print_line`].
macro_rules! out {
    ($($arg:tt)*) => {
        $crate::console::print_line(format_args!($($arg)*))
    };
}

/// Writes a line to standard output. If that fails, the program exits, so that no truncated list
/// looks complete.
pub(crate) fn print_line(line: std::fmt::Arguments<'_>) {
    let line = printable(line.to_string());
    if let Some(host) = HOST.read().unwrap_or_else(PoisonError::into_inner).as_ref() {
        let mut output = host.output.lock().unwrap_or_else(PoisonError::into_inner);
        output.push_str(&line);
        output.push('\n');
        return;
    }
    let mut stdout = std::io::stdout().lock();
    // Standard output is flushed at the end of each line.
    if let Err(error) = stdout.write_all(line.as_bytes()).and_then(|()| stdout.write_all(b"\n")) {
        output_lost(&error);
    }
}

/// Writes a paragraph to standard output, whose lines end between words at the width of the output;
/// see [`print_paragraph`].
macro_rules! prose {
    ($($arg:tt)*) => {
        $crate::console::print_paragraph(0, &format!($($arg)*))
    };
}

/// Writes `text` to standard output. Lines that are wider than the output end between words, and
/// continue after `indent` spaces.
pub(crate) fn print_paragraph(indent: usize, text: &str) {
    match output_width() {
        Some(width) => print_line(format_args!("{}", wrap_words(text, indent, width))),
        None => print_line(format_args!("{text}")),
    }
}

/// Returns the width of standard output in characters: that of the terminal, or COLUMNS. A file and
/// a pipe have none: programs read lines.
pub(crate) fn output_width() -> Option<usize> {
    if is_hosted() {
        return None;
    }
    if std::io::stdout().is_terminal() {
        return Some(termwidth());
    }
    std::env::var("COLUMNS").ok()?.parse().ok().filter(|width| *width > 0)
}

/// Returns the width of pages that are written for a reader, also into a file: that of standard
/// output, or else of the terminal that the program was started in, but at most `most`.
pub(crate) fn page_width(most: usize) -> usize {
    output_width().unwrap_or_else(termwidth).min(most)
}

/// Breaks the lines of `text` between words at `width` characters.
fn wrap_words(text: &str, indent: usize, width: usize) -> String {
    let spaces = " ".repeat(indent);
    let options = Options::new(width).subsequent_indent(&spaces).break_words(false);
    let options =
        options.word_separator(WordSeparator::AsciiSpace).word_splitter(WordSplitter::NoHyphenation);
    fill(text, options.wrap_algorithm(WrapAlgorithm::FirstFit))
}

/// Exits the program, because standard output cannot be written.
pub(crate) fn output_lost(error: &std::io::Error) -> ! {
    // A reader that closes the pipe early, such as `head`, is not an error.
    if error.kind() != std::io::ErrorKind::BrokenPipe {
        say(format!("error: cannot write to standard output: {error}"));
    }
    std::process::exit(i32::from(OUTPUT_LOST));
}

#[cfg(test)]
mod tests {
    use super::{wrap_message, wrap_words};

    #[test]
    fn messages_are_broken_between_words_and_commands_are_not() {
        let message =
            "without labels: the run is learning\nnext:\n  ocelli report runs/a-long-name --out b.html";
        assert_eq!(
            wrap_message(message, 20),
            "without labels: the\nrun is learning\nnext:\n  ocelli report runs/a-long-name --out b.html"
        );
    }

    #[test]
    fn lines_end_between_words() {
        let text = "launcher       none: a single process, started by hand";
        let wrapped =
            "launcher       none: a single\n               process, started by\n               hand";
        assert_eq!(wrap_words(text, 15, 36), wrapped);
        assert_eq!(wrap_words(text, 15, 100), text);
        assert_eq!(wrap_words("run.max_unit_parameters=3", 0, 9), "run.max_unit_parameters=3");
        assert_eq!(wrap_words("one\ntwo three", 0, 5), "one\ntwo\nthree");
    }
}
