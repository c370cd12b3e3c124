//! A shard that is created with its first sample: one without samples leaves no file.

use std::path::PathBuf;

use pipeline::PipelineError;
use pipeline::shard::write::ShardFile;

/// A shard that is being written, once it has a sample.
pub(crate) struct LazyShard {
    path: PathBuf,
    file: Option<ShardFile>,
}

impl LazyShard {
    /// Creates the shard whose final path is `path`, without a file.
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, file: None }
    }

    /// Returns the file, which is created if there is none yet.
    ///
    /// # Errors
    /// As [`ShardFile::create`].
    pub(crate) fn file(&mut self) -> Result<&mut ShardFile, PipelineError> {
        let file = match self.file.take() {
            Some(file) => file,
            None => ShardFile::create(&self.path)?,
        };
        Ok(self.file.insert(file))
    }

    /// Finishes the file; returns whether there is one.
    ///
    /// # Errors
    /// As [`ShardFile::finish`].
    pub(crate) fn finish(self) -> Result<bool, PipelineError> {
        match self.file {
            Some(file) => {
                file.finish()?;
                Ok(true)
            }
            None => Ok(false),
        }
    }
}
