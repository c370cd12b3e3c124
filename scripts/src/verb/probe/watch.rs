//! `ocelli probe --watch`: scores every checkpoint of a run once, as it appears.
use pipeline::secrets::redact_list;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::bail;
use eval::Split;
use serde_json::json;
use trainer::checkpoint::{Checkpoint, Hold, steps};
use xxhash_rust::xxh3::xxh3_64;

use super::job::{Args, Means, split, test_name};
use super::ledger::{Claim, Ledger};
use crate::console::say;
use crate::evaluation::record;
use crate::evaluation::scores::rows;
use crate::progress::StageBar;

/// Interval at which the folder is listed.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Longest time to wait for a run that has not started.
const START_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// Scores the checkpoints of the run in `workdir` until it has ended and all are scored.
pub(super) fn watch(args: &Args, workdir: &Path, means: &Means<'_>) -> anyhow::Result<ExitCode> {
    await_run(workdir)?;
    let ledger = Ledger::open(workdir, name(args, means))?;
    let mut watcher = Watcher { args, means, split: None, last: None, n_scored: 0, missed: BTreeSet::new() };
    loop {
        watcher.last = watcher.last.or_else(|| read_length(workdir));
        let mut is_idle = true;
        for (step, path) in steps(&workdir.join("checkpoints")) {
            let Some(claim) = ledger.claim(step)? else { continue };
            is_idle = false;
            watcher.score(claim, step, &path)?;
        }
        watcher.report_missed(workdir, &ledger);
        if watcher.has_ended(workdir, &ledger) {
            break;
        }
        if is_idle {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
    if args.json {
        out!("{}", json!({ "scored": watcher.n_scored, "missed": watcher.missed }));
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits until `workdir` contains a run.
fn await_run(workdir: &Path) -> anyhow::Result<()> {
    let start = Instant::now();
    while !workdir.join("plan.toml").exists() {
        if start.elapsed() < POLL_INTERVAL {
            say(format!("waiting for a run in {}", workdir.display()));
        }
        if start.elapsed() > START_TIMEOUT {
            bail!("no run in {}", workdir.display());
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

/// Returns the name of an evaluation by its sets and settings: evaluations of the same run with
/// others have separate records.
fn name(args: &Args, means: &Means<'_>) -> String {
    let set: String =
        test_name(args).chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let train: Vec<_> = args.train.iter().map(|spec| redact_list(spec)).collect();
    let test: Vec<_> = args.test.iter().map(|spec| redact_list(spec)).collect();
    let settings = json!({
        "train": train,
        "test": test,
        "protocols": means.protocols,
        "image_px": args.network.image_px,
        "resize_px": args.network.resize_px,
        "network": args.network.network,
        "seed": args.protocols.seed,
    });
    format!("{set}-{:08x}", xxh3_64(settings.to_string().as_bytes()) as u32)
}

/// A process that watches a run.
struct Watcher<'a> {
    args: &'a Args,
    means: &'a Means<'a>,
    /// Images, once a checkpoint has determined their size.
    split: Option<Split>,
    /// Last step of the run and its checkpoint interval, once a checkpoint has been read.
    last: Option<(u64, u64)>,
    n_scored: u64,
    /// Steps whose checkpoints were removed before they were scored.
    missed: BTreeSet<u64>,
}

impl Watcher<'_> {
    /// Scores the checkpoint in `path`. A checkpoint that has been removed is recorded as missed,
    /// one that cannot be read as unreadable.
    fn score(&mut self, claim: Claim<'_>, step: u64, path: &Path) -> anyhow::Result<()> {
        let hold = Hold::new(path);
        let open = match self.args.network.open(path, &self.means.device) {
            Ok(open) => open,
            Err(_) if !path.exists() => return Ok(()),
            Err(error) => {
                say(format!("cannot score step {step}: {error:#}"));
                return claim.give_up(&format!("{error:#}"));
            }
        };
        // All weights have been read into memory.
        drop(hold);
        let split = match self.split.take() {
            Some(split) => split,
            None => split(self.args, &open, &self.means.protocols, self.means.storage)?,
        };
        let scores = {
            let progress = StageBar::new();
            split.score(&open.network, &self.means.protocols, self.means.cache.as_ref(), &progress)?
        };
        let numbers: Vec<(String, f64)> = scores.by_name().collect();
        let texts: Vec<String> = numbers.iter().map(|(name, value)| format!("{name} {value:.2}")).collect();
        say(format!("step {step}: {}", texts.join("  ")));
        let rows = rows(&scores, &split, &open.about(path));
        let scalars = record::scalars(&open, &rows);
        self.split = Some(split);
        self.n_scored += 1;
        claim.finish(&rows, &scalars)
    }

    /// Prints the checkpoints that the run removed before they were scored.
    fn report_missed(&mut self, workdir: &Path, ledger: &Ledger) {
        let existing: BTreeSet<u64> =
            steps(&workdir.join("checkpoints")).into_iter().map(|(step, _)| step).collect();
        let (Some((_, every)), Some(newest)) = (self.last, existing.last()) else { return };
        for step in (1..).map(|n| n * every.max(1)).take_while(|step| step < newest) {
            let is_missed = !existing.contains(&step) && !ledger.is_claimed(step) && !ledger.is_done(step);
            if is_missed && self.missed.insert(step) {
                say(format!(
                    "step {step} was pruned before it was scored; increase run.keep_checkpoints to keep more"
                ));
            }
        }
    }

    /// Returns `true` if the run has written its last checkpoint and all checkpoints have been
    /// scored.
    fn has_ended(&self, workdir: &Path, ledger: &Ledger) -> bool {
        let Some((last, _)) = self.last else { return false };
        let existing = steps(&workdir.join("checkpoints"));
        ledger.is_done(last) && existing.iter().all(|(step, _)| ledger.is_done(*step))
    }
}
