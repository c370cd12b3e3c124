//! Output folder of a job: lists, pictures, clusters, and shards of the kept images.

use std::path::{Path, PathBuf};

use pipeline::{Progress, Storage};
use prep::PrepError;
use prep::classes::ClassNames;
use prep::folder_lock::{FolderLock, lock_for};
use prep::open::split_folders;
use prep::rewrite::{JOB_FILE, claim};
use prep::samples::{SampleOptions, check_keys, write_samples};
use ranks::communicator::Communicator;
use serde_json::json;

use super::agreement::all_succeed;
use super::input::{Images, Input};
use super::job::Job;
use super::lists::{Columns, KEPT, LIST, write_lists};
use super::{clusters, quality};
use crate::CurateError;

/// File name of the sheet of pairs around a threshold.
pub const PAIRS: &str = "pairs.png";

/// File name of the sheet of the most outlying images.
pub const OUTLIERS: &str = "outliers.png";

/// File name of the page of clusters.
pub const MAP: &str = "map.html";

/// Names of the files of a job, besides shards.
const RESULTS: [&str; 8] =
    [LIST, KEPT, PAIRS, OUTLIERS, MAP, quality::FILE, clusters::FILE, clusters::UNFINISHED];

/// Settings of the output.
#[derive(Debug, Clone)]
pub struct OutputSettings {
    /// The folder. A job that was stopped continues in it.
    pub folder: PathBuf,
    /// Whether the kept images are written as shards.
    pub pack: bool,
    /// Prefix of the names of shards.
    pub prefix: String,
    /// How shards are written.
    pub shards: SampleOptions,
    /// Whether the output of another job is deleted.
    pub overwrite: bool,
}

/// An output folder that belongs to a job.
pub struct OutputFolder<'a> {
    settings: OutputSettings,
    /// Features and images of the job.
    pub(super) input: &'a Input,
    storage: &'a Storage,
    /// Whether this process writes: only the first rank does.
    pub is_writer: bool,
    _lock: FolderLock,
}

impl OutputSettings {
    /// Claims the folder, which must be empty or hold output of the same job; parts of the same job
    /// may work in it at the same time. All ranks call it.
    ///
    /// # Errors
    /// [`CurateError::Prep`] if the folder is in use, holds another job or input shards, or if keys
    /// of samples are repeated; [`CurateError::UserFile`] if the folder has a file with the name of
    /// a result and no job; [`CurateError::PackWithoutImages`] if shards are to be written and the
    /// job has no images; [`CurateError::PeersFailed`] if another rank fails.
    pub fn claim<'a>(
        self,
        job: &Job,
        input: &'a Input,
        storage: &'a Storage,
        ranks: &Communicator,
    ) -> Result<OutputFolder<'a>, CurateError> {
        let is_writer = ranks.topology().rank == 0;
        let lock = all_succeed(ranks, self.prepare_and_lock(job, input, is_writer))?;
        Ok(OutputFolder { settings: self, input, storage, is_writer, _lock: lock })
    }

    /// Checks the keys; if `is_writer` is set, also checks and locks the folder, removes the output
    /// of another job if that is allowed, and records this job.
    fn prepare_and_lock(&self, job: &Job, input: &Input, is_writer: bool) -> Result<FolderLock, CurateError> {
        if self.pack && !self.shards.renumber {
            let images = input.images.as_ref().ok_or(CurateError::PackWithoutImages)?;
            check_keys((0..input.names.len()).map(|row| images.locate(row)))?;
        }
        if !is_writer {
            return Ok(FolderLock::default());
        }
        let mut settings = job.settings.clone();
        settings["shards"] = json!(input.sources());
        let samples = input.images.as_ref().map(|images| images.dataset.samples_fingerprint());
        settings["samples"] = json!(samples.map(|hash| format!("{hash:016x}")));
        settings["pack"] = json!([self.pack, self.prefix, self.shards.identity()]);
        if job.work.n_parts() > 1 {
            settings["parts"] = json!(job.work.n_parts());
        }
        if !self.folder.join(JOB_FILE).exists() {
            self.check_no_user_files()?;
        }
        if let Some(images) = &input.images {
            self.refuse_input_folder(images)?;
        }
        let lock = lock_for(job.work, &self.folder, job.verb)?;
        if self.overwrite && self.folder.join(JOB_FILE).exists() {
            // The results of another job must not be taken for results of this one.
            self.remove_results()?;
        }
        claim(input.identity.clone(), &self.folder, job.verb, &settings, self.overwrite)?;
        Ok(lock)
    }

    /// Refuses a folder without a job that has files with the names of results.
    fn check_no_user_files(&self) -> Result<(), CurateError> {
        for name in RESULTS {
            if self.folder.join(name).exists() {
                return Err(CurateError::UserFile { folder: self.folder.clone(), name });
            }
        }
        Ok(())
    }

    /// Refuses a folder that holds input shards, which would be replaced.
    fn refuse_input_folder(&self, images: &Images) -> Result<(), CurateError> {
        let real_folder = self.folder.canonicalize().ok();
        for shard in images.dataset.shards() {
            let path = PathBuf::from(shard.name());
            let real_path = path.canonicalize().ok();
            let shard_folder = real_path.as_deref().and_then(Path::parent);
            if real_folder.is_some() && shard_folder == real_folder.as_deref() {
                return Err(PrepError::InOutput { path }.into());
            }
        }
        Ok(())
    }

    fn remove_results(&self) -> Result<(), CurateError> {
        for name in RESULTS {
            let path = self.folder.join(name);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(CurateError::io("remove", &path, error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl OutputFolder<'_> {
    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.settings.folder
    }

    /// Writes the list of all images, with `columns` for each row, and the list of the kept ones.
    /// Returns the number of kept images.
    ///
    /// # Errors
    /// [`CurateError::Io`] if a list cannot be written.
    pub fn write_lists(
        &self,
        kept: &[bool],
        columns: &dyn Fn(usize) -> Columns,
    ) -> Result<usize, CurateError> {
        write_lists(self.folder(), &self.input.names, kept, columns)
    }

    /// Writes the kept images as shards. Returns the number of shards.
    ///
    /// # Errors
    /// [`CurateError::PackWithoutImages`] if the job has no images, [`CurateError::NothingKept`] if
    /// none is kept, and [`CurateError::Prep`] or [`CurateError::Data`] if shards cannot be read or
    /// written.
    pub fn pack(&self, kept: &[bool], progress: &dyn Progress) -> Result<usize, CurateError> {
        let images = self.input.images.as_ref().ok_or(CurateError::PackWithoutImages)?;
        let samples: Vec<_> =
            (0..kept.len()).filter(|row| kept[*row]).map(|row| images.locate(row)).collect();
        if samples.is_empty() {
            return Err(CurateError::NothingKept);
        }
        copy_class_names(&images.specs, self.storage, self.folder())?;
        progress.begin("pack", samples.len() as u64);
        let OutputSettings { folder, prefix, shards, .. } = &self.settings;
        Ok(write_samples(folder, prefix, shards, &samples, progress)?)
    }
}

/// Copies the class list that lies beside the shards of `specs`, if any.
fn copy_class_names(specs: &[String], storage: &Storage, folder: &Path) -> Result<(), CurateError> {
    let sources = split_folders(specs)?.sources(storage)?;
    Ok(ClassNames::read(&sources)?.copy(folder, false)?)
}
