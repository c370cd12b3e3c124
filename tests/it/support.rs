use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use assert_cmd::Command;
use pipeline::shard::sidecar;
use pipeline::shard::write::{ShardLimits, ShardWriter};
use pipeline::{Dataset, PipelineError, RetryPolicy, SampleId, Storage, StorageConfig};
use tempfile::TempDir;

/// A recipe that trains in seconds on 16-pixel images.
pub(crate) const TINY: &str = r#"
name = "tiny"
seed = 3
[model]
arch = "vit"
image_px = 16
patch_px = 4
width = 32
depth = 2
heads = 2
drop_path = 0.1
layer_scale = 0.5
[method]
name = "dino"
prototypes = 64
head_hidden = 32
head_bottleneck = 16
freeze_last_layer = { steps = 2 }
teacher_temp = [0.04, 0.07]
teacher_temp_warmup = { percent = 50 }
teacher_decay = [0.99, 1.0]
[views]
preset = "dino"
global_px = 16
local_px = 8
n_local = 2
[optim]
batch_size = 8
length = { steps = 12 }
lr = 1e-2
warmup = { steps = 3 }
[run]
log_every_steps = 1
checkpoint_every_steps = 4
workers = 2
data_threads = 2
"#;

/// A folder with shards of procedural images and a tiny recipe.
pub(crate) struct World {
    pub(crate) folder: TempDir,
}

impl World {
    /// Creates a world with `count` images in `train-*.tar`.
    pub(crate) fn new(count: u64) -> Self {
        let world = Self { folder: tempfile::tempdir().unwrap() };
        std::fs::write(world.path("tiny.toml"), TINY).unwrap();
        let count = count.to_string();
        let out = world.text("data");
        ok(&world.ocelli(&["shards", "synth", "--out", &out, "--count", &count, "--size-px", "20"]));
        world
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    pub(crate) fn shard(&self) -> PathBuf {
        self.path("data/train-000000.tar")
    }

    /// Returns a storage with a cache in this folder, which waits milliseconds instead of
    /// seconds.
    pub(crate) fn storage(&self) -> Storage {
        Storage::new(self.storage_config())
    }

    pub(crate) fn storage_config(&self) -> StorageConfig {
        let retry = RetryPolicy {
            first_wait: Duration::from_millis(5),
            max_wait: Duration::from_millis(50),
            stall: Duration::from_millis(500),
            ..RetryPolicy::default()
        };
        StorageConfig { retry, ..StorageConfig::new(self.path("cache")) }
    }

    /// Opens the shard as a data set.
    pub(crate) fn dataset(&self) -> Arc<Dataset> {
        let shards = [self.shard().display().to_string()];
        Arc::new(Dataset::open(&shards, &self.storage()).unwrap())
    }

    /// Writes the members of the shard as files into the folder `name`/train-000000.
    pub(crate) fn extract(&self, name: &str) {
        let shard = self.text("data/train-000000.tar");
        let out = self.text(name);
        ok(&self.ocelli(&["shards", "extract", &shard, "--out", &out]));
    }

    /// Runs the program.
    pub(crate) fn ocelli(&self, args: &[&str]) -> Output {
        program().args(args).output().unwrap()
    }

    /// Runs the program with more environment variables.
    pub(crate) fn ocelli_with(&self, args: &[&str], env: &[(&str, &str)]) -> Output {
        program().args(args).envs(env.iter().copied()).output().unwrap()
    }

    /// Returns the arguments of a tiny pretraining run in `workdir`, followed by `more`.
    pub(crate) fn pretrain_args(&self, workdir: &str, more: &[&str]) -> Vec<String> {
        let mut args: Vec<String> = vec![
            "pretrain".into(),
            "--recipe".into(),
            self.text("tiny.toml"),
            "--shards".into(),
            self.text("data/train-000000.tar"),
            "--workdir".into(),
            self.text(workdir),
        ];
        args.extend(more.iter().map(ToString::to_string));
        args
    }

    /// Runs a tiny pretraining run.
    pub(crate) fn pretrain(&self, workdir: &str, more: &[&str]) -> Output {
        program().args(self.pretrain_args(workdir, more)).output().unwrap()
    }
}

/// Reports that a test, or a part of it, is left out. Bypasses the test harness, which hides the
/// output of tests that pass.
pub(crate) fn left_out(reason: &str) {
    use std::io::Write;
    let mut stderr = std::io::stderr();
    writeln!(stderr, "left out: {reason}").unwrap();
}

/// Returns a command of the program that was built with the tests.
pub(crate) fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ocelli-under-test"));
    // Tests use neither the cache nor the credentials of the user.
    command.env("OCELLI_CACHE", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
    // Features from an earlier run of these tests would hide later changes.
    command.env("OCELLI_FEATURES_GB", "0");
    // Output to a pipe has no width.
    command.env_remove("COLUMNS");
    for (name, _) in std::env::vars() {
        if ["AWS_", "GOOGLE_", "AZURE_"].iter().any(|beginning| name.starts_with(beginning)) {
            command.env_remove(name);
        }
    }
    command
}

/// Parses the last line of standard output as JSON.
pub(crate) fn json_of(output: &Output) -> serde_json::Value {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

/// Returns standard error of a run that must have succeeded.
pub(crate) fn ok(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "status {:?}: {stderr}", output.status.code());
    stderr
}

/// Returns standard error of a run that must have failed with `code`, in one message without a
/// backtrace.
pub(crate) fn fails(output: &Output, code: i32) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert_eq!(stderr.matches("error:").count(), 1, "{stderr}");
    assert!(!stderr.contains("panicked") && !stderr.contains("backtrace"), "{stderr}");
    stderr
}

/// Waits until `condition` holds. `what` says what is waited for, and `limit` how long.
pub(crate) fn wait_for(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < limit, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for the end of a process, which must come within two minutes.
pub(crate) fn wait_for_end(child: &mut Child) -> ExitStatus {
    let mut status = None;
    wait_for("the end of a process", Duration::from_secs(120), || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

/// Reads the rows of metrics without the columns that hold times.
pub(crate) fn metrics(workdir: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(workdir.join("metrics.jsonl")).unwrap();
    let mut rows = Vec::new();
    for line in text.lines() {
        let mut row: serde_json::Value = serde_json::from_str(line).unwrap();
        let columns = row.as_object_mut().unwrap();
        columns.retain(|key, _| !key.starts_with("time/") && !key.starts_with("rate/"));
        rows.push(row);
    }
    rows
}

/// Encodes a picture as PNG.
pub(crate) fn encode_png(picture: &image::DynamicImage) -> Vec<u8> {
    let mut bytes = std::io::Cursor::new(Vec::new());
    picture.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    bytes.into_inner()
}

/// Creates the writer of a shard in `folder` whose name begins with `prefix`, for at most 1,000
/// samples.
pub(crate) fn shard_writer(folder: &Path, prefix: &str) -> ShardWriter {
    let limits = ShardLimits { max_samples: 1000, max_bytes: Some(1 << 30) };
    ShardWriter::new(folder, prefix, limits).unwrap()
}

/// Key, image and label of a sample.
pub(crate) type Known = (String, Vec<u8>, Option<u32>);

/// Reads all samples.
pub(crate) fn samples(dataset: &Dataset) -> Vec<Known> {
    let mut samples = Vec::new();
    for id in 0..dataset.n_samples() {
        let sample = dataset.read(SampleId(id)).unwrap();
        samples.push((sample.key, sample.image.bytes().to_vec(), sample.label));
    }
    samples
}

/// Opens a data set with the storage of `world`.
pub(crate) fn open(world: &World, spec: &str) -> Result<Dataset, PipelineError> {
    Dataset::open(&[spec.to_string()], &world.storage())
}

/// Returns the files in the cache that are shards.
pub(crate) fn cached(world: &World) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(world.path("cache")).into_iter().flatten();
    entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "tar"))
        .collect()
}

/// Removes the sidecar of the shard.
pub(crate) fn without_sidecar(world: &World) {
    std::fs::remove_file(sidecar::path_of(&world.shard())).unwrap();
}
