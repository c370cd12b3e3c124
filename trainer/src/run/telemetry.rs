//! Records of a run: one JSON row per logged step, and TensorBoard events.

use std::fs;
use std::fs::File;
use std::io;
use std::io::Write;
use std::path::{Path, PathBuf};

use pipeline::file::{self, open_append};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::events::Events;
use super::health::Concern;
use crate::error::TrainError;
use crate::recipe::plan::Plan;

/// File with one row per logged step.
pub const METRICS: &str = "metrics.jsonl";

/// File with the warnings of the run.
pub const WARNINGS: &str = "warnings.jsonl";

/// File with the kernel of each size of matrix products on a GPU; each start records them again.
pub const KERNELS: &str = "kernels.jsonl";

/// Writer of `metrics.jsonl`, `warnings.jsonl`, `kernels.jsonl` and of the events.
pub struct Telemetry {
    workdir: PathBuf,
    path: PathBuf,
    file: File,
    events: Events,
}

/// A line of `warnings.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Warning {
    /// Step to which the warning refers, counted from 0.
    pub step: u64,
    /// Subject of the warning.
    pub concern: Concern,
    /// Message.
    pub message: String,
}

/// A line of `kernels.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProductKernel {
    /// First logged step by which the size had been used, counted from 0.
    pub step: u64,
    /// Set of kernels of the run.
    pub kernels: String,
    /// Size, types and layout.
    pub size: String,
    /// The library's algorithm, or the kernels that are used in its place.
    pub kernel: String,
    /// Result of the check at its first use.
    pub checked: String,
}

impl Telemetry {
    /// Opens the files of `workdir` for a run that resumes at `next_step`. Rows and warnings from
    /// there on, which a killed run may have left beyond its last checkpoint, are removed, because
    /// the run will write them again. Warnings of a run that rolls back by itself stay, because
    /// they give the reason.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn open(workdir: &Path, next_step: u64) -> Result<Self, TrainError> {
        remove_rows_from(&workdir.join(WARNINGS), next_step)?;
        remove_rows_from(&workdir.join(KERNELS), next_step)?;
        Self::roll_back(workdir, next_step)
    }

    /// Opens the files like [`Telemetry::open`] for a run that rolls back by itself, whose warnings
    /// stay.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub(crate) fn roll_back(workdir: &Path, next_step: u64) -> Result<Self, TrainError> {
        remove_rows_from(&workdir.join(METRICS), next_step)?;
        Self::append(workdir)
    }

    /// Opens the files of `workdir` for appending. Other processes may append at the same time.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn append(workdir: &Path) -> Result<Self, TrainError> {
        let path = workdir.join(METRICS);
        let file = open_append(&path).map_err(|error| TrainError::io("open", &path, error))?;
        Ok(Self { workdir: workdir.to_path_buf(), path, file, events: Events::open(workdir)? })
    }

    /// Writes one row.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn write(&mut self, step: u64, values: &[(String, f64)]) -> Result<(), TrainError> {
        let mut row = Map::new();
        row.insert("step".into(), step.into());
        for (name, value) in values {
            // JSON has no NaN; readers expect null in its place.
            row.insert(name.clone(), serde_json::Number::from_f64(*value).map_or(Value::Null, Value::Number));
            // Unlike in the rows of this file, steps of events are the number of steps taken.
            self.events.scalar(step + 1, name, *value)?;
        }
        let mut line = Value::Object(row).to_string();
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(|error| TrainError::io("write", &self.path, error))
    }

    /// Writes the plan for TensorBoard: as text, and the values of its recipe as hyperparameters.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub(crate) fn write_plan(&mut self, step: u64, plan: &Plan) -> Result<(), TrainError> {
        // Indented text is shown verbatim.
        let lines: String = plan.to_toml().lines().map(|line| format!("    {line}\n")).collect();
        self.events.text(step, "plan", &lines)?;
        self.events.hyperparameters(&plan.recipe.values())
    }

    /// Writes a warning.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub(crate) fn warn(&mut self, step: u64, concern: Concern, message: &str) -> Result<(), TrainError> {
        self.append_line(WARNINGS, &Warning { step, concern, message: message.into() })
    }

    /// Writes the kernel of a size.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub(crate) fn write_kernel(&mut self, kernel: &ProductKernel) -> Result<(), TrainError> {
        self.append_line(KERNELS, kernel)
    }

    /// Appends a line to a file of the work directory.
    fn append_line(&self, name: &str, value: &impl Serialize) -> Result<(), TrainError> {
        let path = self.workdir.join(name);
        write_line(&path, value).map_err(|error| TrainError::io("write", &path, error))
    }
}

/// Appends a line of JSON to `path`. The file is opened for each line, because lines are rare.
fn write_line(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_string(value)?;
    line.push('\n');
    open_append(path)?.write_all(line.as_bytes())
}

/// Removes the rows of the JSON lines in `path` from `next_step` on. Rows that cannot be read are
/// moved into another file in the same folder, except for an incomplete last row, which a killed
/// run can leave.
fn remove_rows_from(path: &Path, next_step: u64) -> Result<(), TrainError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(TrainError::io("read", path, error)),
    };
    let mut kept = Vec::with_capacity(bytes.len());
    let mut damaged = Vec::new();
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        let row = serde_json::from_slice::<Value>(line).ok();
        match row.and_then(|row| row.get("step").and_then(Value::as_u64)) {
            Some(step) if step < next_step && line.ends_with(b"\n") => kept.extend_from_slice(line),
            Some(_) => {}
            None if line.ends_with(b"\n") => damaged.extend_from_slice(line),
            None => {}
        }
    }
    if !damaged.is_empty() {
        let damaged_path = PathBuf::from(format!("{}.damaged", path.display()));
        let file = open_append(&damaged_path);
        let written = file.and_then(|mut file| file.write_all(&damaged));
        written.map_err(|error| TrainError::io("write", &damaged_path, error))?;
        tracing::warn!(
            "{} has rows that cannot be read; they were moved to {}",
            path.display(),
            damaged_path.display()
        );
    }
    if kept == bytes {
        Ok(())
    } else {
        file::replace(path, &kept).map_err(|error| TrainError::io("write", path, error))
    }
}

/// Writes numbers into a new file of TensorBoard events in `workdir`, and into no other file.
///
/// # Errors
/// [`TrainError::Io`].
pub fn append_scalars(workdir: &Path, step: u64, values: &[(String, f64)]) -> Result<(), TrainError> {
    let mut events = Events::open(workdir)?;
    values.iter().try_for_each(|(name, value)| events.scalar(step, name, *value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_removed_even_between_damaged_ones() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(METRICS);
        let rows: &[u8] = b"{\"step\":1}\n{\"st\xffep\":2}\n{\"step\":3}\n{\"step\":4}\n{\"ste";
        fs::write(&path, rows).unwrap();
        remove_rows_from(&path, 4).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"{\"step\":1}\n{\"step\":3}\n");
        assert_eq!(fs::read(folder.path().join("metrics.jsonl.damaged")).unwrap(), b"{\"st\xffep\":2}\n");
        remove_rows_from(&path, 4).unwrap();
        assert_eq!(fs::read(folder.path().join("metrics.jsonl.damaged")).unwrap().len(), 12, "once");
        remove_rows_from(&folder.path().join("none"), 4).unwrap();
    }
}
