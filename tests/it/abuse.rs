//! Recipes with absurd values: every key of five runs, each with seventeen values. Slow: set
//! `RUN_SLOW_TESTS=1`.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::methods::{CONVNEXT, LEJEPA, REGNET, RESNET, SIMCLR, SWAV, VIT, recipe};
use crate::support::{TINY, World, ok, program};

/// Values that each key is set to.
const VALUES: [&str; 17] = [
    "0",
    "-1",
    "1",
    "2",
    "7",
    "1000000000",
    "1000000000000",
    "9223372036854775807",
    "1e18",
    "-1e18",
    "1e-300",
    "nan",
    "inf",
    "\"\"",
    "\"x\"",
    "true",
    "[]",
];

/// Time that a run may take before it is asked to stop, and time that it may then take to stop, on
/// an idle machine.
const PATIENCE: Duration = Duration::from_secs(5);

/// Outcome of a run.
#[derive(Debug)]
enum Ended {
    /// A documented exit code.
    Well,
    /// Any other end, described.
    Badly(String),
}

/// Runs `arguments`; asks the run to stop after `patience`, and gives it as long to do so.
fn run(arguments: &[String], patience: Duration) -> Ended {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ocelli-under-test"))
        .args(arguments)
        .env("OCELLI_CACHE", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = std::io::Read::read_to_end(&mut stderr, &mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    let start = Instant::now();
    let mut asked = false;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if !asked && start.elapsed() > patience {
            Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
            asked = true;
        }
        if start.elapsed() > 2 * patience {
            child.kill().unwrap();
            child.wait().unwrap();
            return Ended::Badly("does not hear TERM".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let said = reader.join().unwrap();
    let last = said.trim().lines().last().unwrap_or_default().to_string();
    match (status.code(), status.signal()) {
        (Some(0 | 2 | 3 | 78 | 143), _) => Ended::Well,
        // Before training there is nothing to save: TERM does what it always does.
        (None, Some(15)) if asked => Ended::Badly("hangs before it trains".into()),
        (code, signal) => Ended::Badly(format!("code {code:?}, signal {signal:?}: {last}")),
    }
}

/// Collects the dotted keys of a plan, down to values that are not tables.
fn keys(prefix: &str, table: &toml::Table, out: &mut Vec<String>) {
    for (key, value) in table {
        let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            toml::Value::Table(table) => keys(&name, table, out),
            _ => out.push(name),
        }
    }
}

#[test]
fn no_value_of_a_recipe_makes_it_panic_hang_or_abort() {
    if std::env::var_os("RUN_SLOW_TESTS").is_none() {
        return;
    }
    let world = World::new(24);
    let recipes = [
        TINY.to_string(),
        recipe(REGNET, SWAV, 2, ""),
        recipe(RESNET, SIMCLR, 0, ""),
        recipe(CONVNEXT, SIMCLR, 0, ""),
        recipe(VIT, LEJEPA, 2, ""),
    ];
    let small = ["optim.length={steps=6}", "run.workers=1", "run.data_threads=1"];
    let mut cases = Vec::new();
    for (number, recipe) in recipes.iter().enumerate() {
        let name = format!("base-{number}");
        let file = world.text(&format!("{number}.toml"));
        std::fs::write(&file, recipe).unwrap();
        let args = |workdir: &str, more: &[String]| -> Vec<String> {
            let mut args: Vec<String> =
                ["pretrain", "--recipe", &file, "--shards"].map(String::from).to_vec();
            args.push(world.text("data/train-000000.tar"));
            args.extend(["--workdir".to_string(), world.text(workdir)]);
            let sets = small.iter().map(ToString::to_string).chain(more.iter().cloned());
            args.extend(sets.flat_map(|set| ["--set".to_string(), set]));
            args
        };
        let mut base = program();
        ok(&base.args(args(&name, &[])).output().unwrap());
        let plan = std::fs::read_to_string(world.path(&name).join("plan.toml")).unwrap();
        let plan: toml::Table = plan.parse().unwrap();
        let mut names = Vec::new();
        keys("", plan["recipe"].as_table().unwrap(), &mut names);
        for key in names.iter().filter(|key| *key != "name" && *key != "data.shards") {
            for (i, value) in VALUES.iter().enumerate() {
                let workdir = format!("{number}-{key}-{i}");
                cases.push((
                    format!("{key} = {value}"),
                    workdir.clone(),
                    args(&workdir, &[format!("{key}={value}")]),
                ));
            }
        }
    }
    assert!(cases.len() > 69 * 17, "{} cases", cases.len());
    let next = AtomicUsize::new(0);
    let bad = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while let Some((what, workdir, args)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Ended::Badly(how) = run(args, PATIENCE) {
                        bad.lock().unwrap().insert((what.clone(), workdir.clone()), (how, args.clone()));
                    }
                    let _ = std::fs::remove_dir_all(world.path(workdir));
                }
            });
        }
    });
    let mut bad = bad.into_inner().unwrap();
    // A start may be slow on a busy machine: a failed case counts only if it fails again alone,
    // with more time.
    bad.retain(|(_, workdir), (how, args)| {
        let _ = std::fs::remove_dir_all(world.path(workdir));
        let Ended::Badly(again) = run(args, 4 * PATIENCE) else { return false };
        *how = again;
        true
    });
    assert!(bad.is_empty(), "{} of {} cases:\n{bad:#?}", bad.len(), cases.len());
}
