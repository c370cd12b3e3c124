//! The program `ocelli`, with one file per verb. The only crate that parses flags, reads the
//! environment, prints and exits.

#![allow(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

#[macro_use]
mod console;

mod before_after;
mod cluster;
mod columns;
mod curation;
mod evaluation_flags;
mod exit;
mod forecast;
mod guesses;
mod help;
mod initial;
mod memory;
mod network_flags;
mod parts;
mod pictures;
mod progress;
mod recipes;
mod run_end;
mod run_progress;
mod seed_table;
mod shards;
mod signals;
mod storage;
mod training;
mod values;
mod verb;
mod weights_report;

use std::panic::AssertUnwindSafe;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use clap::{Args, Command, CommandFactory, Parser, Subcommand};
use signal_hook::consts::{SIGABRT, SIGXFSZ};
use signal_hook::flag::{register, register_conditional_shutdown};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use trainer::bench::allocator::keep_freed_memory;

use console::Host;
use memory::MEMORY;

pub use signals::interrupt;

/// Self-supervised pretraining of vision models: from a folder of images to a scored backbone.
#[derive(Args)]
#[command(version = env!("OCELLI_VERSION"), max_term_width = help::MAX_WIDTH)]
struct Cli {
    #[command(flatten)]
    storage: storage::StorageFlags,
    #[command(flatten)]
    console: console::ConsoleFlags,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Generate a data set, pretrain on it and probe the result, in a few minutes.
    Quickstart(verb::quickstart::Args),
    /// Create, check, list and edit shards.
    Shards(verb::shards::Args),
    /// List recipes and their keys, and create new recipes.
    Recipe(verb::recipe::Args),
    /// Pretrain a backbone on shards.
    Pretrain(verb::pretrain::Args),
    /// Train a classifier or pixel decoder from weights, and score it.
    Finetune(verb::finetune::Args),
    /// Score frozen features with published protocols: nearest neighbors, linear probes, logistic
    /// regression.
    Probe(verb::probe::Args),
    /// Write the features of images as .npy, .parquet or .safetensors.
    Embed(verb::embed::Args),
    /// Select images by their features: remove near-duplicates, balance clusters, retrieve images
    /// similar to given ones.
    Curate(verb::curate::Args),
    /// List the runs below a folder: step, loss, scores, state, time left.
    Runs(verb::runs::Args),
    /// Write one HTML page about a run, about several side by side, or about weights of any
    /// library.
    Report(verb::report::Args),
    /// Send the recipe, metrics, scores and pictures of runs to an MLflow server.
    Track(verb::track::Args),
    /// Write a backbone for timm, torchvision, transformers, DINOv2's and DINOv3's code or ONNX
    /// runtimes.
    Export(verb::export::Args),
    /// Estimate the memory, traffic, time and goodput of a run before starting it, for any number
    /// of ranks.
    Plan(verb::plan::Args),
    /// Report the hardware and libraries of this machine, and test communication between ranks.
    Doctor(verb::doctor::Args),
    /// Print a shell completion script: `ocelli completions bash > ~/.bash_completion`.
    Completions(verb::shell::CompletionsArgs),
    /// Write manual pages.
    Man(verb::shell::ManArgs),
    /// Benchmark the training step, sharding, devices and the loader.
    Bench(verb::bench::Args),
    /// Print the options of all commands.
    #[command(hide = true)]
    Options,
}

impl CommandFactory for Cli {
    fn command() -> Command {
        with_options_page(help::arrange(Self::augment_args(Command::new("ocelli"))))
    }

    fn command_for_update() -> Command {
        with_options_page(help::arrange(Self::augment_args_for_update(Command::new("ocelli"))))
    }
}

impl Parser for Cli {}

/// Returns `command` with the page `ocelli help options`.
fn with_options_page(command: Command) -> Command {
    command.mut_subcommand("options", |options| options.override_help(help::options_page()))
}

/// Runs the program on the process's arguments.
pub fn main() -> ExitCode {
    keep_freed_memory();
    #[cfg(feature = "mpi")]
    cluster::mpi_settings::open_two_connections();
    // Without this, a program that runs out of memory ends by SIGABRT, which shells report as 134:
    // the code of ranks that may be restarted.
    let code = i32::from(exit::CONFIGURATION);
    let _ = register_conditional_shutdown(SIGABRT, code, MEMORY.exhausted());
    // With a handler, exceeding the limit of the length of files (ulimit -f) is an error of writing
    // and does not end the program.
    let received = Arc::new(AtomicBool::new(false));
    let _ = register(SIGXFSZ, received);
    exit_when_threads_are_exhausted();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return show_usage(&error),
    };
    console::set_flags(cli.console);
    if let Err(error) = check_address_space() {
        console::say(format!("error: {error}"));
        return ExitCode::from(exit::CONFIGURATION);
    }
    match run(cli) {
        Ok(code) => code,
        Err(error) => {
            console::say(format!("error: {}", console::chain(&error)));
            ExitCode::from(exit::exit_code(&error))
        }
    }
}

/// Shows an error of the command line, or the help or the version that it asks for.
fn show_usage(error: &clap::Error) -> ExitCode {
    match answer_usage(error, &console::command_line()) {
        Some(answer) => {
            console::say(format!("error: {answer}"));
            ExitCode::from(exit::CONFIGURATION)
        }
        None => error.exit(),
    }
}

/// Returns the answer to a mistake in the command line `words`, if it is a common one.
fn answer_usage(error: &clap::Error, words: &[String]) -> Option<String> {
    if !error.use_stderr() {
        return None;
    }
    let mut program = Cli::command();
    program.build();
    guesses::answer_usage(error, words, &program, &recipes::names(), read_recipe)
}

/// Returns the text of a recipe; `None` if there is none.
fn read_recipe(name: &str) -> Option<String> {
    recipes::read_text(name).ok()
}

/// Result of a command that was run by [`run_within`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// What the command would have written to its standard output.
    pub output: String,
    /// Whether a signal has asked it to stop, so that it is not complete.
    pub is_stopped: bool,
}

/// A command that was run by [`run_within`] and has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Text of the error, which is no message of the command.
    pub message: String,
    /// Status with which the program would exit.
    pub exit_code: u8,
}

impl Failure {
    /// Creates the failure of a command that has panicked.
    pub fn panic() -> Self {
        Self { message: "the command has panicked: this is a bug in ocelli".into(), exit_code: exit::BUG }
    }

    /// Creates the failure of a command with invalid flags, or at the wrong time.
    fn configuration(message: String) -> Self {
        Self { message, exit_code: exit::CONFIGURATION }
    }
}

/// Runs a command of the program within another process, such as a Python interpreter. `args`
/// follow the name of the program. `messages` receives each line that the program would write to
/// its standard error.
///
/// # Errors
/// [`Failure`], if the command fails, or another one is running in this process.
pub fn run_within(
    args: Vec<String>,
    messages: impl Fn(&str) + Send + Sync + 'static,
) -> Result<Answer, Failure> {
    static RUNNING: Mutex<()> = Mutex::new(());
    let Ok(_running) = RUNNING.try_lock() else {
        let message = "another command of ocelli is running in this process".into();
        return Err(Failure::configuration(message));
    };
    signals::begin_command();
    keep_freed_memory();
    let mut command = vec!["ocelli".to_string()];
    command.extend(args);
    let cli = match Cli::try_parse_from(&command) {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            if let Some(answer) = answer_usage(&error, &command) {
                return Err(Failure::configuration(answer));
            }
            let text = error.to_string();
            let text = text.trim_end();
            return Err(Failure::configuration(text.strip_prefix("error: ").unwrap_or(text).to_string()));
        }
        // Help and version.
        Err(error) => return Ok(Answer { output: error.to_string(), is_stopped: false }),
    };
    console::set_flags(cli.console);
    let host = Host { command, messages: Box::new(messages), output: Mutex::default() };
    console::set_host(Some(host));
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| run(cli)));
    let host = console::set_host(None);
    let output = host.map(|host| host.output.into_inner().unwrap_or_else(PoisonError::into_inner));
    let code = match result {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => {
            let message = console::chain(&error);
            return Err(Failure { message, exit_code: exit::exit_code(&error) });
        }
        Err(_) => return Err(Failure::panic()),
    };
    let output = output.unwrap_or_default();
    match number(code) {
        0 => Ok(Answer { output, is_stopped: false }),
        exit::PREEMPTED => Ok(Answer { output, is_stopped: true }),
        // Such a command has printed what is wrong.
        exit_code => {
            Err(Failure { message: format!("the result is bad:\n{}", output.trim_end()), exit_code })
        }
    }
}

/// Returns the number of an exit code.
fn number(code: ExitCode) -> u8 {
    for number in 0..=u8::MAX {
        if code == ExitCode::from(number) {
            return number;
        }
    }
    exit::CHECK_FAILED
}

/// Runs a command.
fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let filter = match std::env::var("OCELLI_LOG").map(|text| text.parse::<Targets>()) {
        Ok(Ok(filter)) => filter,
        _ => default_filter(cli.console.verbose),
    };
    // In another process, a command before this one has done it.
    let _ = tracing_subscriber::registry().with(console::Events.with_filter(filter)).try_init();
    // Every shard is an open file, and the usual limit is 1,024. If it cannot be raised, opening
    // files fails with an error.
    let _ = rlimit::increase_nofile_limit(u64::MAX);
    let storage = cli.storage.open();
    let folder = cli.storage.folder();
    kernels::device::set_tuning_cache(&folder.join("gpu"));
    match cli.verb {
        Verb::Quickstart(args) => verb::quickstart::run(&args, &storage),
        Verb::Shards(args) => verb::shards::run(&args, &storage),
        Verb::Recipe(args) => verb::recipe::run(&args),
        Verb::Pretrain(args) => verb::pretrain::run(&args, &storage),
        Verb::Finetune(args) => verb::finetune::run(&args, &storage),
        Verb::Probe(args) => verb::probe::run(&args, &storage, &folder),
        Verb::Embed(args) => verb::embed::run(&args, &storage, &folder),
        Verb::Curate(args) => verb::curate::run(&args, &storage, &folder),
        Verb::Runs(args) => verb::runs::run(&args),
        Verb::Report(args) => verb::report::run(&args, &storage),
        Verb::Track(args) => verb::track::run(&args),
        Verb::Export(args) => verb::export::run(&args, &storage),
        Verb::Plan(args) => verb::plan::run(&args, &storage),
        Verb::Doctor(args) => verb::doctor::run(&args),
        Verb::Completions(args) => Ok(verb::shell::completions(&args, Cli::command())),
        Verb::Man(args) => verb::shell::man(&args, Cli::command()),
        Verb::Bench(args) => verb::bench::run(&args, &storage),
        Verb::Options => {
            out!("{}", help::options_page().to_string().trim_end());
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Returns the events that are shown: warnings, with notes about data and sessions, and all notes
/// if the program is verbose.
fn default_filter(is_verbose: bool) -> Targets {
    if is_verbose {
        return Targets::new().with_default(LevelFilter::INFO);
    }
    let filter = Targets::new().with_default(LevelFilter::WARN);
    filter.with_target("prep", LevelFilter::INFO).with_target("session", LevelFilter::INFO)
}

/// Makes the program exit with a message if the system lets it start no more threads: libraries
/// panic then, in any thread.
fn exit_when_threads_are_exhausted() {
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let text = info.payload_as_str().unwrap_or_default();
        // EAGAIN: of the calls whose results are unwrapped, only the start of a thread returns it.
        if !text.contains("Os { code: 11,") {
            default_hook(info);
            return;
        }
        console::say(
            "error: cannot start more threads: raise the limit (ulimit -u, or pids.max of the container), \
             or start fewer processes",
        );
        std::process::exit(i32::from(exit::CONFIGURATION));
    }));
}

/// Checks that the process has enough address space for its threads and their memory.
fn check_address_space() -> Result<(), String> {
    const LEAST_BYTES: f64 = 1e9;
    match session::machine::address_space_bytes() {
        Some(bytes) if bytes < LEAST_BYTES => Err(format!(
            "address space is limited to {:.2} GB (ulimit -v); ocelli needs at least {:.0} GB",
            bytes / 1e9,
            LEAST_BYTES / 1e9
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the commands below "Examples:" in the help of `command` and of all its subcommands.
    fn examples(command: &clap::Command) -> Vec<String> {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let commands = help.lines().filter_map(|line| line.strip_prefix("  ")).map(str::to_string);
        commands.chain(command.get_subcommands().flat_map(examples)).collect()
    }

    #[test]
    fn examples_of_the_help_are_commands() {
        let examples = examples(&Cli::command());
        assert!(examples.len() > 25, "{examples:?}");
        for example in examples {
            assert!(example.len() <= 78, "{example} does not fit a line of 80 characters");
            let (_, command) = example.split_at(example.find("ocelli ").expect("the program"));
            let words = command.split(' ').map(|word| word.trim_matches('\''));
            if let Err(error) = Cli::try_parse_from(words) {
                panic!("{example}: {error}");
            }
        }
    }
}
