//! Recipes with absurd values: every key of five runs, each with seventeen values. Slow: run it
//! with `-- --ignored`.

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

/// Time until a run is asked to stop, and the time that it then has to stop, on an idle machine.
const PATIENCE: Duration = Duration::from_secs(5);

/// Outcome of a run.
#[derive(Debug)]
enum Outcome {
    /// The run ended with a documented exit code.
    Documented,
    /// The run ended in any other way, which the text describes.
    Failure(String),
}

/// Runs `arguments`; asks the run to stop after `patience`, and gives it as much time to do so.
fn run(arguments: &[String], patience: Duration) -> Outcome {
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
    let mut asked_to_stop = false;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if !asked_to_stop && start.elapsed() > patience {
            Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
            asked_to_stop = true;
        }
        if start.elapsed() > 2 * patience {
            child.kill().unwrap();
            child.wait().unwrap();
            return Outcome::Failure("ignores TERM".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let stderr = reader.join().unwrap();
    let last = stderr.trim().lines().last().unwrap_or_default().to_string();
    match (status.code(), status.signal()) {
        (Some(0 | 2 | 3 | 78 | 143), _) => Outcome::Documented,
        // Before training there is nothing to save, and TERM ends the process by default.
        (None, Some(15)) if asked_to_stop => Outcome::Failure("hangs before it trains".into()),
        (code, signal) => Outcome::Failure(format!("code {code:?}, signal {signal:?}: {last}")),
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

/// Returns the arguments of a short run with the recipe in `file`.
fn short_run_args(world: &World, file: &str, workdir: &str, setting: Option<&str>) -> Vec<String> {
    let shard = world.text("data/train-000000.tar");
    let workdir = world.text(workdir);
    let mut args = vec!["pretrain", "--recipe", file, "--shards", &shard, "--workdir", &workdir];
    for setting in ["optim.length={steps=6}", "run.workers=1", "run.data_threads=1"] {
        args.extend(["--set", setting]);
    }
    if let Some(setting) = setting {
        args.extend(["--set", setting]);
    }
    args.iter().map(ToString::to_string).collect()
}

#[test]
#[ignore = "minutes"]
fn no_value_of_a_recipe_makes_it_panic_hang_or_abort() {
    let world = World::new(24);
    let recipes = [
        TINY.to_string(),
        recipe(REGNET, SWAV, 2, ""),
        recipe(RESNET, SIMCLR, 0, ""),
        recipe(CONVNEXT, SIMCLR, 0, ""),
        recipe(VIT, LEJEPA, 2, ""),
    ];
    let mut cases = Vec::new();
    for (number, recipe) in recipes.iter().enumerate() {
        let name = format!("base-{number}");
        let file = world.text(&format!("{number}.toml"));
        std::fs::write(&file, recipe).unwrap();
        ok(&program().args(short_run_args(&world, &file, &name, None)).output().unwrap());
        let plan = std::fs::read_to_string(world.path(&name).join("plan.toml")).unwrap();
        let plan: toml::Table = plan.parse().unwrap();
        let mut names = Vec::new();
        keys("", plan["recipe"].as_table().unwrap(), &mut names);
        for key in names.iter().filter(|key| *key != "name" && *key != "data.shards") {
            for (i, value) in VALUES.iter().enumerate() {
                let workdir = format!("{number}-{key}-{i}");
                let args = short_run_args(&world, &file, &workdir, Some(&format!("{key}={value}")));
                cases.push((format!("{key} = {value}"), workdir, args));
            }
        }
    }
    assert!(cases.len() > 69 * 17, "{} cases", cases.len());
    let next = AtomicUsize::new(0);
    let failures = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while let Some((case, workdir, args)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Outcome::Failure(text) = run(args, PATIENCE) {
                        let mut failures = failures.lock().unwrap();
                        failures.insert((case.clone(), workdir.clone()), (text, args.clone()));
                    }
                    let _ = std::fs::remove_dir_all(world.path(workdir));
                }
            });
        }
    });
    let mut failures = failures.into_inner().unwrap();
    // A start may be slow on a busy machine: a failure counts only if the case fails again alone,
    // with more time.
    failures.retain(|(_, workdir), (text, args)| {
        let _ = std::fs::remove_dir_all(world.path(workdir));
        let Outcome::Failure(second) = run(args, 4 * PATIENCE) else { return false };
        *text = second;
        true
    });
    assert!(failures.is_empty(), "{} of {} cases:\n{failures:#?}", failures.len(), cases.len());
}
