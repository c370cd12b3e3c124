//! Runs that are given hours.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ranks::engine::LocalGroup;
use serde_json::Value;
use session::Session;
use toml::Table;
use trainer::Recipe;
use trainer::run::{RunTimes, measure_times};

use crate::messages::{check_message, lines_with};
use crate::support::{TINY, World, fails, json_of, metrics, ok, wait_for, wait_for_end};

/// Returns the plan of a run.
fn plan(world: &World, run: &str) -> Table {
    fs::read_to_string(world.path(run).join("plan.toml")).unwrap().parse().unwrap()
}

/// Returns the bytes of the weights of a run after its last step.
fn last_weights(world: &World, run: &str) -> Vec<u8> {
    let n_steps = plan(world, run)["total_steps"].as_integer().unwrap();
    let path = format!("{run}/checkpoints/step-{n_steps:010}/rank-00000.safetensors");
    fs::read(world.path(&path)).unwrap()
}

/// Returns the seconds of a time such as `615 ms` or `2.7 s`.
fn seconds_of(time: &str) -> f64 {
    let (number, unit) = time.trim().split_once(' ').unwrap();
    let scale = if unit == "ms" { 1e-3 } else { 1.0 };
    number.replace(',', "").parse::<f64>().unwrap() * scale
}

/// Returns the number that is written before `unit` in `text`.
fn number_before(text: &str, unit: &str) -> f64 {
    let before = text.split(unit).next().unwrap();
    before.rsplit(' ').next().unwrap().replace(',', "").parse().unwrap()
}

/// Returns the time of a step in seconds, as the line that tells the length of a run of `minutes`
/// states it.
fn planned_step_s(stderr: &str, minutes: &str) -> f64 {
    let words = format!(" in {minutes} minutes, of ");
    let note = stderr.lines().find(|line| line.contains(&words)).expect("a note");
    seconds_of(note.split(&words).nth(1).unwrap().split(" each").next().unwrap())
}

/// Checks that the steps of a run took as long as planned, by a factor of 3 at most: other tests
/// run at the same time.
fn check_steps(world: &World, run: &str, planned_s: f64) {
    let text = fs::read_to_string(world.path(run).join("metrics.jsonl")).unwrap();
    let mut sum_s = 0.0;
    let mut n_rows = 0;
    for line in text.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let Some(step_ms) = row["time/step_ms"].as_f64() else { continue };
        sum_s += step_ms / 1e3;
        n_rows += 1;
    }
    let mean_s = sum_s / f64::from(n_rows);
    assert!((planned_s / 3.0..=3.0 * planned_s).contains(&mean_s), "{mean_s} s, planned {planned_s} s");
}

/// Start, steps, probes, checkpoints and report are all within the time: what was measured must add
/// up to it, and steps take as long as measured.
#[test]
fn a_run_ends_within_its_time_with_its_schedule_complete() {
    const SECONDS: f64 = 18.0;
    let world = World::new(60);
    let shard = world.text("data/train-000000.tar");
    let mut more = vec!["--hours", "0.005", "--probe-train", &shard, "--probe-test", &shard];
    more.extend(["--set", "optim.warmup={percent=10}", "--set", "run.checkpoint_every_steps=100"]);
    let stderr = ok(&world.pretrain("run", &more));
    check_steps(&world, "run", planned_step_s(&stderr, "0.3"));
    let note = stderr.lines().find(|line| line.contains(" in 0.3 minutes, of ")).expect("a note");
    let step = note.split(", of ").nth(1).unwrap().split(" each").next().unwrap();
    let steps_s = number_before(note, " steps in 0.3") * seconds_of(step);
    let (_, rest) = note.split_once("not part of the run; ").unwrap();
    let (passed, reserved) = rest.split_once(" have passed, ").unwrap();
    let seconds = steps_s + seconds_of(passed) + seconds_of(reserved.rsplit_once("take ").unwrap().1);
    // A step is given in whole milliseconds.
    assert!((0.9 * SECONDS..1.1 * SECONDS).contains(&seconds), "{seconds} s: {note}");

    let plan = plan(&world, "run");
    let n_steps = plan["total_steps"].as_integer().unwrap();
    assert_eq!(plan["minutes"].as_float(), Some(0.3));
    assert_eq!(plan["warmup_steps"].as_integer(), Some((n_steps as f64 / 10.0).round() as i64));
    let rows = metrics(&world.path("run"));
    assert_eq!(rows.len() as i64, n_steps);
    assert!(rows[rows.len() - 1]["knobs/lr"].as_f64().unwrap() < 3e-5, "the rate has decayed");
    assert!(!world.path("run/checkpoints/.writing-timed").exists());

    let evaluations = Evaluations::read(&world, "run");
    assert_eq!(evaluations.scored_steps, [0, n_steps]);
    // One image is searched for 50 that are trained on, of 8 in a step; 32 at least, of the 60.
    let is_searched = n_steps * 8 / 50 >= 32;
    assert_eq!(evaluations.n_random, usize::from(is_searched), "random weights are searched once");
    let mut searched_steps = Vec::new();
    if is_searched {
        searched_steps.push(0);
        let interval = (n_steps as u64).div_ceil(8) as i64;
        searched_steps.extend((1..n_steps).filter(|step| step % interval == 0));
        searched_steps.push(n_steps);
    }
    assert_eq!(evaluations.searched_steps, searched_steps);
    assert!(evaluations.n_searched.iter().all(|n_images| *n_images == 32), "{:?}", evaluations.n_searched);
}

/// What a run has recorded of its evaluations.
#[derive(Default)]
struct Evaluations {
    /// Steps of the scores of the probe, each once.
    scored_steps: Vec<i64>,
    /// Steps of the searches of views by the network of the run.
    searched_steps: Vec<i64>,
    /// Number of searches by random weights.
    n_random: usize,
    /// Number of images of each search.
    n_searched: Vec<i64>,
}

impl Evaluations {
    /// Reads those of a run.
    fn read(world: &World, run: &str) -> Self {
        let text = fs::read_to_string(world.path(run).join("evaluations.jsonl")).unwrap();
        let mut evaluations = Self::default();
        for line in text.lines() {
            let row: Value = serde_json::from_str(line).unwrap();
            let step = row["about"]["step"].as_i64().unwrap();
            if row["metric"] != "retrieval" {
                evaluations.scored_steps.push(step);
                continue;
            }
            evaluations.n_searched.push(row["test"]["images"].as_i64().unwrap());
            if row["about"]["network"] == "random weights" {
                evaluations.n_random += 1;
            } else {
                evaluations.searched_steps.push(step);
            }
        }
        evaluations.scored_steps.dedup();
        evaluations
    }
}

/// A killed run goes on with the steps of its plan, and ends with the bits of a run that was not
/// killed.
#[test]
fn a_killed_run_of_hours_equals_an_uninterrupted_one() {
    const NAME: &str = "hours::a_killed_run_of_hours_equals_an_uninterrupted_one";
    let world = World::new(24);
    let hours = ["--hours", "0.004", "--set", "optim.warmup={percent=50}"];
    let fault = ["--inject-fault", "kill:rank=0,step=9,phase=backward"];
    let killed = world.pretrain("a", &[&hours[..], &fault].concat());
    assert!(!killed.status.success());
    let begun = plan(&world, "a");
    let stderr = ok(&world.pretrain("a", &hours));
    assert!(stderr.contains("resuming at step") && !stderr.contains("in 0.24 minutes"), "{stderr}");
    assert_eq!(plan(&world, "a"), begun);

    let shard = world.text("data/train-000000.tar");
    let recipe = world.text("a/plan.toml");
    let workdir = world.text("b");
    ok(&world.ocelli(&["pretrain", "--recipe", &recipe, "--shards", &shard, "--workdir", &workdir]));
    assert!(last_weights(&world, "a") == last_weights(&world, "b"), "weights differ");
    assert_eq!(metrics(&world.path("a")), metrics(&world.path("b")));

    // The same minutes, in the recipe.
    ok(&world.pretrain("a", &["--set", "optim.length.minutes=0.24", "--set", "optim.warmup={percent=50}"]));
    let other = world.pretrain("a", &["--hours", "0.005", "--set", "optim.warmup={percent=50}"]);
    check_message(&format!("{NAME}.other"), &fails(&other, 2));
    let twice = world.pretrain("c", &["--hours", "0.003", "--set", "optim.length.epochs=3"]);
    check_message(&format!("{NAME}.twice"), &fails(&twice, 2));
    assert!(!world.path("c").exists());
}

/// Measures the times of a run on two ranks, in a thread each, of which some are asked to stop.
fn times_on_two_ranks(world: &World, is_stopped: [bool; 2]) -> Vec<Option<RunTimes>> {
    let plan = crate::ranks::plan(2, &["optim.length.minutes=0.02"]);
    let dataset = world.dataset();
    let workdir = world.path("run");
    let stops = is_stopped.map(AtomicBool::new);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (engine, stop) in LocalGroup::ranks(2).into_iter().zip(&stops) {
            let plan = &plan;
            let dataset = &dataset;
            let workdir = &workdir;
            threads.push(scope.spawn(move || {
                let comm = crate::ranks::communicator(plan, engine);
                let job = crate::ranks::job(plan, dataset, workdir, stop);
                let (times, comm) = measure_times(&job, 0.02, comm).unwrap();
                comm.finish().unwrap();
                times
            }));
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// All ranks find the times of the slowest, and thus the same number of steps.
#[test]
fn two_ranks_agree_on_the_times() {
    let world = World::new(60);
    let times = times_on_two_ranks(&world, [false, false]);
    assert_eq!(times[0], times[1]);
    let slowest = times[0].as_ref().unwrap();
    assert!(slowest.step_s > 0.0 && slowest.row_s > 0.0 && slowest.checkpoint_s > 0.0, "{times:?}");
    // A tenth of the time, 120 ms, is enough for one, or for four and more.
    assert!(slowest.n_timed >= 1, "{times:?}");
    let checkpoints = world.path("run/checkpoints");
    assert!(!checkpoints.join(".writing-timed").exists());
    assert!(trainer::checkpoint::steps(&checkpoints).is_empty());
}

/// If one rank is asked to stop, no rank goes on timing.
#[test]
fn a_measurement_on_two_ranks_can_be_stopped() {
    let world = World::new(60);
    assert_eq!(times_on_two_ranks(&world, [false, true]), [None, None]);
}

/// A run that is asked to stop while it is timed stops, with nothing but its folder.
#[test]
fn a_run_can_be_stopped_while_it_is_timed() {
    let world = World::new(60);
    let mut recipe = Recipe::parse(TINY, "tiny", &["optim.length.minutes=600".to_string()]).unwrap();
    recipe.data.shards = vec![world.text("data/train-000000.tar")];
    let session = Session::new(recipe, world.path("run")).unwrap();
    session.stop.store(true, Ordering::Relaxed);
    let fitted = session.open(&world.storage()).unwrap().resolve().unwrap().fit().unwrap();
    assert!(fitted.is_untimed());
    assert!(fitted.timed().unwrap().is_none());
    assert!(!world.path("run/plan.toml").exists());

    // The program has nothing to save, and ends at once.
    let mut child = Command::new(env!("CARGO_BIN_EXE_ocelli-under-test"))
        .args(world.pretrain_args("b", &["--hours", "10"]))
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for("the timing of steps", Duration::from_secs(120), || world.path("b").exists());
    Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    let start = Instant::now();
    assert_eq!(wait_for_end(&mut child).signal(), Some(15));
    assert!(start.elapsed() < Duration::from_secs(10), "steps are timed for a minute");
    assert!(!world.path("b/plan.toml").exists());
}

/// Ranks of a launch take the same number of steps.
#[cfg(feature = "mpi")]
#[test]
fn ranks_of_a_launch_run_for_hours() {
    let world = World::new(60);
    let ranks = crate::mpirun::Ranks::new(&world, &["optim.warmup={percent=10}"]);
    ok(&ranks.run(2, "run", &["--hours", "0.003"]));
    let n_steps = plan(&world, "run")["total_steps"].as_integer().unwrap();
    assert_eq!(metrics(&world.path("run")).len() as i64, n_steps);
    assert!(world.path(&format!("run/checkpoints/step-{n_steps:010}")).is_dir());
}

/// Subjects of the lines that tell a choice.
const SUBJECTS: [&str; 5] = ["method: ", "network: ", "images: ", "batch: ", "length: "];

/// Returns the subjects of the lines that tell a choice, in their order.
fn subjects<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut subjects = Vec::new();
    for line in lines {
        subjects.extend(SUBJECTS.iter().find(|subject| line.starts_with(**subject)));
    }
    subjects
}

/// Without a recipe one is chosen, told in five lines, and written into the plan, by which the run
/// is resumed.
#[test]
fn a_recipe_is_chosen_for_hours() {
    let world = World::new(60);
    let shard = world.text("data/train-000000.tar");
    let workdir = world.text("run");
    let args = ["pretrain", "--hours", "0.01", "--shards", &shard, "--workdir", &workdir];
    let stderr = ok(&world.ocelli(&args));
    check_steps(&world, "run", planned_step_s(&stderr, "0.6"));
    let notes = stderr.lines().filter_map(|line| line.strip_prefix("note: "));
    assert_eq!(subjects(notes), SUBJECTS, "{stderr}");
    check_message("hours::a_recipe_is_chosen_for_hours", &lines_with(&stderr, "may be too few"));

    let begun = plan(&world, "run");
    let recipe = &begun["recipe"];
    assert_eq!(recipe["name"].as_str(), Some("lejepa_cifar"));
    assert_eq!(recipe["optim"]["batch_size"].as_integer(), Some(32), "no image repeats within a batch");
    assert_eq!(begun["minutes"].as_float(), Some(0.6));
    assert_eq!(recipe["optim"]["length"]["steps"], begun["total_steps"]);

    // The same command finds the run, and neither chooses nor measures.
    let stderr = ok(&world.ocelli(&args));
    assert!(!stderr.contains("note: method: ") && !stderr.contains("optim.length: "), "{stderr}");
    assert_eq!(plan(&world, "run"), begun);

    // Weights that it did not begin with are not left out in silence.
    let stderr = fails(&world.ocelli(&[&args[..], &["--init", &workdir]].concat()), 2);
    assert!(stderr.contains("started from random weights: leave out --init"), "{stderr}");

    // Images may be named by a setting, too.
    let setting = format!("data.shards=[{shard:?}]");
    let workdir = world.text("set");
    let args = ["pretrain", "--hours", "0.001", "--set", &setting, "--workdir", &workdir];
    ok(&world.ocelli(&args));
    assert_eq!(plan(&world, "set")["n_samples"].as_integer(), Some(60));
}

/// Returns the line of JSON of a plan of eight hours on the world's images, after five lines, a
/// warning of few images, an empty line, and two with the command.
fn planned_choice(world: &World, more: &[&str]) -> Value {
    let shard = world.text("data/train-000000.tar");
    let args = ["plan", "--hours", "8", "--shards", &shard, "--json"];
    let output = world.ocelli(&[&args[..], more].concat());
    ok(&output);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 10, "{text}");
    assert_eq!(subjects(lines[..5].iter().copied()), SUBJECTS, "{text}");
    assert!(lines[4].contains("the longest published run has 800"), "{text}");
    assert!(lines[5].starts_with("warning: 60 images may be too few "), "{text}");
    assert_eq!(lines[6], "", "{text}");
    let choice = json_of(&output);
    assert_eq!(choice["command"], lines[8].trim_start(), "{text}");
    choice
}

/// A plan tells the choice with its command, which means the same; settings of the user take
/// precedence, and weights are continued with views of their size.
#[test]
fn a_plan_tells_what_would_be_chosen() {
    let world = World::new(60);
    let choice = planned_choice(&world, &["--set", "optim.batch_size=16"]);
    assert_eq!(choice["recipe"], "lejepa_cifar");
    let command = choice["command"].as_str().unwrap();
    assert!(command.starts_with("ocelli pretrain --recipe lejepa_cifar --hours 8 "), "{command}");
    assert!(command.contains(" --set optim.batch_size=16 --shards "), "{command}");

    ok(&world.pretrain("first", &["--set", "optim.length={steps=2}"]));
    let first = world.text("first");
    let more = ["--init", &first, "--norm-epsilon", "1e-5", "--set", "optim.batch_size=8"];
    let choice = planned_choice(&world, &more);
    assert_eq!(choice["recipe"], "dinov2_cifar");
    let settings = choice["settings"].as_array().unwrap();
    for setting in ["model=from_init", "views.crops.0.size_px=16", "views.crops.1.size_px=8"] {
        assert!(settings.iter().any(|listed| listed == setting), "{setting}: {settings:?}");
    }
    let command = choice["command"].as_str().unwrap();
    assert!(command.contains(&format!(" --init {first} --norm-epsilon 1e-5 ")), "{command}");

    // The command is one that can be run, here for seconds.
    let arguments = command.strip_prefix("ocelli ").unwrap().replace(" --hours 8 ", " --hours 0.001 ");
    let command = format!("{} {arguments}", env!("CARGO_BIN_EXE_ocelli-under-test"));
    let output = Command::new("sh").args(["-c", &command]).current_dir(world.path(".")).output().unwrap();
    ok(&output);
    let recipe = &plan(&world, "runs/mine")["recipe"];
    assert_eq!(recipe["name"].as_str(), Some("dinov2_cifar"));
    assert_eq!(recipe["optim"]["batch_size"].as_integer(), Some(8));
    assert_eq!(recipe["model"]["width"].as_integer(), Some(32), "that of the weights");
    assert_eq!(recipe["init"]["weights"].as_str(), Some(first.as_str()));
}
