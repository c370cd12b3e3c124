//! `ocelli track`: sends runs to an MLflow server. It only reads the files of a run, which never
//! waits for it: a server that is slow or away costs a run nothing.
//!
//! A second call continues where the first one ended. Numbers carry times that follow from their
//! steps, so that the server stores a repeated one once.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use pipeline::secrets::redact_list;
use report::{Run, named_scores};
use serde::{Deserialize, Serialize};
use trainer::run::status::State;
use xxhash_rust::xxh3::xxh3_64;

use crate::console::say;
use crate::mlflow::{Metric, RunId, Server};

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

/// File in the work directory that records what has been sent, by server and experiment.
const SENT: &str = "mlflow.json";

/// Name of the plan among [`FILES`].
const PLAN: &str = "plan.toml";

/// Name of the report among [`FILES`].
const REPORT: &str = "report.html";

/// Files that are uploaded once a run has ended.
const FILES: [&str; 4] = [PLAN, REPORT, "views.png", "neighbors.png"];

/// Record of the parts of a run that a server has received.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Sent {
    run: RunId,
    /// Last step whose metrics have been sent.
    steps: u64,
    /// Number of scores that have been sent.
    scores: usize,
    /// `true` once the parameters have been sent.
    params: bool,
    /// Start time of the run on the server, in milliseconds since 1970.
    begun_ms: u64,
    /// Files that have been sent, with the hashes of their bytes.
    files: BTreeMap<String, u64>,
    /// Last state that has been sent.
    state: String,
}

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
    let token = args.token.as_ref().filter(|token| !token.is_empty());
    let authorization = token.map(|token| format!("Bearer {token}"));
    let server = Server::new(&args.mlflow, authorization);
    let mut idle_polls = 0;
    loop {
        let mut is_idle = true;
        for workdir in &workdirs {
            match send(args, &server, workdir) {
                Ok(is_complete) => is_idle &= is_complete,
                // The run may continue, and is followed further.
                Err(error) if args.follow => {
                    say(format!("warning: {}: {error:#}", workdir.display()));
                    is_idle = false;
                }
                Err(error) => {
                    return Err(error.context(format!("could not track {}", workdir.display())));
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

/// Sends the new parts of the run in `workdir`; returns `true` if the run has ended and there was
/// nothing new.
fn send(args: &Args, server: &Server, workdir: &Path) -> anyhow::Result<bool> {
    let run = Run::open(workdir)?;
    let key = format!("{} {}", args.mlflow.trim_end_matches('/'), args.experiment);
    let path = workdir.join(SENT);
    let mut records = read(&path)?;
    let mut sent = match records.get(&key) {
        Some(sent) => sent.clone(),
        None => begin(args, server, &run)?,
    };
    // If anything below fails, the run is not begun twice.
    save(&mut records, &key, &sent, &path)?;
    if !sent.params {
        server.params(&sent.run, &params(&run))?;
        sent.params = true;
        save(&mut records, &key, &sent, &path)?;
    }
    let (metrics, steps, scores) = new_metrics(&run, &sent)?;
    server.metrics(&sent.run, &metrics, sent.begun_ms)?;
    let n_metrics = metrics.len();
    sent.steps = steps;
    sent.scores = scores;
    save(&mut records, &key, &sent, &path)?;
    let (state, has_ended) = match run.status.state {
        State::NotStarted => ("SCHEDULED", false),
        State::Running => ("RUNNING", false),
        State::Finished => ("FINISHED", true),
        State::Stopped => ("KILLED", true),
        State::Failed(_) | State::Died(_) => ("FAILED", true),
    };
    let mut has_news = n_metrics > 0;
    if state != sent.state {
        server.state(&sent.run, state, has_ended.then(now_ms))?;
        sent.state = state.into();
        save(&mut records, &key, &sent, &path)?;
        has_news = true;
    }
    if has_ended && send_files(server, &mut sent, &run) {
        save(&mut records, &key, &sent, &path)?;
        has_news = true;
    }
    if has_news && (has_ended || !args.follow) {
        out!("{}: {n_metrics} values sent, {}", run.name(), run.status.state);
    }
    Ok(has_ended && !has_news)
}

/// Begins `run` on the server.
fn begin(args: &Args, server: &Server, run: &Run) -> anyhow::Result<Sent> {
    let start = run.start.as_ref();
    let at_ms = start.map_or_else(now_ms, |start| (start.at_s * 1e3) as u64);
    let mut tags = vec![
        ("mlflow.source.name", "ocelli".to_string()),
        ("workdir", run.workdir.display().to_string()),
        ("data_fingerprint", run.status.plan.data_fingerprint.clone()),
    ];
    tags.extend(start.map(|start| ("command", start.command.join(" "))));
    tags.extend(start.map(|start| ("host", start.host.clone())));
    tags.retain(|(_, value)| !value.is_empty());
    let id = server.begin(&args.experiment, &run.name(), at_ms, &tags)?;
    Ok(Sent {
        run: id,
        steps: 0,
        scores: 0,
        params: false,
        begun_ms: at_ms,
        files: BTreeMap::new(),
        state: String::new(),
    })
}

/// Returns the values of the recipe, and numbers that follow from them.
fn params(run: &Run) -> Vec<(String, String)> {
    let plan = &run.status.plan;
    let mut values: Vec<(String, String)> = Vec::new();
    for (key, value) in plan.recipe.values() {
        let text = match value.as_str() {
            Some(text) => text.to_string(),
            None => value.to_string(),
        };
        values.push((key, text));
    }
    values.push(("total_steps".into(), plan.total_steps.to_string()));
    values.push(("n_samples".into(), plan.n_samples.to_string()));
    values
}

/// Returns the metrics of `run` that are not `sent`, and the counts of steps and scores including
/// them.
fn new_metrics(run: &Run, sent: &Sent) -> anyhow::Result<(Vec<Metric>, u64, usize)> {
    let mut metrics = Vec::new();
    for (name, points) in run.columns() {
        let new = points.iter().filter(|(step, _)| *step > sent.steps);
        metrics.extend(new.map(|(step, value)| Metric { name: name.into(), step: *step, value: *value }));
    }
    let steps = metrics.iter().map(|metric| metric.step).max().unwrap_or(sent.steps);
    let scores = named_scores(&run.workdir, run.status.plan.evaluated()?)?;
    let new = scores.iter().skip(sent.scores).cloned();
    metrics.extend(new.map(|(name, step, value)| Metric { name, step, value }));
    Ok((metrics, steps, scores.len()))
}

/// Sends the [`FILES`] that are new or have changed; returns `true` if there were any.
fn send_files(server: &Server, sent: &mut Sent, run: &Run) -> bool {
    let mut has_news = false;
    let shards = &run.status.plan.recipe.data.shards;
    let shows_secrets = shards.iter().any(|spec| redact_list(spec) != *spec);
    for name in FILES {
        // Only older releases wrote secrets into the plan, and then also into the report.
        if name == REPORT && shows_secrets {
            say(format!(
                "warning: not sending {name}: it is from an older release and may show passwords; recreate \
                 it with `ocelli report`"
            ));
            continue;
        }
        let Ok(mut bytes) = std::fs::read(run.workdir.join(name)) else { continue };
        if name == PLAN {
            // The file of an older release may hold passwords.
            bytes = run.status.plan_toml.clone().into_bytes();
        }
        let hash = xxh3_64(&bytes);
        if sent.files.get(name) == Some(&hash) {
            continue;
        }
        match server.file(&sent.run, name, &bytes) {
            Ok(()) => {
                sent.files.insert(name.into(), hash);
                has_news = true;
            }
            Err(error) => say(format!("warning: could not send {name}: {error:#}")),
        }
    }
    has_news
}

/// Reads the records at `path`, by server and experiment.
fn read(path: &Path) -> anyhow::Result<BTreeMap<String, Sent>> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).with_context(|| {
            format!("cannot read {}; delete it to send the whole run again", path.display())
        }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Writes `records` to `path`, with `sent` as the record of `key`.
fn save(records: &mut BTreeMap<String, Sent>, key: &str, sent: &Sent, path: &Path) -> anyhow::Result<()> {
    records.insert(key.to_string(), sent.clone());
    let text = serde_json::to_vec_pretty(records)?;
    pipeline::file::replace(path, &text).with_context(|| format!("cannot write {}", path.display()))
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
