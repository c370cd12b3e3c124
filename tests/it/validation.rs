//! Runs that are validated while they train: on which images, when they end early, and which
//! weights are their result.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn_tensor::Device;
use networks::probe::{Probe, WatchedScore};
use networks::{NamedTensor, Network};
use pipeline::Order;
use ranks::engine::LocalGroup;
use serde_json::Value;
use session::{Classifier, NetworkSettings, Session};
use trainer::Recipe;
use trainer::checkpoint::{Checkpoint, steps_of_run};
use trainer::run::{Outcome, Quiet, Validations, run};

use crate::finetune::{CLASSES, finetune_on, plan, prepare};
use crate::messages::{check_message, lines_with};
use crate::methods::{VIT, recipe};
use crate::report::page_data;
use crate::support::{World, fails, json_of, metrics, ok};

/// Images to train on, and to validate on.
const SETS: [&str; 2] = ["sets/train", "sets/val"];

/// Settings with which weights never change, so that no validation after the first is better, and
/// of which the newest checkpoint is kept.
const STILL: [&str; 6] =
    ["--set", "optim.lr=0", "--set", "optim.min_lr=0", "--set", "run.keep_checkpoints=1"];

/// Trains a classifier in the folder `run` on the images in `sets/train`, with further flags.
fn train(world: &World, run: &str, more: &[&str]) -> Output {
    let recipe = world.text("alone.toml");
    let train = world.text("sets/train");
    let workdir = world.text(run);
    let args = ["finetune", "--recipe", &recipe, "--shards", &train, "--workdir", &workdir];
    world.ocelli(&[&args[..], more].concat())
}

/// Returns the steps of the rows of `evaluations.jsonl` of a run on `set`, in the order in which
/// they were written, with their scores and losses.
fn evaluations(world: &World, run: &str, set: &str) -> Vec<(u64, f64, f64)> {
    let mut found = Vec::new();
    for line in fs::read_to_string(world.path(run).join("evaluations.jsonl")).unwrap().lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        assert_eq!(row["metric"], "top1", "{row}");
        if row["test"]["set"] == set {
            let step = row["about"]["step"].as_u64().unwrap();
            found.push((step, row["accuracy"].as_f64().unwrap(), row["details"]["loss"].as_f64().unwrap()));
        }
    }
    found
}

/// Returns the steps of [`evaluations`].
fn evaluated_steps(world: &World, run: &str, set: &str) -> Vec<u64> {
    evaluations(world, run, set).into_iter().map(|(step, ..)| step).collect()
}

/// Returns the steps of the checkpoints of a run.
fn saved_steps(world: &World, run: &str) -> Vec<u64> {
    steps_of_run(&world.path(run)).into_iter().map(|(step, _)| step).collect()
}

/// Returns the numbers by which a run was validated.
fn validations(world: &World, run: &str) -> Validations {
    Validations::read(&world.path(run)).unwrap().unwrap()
}

/// Returns the weights of a run after `step` steps, as they are in a file.
fn weights(world: &World, run: &str, step: u64) -> Vec<u8> {
    let path = format!("{run}/checkpoints/step-{step:010}/rank-00000.safetensors");
    fs::read(world.path(&path)).unwrap()
}

/// Validations are at the start, after every eighth of the run or as the recipe says, and at the
/// end, where the classifier is scored once more. They are in the metrics, in the evaluations and
/// on the page. The test set is scored once.
#[test]
fn a_classifier_is_validated_at_intervals() {
    let world = prepare();
    let test = world.text("sets/test");
    fs::create_dir_all(&test).unwrap();
    for class in CLASSES {
        fs::rename(world.path("sets/val").join(class), world.path("sets/test").join(class)).unwrap();
        let copy = world.path("sets/val").join(class);
        fs::create_dir_all(&copy).unwrap();
        for number in 12..16 {
            let name = format!("{number}.png");
            fs::copy(world.path("sets/test").join(class).join(&name), copy.join(&name)).unwrap();
        }
    }
    let output = finetune_on(&world, "alone.toml", SETS, "run", &["--test-shards", &test, "--json"]);
    let stderr = ok(&output);
    assert!(stderr.contains("step 2: val: top1 "), "{stderr}");
    assert_eq!(evaluated_steps(&world, "run", "sets/val"), [0, 2, 4, 6, 8, 10, 12, 12]);
    assert_eq!(evaluated_steps(&world, "run", "sets/test"), [12]);
    let answer = json_of(&output);
    assert_eq!((&answer["steps"], answer.get("best_step")), (&12.into(), None), "{answer}");
    let tested = evaluations(&world, "run", "sets/test")[0].1;
    assert_eq!(answer["test"]["top1"].as_f64(), Some(tested), "{answer}");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    for text in ["8 images of sets/val, 2 classes", "16 images of sets/test, 2 classes"] {
        assert!(stdout.contains(text), "{text}: {stdout}");
    }

    let mut by_step = BTreeMap::new();
    for (step, score, loss) in evaluations(&world, "run", "sets/val") {
        by_step.insert(step, (score, loss));
    }
    let mut logged_steps = vec![0];
    for row in metrics(&world.path("run")) {
        let Some(score) = row["val/top1"].as_f64() else { continue };
        // Rows have the index of their step.
        let step = row["step"].as_u64().unwrap() + 1;
        logged_steps.push(step);
        // The last is scored again from its checkpoint, where sums may be rounded differently.
        if step < 12 {
            assert_eq!((score, row["val/loss"].as_f64().unwrap()), by_step[&step], "step {step}");
        }
    }
    assert_eq!(logged_steps, by_step.keys().copied().collect::<Vec<u64>>());
    let page = page_data(&fs::read_to_string(world.path("run/report.html")).unwrap());
    let scores = page["runs"][0]["scores"].as_array().unwrap();
    let curve = scores.iter().find(|score| score["kind"]["set"] == "sets/val").unwrap();
    assert_eq!(curve["points"].as_array().unwrap().len(), 7, "{curve}");

    ok(&finetune_on(&world, "alone.toml", SETS, "other", &["--set", "run.probe_every_steps=5"]));
    assert_eq!(evaluated_steps(&world, "other", "sets/val"), [0, 5, 10, 12, 12]);
}

/// A run that holds out a part of its images goes on only so, and only a command that validates
/// holds out any.
#[test]
fn held_out_images_are_those_of_a_run_that_validates() {
    let world = prepare();
    let recipe = world.text("alone.toml");
    let train = world.text("sets/train");
    let run = world.text("run");
    let args = ["--recipe", &recipe, "--shards", &train, "--workdir"];
    ok(&world.ocelli(&[&["finetune"][..], &args, &[&run[..], "--set", "optim.length={steps=2}"]].concat()));
    let stderr = fails(&finetune_on(&world, "alone.toml", SETS, "run", &[]), 2);
    let reason =
        format!("the run in {run} holds out 0.1 of its images to validate on: leave out --val-shards");
    assert!(stderr.contains(&reason), "{stderr}");

    let other = world.text("other");
    let more = [other.as_str(), "--set", "data.validation=0.2"];
    let stderr = fails(&world.ocelli(&[&["pretrain"][..], &args, &more].concat()), 2);
    assert!(stderr.contains("data.validation holds out images") && !world.path("other").exists(), "{stderr}");
}

/// Returns the keys of the images that a run of this seed holds out, after a check that none of
/// them is ever shown.
fn held_out_keys(world: &World, seed: u64) -> Vec<String> {
    let mut recipe = Recipe::parse(&recipe(VIT, "name = 'classification'", 0, ""), "alone", &[]).unwrap();
    recipe.data.shards = vec![world.text("sets/train")];
    recipe.data.validation = Some(0.25);
    recipe.seed = seed;
    let session = Session::new(recipe, world.path("none")).unwrap();
    let fitted = session.open(&world.storage()).unwrap().resolve().unwrap().fit().unwrap();
    assert_eq!(fitted.plan().n_samples, 18);
    let held_out = fitted.held_out_images().unwrap();
    let mut keys = Vec::new();
    let mut n_of_class = [0; 2];
    for image in 0..held_out.len() {
        keys.push(held_out.describe(image).1);
        n_of_class[held_out.label(image).unwrap() as usize] += 1;
    }
    assert_eq!(n_of_class, [3, 3], "a quarter of each class");
    let dataset = fitted.dataset();
    let trained = fitted.training_images().unwrap();
    assert_eq!(trained.len(), 18);
    assert!((0..trained.len()).all(|image| !keys.contains(&trained.describe(image).1)));
    let order = Order::for_dataset(dataset, seed, fitted.plan().recipe.data.window_shards);
    for position in 0..2000 {
        // Also the images in place of those that cannot be decoded.
        for attempt in 0..3 {
            let place = order.place(position, attempt);
            let (_, key, _) = dataset.describe(dataset.id(place.shard, place.sample));
            assert!(!keys.contains(&key), "{key} is held out, and shown at {position}");
        }
    }
    keys
}

/// Without images to validate on, a tenth of the others is held out, or another share: the same
/// images at every start and for every seed, none of which is trained on.
#[test]
fn a_part_of_the_images_is_held_out() {
    let world = prepare();
    let output = train(&world, "run", &["--set", "optim.length={steps=2}"]);
    let stderr = ok(&output);
    check_message("validation::a_part_of_the_images_is_held_out", &lines_with(&stderr, "held out"));
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(stdout.contains("2 images of sets/train held-out, 2 classes"), "{stdout}");
    let begun = plan(&world, "run");
    assert_eq!(begun["n_samples"].as_integer(), Some(22));
    assert_eq!(begun["recipe"]["data"]["validation"].as_float(), Some(0.1));
    assert_eq!(evaluated_steps(&world, "run", "sets/train held-out"), [0, 1, 2, 2]);

    let keys = held_out_keys(&world, 3);
    assert_eq!(keys.len(), 6);
    assert_eq!(held_out_keys(&world, 4), keys);

    // Probes of the features are not fitted on them.
    let baseline = train(&world, "baseline", &["--set", "optim.length={steps=2}", "--baseline"]);
    ok(&baseline);
    let stdout = String::from_utf8_lossy(&baseline.stdout).into_owned();
    assert!(stdout.contains("fitted on 22 images of sets/train"), "{stdout}");

    let quarter = ["--set", "data.validation=0.25"];
    ok(&train(&world, "whole", &quarter));
    let killed = train(&world, "parts", &[&quarter[..], &["--inject-fault", "kill:step=6"]].concat());
    assert_eq!(killed.status.code(), None);
    ok(&train(&world, "parts", &quarter));
    assert_eq!(metrics(&world.path("parts")), metrics(&world.path("whole")));
    assert_eq!(validations(&world, "parts"), validations(&world, "whole"));
    assert!(weights(&world, "parts", 12) == weights(&world, "whole", 12), "weights differ");
}

/// What a run cannot be validated on, or end early by, is refused before its first step.
#[test]
fn validations_that_cannot_be_are_refused() {
    const NAME: &str = "validation::validations_that_cannot_be_are_refused";
    let world = prepare();
    let cases: [(&str, &[&str]); 5] = [
        ("none", &["--set", "data.validation=0"]),
        ("few", &["--set", "data.validation=0.01"]),
        ("most", &["--set", "data.validation=0.9"]),
        ("impatient", &["--set", "run.patience=0"]),
        ("other_test_classes", &["--test-shards", "sets/strange"]),
    ];
    fs::create_dir_all(world.path("sets/strange")).unwrap();
    fs::rename(world.path("sets/val/dog"), world.path("sets/strange/owl")).unwrap();
    fs::rename(world.path("sets/val/cat"), world.path("sets/strange/cat")).unwrap();
    for (name, more) in cases {
        let strange = world.text("sets/strange");
        let mut flags = Vec::new();
        for flag in more {
            flags.push(if *flag == "sets/strange" { strange.as_str() } else { *flag });
        }
        check_message(&format!("{NAME}.{name}"), &fails(&train(&world, name, &flags), 2));
        assert!(!world.path(name).join("checkpoints").exists(), "{name}");
    }
    let both = finetune_on(&world, "alone.toml", SETS, "both", &["--set", "data.validation=0.1"]);
    check_message(&format!("{NAME}.both"), &fails(&both, 2));
    let shard = world.text("sets/train");
    let recipe = world.text("lejepa.toml");
    for (name, set) in [("labels", "data.validation=0.1"), ("unvalidated", "run.patience=3")] {
        let workdir = world.text(name);
        let args = ["pretrain", "--recipe", &recipe, "--shards", &shard, "--workdir", &workdir, "--set", set];
        check_message(&format!("{NAME}.{name}"), &fails(&world.ocelli(&args), 2));
        assert!(!world.path(name).join("checkpoints").exists(), "{name}");
    }
}

/// A run that began with images to validate on needs them again.
#[test]
fn a_run_is_resumed_with_its_validation_images() {
    let world = prepare();
    let steps = ["--set", "optim.length={steps=2}"];
    ok(&finetune_on(&world, "alone.toml", SETS, "run", &steps));
    let output = train(&world, "run", &steps);
    check_message("validation::a_run_is_resumed_with_its_validation_images", &fails(&output, 2));
}

/// A run whose score does not change ends after its patience with validations, keeps the first of
/// its best weights, and says so. The same command does nothing more; more patience continues it.
#[test]
fn a_run_that_does_not_become_better_ends_early() {
    let world = prepare();
    let patience = [&STILL[..], &["--set", "run.patience=2"]].concat();
    let with_json = [&patience[..], &["--json"]].concat();
    let output = finetune_on(&world, "alone.toml", SETS, "run", &with_json);
    let stderr = ok(&output);
    let note = lines_with(&stderr, "the run ended early after 6 of 12 steps: top1 on 16 images of sets/val");
    assert!(note.contains("after step 2, in 2 validations; a larger run.patience continues it"), "{note}");
    let answer = json_of(&output);
    assert_eq!((&answer["steps"], &answer["best_step"]), (&6.into(), &2.into()), "{answer}");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(stdout.contains("weights after 2 of 12 steps, the best of 3 validations by top1"), "{stdout}");
    assert_eq!(metrics(&world.path("run")).len(), 6);
    assert_eq!(evaluated_steps(&world, "run", "sets/val"), [0, 2, 4, 6, 2], "the best is scored at the end");
    assert_eq!(saved_steps(&world, "run"), [2, 6]);
    let ended = validations(&world, "run");
    assert_eq!((ended.end_step(), ended.best_step(), ended.numbers.len()), (Some(6), Some(2), 3));

    // The run, its list and its page have the best weights; its folder of checkpoints the newest.
    for (path, step) in [("run", 2), ("run/checkpoints", 6)] {
        let open = Classifier::open(&world.path(path), &NetworkSettings::default(), &Device::flex()).unwrap();
        assert_eq!(open.network.step(), Some(step), "{path}");
    }
    let listed = json_of(&world.ocelli(&["runs", &world.text("run"), "--json"]))[0].clone();
    assert_eq!((&listed["state"], &listed["step"]), (&"finished".into(), &6.into()), "{listed}");
    assert_eq!((&listed["total_steps"], &listed["result_step"]), (&12.into(), &2.into()), "{listed}");
    assert!(listed["why"].as_str().unwrap().starts_with("finished: ended early after 6 of 12"), "{listed}");
    let page = page_data(&fs::read_to_string(world.path("run/report.html")).unwrap());
    assert_eq!(page["runs"][0]["classifiers"][0]["step"], 2);

    let again = finetune_on(&world, "alone.toml", SETS, "run", &with_json);
    assert!(ok(&again).contains("the run ended early after 6 of 12 steps"));
    let repeated = json_of(&again);
    for key in ["steps", "best_step", "top1", "interval"] {
        assert_eq!(repeated[key], answer[key], "{key}");
    }
    let longer = [&patience[..], &["--lengthen", "--set", "optim.length={steps=20}"]].concat();
    assert!(ok(&finetune_on(&world, "alone.toml", SETS, "run", &longer)).contains("after 6 of 20 steps"));
    assert_eq!(metrics(&world.path("run")).len(), 6);

    let more = [&STILL[..], &["--set", "run.patience=4"]].concat();
    ok(&finetune_on(&world, "alone.toml", SETS, "continued", &patience));
    ok(&finetune_on(&world, "alone.toml", SETS, "continued", &more));
    ok(&finetune_on(&world, "alone.toml", SETS, "patient", &more));
    assert_eq!(metrics(&world.path("continued")).len(), 10);
    assert_eq!(metrics(&world.path("continued")), metrics(&world.path("patient")));
    assert_eq!(validations(&world, "continued"), validations(&world, "patient"));
    assert_eq!(saved_steps(&world, "continued"), [2, 10]);
}

/// A run that is killed before, between and after validations ends after the same step, with the
/// same best weights and the same bits.
#[test]
fn a_killed_run_ends_early_at_the_same_step() {
    let world = prepare();
    let patience = [&STILL[..], &["--set", "run.patience=2"]].concat();
    ok(&finetune_on(&world, "alone.toml", SETS, "whole", &patience));
    for step in [1, 3, 5] {
        let fault = format!("kill:step={step},phase=backward");
        let more = [&patience[..], &["--inject-fault", &fault]].concat();
        assert_eq!(finetune_on(&world, "alone.toml", SETS, "parts", &more).status.code(), None);
    }
    ok(&finetune_on(&world, "alone.toml", SETS, "parts", &patience));
    assert_eq!(metrics(&world.path("parts")), metrics(&world.path("whole")));
    assert_eq!(validations(&world, "parts"), validations(&world, "whole"));
    assert_eq!(saved_steps(&world, "parts"), [2, 6]);
    for step in [2, 6] {
        assert!(weights(&world, "parts", step) == weights(&world, "whole", step), "weights of step {step}");
    }
}

/// Whatever the course of its score, the result of a run with patience is the first of its best
/// weights, whose score is that of the end.
#[test]
fn the_best_weights_are_the_result() {
    let world = prepare();
    let more = ["--set", "run.patience=100", "--set", "run.keep_checkpoints=1", "--json"];
    let output = finetune_on(&world, "alone.toml", SETS, "run", &more);
    ok(&output);
    let answer = json_of(&output);
    let mut best = (0, f64::NEG_INFINITY);
    for row in metrics(&world.path("run")) {
        let Some(score) = row["val/top1"].as_f64() else { continue };
        if score > best.1 {
            best = (row["step"].as_u64().unwrap() + 1, score);
        }
    }
    assert_eq!(answer["steps"], 12);
    assert_eq!((answer["best_step"].as_u64(), answer["top1"].as_f64()), (Some(best.0), Some(best.1)));
    let mut expected = vec![best.0, 12];
    expected.dedup();
    assert_eq!(saved_steps(&world, "run"), expected);
}

/// Scores of a run after every two steps.
const SCRIPT: [f64; 6] = [50.0, 60.0, 60.0, 59.0, 70.0, 71.0];

/// A probe whose scores are those of [`SCRIPT`], and which may ask the run to stop.
struct Scripted {
    /// Flag that asks the run to stop.
    stop: Arc<AtomicBool>,
    /// Number of steps after which it is set.
    stop_step: Option<u64>,
}

impl Probe for Scripted {
    fn name(&self) -> &str {
        "script"
    }

    fn interval(&self, _every_steps: u64, _total_steps: u64) -> u64 {
        2
    }

    fn watched(&self) -> Option<WatchedScore> {
        Some(WatchedScore {
            name: "score".into(),
            is_higher_better: true,
            images: "a script".into(),
            fingerprint: None,
        })
    }

    fn run(
        &mut self,
        _network: &Network,
        heads: &[NamedTensor],
        step: u64,
    ) -> Result<Vec<(String, f64)>, String> {
        assert!(heads.is_empty(), "nobody needs them");
        if self.stop_step == Some(step) {
            self.stop.store(true, Ordering::Relaxed);
        }
        let value = if step == 0 { 0.0 } else { SCRIPT[step as usize / 2 - 1] };
        Ok(vec![("other".into(), -1.0), ("score".into(), value)])
    }
}

/// Runs `world_size` ranks, in a thread each, with two validations of patience in the folder
/// `name`, which are asked to stop after `stop_step`; returns their outcomes.
fn run_ranks(world: &World, world_size: usize, name: &str, stop_step: Option<u64>) -> Vec<Outcome> {
    let mut plan = crate::ranks::plan(world_size, &["optim.micro_batches=2"]);
    // The scores are those of a script, whatever the method learns.
    plan.recipe.run.patience = Some(2);
    let dataset = world.dataset();
    let workdir = world.path(name);
    let stop = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for engine in LocalGroup::ranks(world_size) {
            let plan = &plan;
            let dataset = &dataset;
            let workdir = &workdir;
            let stop = &stop;
            threads.push(scope.spawn(move || {
                let comm = crate::ranks::communicator(plan, engine);
                let job = crate::ranks::job(plan, dataset, workdir, stop);
                let script = Scripted { stop: Arc::clone(stop), stop_step };
                let mut probes: Vec<Box<dyn Probe>> = vec![Box::new(script)];
                run(&job, comm, &mut probes, &mut Quiet).unwrap()
            }));
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns the backbone of the checkpoint of `step` of a run.
fn backbone(workdir: &Path, step: u64) -> Vec<NamedTensor> {
    let folder = workdir.join(format!("checkpoints/step-{step:010}"));
    Checkpoint::open(&folder).unwrap().backbone(None).unwrap().0
}

/// Ranks agree on the end, which rank 0 alone knows, and on the checkpoint of the best weights.
#[test]
fn ranks_end_early_together() {
    let world = World::new(60);
    for world_size in [1, 2] {
        let name = format!("ranks-{world_size}");
        let outcomes = run_ranks(&world, world_size, &name, None);
        assert_eq!(outcomes, vec![Outcome::Finished; world_size]);
        let ended = validations(&world, &name);
        assert_eq!((ended.end_step(), ended.kept_step()), (Some(8), Some(4)));
        // Two newest ones are kept, of which one is the best.
        assert_eq!(saved_steps(&world, &name), [4, 8]);
        let rows = metrics(&world.path(&name)).len();
        assert_eq!(rows, 8);
        // The same start finds that the run has ended.
        assert_eq!(run_ranks(&world, world_size, &name, None), outcomes);
        assert_eq!(metrics(&world.path(&name)).len(), rows);

        let interrupted = format!("interrupted-{world_size}");
        let outcomes = run_ranks(&world, world_size, &interrupted, Some(6));
        assert_eq!(outcomes, vec![Outcome::Stopped; world_size]);
        assert_eq!(run_ranks(&world, world_size, &interrupted, None), vec![Outcome::Finished; world_size]);
        assert_eq!(validations(&world, &interrupted), ended);
        for step in [4, 8] {
            let expected = backbone(&world.path("ranks-1"), step);
            for run in [&name, &interrupted] {
                assert!(backbone(&world.path(run), step) == expected, "{run}, step {step}");
            }
        }
    }
}
