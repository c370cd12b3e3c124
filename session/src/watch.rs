//! Scoring of the checkpoints of a run as they appear, each once.
//!
//! Any number of processes may watch a run, on any machine that sees its folder: a checkpoint is
//! scored by the process that claims it first, and by another one if that process dies.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use eval::image_sets::SplitShards;
use eval::probe::Scores;
use eval::{FeatureCache, Protocol, Split};
use kernels::device::Device;
use pipeline::secrets::redact_list;
use pipeline::{Progress, Storage};
use serde_json::json;
use trainer::Plan;
use trainer::checkpoint::{self, Checkpoint, Hold};
use trainer::run::Validations;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::SessionError;
use crate::evaluated_network::{EvaluatedNetwork, NetworkSettings};
use crate::ledger::{Claim, Ledger};

/// Interval at which the folder is listed.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Longest time to wait for a run that has not started.
const START_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// What to evaluate, and how.
pub struct Evaluation<'a> {
    /// Choice of the network of a run or of a checkpoint.
    pub network: NetworkSettings,
    /// Images to fit on and to score on.
    pub images: SplitShards,
    /// Protocols to score by.
    pub protocols: Vec<Protocol>,
    /// Device to compute on.
    pub device: Device,
    /// Cache of features.
    pub cache: Option<FeatureCache>,
    /// Storage of the images.
    pub storage: &'a Storage,
}

/// Something that happens while a run is watched.
pub enum WatchEvent<'a> {
    /// There is no run in the folder yet.
    Waiting,
    /// A checkpoint was scored.
    Scored {
        /// Step of the checkpoint.
        step: u64,
        /// Its scores.
        scores: &'a Scores,
    },
    /// A checkpoint cannot be scored.
    NotScorable {
        /// Step of the checkpoint.
        step: u64,
        /// Reason.
        reason: &'a str,
    },
    /// The run removed a checkpoint before it was scored.
    Missed {
        /// Step of the checkpoint.
        step: u64,
    },
}

/// What a watch has done.
#[derive(Debug, Clone, Default)]
pub struct Watched {
    /// Number of checkpoints that this process scored.
    pub n_scored: u64,
    /// Steps whose checkpoints were removed before they were scored.
    pub missed: BTreeSet<u64>,
}

impl Evaluation<'_> {
    /// Scores the checkpoints of the run in `workdir`, which may not have started, until it has
    /// ended and all are scored. `new_progress` creates the receiver of the progress of each
    /// checkpoint, and `report` receives what happens.
    ///
    /// # Errors
    /// [`SessionError`] when there is no run within a day, images cannot be opened or scored, or
    /// scores cannot be recorded.
    pub fn watch(
        &self,
        workdir: &Path,
        new_progress: &dyn Fn() -> Box<dyn Progress>,
        report: &mut dyn FnMut(WatchEvent<'_>),
    ) -> Result<Watched, SessionError> {
        await_run(workdir, report)?;
        let ledger = Ledger::open(workdir, self.ledger_name())?;
        let mut watcher = Watcher {
            evaluation: self,
            workdir,
            new_progress,
            report,
            split: None,
            length: None,
            watched: Watched::default(),
        };
        let mut newest_step = None;
        loop {
            let checkpoints = checkpoint::steps_of_run(workdir);
            let last_step = checkpoints.last().map(|(step, _)| *step);
            // A run may be lengthened while it is watched: its next checkpoint states the new
            // length.
            if watcher.length.is_none() || last_step != newest_step {
                watcher.length = read_length(workdir).or(watcher.length);
                newest_step = last_step;
            }
            let mut is_idle = true;
            for (step, path) in checkpoints {
                let Some(claim) = ledger.claim(step)? else { continue };
                is_idle = false;
                watcher.score(claim, step, &path)?;
            }
            watcher.report_missed(&ledger);
            if watcher.has_ended(&ledger) {
                return Ok(watcher.watched);
            }
            if is_idle {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }

    /// Returns the name of the evaluation by its sets and settings: evaluations of the same run
    /// with others have separate records.
    fn ledger_name(&self) -> String {
        let images = &self.images;
        let test_set = images.test_set();
        let set: String = test_set.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let train: Vec<_> = images.train.iter().map(|spec| redact_list(spec)).collect();
        let test: Vec<_> = images.test.iter().map(|spec| redact_list(spec)).collect();
        let settings = json!({
            "train": train,
            "test": test,
            "protocols": self.protocols,
            "image_px": self.network.image_px,
            "resize_px": self.network.resize_px,
            "network": self.network.hints.network,
            "seed": images.seed,
        });
        format!("{set}-{:08x}", xxh3_64(settings.to_string().as_bytes()) as u32)
    }
}

/// Waits until `workdir` contains a run.
fn await_run(workdir: &Path, report: &mut dyn FnMut(WatchEvent<'_>)) -> Result<(), SessionError> {
    let plan = Plan::path_in(workdir);
    if !plan.exists() {
        report(WatchEvent::Waiting);
    }
    let start = Instant::now();
    while !plan.exists() {
        if start.elapsed() > START_TIMEOUT {
            return Err(SessionError::NoRun { workdir: workdir.to_path_buf() });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Length of a run.
#[derive(Clone, Copy)]
struct Length {
    total_steps: u64,
    /// Number of steps between two checkpoints.
    checkpoint_every: u64,
}

/// Returns the length of the run, from its newest checkpoint.
fn read_length(workdir: &Path) -> Option<Length> {
    let plan = Checkpoint::open(workdir).ok()?.manifest.plan;
    let checkpoint_every = plan.recipe.run.checkpoint_every_steps;
    Some(Length { total_steps: plan.total_steps, checkpoint_every })
}

/// State of a process that watches a run.
struct Watcher<'a> {
    evaluation: &'a Evaluation<'a>,
    workdir: &'a Path,
    new_progress: &'a dyn Fn() -> Box<dyn Progress>,
    report: &'a mut dyn FnMut(WatchEvent<'_>),
    /// Images, once a checkpoint has determined their size.
    split: Option<Split>,
    /// Length of the run, once a checkpoint has been read.
    length: Option<Length>,
    watched: Watched,
}

impl Watcher<'_> {
    /// Scores the checkpoint in `path`. A checkpoint that has been removed is skipped
    /// (`report_missed` reports it), one that cannot be scored is reported and not tried again.
    fn score(&mut self, claim: Claim<'_>, step: u64, path: &Path) -> Result<(), SessionError> {
        let Evaluation { network, images, protocols, device, cache, storage } = self.evaluation;
        let hold = Hold::new(path);
        let open = match EvaluatedNetwork::open(path, network, device) {
            Ok(open) => open,
            Err(_) if !path.exists() => return Ok(()),
            Err(error) => {
                let reason = error.to_string();
                (self.report)(WatchEvent::NotScorable { step, reason: &reason });
                return claim.give_up(&reason);
            }
        };
        // Weights are in memory: the run may remove the checkpoint.
        drop(hold);
        let split = match self.split.take() {
            Some(split) => split,
            None => images.open(protocols, open.transform, open.rules, storage)?,
        };
        let scores = split.score(&open.network, protocols, cache.as_ref(), &*(self.new_progress)())?;
        (self.report)(WatchEvent::Scored { step, scores: &scores });
        let rows = eval::scores::rows(&scores, &split, &open.info(path)?);
        self.split = Some(split);
        self.watched.n_scored += 1;
        claim.finish(&rows, &open.scalars(&rows))
    }

    /// Reports the checkpoints that the run removed before they were scored.
    fn report_missed(&mut self, ledger: &Ledger) {
        let existing: BTreeSet<u64> =
            checkpoint::steps_of_run(self.workdir).into_iter().map(|(step, _)| step).collect();
        let (Some(length), Some(newest)) = (self.length, existing.last()) else { return };
        let every = length.checkpoint_every.max(1);
        for step in (1..).map(|n| n * every).take_while(|step| step < newest) {
            let is_missed = !existing.contains(&step) && !ledger.is_claimed(step) && !ledger.is_done(step);
            if is_missed && self.watched.missed.insert(step) {
                (self.report)(WatchEvent::Missed { step });
            }
        }
    }

    /// Returns `true` if the run has written its last checkpoint and all checkpoints have been
    /// scored.
    fn has_ended(&self, ledger: &Ledger) -> bool {
        let Some(length) = self.length else { return false };
        // A run that does not become better may end before its last step. A file that cannot be
        // read now is read again.
        let validations = Validations::read(self.workdir).ok().flatten();
        let end_step = validations.and_then(|validations| validations.end_step());
        let last_step = end_step.unwrap_or(length.total_steps);
        let existing = checkpoint::steps_of_run(self.workdir);
        ledger.is_done(last_step) && existing.iter().all(|(step, _)| ledger.is_done(*step))
    }
}
