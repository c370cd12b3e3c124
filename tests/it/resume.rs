use std::io::BufRead;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{World, fails, metrics, ok};

/// Starts a run of many steps and signals it once it has logged `rows` rows.
fn interrupt(world: &World, workdir: &str, signal: &str, rows: usize) -> Option<i32> {
    let more = ["--set", "optim.length={steps=400}"];
    let mut child = Command::new(env!("CARGO_BIN_EXE_ocelli-under-test"))
        .args(world.pretrain_args(workdir, &more))
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let path = world.path(workdir).join("metrics.jsonl");
    let start = Instant::now();
    while std::fs::read_to_string(&path).map_or(0, |text| text.lines().count()) < rows {
        assert!(start.elapsed() < Duration::from_secs(120), "the run does not get on");
        std::thread::sleep(Duration::from_millis(5));
    }
    Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    child.wait().unwrap().code()
}

#[test]
fn a_killed_run_continues_bit_for_bit() {
    let world = World::new(50);
    let more = ["--set", "optim.length={steps=400}"];
    ok(&world.pretrain("unbroken", &more));
    let unbroken = metrics(&world.path("unbroken"));
    assert_eq!(unbroken.len(), 400);
    // Killed by no signal that can be caught, at three places between checkpoints.
    for rows in [9, 30, 53] {
        assert_eq!(interrupt(&world, "broken", "-9", rows), None);
    }
    let stderr = ok(&world.pretrain("broken", &more));
    assert!(stderr.contains("continuing at step"), "{stderr}");
    assert_eq!(metrics(&world.path("broken")), unbroken);
    let checkpoint = |run: &str| {
        std::fs::read(world.path(run).join("checkpoints/step-0000000400/rank-00000.safetensors")).unwrap()
    };
    assert!(checkpoint("broken") == checkpoint("unbroken"), "weights differ");
    // Whoever may read the manifest may read the weights.
    let mode = |name: &str| {
        let path = world.path("broken").join("checkpoints/step-0000000400").join(name);
        std::fs::metadata(path).unwrap().permissions()
    };
    assert_eq!(mode("rank-00000.safetensors"), mode("manifest.json"));
}

#[test]
fn a_run_that_is_asked_to_stop_writes_a_checkpoint_and_says_143() {
    let world = World::new(50);
    for signal in ["-TERM", "-USR2"] {
        let workdir = format!("run{signal}");
        assert_eq!(interrupt(&world, &workdir, signal, 6), Some(143));
        let rows = metrics(&world.path(&workdir)).len();
        let newest = trainer::checkpoint::Checkpoint::open(&world.path(&workdir)).unwrap();
        assert_eq!(newest.manifest.step as usize, rows, "the checkpoint is of the last step");
    }
}

/// An interrupt from the keyboard is answered at once, and ends the run after its step; a second
/// one ends it at once.
#[test]
fn interrupts_are_answered() {
    let world = World::new(50);
    // A step takes long: what answers is not the loop of steps.
    let more = ["--set", "optim.length={steps=4000}", "--inject-fault", "hang:step=3,phase=backward"];
    // A shell that runs the tests in the background lets them ignore interrupts, which the program
    // would go on ignoring.
    let mut child = Command::new("env")
        .args(["--default-signal=INT", env!("CARGO_BIN_EXE_ocelli-under-test")])
        .args(world.pretrain_args("run", &more))
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = child.id().to_string();
    // A program that does not answer would be waited for: its end is the end of its lines.
    let overdue = std::thread::spawn({
        let pid = pid.clone();
        move || {
            std::thread::park_timeout(Duration::from_secs(120));
            Command::new("kill").args(["-9", &pid]).stderr(Stdio::null()).status()
        }
    });
    let lines = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok);
    let path = world.path("run").join("metrics.jsonl");
    let start = Instant::now();
    while std::fs::read_to_string(&path).map_or(0, |text| text.lines().count()) < 3 {
        assert!(start.elapsed() < Duration::from_secs(120), "the run does not get on");
        std::thread::sleep(Duration::from_millis(5));
    }
    let interrupt = || Command::new("kill").args(["-INT", &pid]).status().unwrap();
    interrupt();
    let answer = lines.find(|line| line.contains("finishing step"));
    assert!(answer.is_some_and(|line| line.contains("finishing step 4, at most one more")));
    interrupt();
    assert!(lines.any(|line| line.contains("stopped without saving")));
    assert_eq!(child.wait().unwrap().code(), Some(130));
    overdue.thread().unpark();
    // It finds no such process.
    overdue.join().unwrap().unwrap();
}

/// A damaged newest checkpoint is skipped for the previous one.
#[test]
fn a_damaged_checkpoint_is_passed_over() {
    let world = World::new(50);
    ok(&world.pretrain("run", &[]));
    let unbroken = metrics(&world.path("run"));
    let newest = world.path("run").join("checkpoints/step-0000000012/rank-00000.safetensors");
    let mut bytes = std::fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&newest, bytes).unwrap();
    let stderr = ok(&world.pretrain("run", &[]));
    assert!(stderr.contains("checksum") && stderr.contains("continuing at step 8"), "{stderr}");
    assert_eq!(metrics(&world.path("run")), unbroken);
}

/// A manifest that was changed by hand, or by a bad disk, is rejected: the run continues from the
/// previous checkpoint.
#[test]
fn a_changed_manifest_is_refused() {
    let world = World::new(24);
    ok(&world.pretrain("run", &[]));
    let whole = metrics(&world.path("run"));
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
        let refused = fails(&world.ocelli(&["export", "--checkpoint", &checkpoint, "--out", &out]), 3);
        assert!(refused.contains("manifest.json has been changed"), "{refused}");
    }
    let told = ok(&world.pretrain("run", &[]));
    assert!(told.contains("continuing at step 8 of 12"), "{told}");
    assert_eq!(metrics(&world.path("run")), whole);
}
