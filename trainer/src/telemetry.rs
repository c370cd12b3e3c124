//! What a run writes of itself: one JSON row a logged step, and TensorBoard events beside it.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tensorboard_rs::summary_writer::SummaryWriter;

use crate::error::TrainError;

/// Writer of `metrics.jsonl` and of the events.
pub struct Telemetry {
    path: PathBuf,
    file: File,
    events: SummaryWriter,
}

impl Telemetry {
    /// Opens the files of `workdir`. Rows from `next_step` on, which a killed run may have left
    /// beyond its last checkpoint, are taken out: they will be written again.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn open(workdir: &Path, next_step: u64) -> Result<Self, TrainError> {
        let path = workdir.join("metrics.jsonl");
        if let Ok(text) = fs::read_to_string(&path) {
            let before = |line: &&str| {
                serde_json::from_str::<Value>(line)
                    .ok()
                    .and_then(|row| row.get("step").and_then(Value::as_u64))
                    .is_some_and(|step| step < next_step)
            };
            let kept: String = text.lines().filter(before).flat_map(|line| [line, "\n"]).collect();
            fs::write(&path, kept).map_err(|error| TrainError::io("write", &path, error))?;
        }
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|error| TrainError::io("open", &path, error))?;
        let events = workdir.join("events");
        fs::create_dir_all(&events).map_err(|error| TrainError::io("create folder", &events, error))?;
        Ok(Self { path, file, events: SummaryWriter::new(&events) })
    }

    /// Writes one row.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn write(&mut self, step: u64, values: &[(String, f64)]) -> Result<(), TrainError> {
        let mut row = Map::new();
        row.insert("step".into(), step.into());
        for (name, value) in values {
            // JSON has no NaN; null is what readers expect in its place.
            row.insert(name.clone(), serde_json::Number::from_f64(*value).map_or(Value::Null, Value::Number));
            self.events.add_scalar(name, *value as f32, step as usize);
        }
        let mut line = Value::Object(row).to_string();
        line.push('\n');
        self.events.flush();
        self.file.write_all(line.as_bytes()).map_err(|error| TrainError::io("write", &self.path, error))
    }
}
