//! Time and memory that a run says it needs, compared with what it takes.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{World, json_of, ok, program};

/// Returns the numbers of gigabytes after "needs about" in `text`: those that are needed, and those
/// that are there.
fn said_gb(text: &str) -> [f64; 2] {
    let (_, rest) = text.split_once("needs about ").unwrap_or_else(|| panic!("no memory in: {text}"));
    let (needed, rest) = rest.split_once(" of ").unwrap();
    let (available, _) = rest.split_once(" GB").unwrap();
    [needed.parse().unwrap(), available.parse().unwrap()]
}

/// Time and memory stand in one note before the first step, `plan` says the same, and neither
/// promises a bound.
#[test]
fn time_and_memory_are_said_before_the_first_step() {
    let world = World::new(24);
    let log = ok(&world.pretrain("run", &["--set", "optim.length={steps=20}", "--log-every", "1e9"]));
    let note = log.lines().find(|line| line.contains("needs about")).unwrap_or_else(|| panic!("{log}"));
    assert!(note.starts_with("note: 20 steps of 8 images: at least "), "{note}");
    assert!(
        note.contains(" each for products and activations; needs about ") && note.ends_with(" GB of memory"),
        "{note}"
    );
    assert!(!log.contains("bound"), "{log}");
    let [needed, available] = said_gb(note);
    assert!(needed > 0.0 && needed < available, "{note}");

    let args = ["plan", "--recipe", &world.text("tiny.toml"), "--images", "24", "--json"];
    let output = world.ocelli(&args);
    ok(&output);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("about") && text.contains("measured on this machine"), "{text}");
    assert!(!text.contains("bound"), "{text}");
    let [planned, _] = said_gb(&text);
    // The process that plans has loaded less of its code.
    assert!(planned < 1.5 * needed && needed < 3.0 * planned, "{planned} GB planned, {needed} GB said");
    let row = json_of(&output)["rows"][0].clone();
    let process_bytes = row["process_bytes"].as_f64().unwrap();
    assert!(process_bytes > row["peak_bytes"].as_f64().unwrap(), "{row}");
    assert!((process_bytes - 1e9 * planned).abs() <= 0.051e9, "{process_bytes} bytes, {planned} GB");
    assert!(row["step_s"].as_f64().unwrap() > 0.0, "{row}");

    // A run that is resumed has fewer steps left.
    let longer = ["--lengthen", "--set", "optim.length={steps=30}", "--log-every", "1e9"];
    let log = ok(&world.pretrain("run", &longer));
    assert!(log.contains("note: 10 of 30 steps are left, of 8 images: at least "), "{log}");
}

/// Returns the rows of a log in JSON.
fn rows(log: &str) -> Vec<Value> {
    log.lines().map(|row| serde_json::from_str(row).unwrap()).collect()
}

/// Returns the seconds of a row of a log.
fn time_s(row: &Value) -> f64 {
    row["time"].as_f64().unwrap()
}

/// Returns whether a row of a log has the scores after the last of 40 steps.
fn is_last_probe(row: &Value) -> bool {
    row["message"].as_str().is_some_and(|text| text.starts_with("step 40: probe"))
}

/// Returns the steps that a row of a log says were taken, if it is a row of a step.
fn steps_taken(row: &Value) -> Option<u64> {
    row["step"].as_u64()
}

/// A probe before the first step takes as long as many steps, and is no part of the time of one;
/// the probes that are left are part of the time that is left. Each has a line with its name.
#[test]
fn the_time_left_has_probes_beside_steps() {
    let world = World::new(1000);
    ok(&world.pretrain("a", &["--set", "optim.length={steps=2}"]));
    let first = world.text("a");
    let shard = world.text("data/train-000000.tar");
    let mut more = vec!["--init", &first, "--probe-train", &shard, "--probe-test", &shard];
    more.extend(["--probe-protocols", "knn,linear-honest", "--log-format", "json", "--log-every", "1e-6"]);
    for set in [
        "optim.length={steps=40}",
        "run.probe_every_steps=10",
        "run.log_every_steps=10",
        "run.checkpoint_every_steps=1000",
    ] {
        more.extend(["--set", set]);
    }
    let log = ok(&world.pretrain("b", &more));
    let rows = rows(&log);
    for phase in ["scoring before the first step, features: ", "scoring after step 10, features: "] {
        let found = rows.iter().filter_map(|row| row["message"].as_str()).find(|text| text.contains(phase));
        let line = found.unwrap_or_else(|| panic!("no line with {phase} in:\n{log}"));
        assert!(line.contains(" of 1,000, "), "{line}");
    }
    let end_s = time_s(rows.iter().find(|row| is_last_probe(row)).expect("the last probe"));
    let mut n_compared = 0;
    for row in &rows {
        if !steps_taken(row).is_some_and(|step| (5..=30).contains(&step)) {
            continue;
        }
        let estimated_s = row["seconds_left"].as_f64().unwrap();
        let left_s = end_s - time_s(row);
        // Other tests run at the same time, and may delay any part of the run.
        let is_close = estimated_s < 2.5 * left_s + 1.0 && left_s < 2.5 * estimated_s + 1.0;
        assert!(is_close, "{row}: {left_s} s were left");
        n_compared += 1;
    }
    assert!(n_compared > 20, "{log}");
    // Four probes follow the first step.
    let first_step_s = time_s(rows.iter().find(|row| steps_taken(row) == Some(1)).unwrap());
    let metrics = std::fs::read_to_string(world.path("b/metrics.jsonl")).unwrap();
    let mut probes_s = 0.0;
    for line in metrics.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        probes_s += row["time/probe_ms"].as_f64().unwrap_or_default() / 1e3;
    }
    assert!(probes_s > 0.0 && probes_s < end_s - first_step_s + 0.1, "{probes_s} s of probes: {log}");
}

/// Returns the standard error of a run of a program with `args`, and the most bytes of memory that
/// its process held.
fn run_and_watch(args: &[&str]) -> (String, f64) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ocelli-under-test"))
        .args(args)
        .env("OCELLI_CACHE", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let path = format!("/proc/{}/status", child.id());
    let start = Instant::now();
    let mut peak_bytes = 0.0_f64;
    while child.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < Duration::from_secs(300), "{args:?} does not end");
        // A process that has just ended has no such line.
        let status = std::fs::read_to_string(&path).unwrap_or_default();
        if let Some(line) = status.lines().find_map(|line| line.strip_prefix("VmHWM:")) {
            let kilobytes: f64 = line.split_whitespace().next().unwrap().parse().unwrap();
            peak_bytes = peak_bytes.max(1024.0 * kilobytes);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    (ok(&child.wait_with_output().unwrap()), peak_bytes)
}

/// The bounds are wide: `scripts/bench/resident.py` measures recipes in full. A transformer whose
/// graphs are most of the memory, a convolutional network, and a run whose program is most of it.
#[test]
fn processes_take_about_the_memory_that_they_say() {
    let world = World::new(64);
    let shard = world.text("data/train-000000.tar");
    let tiny = world.text("tiny.toml");
    for (recipe, batch_size) in [(tiny.as_str(), 8), ("lejepa_cifar", 64), ("simclr_cifar", 16)] {
        let workdir = world.text(&format!("run-{batch_size}"));
        let batch = format!("optim.batch_size={batch_size}");
        let mut args = vec!["pretrain", "--recipe", recipe, "--shards", &shard, "--workdir", &workdir];
        args.extend(["--set", &batch, "--set", "optim.length={steps=3}"]);
        args.extend(["--set", "run.checkpoint_every_steps=2"]);
        let (log, peak_bytes) = run_and_watch(&args);
        let [said, _] = said_gb(&log);
        let held = peak_bytes / 1e9;
        // The code of a debug build takes up to a tenth of a gigabyte.
        assert!(held < 1.4 * said + 0.1, "{recipe}: {held} GB, said {said}");
        assert!(held > 0.5 * said, "{recipe}: {held} GB, said {said}");
    }
}

/// Pictures after a run have a bar with a name.
#[test]
fn pictures_after_the_last_step_have_a_bar() {
    let world = World::new(40);
    let log = ok(&world.pretrain("run", &["--log-every", "1e-6"]));
    assert!(log.contains("pictures, features: ") && log.contains(" of 40,"), "{log}");
    let args = ["report", &world.text("run"), "--log-every", "1e-6"];
    let log = ok(&program().args(args).output().unwrap());
    assert!(log.contains("pictures, features: "), "{log}");
}
