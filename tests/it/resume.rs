use std::io::BufRead;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, metrics, ok, wait_for, wait_for_end};

/// Waits until a run has logged `n_rows` rows.
fn wait_for_rows(workdir: &Path, n_rows: usize) {
    let path = workdir.join("metrics.jsonl");
    wait_for("steps of the run", Duration::from_secs(120), || {
        std::fs::read_to_string(&path).map_or(0, |text| text.lines().count()) >= n_rows
    });
}

fn send_signal(pid: &str, signal: &str) {
    Command::new("kill").args([signal, pid]).status().unwrap();
}

/// Starts a run of many steps and signals it once it has logged `n_rows` rows; returns its exit
/// code.
fn interrupt(world: &World, workdir: &str, signal: &str, n_rows: usize) -> Option<i32> {
    let more = ["--set", "optim.length={steps=400}"];
    let mut child = Command::new(env!("CARGO_BIN_EXE_ocelli-under-test"))
        .args(world.pretrain_args(workdir, &more))
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for_rows(&world.path(workdir), n_rows);
    send_signal(&child.id().to_string(), signal);
    wait_for_end(&mut child).code()
}

#[test]
fn a_killed_run_resumes_bit_for_bit() {
    let world = World::new(50);
    let more = ["--set", "optim.length={steps=400}"];
    ok(&world.pretrain("unbroken", &more));
    let expected_rows = metrics(&world.path("unbroken"));
    assert_eq!(expected_rows.len(), 400);
    // Killed by a signal that cannot be caught, at three steps between checkpoints.
    for n_rows in [9, 30, 53] {
        assert_eq!(interrupt(&world, "broken", "-9", n_rows), None);
    }
    let stderr = ok(&world.pretrain("broken", &more));
    assert!(stderr.contains("resuming at step"), "{stderr}");
    assert_eq!(metrics(&world.path("broken")), expected_rows);
    let resumed = world.path("broken/checkpoints/step-0000000400");
    let expected = world.path("unbroken/checkpoints/step-0000000400");
    let resumed_weights = std::fs::read(resumed.join("rank-00000.safetensors")).unwrap();
    let expected_weights = std::fs::read(expected.join("rank-00000.safetensors")).unwrap();
    assert!(resumed_weights == expected_weights, "weights differ");
    // The weights have the permissions of the manifest.
    let weights = std::fs::metadata(resumed.join("rank-00000.safetensors")).unwrap();
    let manifest = std::fs::metadata(resumed.join("manifest.json")).unwrap();
    assert_eq!(weights.permissions(), manifest.permissions());
}

#[test]
fn a_run_writes_a_checkpoint_after_a_signal_and_exits_with_143() {
    let world = World::new(50);
    for signal in ["-TERM", "-USR2"] {
        let workdir = format!("run{signal}");
        assert_eq!(interrupt(&world, &workdir, signal, 6), Some(143));
        let rows = metrics(&world.path(&workdir)).len();
        let newest = trainer::checkpoint::Checkpoint::open(&world.path(&workdir)).unwrap();
        assert_eq!(newest.manifest.step as usize, rows, "the checkpoint is of the last step");
    }
}

/// An interrupt from the keyboard is confirmed immediately and ends the run after the current step;
/// a second one ends it immediately.
#[test]
fn interrupts_are_confirmed_during_a_step() {
    let world = World::new(50);
    // A step that hangs, so that the loop over steps cannot print the confirmation.
    let more = ["--set", "optim.length={steps=4000}", "--inject-fault", "hang:step=3,phase=backward"];
    // A shell that runs the tests in the background makes them ignore interrupts, and the program
    // would inherit that.
    let mut child = Command::new("env")
        .args(["--default-signal=INT", env!("CARGO_BIN_EXE_ocelli-under-test")])
        .args(world.pretrain_args("run", &more))
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = child.id().to_string();
    // The test reads the lines of the program until it ends: a program that prints nothing must be
    // killed.
    let timeout = std::thread::spawn({
        let pid = pid.clone();
        move || {
            std::thread::park_timeout(Duration::from_secs(120));
            Command::new("kill").args(["-9", &pid]).stderr(Stdio::null()).status()
        }
    });
    let lines = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok);
    wait_for_rows(&world.path("run"), 3);
    send_signal(&pid, "-INT");
    let answer = lines.find(|line| line.contains("step 4")).unwrap_or_default();
    check_message("resume::interrupts_are_confirmed_during_a_step.first", &answer);
    send_signal(&pid, "-INT");
    check_message("resume::interrupts_are_confirmed_during_a_step.second", &lines.last().unwrap_or_default());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    timeout.thread().unpark();
    // The process has ended, so that `kill` fails.
    timeout.join().unwrap().unwrap();
}

/// A damaged newest checkpoint is skipped for the previous one.
#[test]
fn a_damaged_checkpoint_is_skipped() {
    let world = World::new(50);
    ok(&world.pretrain("run", &[]));
    let expected_rows = metrics(&world.path("run"));
    let newest = world.path("run").join("checkpoints/step-0000000012/rank-00000.safetensors");
    let mut bytes = std::fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&newest, bytes).unwrap();
    let stderr = ok(&world.pretrain("run", &[]));
    check_message("resume::a_damaged_checkpoint_is_skipped.damaged", &lines_with(&stderr, "rank-00000"));
    check_message("resume::a_damaged_checkpoint_is_skipped.resumed", &lines_with(&stderr, "step 8 of 12"));
    assert_eq!(metrics(&world.path("run")), expected_rows);
}

/// A manifest that was changed by hand, or by a bad disk, is rejected: the run resumes from the
/// previous checkpoint.
#[test]
fn a_changed_manifest_is_refused() {
    let world = World::new(24);
    ok(&world.pretrain("run", &[]));
    let expected = metrics(&world.path("run"));
    let manifest = world.path("run/checkpoints/step-0000000012/manifest.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    for (from, to) in [
        ("\"step\": 12", "\"step\": 11"),
        ("\"n_updates\": 12", "\"n_updates\": 85"),
        ("\"heads\": 2", "\"heads\": 1"),
    ] {
        assert!(text.contains(from), "{from}");
        std::fs::write(&manifest, text.replacen(from, to, 1)).unwrap();
        let checkpoint = world.text("run/checkpoints/step-0000000012");
        let out = world.text("x.safetensors");
        let output = world.ocelli(&["export", "--checkpoint", &checkpoint, "--out", &out]);
        check_message("resume::a_changed_manifest_is_refused", &fails(&output, 3));
    }
    let stderr = ok(&world.pretrain("run", &[]));
    check_message("resume::a_changed_manifest_is_refused.resumed", &lines_with(&stderr, "step 8 of 12"));
    assert_eq!(metrics(&world.path("run")), expected);
}
