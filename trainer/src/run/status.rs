//! State of a run, such as running, finished or dead, read from its work directory.

use std::fmt;
use std::path::Path;

use super::heartbeat::{Heartbeat, RankState, rank_state, read_heartbeats};
use super::validations::Validations;
use super::workdir::read_plan;
use crate::checkpoint::steps_of_run;
use crate::error::TrainError;
use crate::recipe::plan::Plan;

/// State of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// The ranks are alive.
    Running,
    /// All steps are taken, or the run has ended early because it did not become better.
    Finished,
    /// The run was asked to stop; the same command resumes it.
    Stopped,
    /// A rank gave up, for the reason that it recorded.
    Failed(String),
    /// A rank has ended without notice, or its heartbeat has stopped.
    Died(String),
    /// No rank has written a heartbeat yet.
    NotStarted,
}

/// Status of a run.
#[derive(Debug, Clone)]
pub struct Status {
    /// State of the run.
    pub state: State,
    /// Steps taken, as far as is known.
    pub step: u64,
    /// Plan of the run.
    pub plan: Plan,
    /// Plan as text, without secrets, even if an older release has written some to the file.
    pub plan_toml: String,
    /// Numbers by which the run is validated, if it is.
    pub validations: Option<Validations>,
    /// Why the run has ended before its last step, if it has: `ended early after 300 of 1,000
    /// steps: …`.
    pub early_end: Option<String>,
}

impl Status {
    /// Reads the status of the run in `workdir`. Nothing is locked or written, so the run is not
    /// disturbed.
    ///
    /// # Errors
    /// [`TrainError::NoRun`] if there is none, [`TrainError::Recipe`] for a run of another release,
    /// [`TrainError::Io`].
    pub fn read(workdir: &Path) -> Result<Self, TrainError> {
        let Some((_, plan)) = read_plan(workdir)? else {
            return Err(TrainError::NoRun { workdir: workdir.to_path_buf() });
        };
        let plan_toml = plan.to_toml();
        let newest = steps_of_run(workdir).last().map_or(0, |(step, _)| *step);
        let beats = read_heartbeats(workdir, plan.world_size);
        // A rank that left names the step that it was in, which may not have ended.
        let step = beats.iter().map(|beat| beat.step).min().unwrap_or(newest).max(newest);
        let validations = Validations::read(workdir)?;
        let mut early_end = None;
        if let Some(validations) = &validations
            && validations.end_step().is_some_and(|end_step| newest >= end_step)
        {
            early_end = validations.ending_in_words(plan.total_steps);
        }
        let has_ended = newest >= plan.total_steps || early_end.is_some();
        let state = if has_ended { State::Finished } else { state(&beats) };
        Ok(Self { state, step: step.min(plan.total_steps), plan, plan_toml, validations, early_end })
    }

    /// Returns the number of steps after which the weights are the result of the run: its last
    /// step, or the best one of a run with `run.patience`, once it has ended.
    pub fn result_step(&self) -> u64 {
        let kept_step = self.validations.as_ref().and_then(Validations::kept_step);
        kept_step.filter(|_| self.state == State::Finished).unwrap_or(self.plan.total_steps)
    }
}

/// Determines the state of a run with steps left from its heartbeats.
fn state(beats: &[Heartbeat]) -> State {
    let Some(first) = beats.first() else { return State::NotStarted };
    // A rank that failed by itself comes before ranks that left because they lost another one.
    let failed = beats.iter().filter(|beat| beat.reason.is_some()).max_by_key(|beat| beat.by_itself);
    if let Some(beat) = failed
        && let Some(reason) = &beat.reason
    {
        return State::Failed(format!("rank {}: {reason}", beat.rank));
    }
    for beat in beats {
        if let RankState::Gone(reason) = rank_state(beat) {
            return State::Died(format!(
                "rank {} in step {}, {}: {reason}",
                beat.rank, beat.step, beat.phase
            ));
        }
    }
    match rank_state(first) {
        RankState::Left => State::Stopped,
        RankState::Alive | RankState::Gone(_) => State::Running,
    }
}

impl State {
    /// Name of the state, such as `running`.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Finished => "finished",
            Self::Stopped => "stopped",
            Self::Failed(_) => "failed",
            Self::Died(_) => "died",
            Self::NotStarted => "not started",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(why) | Self::Died(why) => write!(f, "{}: {why}", self.word()),
            _ => f.write_str(self.word()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::clock::now_s;

    fn beat(rank: usize, phase: &str, age_s: f64) -> Heartbeat {
        Heartbeat {
            rank,
            host: "another machine".into(),
            pid: 1,
            at_s: now_s() - age_s,
            step: 7,
            phase: phase.into(),
            number: 0,
            collective: String::new(),
            unit: String::new(),
            reason: None,
            by_itself: false,
        }
    }

    fn failed_beat(rank: usize, by_itself: bool, reason: &str) -> Heartbeat {
        Heartbeat { reason: Some(reason.into()), by_itself, ..beat(rank, "leaving", 9.0) }
    }

    #[test]
    fn state_of_a_run_follows_from_its_heartbeats() {
        assert_eq!(state(&[]), State::NotStarted);
        assert_eq!(state(&[beat(0, "forward", 1.0), beat(1, "forward", 0.0)]), State::Running);
        assert_eq!(state(&[beat(0, "leaving", 1e6), beat(1, "leaving", 1e6)]), State::Stopped);
        let died = state(&[beat(0, "forward", 1.0), beat(1, "backward", 60.0)]);
        assert!(matches!(&died, State::Died(how) if how.contains("rank 1 in step 7, backward")), "{died}");
        let failed =
            state(&[failed_beat(0, false, "rank 1 is lost"), failed_beat(1, true, "the disk is full")]);
        assert_eq!(failed, State::Failed("rank 1: the disk is full".into()));
    }
}
