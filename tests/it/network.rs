//! Times of steps over two nodes whose cable has a bandwidth, a delay and a loss, compared with the
//! estimates of `ocelli plan`. They are ignored by default, because times mean nothing on a busy
//! machine or in a debug build; they need root, `tc` and Python.

use std::io::Write;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use serde_json::Value;

use crate::mpirun::{Ranks, n_rows, wait_for_steps};
use crate::nodes::{Cable, Nodes};
use crate::support::{World, metrics};

/// Cables of three bandwidths and three delays, one with a loss: megabits per second, milliseconds,
/// share of the packets.
const CABLES: [(u32, f64, f64); 10] = [
    (800, 0.0, 0.0),
    (800, 1.0, 0.0),
    (800, 5.0, 0.0),
    (240, 0.0, 0.0),
    (240, 1.0, 0.0),
    (240, 5.0, 0.0),
    (80, 0.0, 0.0),
    (80, 1.0, 0.0),
    (80, 5.0, 0.0),
    (240, 1.0, 0.001),
];

/// Settings of a network whose computation takes about as long as its transfer over the medium
/// cable.
const SETTINGS: [&str; 6] = [
    "run.workers=1",
    "run.keep=100",
    "optim.batch_size=16",
    "optim.micro_batches=4",
    "method.prototypes=8192",
    "run.shard=\"full\"",
];

/// Runs the program on `n_each` ranks of each node; returns standard output.
fn run_on_nodes(nodes: &Nodes, n_each: usize, world: &World, args: &[String]) -> String {
    let mut command = nodes.mpirun(n_each, world.folder.path(), args);
    command.env("OMPI_MCA_mpi_yield_when_idle", "1").stdout(std::process::Stdio::piped());
    let Output { status, stdout, .. } = command.output().unwrap();
    let stderr = std::fs::read_to_string(world.path("stderr-0")).unwrap_or_default();
    assert!(status.success(), "{args:?}: {stderr}");
    String::from_utf8(stdout).unwrap()
}

/// Parses the last line of JSON in `text`.
fn parse_json(text: &str) -> Value {
    let line = text.lines().rfind(|line| line.starts_with('{')).unwrap_or_else(|| panic!("no JSON: {text}"));
    serde_json::from_str(line).unwrap()
}

/// Arguments of a command with the settings of the trial.
fn with_settings(args: &[&str]) -> Vec<String> {
    let settings = SETTINGS.iter().flat_map(|setting| ["--set", setting]);
    args.iter().copied().chain(settings).map(String::from).collect()
}

/// Measures steps of a run on `n_each` ranks of each node: the median duration of a step in
/// milliseconds, and of its part without waiting. The first two steps warm up.
fn measure_steps(nodes: &Nodes, n_each: usize, world: &World) -> (f64, f64) {
    let workdir = world.path("measured");
    let _ = std::fs::remove_dir_all(&workdir);
    let workdir_text = world.text("measured");
    let shard = world.text("data/train-000000.tar");
    let args = ["pretrain", "--recipe", "dino_cifar", "--shards", &shard, "--workdir", &workdir_text];
    let length = ["--set", "optim.length={steps=7}", "--set", "run.log_every_steps=1"];
    run_on_nodes(nodes, n_each, world, &with_settings(&[&args[..], &length].concat()));
    let mut steps_ms = Vec::new();
    let mut computing_ms = Vec::new();
    for row in metrics(&workdir).iter().skip(2) {
        let step_ms = row["time/step_ms"].as_f64().unwrap();
        steps_ms.push(step_ms);
        computing_ms.push(step_ms - row["time/rank_wait_ms"].as_f64().unwrap());
    }
    steps_ms.sort_by(f64::total_cmp);
    computing_ms.sort_by(f64::total_cmp);
    (steps_ms[steps_ms.len() / 2], computing_ms[computing_ms.len() / 2])
}

/// Returns the planned row of fully sharded ranks that compute at `tflops`.
fn plan_row(world: &World, n_ranks: usize, flags: &[&str], tflops: f64) -> Value {
    let n_ranks = n_ranks.to_string();
    let tflops = tflops.to_string();
    let args = ["plan", "--recipe", "dino_cifar", "--ranks", &n_ranks, "--tflops", &tflops, "--json"];
    let args = with_settings(&[&args[..], flags].concat());
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let output = world.ocelli(&args);
    let table = parse_json(&String::from_utf8(output.stdout).unwrap());
    let rows = table["rows"].as_array().unwrap();
    rows.iter().find(|row| row["mode"] == "full").unwrap().clone()
}

/// Returns the planned duration of a step in milliseconds, where a rank computes for `compute_ms`.
fn planned_step_ms(world: &World, n_ranks: usize, flags: &[&str], compute_ms: f64) -> f64 {
    let compute_s_at_1 = plan_row(world, n_ranks, flags, 1.0)["compute_s"].as_f64().unwrap();
    let tflops = compute_s_at_1 / (compute_ms / 1e3);
    1e3 * plan_row(world, n_ranks, flags, tflops)["step_s"].as_f64().unwrap()
}

#[test]
#[ignore = "compares times: a release build, root, tc, and an idle machine"]
fn steps_take_as_long_as_planned() {
    let world = World::new(8);
    let mut stderr = std::io::stderr();
    let mut ratios = Vec::new();
    let mut n_near = 0;
    for n_each in [1, 2] {
        let Some(fast) = Nodes::new() else { return };
        let (_, compute_ms) = measure_steps(&fast, n_each, &world);
        drop(fast);
        for (megabits_per_s, delay_ms, loss) in CABLES {
            let Some(nodes) = Nodes::with_cable(Cable { megabits_per_s, delay_ms, loss }) else { return };
            let doctor_args = ["doctor", "--fabric", "--buffer-mb", "2"].map(String::from);
            let stdout = run_on_nodes(&nodes, n_each, &world, &doctor_args);
            let flags = stdout.lines().find_map(|line| line.strip_prefix("for a plan     ")).unwrap();
            let plan_flags: Vec<&str> = flags.split(' ').collect();
            let planned_ms = planned_step_ms(&world, 2 * n_each, &plan_flags, compute_ms);
            let (step_ms, _) = measure_steps(&nodes, n_each, &world);
            let ratio = planned_ms / step_ms;
            writeln!(
                stderr,
                "{} ranks, {megabits_per_s} Mbit/s, {delay_ms} ms, loss {loss}: {step_ms:.0} ms, planned \
                 {planned_ms:.0} ({ratio:.2}); computing {compute_ms:.0}; {flags}",
                2 * n_each
            )
            .unwrap();
            n_near += usize::from((0.8..1.2).contains(&ratio));
            ratios.push(ratio);
        }
    }
    assert!(ratios.iter().all(|ratio| (1.0 / 1.3..1.3).contains(ratio)), "{ratios:?}");
    assert!(10 * n_near >= 9 * ratios.len(), "{n_near} of {} within 20 %: {ratios:?}", ratios.len());
}

/// Steps per second of a run, counted over `seconds`.
fn step_rate(workdir: &Path, seconds: u64) -> f64 {
    let before = n_rows(workdir);
    std::thread::sleep(Duration::from_secs(seconds));
    (n_rows(workdir) - before) as f64 / seconds as f64
}

/// Losses of all steps of a run.
fn losses(workdir: &Path) -> Vec<Value> {
    metrics(workdir).into_iter().map(|row| row["train/loss"].clone()).collect()
}

/// A cable that becomes slow, and one that stalls for five seconds, delay a run and change none of
/// its losses.
#[test]
#[ignore = "minutes, and root for network namespaces"]
fn a_slow_or_stalled_cable_does_not_change_losses() {
    let cable = Cable { megabits_per_s: 0, delay_ms: 1.0, loss: 0.001 };
    let Some(nodes) = Nodes::with_cable(cable) else { return };
    let world = World::new(60);
    let ranks = Ranks::new(&world, &["run.deadline_s=20", "optim.length={steps=300}"]);
    assert!(ranks.run(1, "whole", &[]).status.success());
    let mut command = nodes.mpirun(1, world.folder.path(), &ranks.args("run", &[]));
    let mut child = command.spawn().unwrap();
    let workdir = world.path("run");
    wait_for_steps(&workdir, 10);
    let fast = step_rate(&workdir, 1);
    nodes.set_rate(1);
    let slow = step_rate(&workdir, 4);
    assert!(slow > 0.0 && slow < 0.5 * fast, "{slow} steps a second over a slow cable, {fast} before");
    nodes.set_rate(10_000);
    nodes.stall();
    std::thread::sleep(Duration::from_secs(5));
    let stalled_at = n_rows(&workdir);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(n_rows(&workdir), stalled_at, "steps are taken over a cable that is stalled");
    nodes.stall();
    assert!(child.wait().unwrap().success(), "{}", ranks.stderr(0));
    assert_eq!(losses(&workdir), losses(&world.path("whole")));
}
