//! The scripts for Slurm on a cluster of two nodes on this machine. Slow: run it with
//! `-- --ignored`; needs root and Slurm.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::curate::npy;
use crate::support::{World, left_out, ok, wait_for};

/// Steps of a run, enough to disturb it several times.
const STEPS: usize = 240;

/// A cluster, started by the script for users.
struct Cluster {
    folder: PathBuf,
}

impl Cluster {
    /// Starts a cluster, or prints the reason and returns `None` if that is not possible.
    fn new(world: &World) -> Option<Self> {
        let output = Self::script(&["up", &world.text("slurm")]);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_impossible = ["root", "missing", "is up"].iter().any(|reason| stderr.contains(reason));
        if output.status.code() == Some(2) && is_impossible {
            left_out(&format!("the scripts for Slurm; {stderr}"));
            return None;
        }
        let cluster = Self { folder: world.path("slurm") };
        assert!(output.status.success(), "{stderr}");
        Some(cluster)
    }

    fn script(args: &[&str]) -> Output {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/slurm/small_cluster.sh");
        Command::new(script).args(args).output().unwrap()
    }

    /// Prepares one of Slurm's commands.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("SLURM_CONF", self.folder.join("slurm.conf")).current_dir(self.folder.parent().unwrap());
        command
    }

    /// Runs one of Slurm's commands and returns its standard output.
    fn stdout(&self, program: &str, args: &[&str]) -> String {
        let output = self.command(program).args(args).output().unwrap();
        assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Submits an unchanged script with `args`, and returns the number of the job.
    fn submit(&self, script: &str, flags: &[&str], args: &[&str], environment: &[(&str, String)]) -> String {
        let path = format!("{}/../scripts/slurm/{script}", env!("CARGO_MANIFEST_DIR"));
        let mut command = self.command("sbatch");
        command.args(["--parsable"]).args(flags).arg(path).args(args);
        command.env("OCELLI", env!("CARGO_BIN_EXE_ocelli-under-test")).envs(environment.iter().cloned());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_string()
    }

    /// Waits until Slurm has no more jobs.
    fn wait(&self) {
        let start = Instant::now();
        while !self.stdout("squeue", &["--noheader"]).trim().is_empty() {
            let is_hanging = start.elapsed() >= Duration::from_secs(900);
            assert!(!is_hanging, "jobs hang:\n{}", self.stdout("squeue", &[]));
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        Self::script(&["down", &self.folder.display().to_string()]);
    }
}

/// Returns the environment variables of a pretraining run of `n_steps` in `workdir`.
fn run_environment(world: &World, workdir: &str, n_steps: usize) -> Vec<(&'static str, String)> {
    let args = format!(
        "--set run.workers=1 --set optim.batch_size=24 --set optim.micro_batches=12 --set \
         optim.length={{steps={n_steps}}} --set run.deadline_s=10 --set run.checkpoint_every_steps=60"
    );
    vec![
        ("RECIPE", world.text("tiny.toml")),
        ("SHARDS", world.text("data/train-000000.tar")),
        ("WORKDIR", world.text(workdir)),
        ("OCELLI_ARGS", args),
        // All ranks share this machine's cores.
        ("OMPI_MCA_mpi_yield_when_idle", "1".to_string()),
    ]
}

/// Submits a pretraining run of `n_steps` in `workdir` on both nodes.
fn pretrain(world: &World, cluster: &Cluster, workdir: &str, n_steps: usize, flags: &[&str]) -> String {
    let environment = run_environment(world, workdir, n_steps);
    let usual = ["--nodes=2", "--output=pretrain-%j.log"];
    cluster.submit("pretrain.sbatch", &[&usual, flags].concat(), &[], &environment)
}

/// Losses of all steps in complete rows of the metrics.
fn losses(workdir: &Path) -> Vec<f64> {
    let text = std::fs::read_to_string(workdir.join("metrics.jsonl")).unwrap_or_default();
    let rows = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    rows.filter_map(|row| row["train/loss"].as_f64()).collect()
}

/// Waits until the run in `workdir` has taken `n_steps` steps.
fn wait_for_steps(world: &World, workdir: &str, n_steps: usize) {
    let what = format!("{n_steps} steps in {workdir}");
    wait_for(&what, Duration::from_secs(300), || losses(&world.path(workdir)).len() >= n_steps);
}

/// After requeuing, preemption, the loss of a node and the end of its time limit, a run has the
/// losses of an undisturbed one, and two watchers score each of its checkpoints once.
#[test]
#[ignore = "minutes, root and Slurm"]
fn jobs_resume_after_requeue_preemption_node_loss_and_time_limit() {
    let world = World::new(60);
    let Some(cluster) = Cluster::new(&world) else { return };
    let start = Instant::now();
    pretrain(&world, &cluster, "whole", STEPS, &[]);
    cluster.wait();
    let steps_per_s = STEPS as f64 / start.elapsed().as_secs_f64();
    let undisturbed = losses(&world.path("whole"));
    assert_eq!(undisturbed.len(), STEPS, "{}", cluster.stdout("sh", &["-c", "tail -n 30 pretrain-*.log"]));

    let job = pretrain(&world, &cluster, "broken", STEPS, &[]);
    wait_for_steps(&world, "broken", 40);
    cluster.stdout("scontrol", &["requeue", &job]);
    wait_for_steps(&world, "broken", 90);
    let urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 5", "--output=/dev/null"];
    cluster.stdout("sbatch", &urgent);
    wait_for_steps(&world, "broken", 140);
    Cluster::script(&["cut", "2"]);
    // The ranks of the other node reach their deadline, and the job is queued again.
    std::thread::sleep(Duration::from_secs(40));
    Cluster::script(&["mend", "2"]);
    cluster.stdout("scontrol", &["update", "nodename=node2", "state=resume"]);
    cluster.wait();
    let log = std::fs::read_to_string(world.path(&format!("pretrain-{job}.log"))).unwrap();
    assert!(losses(&world.path("broken")) == undisturbed, "{log}");
    for reason in ["DUE TO JOB REQUEUE", "DUE TO PREEMPTION", "has not finished within"] {
        assert!(log.contains(reason), "{reason}: {log}");
    }
    assert!(log.matches("resuming at step").count() >= 3, "{log}");

    // A time limit. Slurm sends the signal up to a minute after the start: these runs take longer.
    let n_steps = (100.0 * steps_per_s) as usize;
    pretrain(&world, &cluster, "long", n_steps, &[]);
    cluster.wait();
    let long = losses(&world.path("long"));
    let job = pretrain(&world, &cluster, "timed", n_steps, &["--time=2", "--signal=USR2@100"]);
    cluster.wait();
    let log = std::fs::read_to_string(world.path(&format!("pretrain-{job}.log"))).unwrap();
    assert!(long.len() == n_steps && losses(&world.path("timed")) == long, "{log}");
    assert!(log.contains("exit code 143; queued again") && log.contains("resuming at step"), "{log}");

    start_on_gpus(&world, &cluster, &undisturbed);
    prepare_in_parts(&world, &cluster);
    curate_again(&world, &cluster);
    watch(&world, &cluster);
}

/// Starts a rank for each GPU that Slurm allocates, two of the three of each node. NCCL would need
/// real GPUs, so each rank trains its own run. After a signal to stop, all of them write a
/// checkpoint, and they resume when the job is queued again.
fn start_on_gpus(world: &World, cluster: &Cluster, undisturbed: &[f64]) {
    let program = format!(
        r#"#!/bin/bash
echo "$RANK of $WORLD_SIZE, GPU $LOCAL_RANK of $CUDA_VISIBLE_DEVICES, meets at $MASTER_ADDR" >> "$WORKDIR.ranks"
rank=$RANK workdir=$WORKDIR
for name in $(compgen -e | grep -E '^(RANK|WORLD_SIZE|LOCAL_|SLURM_|PMI)'); do unset "$name"; done
exec {} "${{@/#$workdir/$workdir-$rank}}"
"#,
        env!("CARGO_BIN_EXE_ocelli-under-test")
    );
    std::fs::write(world.path("rank.sh"), program).unwrap();
    std::fs::set_permissions(world.path("rank.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let scripts = format!("{}/../scripts", env!("CARGO_MANIFEST_DIR"));
    let more = [("SCRIPTS", scripts), ("OCELLI", world.text("rank.sh"))];
    let environment = [run_environment(world, "gpus", STEPS), more.to_vec()].concat();
    let flags = ["--nodes=2", "--gpus-per-node=2", "--output=gpus-%j.log"];
    let job = cluster.submit("pretrain_gpu.sbatch", &flags, &[], &environment);
    for rank in 0..4 {
        wait_for_steps(world, &format!("gpus-{rank}"), 40);
    }
    cluster.stdout("scancel", &["--signal=USR2", &job]);
    cluster.wait();
    let log = std::fs::read_to_string(world.path(&format!("gpus-{job}.log"))).unwrap();
    assert!(log.contains("exit code 143; queued again"), "{log}");
    assert_eq!(log.matches("resuming at step").count(), 4, "{log}");
    for rank in 0..4 {
        assert!(losses(&world.path(&format!("gpus-{rank}"))) == undisturbed, "rank {rank}: {log}");
    }
    let ranks = std::fs::read_to_string(world.path("gpus.ranks")).unwrap();
    let ranks: BTreeSet<&str> = ranks.lines().collect();
    let expected = (0..4).map(|rank| format!("{rank} of 4, GPU {} of 0,1, meets at node1", rank % 2));
    assert_eq!(ranks, expected.collect::<Vec<_>>().iter().map(String::as_str).collect());
}

/// Packs images by an array of jobs, and a job that joins the parts.
fn prepare_in_parts(world: &World, cluster: &Cluster) {
    world.extract("photos");
    let photos = world.text("photos");
    let one_job = world.text("packed");
    let parts = world.text("packed-in-parts");
    let args = ["shards", "pack", &photos, "--samples-per-shard", "7", "--out"];
    ok(&world.ocelli(&[&args[..], &[&one_job]].concat()));
    let args = [&args[..], &[&parts]].concat();
    let flags = ["--cpus-per-task=1", "--mem=1G", "--output=part-%a.log"];
    let array = cluster.submit("parts.sbatch", &[&flags[..], &["--array=1-4"]].concat(), &args, &[]);
    let after = format!("--dependency=afterok:{array}");
    cluster.submit("parts.sbatch", &[&flags[..], &[&after]].concat(), &args, &[("JOIN", "4".into())]);
    cluster.wait();
    for number in 0..9 {
        let file = format!("train-{number:06}.tar");
        assert!(have_equal_files(&one_job, &parts, &file), "{file}");
    }
    let stdout = cluster.stdout("sh", &["-c", "cat part-*.log"]);
    assert!(stdout.contains("60 samples of") && stdout.contains("in 9 shards:"), "{stdout}");
}

/// Returns `true` if two folders have the same bytes in `file`.
fn have_equal_files(a: &str, b: &str, file: &str) -> bool {
    std::fs::read(format!("{a}/{file}")).unwrap() == std::fs::read(format!("{b}/{file}")).unwrap()
}

/// Curates on both nodes: a job that is queued again after its centers were saved writes the same
/// files as one process.
fn curate_again(world: &World, cluster: &Cluster) {
    let mut state = 1u32;
    let mut rows = Vec::with_capacity(100_000 * 32);
    for _ in 0..100_000 * 32 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        rows.push((state >> 8) as f32 / (1 << 24) as f32);
    }
    std::fs::write(world.path("rows.npy"), npy(&rows, 32)).unwrap();
    let features = world.text("rows.npy");
    let alone = world.text("alone");
    let again = world.text("again");
    let args =
        format!("--features {features} --clusters 2000 --resample-times 20 --iterations 20 --count 9000");
    let args: Vec<&str> = args.split(' ').collect();
    ok(&world.ocelli(&[&["curate", "balance"], &args[..], &["--out", &alone]].concat()));
    let flags = ["--nodes=2", "--output=curate-%j.log"];
    let args = [&["balance"], &args[..], &["--out", &again]].concat();
    // All ranks share this machine's cores.
    let environment = [("OMPI_MCA_mpi_yield_when_idle", "1".to_string())];
    let job = cluster.submit("curate.sbatch", &flags, &args, &environment);
    let centers = world.path("again/clusters.part.safetensors");
    wait_for("saved centers", Duration::from_secs(300), || centers.exists());
    cluster.stdout("scontrol", &["requeue", &job]);
    cluster.wait();
    let log = std::fs::read_to_string(world.path(&format!("curate-{job}.log"))).unwrap();
    assert!(log.contains("continuing after "), "{log}");
    for file in ["list.jsonl", "keep.txt", "clusters.safetensors"] {
        assert!(have_equal_files(&alone, &again, file), "{file} differs: {log}");
    }
}

/// Scores the checkpoints of a run by two watchers, each once.
fn watch(world: &World, cluster: &Cluster) {
    let train = world.text("data/train-000000.tar");
    let environment = [
        ("WORKDIR", world.text("broken")),
        ("TRAIN", train.clone()),
        ("TEST", train),
        ("OCELLI_ARGS", "--protocol knn".into()),
    ];
    let flags = ["--array=1-2", "--cpus-per-task=1", "--mem=1G", "--output=watch-%a.log"];
    cluster.submit("watch.sbatch", &flags, &[], &environment);
    cluster.wait();
    let text = std::fs::read_to_string(world.path("broken/evaluations.jsonl")).unwrap();
    let rows = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let scores: Vec<(u64, String)> =
        rows.map(|row| (row["about"]["step"].as_u64().unwrap(), row["metric"].to_string())).collect();
    let distinct: BTreeSet<&(u64, String)> = scores.iter().collect();
    assert_eq!(distinct.len(), scores.len(), "a checkpoint was scored twice: {text}");
    let scored: BTreeSet<String> = scores.iter().map(|(step, _)| format!("step-{step:010}")).collect();
    let folders = std::fs::read_dir(world.path("broken/checkpoints")).unwrap();
    let names = folders.map(|folder| folder.unwrap().file_name().into_string().unwrap());
    assert_eq!(scored, names.filter(|name| name.starts_with("step-")).collect());
}
