//! `ocelli track`: sends runs to an MLflow server. A second call continues where the first one
//! ended.

use std::path::PathBuf;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, bail};
use report::Run;
use report::track::{Delivery, Tracker};

use crate::console::{chain, say};

/// Flags of `track`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  ocelli track runs/mine --mlflow http://127.0.0.1:5000 --follow\n  ocelli \
        track runs/ --mlflow http://127.0.0.1:5000 --experiment shapes"
)]
pub(crate) struct Args {
    /// Work directories, or folders containing them.
    #[arg(required = true)]
    workdirs: Vec<PathBuf>,
    /// Server URL, such as http://127.0.0.1:5000.
    #[arg(long, env = "MLFLOW_TRACKING_URI", hide_env_values = true, value_name = "URL")]
    mlflow: String,
    /// Experiment to add the runs to; created if it does not exist.
    #[arg(long, env = "MLFLOW_EXPERIMENT_NAME", default_value = "ocelli")]
    experiment: String,
    /// Keep sending until all runs have ended, plus two minutes for their pictures and reports.
    #[arg(long)]
    follow: bool,
    /// Access token, for servers that require one.
    #[arg(long, env = "MLFLOW_TRACKING_TOKEN", hide_env_values = true)]
    token: Option<String>,
}

/// Time between two checks of the runs.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Number of checks without news, after all runs have ended, before the end: pictures are drawn
/// after the last checkpoint.
const IDLE_POLLS: u32 = 12;

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let workdirs: Vec<PathBuf> = args.workdirs.iter().flat_map(|folder| Run::workdirs_in(folder)).collect();
    if workdirs.is_empty() {
        bail!("no run in {}", args.workdirs[0].display());
    }
    if !args.mlflow.starts_with("http://") && !args.mlflow.starts_with("https://") {
        bail!("{} is not a server URL: it must start with http:// or https://", args.mlflow);
    }
    if args.mlflow.contains(['@', '?']) {
        bail!(
            "the server URL must not contain a user, a password or a query; set MLFLOW_TRACKING_TOKEN \
             to pass a token"
        );
    }
    let token = args.token.as_deref().filter(|token| !token.is_empty());
    let tracker = Tracker::new(&args.mlflow, &args.experiment, token);
    let mut idle_polls = 0;
    loop {
        let mut is_idle = true;
        for workdir in &workdirs {
            match tracker.send(workdir) {
                Ok(delivery) => {
                    print_news(args, &delivery);
                    is_idle &= delivery.has_ended && !delivery.sent_anything;
                }
                // The run may continue, and is followed further.
                Err(error) if args.follow => {
                    say(format!("warning: {}: {}", workdir.display(), chain(&error.into())));
                    is_idle = false;
                }
                Err(error) => {
                    return Err(error).with_context(|| format!("could not track {}", workdir.display()));
                }
            }
        }
        idle_polls = if is_idle { idle_polls + 1 } else { 0 };
        if !args.follow || idle_polls == IDLE_POLLS {
            return Ok(ExitCode::SUCCESS);
        }
        sleep(POLL_INTERVAL);
    }
}

/// Prints what was sent of a run; of one that is followed, only at its end.
fn print_news(args: &Args, delivery: &Delivery) {
    if delivery.sent_anything && (delivery.has_ended || !args.follow) {
        out!("{}: {} values sent, {}", delivery.name, delivery.n_values, delivery.state);
    }
}
