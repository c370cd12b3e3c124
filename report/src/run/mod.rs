//! Runs as read from the files of their work directories.

pub(crate) mod jsonl;
pub(crate) mod learning;
pub(crate) mod metrics;
pub(crate) mod overview;
pub(crate) mod quarantine;
pub(crate) mod scores;
pub(crate) mod seeds;
pub(crate) mod start;

use std::path::{Path, PathBuf};

use trainer::Plan;
use trainer::run::status::Status;
use trainer::run::telemetry::{WARNINGS, Warning};

use crate::ReportError;
use metrics::Metrics;
use quarantine::BadSample;
use scores::Evaluations;
use start::Start;

/// A run.
#[derive(Debug, Clone)]
pub struct Run {
    /// Work directory of the run.
    pub workdir: PathBuf,
    /// State of the run, its steps and its plan.
    pub status: Status,
    /// Logged rows.
    pub(crate) metrics: Metrics,
    /// Scores of the run's checkpoints.
    pub(crate) evaluations: Evaluations,
    /// Warnings of the run, in the order of the steps.
    pub(crate) warnings: Vec<Warning>,
    /// Samples that could not be used.
    pub(crate) bad: Vec<BadSample>,
    /// Last start of the run, where it is known.
    pub start: Option<Start>,
}

impl Run {
    /// Reads the run in `workdir`. Files that are missing count as empty; damaged lines are
    /// skipped.
    ///
    /// # Errors
    /// [`ReportError::Run`] where there is no run of this release, [`ReportError::Read`].
    pub fn open(workdir: &Path) -> Result<Self, ReportError> {
        let status = Status::read(workdir)?;
        let result_step = status.result_step();
        Ok(Self {
            metrics: Metrics::read(workdir)?,
            evaluations: Evaluations::read(workdir, status.plan.evaluated()?, result_step)?,
            status,
            warnings: jsonl::rows(&workdir.join(WARNINGS))?,
            bad: quarantine::read(workdir)?,
            start: Start::read_newest(workdir)?,
            workdir: workdir.to_path_buf(),
        })
    }

    /// Returns the name of the run's folder.
    pub fn name(&self) -> String {
        let path = self.workdir.canonicalize().unwrap_or_else(|_| self.workdir.clone());
        path.file_name()
            .map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
    }

    /// Returns the path of the run below `folder`, or its name if it is not below it.
    pub fn name_below(&self, folder: &Path) -> String {
        match self.workdir.strip_prefix(folder) {
            Ok(below) if !below.as_os_str().is_empty() => below.display().to_string(),
            _ => self.name(),
        }
    }

    /// Returns the logged numbers, column by column: steps taken, and the value.
    pub fn columns(&self) -> impl Iterator<Item = (&str, &[(u64, f64)])> {
        self.metrics.0.iter().map(|(name, points)| (name.as_str(), points.as_slice()))
    }

    /// Returns the work directories below `folder`, or `folder` itself if it is one, in the order
    /// of their names.
    pub fn workdirs_in(folder: &Path) -> Vec<PathBuf> {
        let mut workdirs = Vec::new();
        collect_workdirs(folder, 0, &mut workdirs);
        workdirs.sort();
        workdirs
    }
}

/// Limit of the depth of folders that are searched for runs.
const MAX_DEPTH: usize = 4;

fn collect_workdirs(folder: &Path, depth: usize, workdirs: &mut Vec<PathBuf>) {
    if Plan::path_in(folder).is_file() {
        workdirs.push(folder.to_path_buf());
        return;
    }
    if depth == MAX_DEPTH {
        return;
    }
    // A folder that cannot be listed holds no run that could be shown.
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        // Links are not followed: they may lead in a circle.
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect_workdirs(&entry.path(), depth + 1, workdirs);
        }
    }
}
