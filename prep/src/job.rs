//! Descriptions of jobs: everything that affects the results, as JSON, recorded beside them.
//!
//! A job that was stopped continues when its command is run again. Its description is compared with
//! the recorded one, so that results of different jobs are not mixed: one description for a folder
//! or for a prefix of shards, one in each result of a part.

use std::fs;
use std::path::Path;

use pipeline::file;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::PrepError;

/// Description of a job. Equal jobs have the same results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Job(pub(crate) Value);

impl Job {
    /// Reads the job that is recorded in the file `mark`; `None` if there is no such file.
    ///
    /// # Errors
    /// [`PrepError::Io`], or [`PrepError::Json`] if the description is damaged.
    pub(crate) fn read(mark: &Path) -> Result<Option<Self>, PrepError> {
        match fs::read(mark) {
            Ok(bytes) => {
                serde_json::from_slice(&bytes).map(Some).map_err(|error| PrepError::json(mark, error))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(PrepError::io("read", mark, error)),
        }
    }

    /// Records the job in the file `mark`, in place of another.
    ///
    /// # Errors
    /// [`PrepError::Io`].
    pub(crate) fn replace(&self, mark: &Path) -> Result<(), PrepError> {
        file::replace(mark, self.text().as_bytes()).map_err(|error| PrepError::io("write", mark, error))
    }

    /// Records the job in the file `mark` unless the file exists. Returns `false` if it records a
    /// different job, which another process has just begun.
    ///
    /// # Errors
    /// [`PrepError::Io`], or [`PrepError::Json`] if the existing description is damaged.
    pub(crate) fn create(&self, mark: &Path) -> Result<bool, PrepError> {
        let is_new = file::create_new(mark, self.text().as_bytes())
            .map_err(|error| PrepError::io("write", mark, error))?;
        Ok(is_new || Self::read(mark)?.as_ref() == Some(self))
    }

    /// Returns the verb of the job, if the description states it.
    pub(crate) fn verb(&self) -> Option<&str> {
        self.0["verb"].as_str()
    }

    fn text(&self) -> String {
        format!("{}\n", self.0)
    }
}
