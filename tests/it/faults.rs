//! External faults during a run, and inconsistent recipes.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, metrics, ok, wait_for, wait_for_end};

/// Starts the program without waiting for it.
fn spawn(args: &[String]) -> std::process::Child {
    Command::new(env!("CARGO_BIN_EXE_ocelli-under-test"))
        .args(args)
        .env("OCELLI_CACHE", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until the run `run` has a checkpoint.
fn wait_for_checkpoint(world: &World) {
    let latest = world.path("run/checkpoints/latest");
    wait_for("a checkpoint", Duration::from_secs(60), || latest.exists());
}

#[test]
fn a_run_whose_folder_is_moved_ends_without_creating_another() {
    let world = World::new(24);
    let mut child = spawn(&world.pretrain_args("run", &["--set", "optim.length={steps=1000000}"]));
    wait_for_checkpoint(&world);
    std::fs::rename(world.path("run"), world.path("moved")).unwrap();
    wait_for_end(&mut child);
    let output = child.wait_with_output().unwrap();
    check_message("faults::a_run_whose_folder_is_moved_ends_without_creating_another", &fails(&output, 3));
    assert!(!world.path("run/checkpoints").exists(), "a folder without a plan");
    ok(&world.ocelli(&["runs", &world.text("moved")]));
}

/// The replacement has the same number of samples and the same keys, but other images.
#[test]
fn replaced_shards_are_detected() {
    let world = World::new(24);
    ok(&world.pretrain("run", &["--set", "optim.length={steps=4}"]));
    let data = world.text("data");
    let other = world.text("other");
    ok(&world.ocelli(&[
        "shards",
        "synth",
        "--out",
        &other,
        "--count",
        "24",
        "--size-px",
        "20",
        "--seed",
        "9",
    ]));
    let before = metrics(&world.path("run"));
    std::fs::rename(&data, world.path("old")).unwrap();
    std::fs::rename(&other, &data).unwrap();
    let more = ["--lengthen", "--set", "optim.length={steps=8}"];
    check_message("faults::replaced_shards_are_detected", &fails(&world.pretrain("run", &more), 2));
    assert_eq!(metrics(&world.path("run")), before);
    // The same shards without their index are accepted.
    std::fs::remove_dir_all(&data).unwrap();
    std::fs::rename(world.path("old"), &data).unwrap();
    crate::support::without_sidecar(&world);
    ok(&world.pretrain("run", &more));
}

#[test]
fn a_run_without_a_finite_step_fails() {
    let world = World::new(24);
    for steps in ["1", "3"] {
        let length = format!("optim.length={{steps={steps}}}");
        let fault = format!("nan:step=0,steps={steps}");
        let more = ["--set", &length, "--set", "optim.warmup={steps=0}", "--inject-fault", &fault];
        let output = world.pretrain(&format!("run-{steps}"), &more);
        check_message(&format!("faults::a_run_without_a_finite_step_fails.{steps}"), &fails(&output, 78));
    }
}

/// Returns whether the run `run` has a checkpoint of this step.
fn has_checkpoint(world: &World, step: u64) -> bool {
    world.path(&format!("run/checkpoints/step-{step:010}")).exists()
}

/// Removes the checkpoint of this step, if the run `run` has it.
fn remove_checkpoint(world: &World, step: u64) {
    let folder = world.path(&format!("run/checkpoints/step-{step:010}"));
    if folder.exists() {
        std::fs::remove_dir_all(folder).unwrap();
    }
}

/// A wrong product ends the run without a checkpoint, and the message names the newest checkpoint
/// that is older than the fault. A checkpoint is complete at the latest when the next one begins:
/// whether the newest is, when a fault ends the run, depends on the disk.
#[test]
fn a_run_with_a_wrong_product_names_the_last_good_checkpoint() {
    let world = World::new(24);
    let every = ["--set", "run.checkpoint_every_steps=2", "--set", "run.keep_checkpoints=9"];
    // No older checkpoint exists.
    let fault = ["--inject-fault", "product:rank=0,step=6"];
    let output = world.pretrain("run", &[&every[..], &fault].concat());
    check_message(
        "faults::a_run_with_a_wrong_product_names_the_last_good_checkpoint.no_checkpoint",
        &fails(&output, 1),
    );
    assert!(has_checkpoint(&world, 4) && !has_checkpoint(&world, 7));
    // The run resumes with the checkpoint of step 4, and saves others before the fault. That of
    // step 10 is due when the fault is found.
    remove_checkpoint(&world, 6);
    let fault = ["--inject-fault", "product:rank=0,step=9"];
    let output = world.pretrain("run", &[&every[..], &fault].concat());
    check_message(
        "faults::a_run_with_a_wrong_product_names_the_last_good_checkpoint.good_checkpoint",
        &fails(&output, 1),
    );
    assert!(has_checkpoint(&world, 6) && !has_checkpoint(&world, 9) && !has_checkpoint(&world, 10));
    // Without the fault the run ends.
    remove_checkpoint(&world, 6);
    remove_checkpoint(&world, 8);
    ok(&world.pretrain("run", &every));
    assert_eq!(metrics(&world.path("run")).len(), 12);
}

#[test]
fn settings_beyond_the_end_of_the_run_cause_warnings() {
    let world = World::new(24);
    let more = ["--set", "optim.length={steps=2}", "--inject-fault", "kill:step=9"];
    let stderr = ok(&world.pretrain("run", &more));
    check_message(
        "faults::settings_beyond_the_end_of_the_run_cause_warnings.warmup",
        &lines_with(&stderr, "optim.warmup"),
    );
    check_message(
        "faults::settings_beyond_the_end_of_the_run_cause_warnings.fault",
        &lines_with(&stderr, "--inject-fault"),
    );
}

/// Models that are too large are rejected at once, with the key or the memory in the message.
#[test]
fn models_that_do_not_fit_are_refused() {
    let world = World::new(24);
    for (set, wanted) in [
        ("model.depth=100000000", "model.depth"),
        ("model.width=1000000000000", "model.width"),
        ("method.prototypes=1000000000000", "method.prototypes"),
        ("method.prototypes=16777216", "GB"),
        ("optim.batch_size=9223372036854775807", "optim.batch_size"),
        ("run.deadline_s=0", "run.deadline_s"),
        ("method.koleo_weight=1e18", "method.koleo_weight"),
    ] {
        let start = Instant::now();
        let more = ["--set", set, "--set", "method.head_bottleneck=4096"];
        let stderr = fails(&world.pretrain("run", &more), 2);
        assert!(stderr.contains(wanted), "{set}: {stderr}");
        assert!(start.elapsed() < Duration::from_secs(20), "{set} took {:?}", start.elapsed());
    }
    assert!(!world.path("run").exists());
}

#[test]
fn a_setting_in_another_unit_replaces_the_first() {
    let world = World::new(24);
    let more = ["--set", "optim.length.samples=16", "--set", "optim.warmup.percent=50"];
    ok(&world.pretrain("run", &more));
    assert_eq!(metrics(&world.path("run")).len(), 2);
    let output = world.pretrain("other", &["--set", "optim.lr=1\nseed = 3"]);
    check_message("faults::a_setting_in_another_unit_replaces_the_first", &fails(&output, 2));
}

#[test]
fn a_pipe_as_shard_and_an_endless_recipe_are_refused() {
    let world = World::new(24);
    let pipe = world.text("pipe.tar");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let output = world.ocelli(&["shards", "ls", &pipe]);
    check_message("faults::a_pipe_as_shard_and_an_endless_recipe_are_refused.pipe", &fails(&output, 3));
    let zero = ["plan", "--recipe", "/dev/zero"];
    let output = world.ocelli(&zero);
    check_message("faults::a_pipe_as_shard_and_an_endless_recipe_are_refused.endless", &fails(&output, 2));
}

/// Control characters in names are escaped, and a cause is printed once.
#[test]
fn messages_escape_control_characters_and_print_a_cause_once() {
    let world = World::new(24);
    let stderr = fails(&world.ocelli(&["shards", "ls", &world.text("no\u{1b}cwhere.tar")]), 2);
    assert!(!stderr.contains('\u{1b}') && stderr.contains("\\u{1b}cwhere"), "{stderr}");
    let missing = world.text("missing.pth");
    let stderr = fails(&world.pretrain("run", &["--init", &missing]), 2);
    assert_eq!(stderr.matches("No such file").count(), 1, "{stderr}");
}

/// A run that is stopped before its first step does not report a checkpoint.
#[test]
fn an_early_signal_reports_no_checkpoint() {
    let world = World::new(24);
    for wait_ms in [5, 20, 50, 100] {
        let run = format!("run-{wait_ms}");
        let mut child = spawn(&world.pretrain_args(&run, &["--set", "optim.length={steps=1000000}"]));
        std::thread::sleep(Duration::from_millis(wait_ms));
        let pid = child.id().to_string();
        Command::new("kill").args(["-TERM", &pid]).status().unwrap();
        let mut pipe = child.stderr.take().unwrap();
        let status = wait_for_end(&mut child);
        let mut stderr = String::new();
        std::io::Read::read_to_string(&mut pipe, &mut stderr).unwrap();
        let has_checkpoint = world.path(&run).join("checkpoints/latest").exists();
        assert_eq!(stderr.contains("checkpoint saved"), has_checkpoint, "{status}: {stderr}");
    }
}

/// Steps may be so long that checkpoints are also written by time.
#[test]
fn checkpoints_are_also_written_by_time() {
    let world = World::new(24);
    let more = [
        "--set",
        "run.checkpoint_every_steps=1000",
        "--set",
        "run.checkpoint_every_minutes=1e-9",
        "--set",
        "run.keep_checkpoints=9",
        "--set",
        "optim.length={steps=4}",
    ];
    ok(&world.pretrain("run", &more));
    let steps = trainer::checkpoint::steps(&world.path("run/checkpoints"));
    assert_eq!(steps.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3, 4]);
}

/// A log has the time of day and the time left, has warnings alone with `--quiet`, and is JSON if
/// requested.
#[test]
fn logs_have_the_requested_format() {
    let world = World::new(24);
    let log = ok(&world.pretrain("text", &[]));
    let line = log.lines().find(|line| line.contains("step 12/12")).unwrap();
    let time = line.split(' ').next().unwrap();
    assert!(time.len() == 9 && time.ends_with('Z') && time.matches(':').count() == 2, "{line}");
    assert!(line.contains("epoch 4.00") && line.contains(" left"), "{line}");
    assert!(log.contains("note: 12 steps of 8 images: at least "), "{log}");
    // Warnings are told in any case.
    let log = ok(&world.pretrain("quiet", &["--quiet"]));
    check_message("faults::logs_have_the_requested_format", &log);
    let log = ok(&world.pretrain("json", &["--log-format", "json", "--set", "optim.length={steps=2}"]));
    let rows: Vec<serde_json::Value> = log.lines().map(|row| serde_json::from_str(row).unwrap()).collect();
    assert!(rows.iter().any(|row| row["level"] == "warning"), "{log}");
    let last = rows.iter().find(|row| row["step"] == 2).expect("a line of progress");
    assert!(last["loss"].is_f64() && last["total_steps"] == 2 && last["images_per_s"].is_f64(), "{last}");
    assert!(rows.iter().all(|row| row["time"].as_f64().is_some_and(|time| time > 1.7e9)), "{log}");
}

/// A program that ignores HUP, as under `nohup`, survives the closing of its terminal.
#[test]
fn a_signal_that_is_ignored_stays_ignored() {
    let world = World::new(24);
    let args = world.pretrain_args("run", &["--set", "optim.length={steps=1000000}"]);
    let mut child = Command::new("sh")
        .args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_ocelli-under-test")])
        .args(&args)
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for_checkpoint(&world);
    let pid = child.id().to_string();
    Command::new("kill").args(["-HUP", &pid]).status().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert!(child.try_wait().unwrap().is_none(), "it ended by a signal that it was to ignore");
    Command::new("kill").args(["-TERM", &pid]).status().unwrap();
    assert_eq!(wait_for_end(&mut child).code(), Some(143));
}
