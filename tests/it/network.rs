//! Steps over two nodes whose cable has a bandwidth, a delay and a loss, beside the estimates of
//! `ocelli plan`. Times are compared only if `RUN_NETWORK_TRIAL=1` is set, because they say nothing
//! on a machine that does other work, nor in a debug build; needs root, `tc` and Python.

use std::io::Write;
use std::process::Output;
use std::time::Duration;

use serde_json::Value;

use crate::mpirun::{Ranks, n_rows, wait_for_steps};
use crate::nodes::{Cable, Nodes};
use crate::support::World;

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

/// Network that computes for about as long as it is sent over the middle one of the cables.
const SETTINGS: [&str; 6] = [
    "run.workers=1",
    "run.keep=100",
    "optim.batch_size=16",
    "optim.micro_batches=4",
    "method.prototypes=8192",
    "run.shard=\"full\"",
];

/// Runs the program on `n_each` ranks of each node; returns what it printed.
fn over(nodes: &Nodes, n_each: usize, world: &World, args: &[String]) -> String {
    let mut command = nodes.mpirun(n_each, world.folder.path(), args);
    command.env("OMPI_MCA_mpi_yield_when_idle", "1").stdout(std::process::Stdio::piped());
    let Output { status, stdout, .. } = command.output().unwrap();
    let said = || std::fs::read_to_string(world.path("stderr-0")).unwrap_or_default();
    assert!(status.success(), "{args:?}: {}", said());
    String::from_utf8(stdout).unwrap()
}

fn json(text: &str) -> Value {
    let line = text.lines().rfind(|line| line.starts_with('{')).unwrap_or_else(|| panic!("no JSON: {text}"));
    serde_json::from_str(line).unwrap()
}

/// Arguments of a command with the settings of the trial.
fn with_settings(args: &[&str]) -> Vec<String> {
    let settings = SETTINGS.iter().flat_map(|setting| ["--set", setting]);
    args.iter().copied().chain(settings).map(String::from).collect()
}

/// Measures steps on `n_each` ranks of each node: milliseconds of a step, and of it those that are
/// not spent on waiting.
fn measured(nodes: &Nodes, n_each: usize, world: &World) -> (f64, f64) {
    let args =
        with_settings(&["bench", "shard", "--recipe", "dino_cifar", "--as-set", "--repeats", "5", "--json"]);
    let mode = json(&over(nodes, n_each, world, &args))["modes"][0].clone();
    let step_ms = mode["step_ms"].as_f64().unwrap();
    let wait_ms = mode["wait_ms"].as_f64().unwrap();
    (step_ms, step_ms - wait_ms)
}

/// Returns the milliseconds of a step by `ocelli plan`, where a rank computes for `compute_ms`.
fn planned(world: &World, n_ranks: usize, flags: &[&str], compute_ms: f64) -> f64 {
    let plan = |tflops: f64| {
        let n = n_ranks.to_string();
        let tflops = tflops.to_string();
        let args = ["plan", "--recipe", "dino_cifar", "--ranks", &n, "--tflops", &tflops, "--json"];
        let args = with_settings(&[&args[..], flags].concat());
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let output = world.ocelli(&args);
        let table = json(&String::from_utf8(output.stdout).unwrap());
        let rows = table["rows"].as_array().unwrap().clone();
        rows.into_iter().find(|row| row["mode"] == "full").unwrap()
    };
    let at_one = plan(1.0)["compute_s"].as_f64().unwrap();
    1e3 * plan(at_one / (compute_ms / 1e3))["step_s"].as_f64().unwrap()
}

#[test]
fn steps_take_as_long_as_planned() {
    if std::env::var_os("RUN_NETWORK_TRIAL").is_none() {
        return;
    }
    let world = World::new(8);
    let mut stderr = std::io::stderr();
    let mut ratios = Vec::new();
    let mut n_near = 0;
    for n_each in [1, 2] {
        let Some(fast) = Nodes::new() else { return };
        let (_, compute_ms) = measured(&fast, n_each, &world);
        drop(fast);
        for (megabits_per_s, delay_ms, loss) in CABLES {
            let Some(nodes) = Nodes::joined_by(Cable { megabits_per_s, delay_ms, loss }) else { return };
            let said =
                over(&nodes, n_each, &world, &["doctor", "--fabric", "--buffer-mb", "2"].map(String::from));
            let flags = said.lines().find_map(|line| line.strip_prefix("for a plan     ")).unwrap();
            let planned_ms = planned(&world, 2 * n_each, &flags.split(' ').collect::<Vec<_>>(), compute_ms);
            let (step_ms, _) = measured(&nodes, n_each, &world);
            let ratio = planned_ms / step_ms;
            writeln!(
                stderr,
                "{} ranks, {megabits_per_s} Mbit/s, {delay_ms} ms, loss {loss}: {step_ms:.0} ms, planned {planned_ms:.0} \
                 ({ratio:.2}); computing {compute_ms:.0}; {flags}",
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

/// A cable that becomes slow, and one that stalls for five seconds, delay a run and change none of
/// its losses.
#[test]
fn a_slow_or_stalled_cable_only_takes_time() {
    if std::env::var_os("RUN_SLOW_TESTS").is_none() {
        return;
    }
    let cable = Cable { megabits_per_s: 0, delay_ms: 1.0, loss: 0.001 };
    let Some(nodes) = Nodes::joined_by(cable) else { return };
    let world = World::new(60);
    let ranks = Ranks::new(&world, &["run.deadline_s=20", "optim.length={steps=300}"]);
    let losses = |run: &str| -> Vec<Value> {
        let rows = crate::support::metrics(&world.path(run));
        rows.into_iter().map(|row| row["train/loss"].clone()).collect()
    };
    assert!(ranks.run(1, "whole", &[]).status.success());
    let mut command = nodes.mpirun(1, world.folder.path(), &ranks.args("run", &[]));
    let mut child = command.spawn().unwrap();
    wait_for_steps(&world.path("run"), 10);
    let n_steps = || n_rows(&world.path("run"));
    let rate = |seconds: u64| {
        let before = n_steps();
        std::thread::sleep(Duration::from_secs(seconds));
        (n_steps() - before) as f64 / seconds as f64
    };
    let fast = rate(1);
    nodes.set_rate(1);
    let slow = rate(4);
    assert!(slow > 0.0 && slow < 0.5 * fast, "{slow} steps a second over a slow cable, {fast} before");
    nodes.set_rate(10_000);
    nodes.stall();
    std::thread::sleep(Duration::from_secs(5));
    let stalled_at = n_steps();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(n_steps(), stalled_at, "steps are taken over a cable that is stalled");
    nodes.stall();
    assert!(child.wait().unwrap().success(), "{}", ranks.stderr(0));
    assert_eq!(losses("run"), losses("whole"));
}
