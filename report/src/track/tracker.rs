//! Sends runs to MLflow. It reads only the run's files, so a slow or unreachable server never
//! delays training.
//!
//! What has been sent is recorded in the work directory, so that a second call continues where the
//! first one ended. The times of numbers are made up: the start of the run and a millisecond per
//! step, so that the server keeps one copy of a number that is sent again.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use pipeline::secrets::redact_list;
use serde::{Deserialize, Serialize};
use trainer::run::status::State;
use xxhash_rust::xxh3::xxh3_64;

use super::server::{Metric, RunId, Server};
use crate::ReportError;
use crate::picture::workdir::{masks_name, worst_name};
use crate::run::Run;
use crate::run::scores::{NamedScore, named_scores};

/// File in the work directory that records what has been sent, by server and experiment.
const SENT: &str = "mlflow.json";

/// Name of the plan among [`FILES`].
const PLAN: &str = "plan.toml";

/// Name of the report among [`FILES`].
const REPORT: &str = "report.html";

/// Files that are uploaded once a run has ended, with the pictures of its classifier or decoder.
/// Earlier releases drew `worst.png`.
const FILES: [&str; 5] = [PLAN, REPORT, "views.png", "neighbors.png", "worst.png"];

/// Sender of runs to an experiment on a server.
pub struct Tracker {
    server: Server,
    /// Server and experiment, the key of the records of what has been sent.
    key: String,
    experiment: String,
}

/// What a call has sent of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// Name of the run.
    pub name: String,
    /// Number of metrics and scores that were sent.
    pub n_values: usize,
    /// State of the run.
    pub state: State,
    /// Whether the run takes no more steps unless it is resumed.
    pub has_ended: bool,
    /// Whether anything was sent.
    pub sent_anything: bool,
}

/// Record of the parts of a run that a server has received.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Sent {
    run: RunId,
    /// Last step whose metrics have been sent.
    #[serde(rename = "steps")]
    last_step: u64,
    /// Number of scores that have been sent.
    #[serde(rename = "scores")]
    n_scores: usize,
    /// `true` once the parameters have been sent.
    #[serde(rename = "params")]
    has_params: bool,
    /// Start time of the run on the server, in milliseconds since 1970.
    begun_ms: u64,
    /// Files that have been sent, with the hashes of their bytes.
    files: BTreeMap<String, u64>,
    /// Last state that has been sent.
    state: String,
}

impl Tracker {
    /// Creates the sender to `experiment` on the server at `address`. `experiment` is created by
    /// the first send if missing. `token` is for servers that require one.
    pub fn new(address: &str, experiment: &str, token: Option<&str>) -> Self {
        Self {
            server: Server::new(address, token.map(|token| format!("Bearer {token}"))),
            key: format!("{} {experiment}", address.trim_end_matches('/')),
            experiment: experiment.to_string(),
        }
    }

    /// Sends the new parts of the run in `workdir`.
    ///
    /// # Errors
    /// [`ReportError`] if the run cannot be read or the server rejects it.
    pub fn send(&self, workdir: &Path) -> Result<Delivery, ReportError> {
        let run = Run::open(workdir)?;
        let server = &self.server;
        let path = workdir.join(SENT);
        let mut records = read(&path)?;
        let mut sent = match records.get(&self.key) {
            Some(sent) => sent.clone(),
            None => self.begin(&run)?,
        };
        // Saved first: a retry must not create a second run.
        self.save(&mut records, &sent, &path)?;
        if !sent.has_params {
            server.send_params(&sent.run, &params(&run))?;
            sent.has_params = true;
            self.save(&mut records, &sent, &path)?;
        }
        let (metrics, last_step, n_scores) = new_metrics(&run, &sent)?;
        server.send_metrics(&sent.run, &metrics, sent.begun_ms)?;
        let n_values = metrics.len();
        sent.last_step = last_step;
        sent.n_scores = n_scores;
        self.save(&mut records, &sent, &path)?;
        let (state, has_ended) = match run.status.state {
            State::NotStarted => ("SCHEDULED", false),
            State::Running => ("RUNNING", false),
            State::Finished => ("FINISHED", true),
            State::Stopped => ("KILLED", true),
            State::Failed(_) | State::Died(_) => ("FAILED", true),
        };
        let mut sent_anything = n_values > 0;
        if state != sent.state {
            server.send_state(&sent.run, state, has_ended.then(now_ms))?;
            sent.state = state.into();
            self.save(&mut records, &sent, &path)?;
            sent_anything = true;
        }
        if has_ended && self.send_files(&mut sent, &run) {
            self.save(&mut records, &sent, &path)?;
            sent_anything = true;
        }
        Ok(Delivery { name: run.name(), n_values, state: run.status.state, has_ended, sent_anything })
    }

    /// Begins `run` on the server.
    fn begin(&self, run: &Run) -> Result<Sent, ReportError> {
        let start = run.start.as_ref();
        let at_ms = start.map_or_else(now_ms, |start| (start.at_s * 1e3) as u64);
        let mut tags = vec![
            ("mlflow.source.name", "ocelli".to_string()),
            ("workdir", run.workdir.display().to_string()),
        ];
        let fingerprint = run.status.plan.data_fingerprint.clone();
        tags.extend(fingerprint.map(|fingerprint| ("data_fingerprint", fingerprint)));
        tags.extend(start.map(|start| ("command", start.command.join(" "))));
        tags.extend(start.map(|start| ("host", start.host.clone())));
        tags.retain(|(_, value)| !value.is_empty());
        let id = self.server.begin(&self.experiment, &run.name(), at_ms, &tags)?;
        Ok(Sent {
            run: id,
            last_step: 0,
            n_scores: 0,
            has_params: false,
            begun_ms: at_ms,
            files: BTreeMap::new(),
            state: String::new(),
        })
    }

    /// Sends the [`FILES`] and the pictures of the classifier or the decoder that are new or have
    /// changed; returns whether it sent any.
    fn send_files(&self, sent: &mut Sent, run: &Run) -> bool {
        let mut sent_any = false;
        let shards = &run.status.plan.recipe.data.shards;
        let shows_secrets = shards.iter().any(|spec| redact_list(spec) != *spec);
        let mut names: Vec<String> = Vec::from(FILES.map(String::from));
        for classifier in &run.evaluations.classifiers {
            names.push(format!("{}.png", worst_name(&classifier.kind.set)));
        }
        for masks in &run.evaluations.masks {
            names.push(format!("{}.png", masks_name(&masks.kind.set)));
        }
        names.dedup();
        for name in &names {
            // Only earlier versions wrote secrets into the plan, and then also into the report.
            if name == REPORT && shows_secrets {
                tracing::warn!(
                    "not sending {name}: it is from an older release and may show passwords; recreate it \
                     with `ocelli report`"
                );
                continue;
            }
            let Ok(mut bytes) = std::fs::read(run.workdir.join(name)) else { continue };
            if name == PLAN {
                // The file of an earlier version may hold passwords.
                bytes = run.status.plan_toml.clone().into_bytes();
            }
            let hash = xxh3_64(&bytes);
            if sent.files.get(name) == Some(&hash) {
                continue;
            }
            match self.server.send_file(&sent.run, name, &bytes) {
                Ok(()) => {
                    sent.files.insert(name.clone(), hash);
                    sent_any = true;
                }
                Err(error) => tracing::warn!("could not send {name}: {error}"),
            }
        }
        sent_any
    }

    /// Writes `records` to `path`, with `sent` as the record of this server and experiment.
    fn save(
        &self,
        records: &mut BTreeMap<String, Sent>,
        sent: &Sent,
        path: &Path,
    ) -> Result<(), ReportError> {
        records.insert(self.key.clone(), sent.clone());
        let text = serde_json::to_vec_pretty(records).map_err(std::io::Error::from);
        text.and_then(|text| pipeline::file::replace(path, &text))
            .map_err(|source| ReportError::Write { path: path.to_path_buf(), source })
    }
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

/// Returns the metrics of `run` that are not `sent`, and with them the last step and the number of
/// scores.
fn new_metrics(run: &Run, sent: &Sent) -> Result<(Vec<Metric>, u64, usize), ReportError> {
    let mut metrics = Vec::new();
    for (name, points) in run.columns() {
        let new = points.iter().filter(|(step, _)| *step > sent.last_step);
        metrics.extend(new.map(|(step, value)| Metric { name: name.into(), step: *step, value: *value }));
    }
    let last_step = metrics.iter().map(|metric| metric.step).max().unwrap_or(sent.last_step);
    let scores = named_scores(&run.workdir, run.status.plan.evaluated()?)?;
    let new = scores.iter().skip(sent.n_scores).cloned();
    metrics.extend(new.map(|NamedScore { name, step, value }| Metric { name, step, value }));
    Ok((metrics, last_step, scores.len()))
}

/// Reads the records at `path`, by server and experiment.
fn read(path: &Path) -> Result<BTreeMap<String, Sent>, ReportError> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map_err(|source| ReportError::Record { path: path.to_path_buf(), source }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(source) => Err(ReportError::Read { path: path.to_path_buf(), source }),
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
