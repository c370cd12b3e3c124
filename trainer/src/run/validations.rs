//! Numbers by which a run is validated while it trains: which of its weights are the best, and
//! whether it ends early.
//!
//! ```text
//! best      the first of the best numbers so far; an equal number is not better
//! n         number of validations since the best; all of them if none has given a number
//! ends      if n ≥ run.patience
//! ```
//!
//! Both follow from the numbers alone. Rank 0 writes them into the work directory before the
//! checkpoint of their step, and a run that resumes takes those up to its step: so it decides as if
//! it had not been interrupted. The weights before the first step are not among them.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::{fs, io};

use networks::probe::WatchedScore;
use pipeline::file;
use pipeline::words::{counted, thousands};
use serde::{Deserialize, Serialize};

use crate::checkpoint::{Checkpoint, steps, steps_of_run};
use crate::error::TrainError;

/// Name of the file in the work directory.
const VALIDATIONS: &str = "validations.json";

/// Numbers by which a run is validated.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Validations {
    /// Name of the number.
    pub score: String,
    /// Whether larger numbers are better.
    pub is_higher_better: bool,
    /// Images on which it is measured, in words.
    pub images: String,
    /// Hash that identifies these images; `None` if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// `run.patience` of the newest start. Without it, the result of the run is its last weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patience: Option<u64>,
    /// The numbers, in the order of their steps.
    pub numbers: Vec<Validation>,
}

/// A number after a number of steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Validation {
    /// Number of steps taken.
    pub step: u64,
    /// The number; `None` if it is not finite.
    pub value: Option<f64>,
}

impl Validations {
    /// Reads the numbers of the run in `workdir`; `None` if it has none.
    ///
    /// # Errors
    /// [`TrainError::Io`], also for a damaged file.
    pub fn read(workdir: &Path) -> Result<Option<Self>, TrainError> {
        let path = path_in(workdir);
        let text = match fs::read(&path) {
            Ok(text) => text,
            // A checkpoint may be named by a file.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(error) => return Err(TrainError::io("read", &path, error)),
        };
        match serde_json::from_slice(&text) {
            Ok(validations) => Ok(Some(validations)),
            Err(error) => {
                let reason =
                    format!("{error}; remove it: the run continues, and validations are compared anew");
                Err(TrainError::io("read", &path, io::Error::new(ErrorKind::InvalidData, reason)))
            }
        }
    }

    /// Writes the numbers into `workdir`.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub(super) fn write(&self, workdir: &Path) -> Result<(), TrainError> {
        let path = path_in(workdir);
        let text = serde_json::to_vec_pretty(self).map_err(io::Error::from);
        let written = text.and_then(|text| file::replace(&path, &text));
        written.map_err(|error| TrainError::io("write", &path, error))
    }

    /// Forgets the numbers after more than `step` steps, which the run will measure again.
    pub(super) fn go_back_to(&mut self, step: u64) {
        self.numbers.retain(|validation| validation.step <= step);
    }

    /// Forgets all numbers if the weights of the best one are not in the folder `checkpoints`: a
    /// run without patience keeps the newest alone. Returns what to warn about then, in a run that
    /// continues from step `first`.
    pub(super) fn forget_if_not_kept(&mut self, checkpoints: &Path, first: u64) -> Option<String> {
        let best = self.kept_step()?;
        if steps(checkpoints).iter().any(|(saved_step, _)| *saved_step == best) {
            return None;
        }
        self.numbers.clear();
        Some(format!(
            "the weights after step {best}, the best so far by {}, were not kept, because the run had no \
             run.patience then: validations are compared from step {first} on",
            self.score
        ))
    }

    /// Returns whether `watched` was measured on the images of the numbers: by their fingerprints
    /// where both have one, else by their words.
    fn has_images_of(&self, watched: &WatchedScore) -> bool {
        match (&self.fingerprint, &watched.fingerprint) {
            (Some(known), Some(watched)) => known == watched,
            _ => self.images == watched.images,
        }
    }

    /// Sets the number that is watched. Earlier ones are forgotten if they were measured on other
    /// images, or are other numbers; returns whether there were any.
    pub(super) fn watch(&mut self, watched: WatchedScore) -> bool {
        let is_known = self.score == watched.name && self.has_images_of(&watched);
        let is_same = is_known && self.is_higher_better == watched.is_higher_better;
        let forgets = !is_same && !self.numbers.is_empty();
        if !is_same {
            self.numbers.clear();
        }
        self.score = watched.name;
        self.is_higher_better = watched.is_higher_better;
        self.images = watched.images;
        self.fingerprint = watched.fingerprint;
        forgets
    }

    /// Adds the number `value` after `step` steps.
    pub(super) fn add(&mut self, step: u64, value: f64) {
        self.numbers.push(Validation { step, value: Some(value).filter(|value| value.is_finite()) });
    }

    /// Returns whether `value` is better than `other`.
    fn is_better(&self, value: f64, other: f64) -> bool {
        if self.is_higher_better { value > other } else { value < other }
    }

    /// Returns the index and the value of the best number among those at steps for which
    /// `is_counted` holds.
    fn best_index(&self, is_counted: impl Fn(u64) -> bool) -> Option<(usize, f64)> {
        let mut best: Option<(usize, f64)> = None;
        for (index, validation) in self.numbers.iter().enumerate() {
            let Some(value) = validation.value.filter(|_| is_counted(validation.step)) else { continue };
            if best.is_none_or(|(_, known)| self.is_better(value, known)) {
                best = Some((index, value));
            }
        }
        best
    }

    /// Returns the number of steps after which the best number was measured.
    pub fn best_step(&self) -> Option<u64> {
        self.best_index(|_| true).map(|(index, _)| self.numbers[index].step)
    }

    /// Returns the number of steps whose weights are kept and are the result of the run: those of
    /// the best number, in a run with `run.patience`.
    pub fn kept_step(&self) -> Option<u64> {
        self.patience.and_then(|_| self.best_step())
    }

    /// Returns the number of validations since the best.
    fn n_since_best(&self) -> u64 {
        let n_until_best = self.best_index(|_| true).map_or(0, |(index, _)| index + 1);
        (self.numbers.len() - n_until_best) as u64
    }

    /// Returns the number of steps after which the run ends early, if it does.
    pub fn end_step(&self) -> Option<u64> {
        let patience = self.patience?;
        let newest = self.numbers.last()?;
        (self.n_since_best() >= patience).then_some(newest.step)
    }

    /// Says why a run of `total_steps` steps ends early: `ended early after 300 of 1,000 steps:
    /// top1 on 90 images of val has not become better than 91.2, after step 150, in 3 validations`;
    /// `None` if it does not.
    pub fn ending_in_words(&self, total_steps: u64) -> Option<String> {
        let end_step = self.end_step().filter(|step| *step < total_steps)?;
        let best = match self.best_index(|_| true) {
            Some((index, value)) => {
                let step = thousands(self.numbers[index].step);
                format!("has not become better than {}, after step {step},", rounded(value))
            }
            None => "has not been a number".into(),
        };
        Some(format!(
            "ended early after {} of {}: {} on {} {best} in {}",
            thousands(end_step),
            counted(total_steps, "step"),
            self.score,
            self.images,
            counted(self.n_since_best(), "validation")
        ))
    }
}

/// Formats a number with two digits after the point at most.
fn rounded(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

fn path_in(workdir: &Path) -> PathBuf {
    workdir.join(VALIDATIONS)
}

/// Opens the checkpoint in `path` as [`Checkpoint::open`] does; of the work directory of a run with
/// `run.patience`, the best one instead of the newest.
///
/// # Errors
/// [`TrainError::CheckpointRead`], [`TrainError::Io`].
pub fn open_result(path: &Path) -> Result<Checkpoint, TrainError> {
    let validations = Validations::read(path)?.filter(|validations| validations.patience.is_some());
    let Some(validations) = validations else { return Checkpoint::open(path) };
    let saved = steps_of_run(path);
    // The newest number may be of weights that are being saved.
    let best = validations.best_index(|step| saved.iter().any(|(saved_step, _)| *saved_step == step));
    let Some((index, _)) = best else { return Checkpoint::open(path) };
    let best_step = validations.numbers[index].step;
    for (step, folder) in &saved {
        if *step != best_step {
            continue;
        }
        match Checkpoint::open(folder) {
            Ok(checkpoint) => return Ok(checkpoint),
            Err(error) => tracing::warn!("{error}; trying the newest checkpoint"),
        }
    }
    Checkpoint::open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(is_higher_better: bool) -> WatchedScore {
        WatchedScore {
            name: "top1".into(),
            is_higher_better,
            images: "9 images of val".into(),
            fingerprint: None,
        }
    }

    /// Returns a run with these numbers, one every ten steps.
    fn validations(values: &[f64], is_higher_better: bool, patience: Option<u64>) -> Validations {
        let mut validations = Validations { patience, ..Validations::default() };
        assert!(!validations.watch(watched(is_higher_better)));
        for (index, value) in values.iter().enumerate() {
            validations.add(10 * (index as u64 + 1), *value);
        }
        validations
    }

    /// Returns the steps after which a run with these numbers ends, and its best step then; `None`
    /// if it does not end. The run is killed after `interrupted` steps, and resumes with the
    /// checkpoint of step `saved` and the numbers that it has written.
    fn end_and_best(
        values: &[f64],
        is_higher_better: bool,
        patience: u64,
        interrupted: u64,
        saved: u64,
    ) -> Option<(u64, u64)> {
        let mut run = validations(&[], is_higher_better, Some(patience));
        let mut written = run.clone();
        let mut step = 0;
        let mut is_interrupted = false;
        while step < 10 * values.len() as u64 {
            step += 1;
            if step.is_multiple_of(10) {
                run.add(step, values[step as usize / 10 - 1]);
                written = run.clone();
                if let Some(end_step) = run.end_step() {
                    assert_eq!(end_step, step, "a run ends after its newest validation");
                    return Some((end_step, run.kept_step().unwrap()));
                }
            }
            if step == interrupted && !is_interrupted {
                is_interrupted = true;
                run = written.clone();
                run.go_back_to(saved);
                assert!(!run.watch(watched(is_higher_better)));
                assert_eq!(run.end_step(), None, "it would have ended before");
                step = saved;
            }
        }
        None
    }

    #[test]
    fn a_run_ends_after_validations_that_are_no_better() {
        for (values, is_higher_better, patience, expected) in [
            (&[50.0, 60.0, 60.0, 59.0, 70.0, 70.0][..], true, 2, Some((40, 20))),
            (&[50.0, 60.0, 60.0, 59.0, 70.0, 70.0], true, 3, None),
            (&[50.0, 49.0], true, 1, Some((20, 10))),
            (&[2.0, 1.5, 1.6, 1.5, 1.7], false, 3, Some((50, 20))),
            (&[2.0, 1.5, f64::NAN, 1.4, 1.5], false, 2, None),
            (&[2.0, 1.5, f64::NAN, f64::INFINITY, 1.4], false, 2, Some((40, 20))),
        ] {
            let n_steps = 10 * values.len() as u64;
            for saved in 0..n_steps {
                for interrupted in saved + 1..=n_steps {
                    if expected.is_some_and(|(end_step, _)| interrupted >= end_step) {
                        continue;
                    }
                    let found = end_and_best(values, is_higher_better, patience, interrupted, saved);
                    assert_eq!(found, expected, "{values:?}, {patience}: {saved}, {interrupted}");
                }
            }
        }
    }

    #[test]
    fn a_run_without_numbers_ends_without_a_best_one() {
        let run = validations(&[f64::NAN, f64::NAN], true, Some(2));
        assert_eq!((run.end_step(), run.best_step()), (Some(20), None));
        let words = "ended early after 20 of 100 steps: top1 on 9 images of val has not been a number in 2 \
                     validations";
        assert_eq!(run.ending_in_words(100).as_deref(), Some(words));
    }

    /// Without patience there are the same numbers, and the last weights are the result. More
    /// patience continues a run that has ended.
    #[test]
    fn patience_may_change_between_starts() {
        let values = [50.0, 60.0, 59.0, 58.0];
        let none = validations(&values, true, None);
        assert_eq!((none.end_step(), none.best_step(), none.kept_step()), (None, Some(20), None));
        let some = validations(&values, true, Some(2));
        assert_eq!((some.end_step(), some.kept_step()), (Some(40), Some(20)));
        let words = "ended early after 40 of 1,000 steps: top1 on 9 images of val has not become better \
                     than 60, after step 20, in 2 validations";
        assert_eq!(some.ending_in_words(1000).as_deref(), Some(words));
        assert_eq!(some.ending_in_words(40), None, "all steps are taken");
        assert_eq!(validations(&values, true, Some(3)).end_step(), None);
        assert_eq!([rounded(91.25), rounded(0.0), rounded(100.0)], ["91.25", "0", "100"]);
    }

    #[test]
    fn numbers_of_other_images_are_forgotten() {
        let mut run = validations(&[50.0, 60.0], true, Some(2));
        assert!(!run.watch(watched(true)), "the same");
        assert_eq!(run.numbers.len(), 2);
        assert!(run.watch(WatchedScore { images: "9 images of others".into(), ..watched(true) }));
        assert_eq!((run.numbers.len(), run.images.as_str()), (0, "9 images of others"));
    }

    /// Images are recognized by their fingerprint: moved ones are the same, and others of the same
    /// name are others. A run without one has words alone.
    #[test]
    fn images_are_recognized_by_their_fingerprint() {
        let first = WatchedScore { fingerprint: Some("a".into()), ..watched(true) };
        let moved = WatchedScore { images: "9 images of moved/val".into(), ..first.clone() };
        let others = WatchedScore { fingerprint: Some("b".into()), ..moved.clone() };
        let mut run = validations(&[50.0, 60.0], true, Some(2));
        assert!(!run.watch(first), "the same words");
        assert!(!run.watch(moved), "the same fingerprint");
        assert_eq!((run.numbers.len(), run.images.as_str()), (2, "9 images of moved/val"));
        assert!(run.watch(others), "another fingerprint");
        assert_eq!((run.numbers.len(), run.fingerprint.as_deref()), (0, Some("b")));
    }

    /// The result of a run with patience is one of the weights that are saved.
    #[test]
    fn numbers_without_saved_weights_are_forgotten_with_patience() {
        let folder = tempfile::tempdir().unwrap();
        for step in [30, 40] {
            fs::create_dir(folder.path().join(format!("step-{step:010}"))).unwrap();
        }
        let values = [50.0, 60.0, 59.0, 58.0];
        let mut none = validations(&values, true, None);
        assert_eq!(none.forget_if_not_kept(folder.path(), 40), None);
        assert_eq!(none.numbers.len(), 4);
        let mut pruned = validations(&values, true, Some(3));
        let warning = pruned.forget_if_not_kept(folder.path(), 40).unwrap();
        assert!(warning.contains("after step 20") && warning.contains("from step 40 on"), "{warning}");
        assert_eq!((pruned.numbers.len(), pruned.kept_step(), pruned.end_step()), (0, None, None));
        let mut kept = validations(&[50.0, 60.0, 61.0, 58.0], true, Some(3));
        assert_eq!(kept.forget_if_not_kept(folder.path(), 40), None);
        assert_eq!(kept.kept_step(), Some(30));
    }

    /// A number is read as it was written, to the last bit.
    #[test]
    fn numbers_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Validations::read(folder.path()).unwrap(), None);
        let run = validations(&[0.1 + 0.2, f64::NAN, 100.0 / 3.0], false, Some(7));
        run.write(folder.path()).unwrap();
        assert_eq!(Validations::read(folder.path()).unwrap(), Some(run));
        fs::write(folder.path().join(VALIDATIONS), "{").unwrap();
        let error = Validations::read(folder.path()).unwrap_err();
        assert!(matches!(error, TrainError::Io { .. }) && error.to_string().contains("remove it"), "{error}");
    }
}
