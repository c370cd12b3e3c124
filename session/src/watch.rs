//! Scoring of the checkpoints of a run as they appear, each once.
//!
//! Any number of processes may watch a run, on any machine that sees its folder: a checkpoint is
//! scored by the process that claims it first, and by another one if that process dies.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use eval::image_sets::SplitShards;
use eval::probe::Scores;
use eval::scores::rows;
use eval::{FeatureCache, Protocol, Split};
use kernels::device::Device;
use pipeline::secrets::redact_list;
use pipeline::{Progress, Storage};
use serde_json::json;
use trainer::checkpoint::{Checkpoint, Hold, steps};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::SessionError;
use crate::evaluated::{EvaluatedNetwork, NetworkSettings};
use crate::ledger::{Claim, Ledger};

/// Interval at which the folder is listed.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Longest time to wait for a run that has not started.
const START_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// An evaluation of networks by protocols.
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
    Unreadable {
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

/// Results of a watch.
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
        let ledger = Ledger::open(workdir, self.name())?;
        let mut watcher = Watcher {
            evaluation: self,
            workdir,
            new_progress,
            report,
            split: None,
            last: None,
            watched: Watched::default(),
        };
        loop {
            watcher.last = watcher.last.or_else(|| read_length(workdir));
            let mut is_idle = true;
            for (step, path) in steps(&workdir.join("checkpoints")) {
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
    fn name(&self) -> String {
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
    let start = Instant::now();
    while !workdir.join("plan.toml").exists() {
        if start.elapsed() < POLL_INTERVAL {
            report(WatchEvent::Waiting);
        }
        if start.elapsed() > START_TIMEOUT {
            return Err(SessionError::NoRun { workdir: workdir.to_path_buf() });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Returns the last step of the run and its checkpoint interval, from its newest checkpoint.
fn read_length(workdir: &Path) -> Option<(u64, u64)> {
    let plan = Checkpoint::open(workdir).ok()?.manifest.plan;
    Some((plan.total_steps, plan.recipe.run.checkpoint_every_steps))
}

/// State of a process that watches a run.
struct Watcher<'a> {
    evaluation: &'a Evaluation<'a>,
    workdir: &'a Path,
    new_progress: &'a dyn Fn() -> Box<dyn Progress>,
    report: &'a mut dyn FnMut(WatchEvent<'_>),
    /// Images, once a checkpoint has determined their size.
    split: Option<Split>,
    /// Last step of the run and its checkpoint interval, once a checkpoint has been read.
    last: Option<(u64, u64)>,
    watched: Watched,
}

impl Watcher<'_> {
    /// Scores the checkpoint in `path`. A checkpoint that has been removed is recorded as missed,
    /// one that cannot be read as unreadable.
    fn score(&mut self, claim: Claim<'_>, step: u64, path: &Path) -> Result<(), SessionError> {
        let Evaluation { network, images, protocols, device, cache, storage } = self.evaluation;
        let hold = Hold::new(path);
        let open = match EvaluatedNetwork::open(path, network, device) {
            Ok(open) => open,
            Err(_) if !path.exists() => return Ok(()),
            Err(error) => {
                let reason = error.to_string();
                (self.report)(WatchEvent::Unreadable { step, reason: &reason });
                return claim.give_up(&reason);
            }
        };
        // All weights have been read into memory.
        drop(hold);
        let split = match self.split.take() {
            Some(split) => split,
            None => images.open(protocols, open.transform, open.rules, storage)?,
        };
        let scores = {
            let progress = (self.new_progress)();
            split.score(&open.network, protocols, cache.as_ref(), &*progress)?
        };
        (self.report)(WatchEvent::Scored { step, scores: &scores });
        let rows = rows(&scores, &split, &open.about(path));
        self.split = Some(split);
        self.watched.n_scored += 1;
        claim.finish(&rows, &open.scalars(&rows))
    }

    /// Reports the checkpoints that the run removed before they were scored.
    fn report_missed(&mut self, ledger: &Ledger) {
        let existing: BTreeSet<u64> =
            steps(&self.workdir.join("checkpoints")).into_iter().map(|(step, _)| step).collect();
        let (Some((_, every)), Some(newest)) = (self.last, existing.last()) else { return };
        for step in (1..).map(|n| n * every.max(1)).take_while(|step| step < newest) {
            let is_missed = !existing.contains(&step) && !ledger.is_claimed(step) && !ledger.is_done(step);
            if is_missed && self.watched.missed.insert(step) {
                (self.report)(WatchEvent::Missed { step });
            }
        }
    }

    /// Returns `true` if the run has written its last checkpoint and all checkpoints have been
    /// scored.
    fn has_ended(&self, ledger: &Ledger) -> bool {
        let Some((last, _)) = self.last else { return false };
        let existing = steps(&self.workdir.join("checkpoints"));
        ledger.is_done(last) && existing.iter().all(|(step, _)| ledger.is_done(*step))
    }
}
