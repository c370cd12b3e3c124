//! What a run writes of itself: one JSON row a logged step, and TensorBoard events beside it.

use std::fs;
use std::fs::{File, OpenOptions};
use std::io;
use std::io::Write;
use std::path::{Path, PathBuf};

use pipeline::file;
use protobuf::Message;
use serde_json::{Map, Value};
use tensorboard_proto::event::Event;
use tensorboard_rs::record_writer::RecordWriter;
use tensorboard_rs::summary;

use super::clock::now_s;
use crate::error::TrainError;

/// Writer of `metrics.jsonl` and of the events.
pub struct Telemetry {
    path: PathBuf,
    file: File,
    events: Events,
}

impl Telemetry {
    /// Opens the files of `workdir` for a run that goes on at `next_step`. Rows from there on, which
    /// a killed run may have left beyond its last checkpoint, are taken out: they will be written
    /// again.
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
            if kept != text {
                let written = file::replace(&path, kept.as_bytes());
                written.map_err(|error| TrainError::io("write", &path, error))?;
            }
        }
        Self::append(workdir)
    }

    /// Opens the files of `workdir` to add to them, whoever else does.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn append(workdir: &Path) -> Result<Self, TrainError> {
        let path = workdir.join("metrics.jsonl");
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|error| TrainError::io("open", &path, error))?;
        Ok(Self { path, file, events: Events::open(workdir)? })
    }

    /// Writes one row.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn write(&mut self, step: u64, values: &[(String, f64)]) -> Result<(), TrainError> {
        let mut row = Map::new();
        row.insert("step".into(), step.into());
        for (name, value) in values {
            // JSON has no NaN; null is what readers expect in its topology.
            row.insert(name.clone(), serde_json::Number::from_f64(*value).map_or(Value::Null, Value::Number));
            self.events.scalar(step, name, *value)?;
        }
        let mut line = Value::Object(row).to_string();
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(|error| TrainError::io("write", &self.path, error))
    }
}

/// Writes numbers into the TensorBoard events of `workdir` alone, in a file of their own.
///
/// # Errors
/// [`TrainError::Io`].
pub fn append_scalars(workdir: &Path, step: u64, values: &[(String, f64)]) -> Result<(), TrainError> {
    let mut events = Events::open(workdir)?;
    values.iter().try_for_each(|(name, value)| events.scalar(step, name, *value))
}

/// A file of TensorBoard events.
struct Events {
    path: PathBuf,
    writer: RecordWriter<File>,
}

impl Events {
    /// A new file in the folder of `workdir`.
    fn open(workdir: &Path) -> Result<Self, TrainError> {
        let folder = workdir.join("events");
        fs::create_dir_all(&folder).map_err(|error| TrainError::io("create folder", &folder, error))?;
        let now = now_s();
        let name = format!("events.out.tfevents.{:010}.ocelli.{}.0", now as u64, std::process::id());
        let path = folder.join(name);
        let open = || -> io::Result<RecordWriter<File>> {
            let mut writer = RecordWriter::new(File::create(&path)?);
            let mut version = Event::new();
            version.set_wall_time(now);
            version.set_file_version("brain.Event:2".into());
            writer.write(&version.write_to_bytes().map_err(io::Error::other)?)?;
            Ok(writer)
        };
        let writer = open().map_err(|error| TrainError::io("write", &path, error))?;
        Ok(Self { path, writer })
    }

    fn scalar(&mut self, step: u64, name: &str, value: f64) -> Result<(), TrainError> {
        let mut event = Event::new();
        event.set_wall_time(now_s());
        event.set_step(step as i64);
        event.set_summary(summary::scalar(name, value as f32));
        let bytes = event.write_to_bytes().map_err(io::Error::other);
        let written = bytes.and_then(|bytes| self.writer.write(&bytes));
        written.map_err(|error| TrainError::io("write", &self.path, error))
    }
}
