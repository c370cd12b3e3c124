use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::{World, wait_for};

/// Deadline of collectives, in seconds, in tests that wait for it.
pub(crate) const DEADLINE_S: &str = "run.deadline_s=4";

/// Prepares the program's `args` on `n` ranks. Each rank's standard error and exit code are written
/// to files in `folder`: mpirun separates neither.
pub(crate) fn mpirun(n: usize, folder: &Path, args: &[String]) -> Command {
    let script = folder.join("rank.sh");
    let text = "#!/bin/bash\nout=$1; shift\n\"$@\" 2> $out/stderr-$OMPI_COMM_WORLD_RANK\n\
                code=$?; echo $code > $out/code-$OMPI_COMM_WORLD_RANK; exit $code\n";
    fs::write(&script, text).unwrap();
    let mut command = Command::new("mpirun");
    command
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env_remove("OCELLI_CACHE")
        // mpirun does not end the other ranks when one dies: they must detect it by themselves.
        .args(["--oversubscribe", "--enable-recovery", "-n", &n.to_string(), "bash"])
        .arg(&script)
        .arg(folder)
        .arg(env!("CARGO_BIN_EXE_ocelli-under-test"))
        .args(args);
    command
}

pub(crate) struct Ranks<'w> {
    world: &'w World,
    overrides: Vec<String>,
}

impl<'w> Ranks<'w> {
    /// Prepares runs of 24 images a step in 12 micro-batches, which are equal on 1, 2, 3 and 4
    /// ranks.
    pub(crate) fn new(world: &'w World, more: &[&str]) -> Self {
        let defaults = ["run.workers=1", "optim.batch_size=24", "optim.micro_batches=12"];
        let overrides = defaults.iter().chain(more).map(ToString::to_string).collect();
        Self { world, overrides }
    }

    pub(crate) fn args(&self, workdir: &str, more: &[&str]) -> Vec<String> {
        let mut args = self.world.pretrain_args(workdir, &[]);
        args.extend(self.overrides.iter().flat_map(|entry| ["--set".to_string(), entry.clone()]));
        args.extend(more.iter().map(ToString::to_string));
        args
    }

    pub(crate) fn run(&self, n: usize, workdir: &str, more: &[&str]) -> Output {
        self.launch(n, &self.args(workdir, more))
    }

    /// Runs the program's `args` on `n` ranks to their end.
    pub(crate) fn launch(&self, n: usize, args: &[String]) -> Output {
        for rank in 0..n {
            let _ = fs::remove_file(self.code_path(rank));
        }
        let mut command = mpirun(n, self.world.folder.path(), args);
        // To files: mpirun would block on a full pipe.
        let stdout = self.world.path("mpirun-stdout");
        let stderr = self.world.path("mpirun-stderr");
        command.stdout(File::create(&stdout).unwrap()).stderr(File::create(&stderr).unwrap());
        let mut child = command.spawn().unwrap();
        // Open MPI 4.1's mpirun sometimes keeps running after all of its ranks have ended with
        // errors: it has five seconds.
        let mut end: Option<Instant> = None;
        wait_for("the end of mpirun or of its ranks", Duration::from_secs(300), || {
            if end.is_none() && (0..n).all(|rank| self.code_path(rank).exists()) {
                end = Some(Instant::now());
            }
            child.try_wait().unwrap().is_some() || end.is_some_and(|end| end.elapsed().as_secs() >= 5)
        });
        let _ = child.kill();
        let status = child.wait().unwrap();
        Output { status, stdout: fs::read(stdout).unwrap(), stderr: fs::read(stderr).unwrap() }
    }

    /// Returns the file with the exit code of a rank.
    fn code_path(&self, rank: usize) -> PathBuf {
        self.world.path(&format!("code-{rank}"))
    }

    pub(crate) fn start(&self, n: usize, workdir: &str, more: &[&str]) -> Child {
        let mut command = mpirun(n, self.world.folder.path(), &self.args(workdir, more));
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    pub(crate) fn stderr(&self, rank: usize) -> String {
        fs::read_to_string(self.world.path(&format!("stderr-{rank}"))).unwrap()
    }

    pub(crate) fn code(&self, rank: usize) -> i32 {
        let text = fs::read_to_string(self.code_path(rank)).unwrap();
        text.trim().parse().unwrap()
    }
}

/// Returns the number of rows of metrics that the run in `workdir` has written so far.
pub(crate) fn n_rows(workdir: &Path) -> usize {
    fs::read_to_string(workdir.join("metrics.jsonl")).map_or(0, |text| text.lines().count())
}

/// Waits until the run in `workdir` has written `n` rows of metrics.
pub(crate) fn wait_for_steps(workdir: &Path, n: usize) {
    let what = format!("{n} steps in {}", workdir.display());
    wait_for(&what, Duration::from_secs(60), || n_rows(workdir) >= n);
}
