//! Output of a verb of `ocelli curate`: a list of all images, a list of the kept ones, and shards.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use eval::features::file::ImageName;
use pipeline::Storage;
use pipeline::file::AtomicFile;
use pipeline::secrets::redact_list;
use serde_json::{Map, Value, json};

use super::clusters;
use super::input::{Images, Input};
use crate::progress::StageBar;
use crate::shards::limits::LimitFlags;
use pipeline::Progress;
use prep::classes::copy_classes;
use prep::folder_lock::{FolderLock, lock_for};
use prep::names::shard_list;
use prep::open::is_folder_of_images;
use prep::parts::Work;
use prep::rewrite::claim;
use prep::samples::{check_keys, write_samples};
use ranks::launch::Launch;

/// List of all images, one line each.
pub(crate) const LIST: &str = "list.jsonl";

/// List of the kept images: shard, tab, key.
const KEPT: &str = "keep.txt";

/// Names of the files that a call writes, besides shards.
const RESULTS: [&str; 8] =
    [LIST, KEPT, PAIRS, OUTLIERS, MAP, QUALITIES, clusters::FILE, clusters::UNFINISHED];

/// Sheet of pairs around a threshold.
pub(crate) const PAIRS: &str = "pairs.png";

/// Sheet of the most outlying images.
pub(crate) const OUTLIERS: &str = "outliers.png";

/// Page of clusters.
pub(crate) const MAP: &str = "map.html";

/// Qualities of the images that have been measured.
pub(crate) const QUALITIES: &str = "quality.txt";

/// Flags of the output.
#[derive(clap::Args)]
pub(crate) struct OutputFlags {
    /// Output folder for lists, pictures and shards. Rerun a stopped command with the same folder
    /// to continue it.
    #[arg(long)]
    pub(crate) out: PathBuf,
    /// Also write the kept images to the folder as shards, with their keys, labels and all other
    /// members.
    #[arg(long, requires = "shards")]
    pub(crate) pack: bool,
    /// Prefix of the shard names.
    #[arg(long, default_value = "train")]
    prefix: String,
    #[command(flatten)]
    limits: LimitFlags,
    /// Delete the output of another call in the folder and start over.
    #[arg(long)]
    overwrite: bool,
    /// Print a line of JSON at the end: images, kept, shards, and fields specific to the command.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Columns of a row of the list, besides names and classes.
pub(crate) type ListColumns<'a> = &'a dyn Fn(usize) -> Vec<(&'static str, Value)>;

/// An output folder that belongs to this call.
pub(crate) struct Output<'a> {
    flags: &'a OutputFlags,
    storage: &'a Storage,
    /// Whether this process writes: only the first rank does.
    pub(crate) is_writer: bool,
    _lock: FolderLock,
}

impl OutputFlags {
    /// Returns whether `--overwrite` was given.
    pub(crate) fn overwrites(&self) -> bool {
        self.overwrite
    }

    /// Locks the folder, which must be empty or hold output of the same call.
    pub(crate) fn claim<'a>(
        &'a self,
        verb: &'static str,
        settings: Value,
        input: &Input,
        launch: &Launch,
        storage: &'a Storage,
    ) -> anyhow::Result<Output<'a>> {
        self.claim_for(Work::Whole, verb, settings, input, launch, storage)
    }

    /// Locks the folder as [`OutputFlags::claim`] does; parts of the same job may work in it at the
    /// same time.
    pub(crate) fn claim_for<'a>(
        &'a self,
        work: Work,
        verb: &'static str,
        mut settings: Value,
        input: &Input,
        launch: &Launch,
        storage: &'a Storage,
    ) -> anyhow::Result<Output<'a>> {
        if self.pack && !self.limits.renumber {
            let images = input.images.as_ref().context("--pack needs --shards")?;
            check_keys((0..input.names.len()).map(|row| images.locate(row)))?;
        }
        let is_writer = launch.rank == 0;
        if !is_writer {
            return Ok(Output { flags: self, storage, is_writer, _lock: FolderLock::default() });
        }
        let specs = input.images.iter().flat_map(|images| &images.specs);
        settings["shards"] = json!(specs.map(|spec| redact_list(spec)).collect::<Vec<_>>());
        let samples = input.images.as_ref().map(|images| images.dataset.samples_fingerprint());
        settings["samples"] = json!(samples.map(|hash| format!("{hash:016x}")));
        settings["pack"] = json!([self.pack, self.prefix, self.limits.identity()]);
        if work.n_parts() > 1 {
            settings["parts"] = json!(work.n_parts());
        }
        self.check_existing_files()?;
        if let Some(images) = &input.images {
            self.check_inputs(images)?;
        }
        let lock = lock_for(work, &self.out, verb)?;
        if self.overwrite && self.out.join("job.json").exists() {
            // The results of another call must not be taken for those of this one.
            self.remove_results()?;
        }
        claim(input.identity.clone(), &self.out, verb, &settings, self.overwrite)?;
        Ok(Output { flags: self, storage, is_writer, _lock: lock })
    }

    /// Refuses a folder with files of these names that this program has not written.
    fn check_existing_files(&self) -> anyhow::Result<()> {
        if self.out.join("job.json").exists() {
            return Ok(());
        }
        for name in RESULTS {
            if self.out.join(name).exists() {
                bail!(
                    "{}: refusing to overwrite {name}, which ocelli did not write; choose another --out",
                    self.out.display()
                );
            }
        }
        Ok(())
    }

    /// Refuses a folder that holds input shards, which would be replaced.
    fn check_inputs(&self, images: &Images) -> anyhow::Result<()> {
        let out = self.out.canonicalize().ok();
        for shard in images.dataset.shards() {
            let path = Path::new(&shard.name()).canonicalize().ok();
            let folder = path.as_deref().and_then(Path::parent);
            if out.is_some() && folder == out.as_deref() {
                bail!("{} is in the output folder; choose another --out", shard.name());
            }
        }
        Ok(())
    }

    fn remove_results(&self) -> anyhow::Result<()> {
        for name in RESULTS {
            let path = self.out.join(name);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot remove {}", path.display()));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Output<'_> {
    /// Returns the path of `name` in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.flags.out.join(name)
    }

    /// Writes the lists, with `columns` for each row, and with --pack the kept images as shards;
    /// prints the numbers of kept images, and `summary` as JSON.
    pub(crate) fn write(
        &self,
        input: &Input,
        kept: &[bool],
        columns: ListColumns<'_>,
        mut summary: Map<String, Value>,
    ) -> anyhow::Result<()> {
        if !self.is_writer {
            return Ok(());
        }
        self.write_list(&input.names, kept, columns)?;
        let n_kept = kept.iter().filter(|is_kept| **is_kept).count();
        out!("{n_kept} of {} images kept: {}", kept.len(), self.path(LIST).display());
        if self.flags.pack {
            let images = input.images.as_ref().context("--pack needs --shards")?;
            let n_shards = self.pack(images, kept)?;
            out!("shards: {}", shard_list(&self.flags.out, &self.flags.prefix, n_shards));
            summary.insert("shards".into(), json!(n_shards));
        }
        summary.insert("images".into(), json!(kept.len()));
        summary.insert("kept".into(), json!(n_kept));
        if self.flags.json {
            out!("{}", Value::Object(summary));
        }
        Ok(())
    }

    fn write_list(&self, names: &[ImageName], kept: &[bool], columns: ListColumns<'_>) -> anyhow::Result<()> {
        let mut list = Lines::create(self.path(LIST))?;
        let mut keep = Lines::create(self.path(KEPT))?;
        for (row, (name, is_kept)) in names.iter().zip(kept).enumerate() {
            let mut line = json!({ "key": name.key, "keep": is_kept });
            let fields =
                [("shard", json!(name.shard)), ("label", json!(name.label)), ("class", json!(name.class))];
            for (key, value) in fields {
                if !value.is_null() {
                    line[key] = value;
                }
            }
            for (key, value) in columns(row) {
                line[key] = value;
            }
            list.push(&line.to_string())?;
            if *is_kept {
                match &name.shard {
                    Some(shard) => keep.push(&format!("{shard}\t{}", name.key))?,
                    None => keep.push(&name.key)?,
                }
            }
        }
        list.finish()?;
        keep.finish()
    }

    fn pack(&self, images: &Images, kept: &[bool]) -> anyhow::Result<usize> {
        let samples: Vec<_> =
            (0..kept.len()).filter(|row| kept[*row]).map(|row| images.locate(row)).collect();
        if samples.is_empty() {
            bail!("no images are kept");
        }
        copy_class_names(&images.specs, self.storage, &self.flags.out)?;
        let progress = StageBar::new();
        progress.begin("pack", samples.len() as u64);
        let options = self.flags.limits.options();
        Ok(write_samples(&self.flags.out, &self.flags.prefix, &options, &samples, &progress)?)
    }
}

/// Copies the list of class names beside the first of the shards `specs`, if there is one.
fn copy_class_names(specs: &[String], storage: &Storage, out: &Path) -> anyhow::Result<()> {
    let shards: Vec<String> =
        specs.iter().filter(|spec| !is_folder_of_images(spec).unwrap_or(false)).cloned().collect();
    if !shards.is_empty() {
        copy_classes(&storage.sources(&shards)?, out, false)?;
    }
    Ok(())
}

/// Rounds a number to six significant digits, the precision of every single-precision number.
pub(crate) fn six_digits(value: f32) -> Value {
    format!("{value:.5e}").parse().map_or(Value::Null, |value: f64| json!(value))
}

/// A file of lines, which is renamed to its path when it is complete.
struct Lines {
    path: PathBuf,
    file: AtomicFile,
}

impl Lines {
    fn create(path: PathBuf) -> anyhow::Result<Self> {
        let file = AtomicFile::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { path, file })
    }

    fn push(&mut self, line: &str) -> anyhow::Result<()> {
        writeln!(self.file, "{line}").with_context(|| format!("cannot write {}", self.path.display()))
    }

    fn finish(self) -> anyhow::Result<()> {
        self.file.finish().with_context(|| format!("cannot write {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_lists_are_short() {
        assert_eq!(six_digits(0.976_881_8).to_string(), "0.976882");
        assert_eq!(six_digits(1.0).to_string(), "1.0");
        assert_eq!(six_digits(-0.000_123_456_78).to_string(), "-0.000123457");
    }
}
