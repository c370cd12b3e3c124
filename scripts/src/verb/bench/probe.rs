//! `ocelli bench probe`: measures the time of protocols on features of a given size, without
//! images.

use std::process::ExitCode;

use eval::bench::{NoiseSizes, ProtocolBench};
use serde_json::{Map, Value, json};

use super::compare::{CompareFlag, print_figures};
use crate::evaluation_flags::ProtocolFlags;

/// Flags of `bench probe`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of training rows.
    #[arg(long, default_value_t = 10_000)]
    train: usize,
    /// Number of test rows.
    #[arg(long, default_value_t = 2000)]
    test: usize,
    /// Width of a class token.
    #[arg(long, default_value_t = 384)]
    width: usize,
    /// Number of classes.
    #[arg(long, default_value_t = 10)]
    classes: usize,
    /// Number of runs per protocol.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    #[command(flatten)]
    protocols: ProtocolFlags,
    #[command(flatten)]
    compare: CompareFlag,
    /// Print a line of JSON at the end: median seconds by protocol.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let before = args.compare.read()?;
    let protocols = args.protocols.protocols()?;
    let sizes =
        NoiseSizes { n_train: args.train, n_test: args.test, width: args.width, n_classes: args.classes };
    let bench = ProtocolBench::new(sizes, &protocols);
    let mut figures = Map::new();
    for protocol in &protocols {
        let times = bench.time(protocol, args.repeats)?;
        let name = protocol.name();
        let median = times.seconds[times.seconds.len() / 2];
        let spread = match times.seconds[..] {
            [shortest, .., longest] => format!("; {shortest:.2} to {longest:.2}"),
            _ => String::new(),
        };
        let accuracy = times.accuracy;
        out!("{name:<16} {median:>8.2} s{spread}  (accuracy {accuracy:.1} on noise with classes)");
        figures.insert(format!("{name}_s"), json!(median));
    }
    print_figures(before.as_ref(), &Value::Object(figures), args.json);
    Ok(ExitCode::SUCCESS)
}
