//! `ocelli probe` as a user calls it: protocols, settings, messages about bad sets, and records in
//! a run.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, json_of, ok, shard_writer, wait_for_end};

/// Creates a world with a run of a few steps, and shards `train` and `test` of different images.
fn world_with_run() -> World {
    let world = World::new(60);
    ok(&world.pretrain("run", &[]));
    pack(&world, "train", 0..40, |i| Some((i % 4).to_string()));
    pack(&world, "test", 40..60, |i| Some((i % 4).to_string()));
    world
}

/// Packs images of the world's shard under `name`, with classes.
fn pack(world: &World, name: &str, numbers: std::ops::Range<usize>, class: impl Fn(usize) -> Option<String>) {
    let dataset = world.dataset();
    let folder = world.path(name);
    fs::create_dir_all(&folder).unwrap();
    let mut writer = shard_writer(&folder, name);
    for i in numbers {
        let image = dataset.read(pipeline::SampleId(i as u64)).unwrap().image;
        let class = class(i);
        let mut members: Vec<(&str, &[u8])> = vec![("jpg", image.bytes())];
        members.extend(class.iter().map(|class| ("cls", class.as_bytes())));
        writer.add(&format!("{i:08}"), &members).unwrap();
    }
    writer.finish().unwrap();
}

pub(crate) fn shard(world: &World, name: &str) -> String {
    world.text(&format!("{name}/{name}-000000.tar"))
}

pub(crate) fn probe(world: &World, train: &str, test: &str, more: &[&str]) -> Output {
    let run = world.text("run");
    let train = shard(world, train);
    let test = shard(world, test);
    let args = ["probe", "--checkpoint", &run, "--train", &train, "--test", &test, "--json"];
    world.ocelli(&[&args[..], more].concat())
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn every_protocol_describes_its_numbers() {
    let world = world_with_run();
    let protocols = "knn,linear-honest,linear-dino,linear-dinov2,linear-dinov2-features,logreg,few-shot";
    let settings = [
        "knn.k=1,5",
        "linear-honest.epochs=2",
        "linear-dino.epochs=2",
        "linear-dinov2.epochs=2",
        "linear-dinov2-features.epochs=2",
        "few-shot.tries=2",
        "few-shot.shots=1,3",
    ];
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    let output = probe(&world, "train", "test", &[&["--protocol", protocols], &settings[..]].concat());
    ok(&output);
    assert!(!stderr(&output).contains("warning"), "{}", stderr(&output));
    let result = json_of(&output);
    let numbers = result["networks"]["teacher"].as_object().unwrap();
    let expected = [
        "few_shot_1",
        "few_shot_3",
        "knn_1",
        "knn_5",
        "linear_dino",
        "linear_dinov2",
        "linear_dinov2_features",
        "linear_honest",
        "logreg",
    ];
    assert_eq!(numbers.keys().collect::<Vec<_>>(), expected);
    for (name, number) in numbers {
        let accuracy = number["accuracy"].as_f64().unwrap();
        let interval = number["interval"].as_array().unwrap();
        let bounds: Vec<f64> = interval.iter().map(|bound| bound.as_f64().unwrap()).collect();
        assert!(bounds[0] <= accuracy && accuracy <= bounds[1], "{name}: {number}");
        let confusion: u64 = number["confusion"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|row| row.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()))
            .sum();
        // Few shots are sampled twice.
        assert_eq!(confusion, if name.starts_with("few") { 40 } else { 20 }, "{name}");
        let resize_px = if name == "logreg" { 16 } else { 18 };
        assert_eq!(
            number["transform_in_words"],
            format!("Resize({resize_px}, bicubic), CenterCrop(16)"),
            "{name}"
        );
    }
    for (name, words) in [("linear_dinov2", "bicubic crops"), ("linear_dinov2_features", "not the published")]
    {
        assert_eq!(numbers[name]["details"]["heads"].as_array().unwrap().len(), 52);
        assert!(numbers[name]["protocol_in_words"].as_str().unwrap().contains(words), "{name}");
    }
    assert_eq!((&result["train"]["images"], &result["test"]["images"]), (&40.into(), &20.into()));
    assert_eq!(result["classes"], serde_json::json!(["0", "1", "2", "3"]));
    assert_eq!((&result["about"]["step"], &result["about"]["network"]), (&12.into(), &"teacher".into()));

    let rows = fs::read_to_string(world.path("run/evaluations.jsonl")).unwrap();
    assert_eq!(rows.lines().count(), expected.len());
    assert_eq!(rows.matches("\"Resize(16, bicubic), CenterCrop(16)\"").count(), 1, "logreg's row");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        stdout.contains("a tenth of train; Resize(16, bicubic)")
            && stdout.contains("for their settings; Resize(18"),
        "{stdout}"
    );
    // More shots than a class has are refused before anything is computed.
    let few =
        probe(&world, "train", "test", &["--protocol", "knn,few-shot", "--set", "few-shot.shots=1,1000"]);
    check_message("evaluation::every_protocol_describes_its_numbers.shots", &fails(&few, 2));
    assert!(few.stdout.is_empty(), "{few:?}");
    // A size on the command line applies to all protocols.
    let same =
        probe(&world, "train", "test", &["--protocol", "knn,logreg", "--resize-px", "17", "--no-record"]);
    ok(&same);
    let teacher = json_of(&same)["networks"]["teacher"].to_string();
    assert_eq!(
        teacher.matches("Resize(17, bicubic)").count(),
        3,
        "two numbers of knn, of 20 images, and one: {teacher}"
    );
    ok(&probe(&world, "train", "test", &["--no-record"]));
    assert_eq!(fs::read_to_string(world.path("run/evaluations.jsonl")).unwrap(), rows);
}

/// The official code has 48 heads on one GPU, because two rates have the same name.
#[test]
fn heads_of_equal_names_are_merged() {
    let world = world_with_run();
    let settings = [
        "--protocol",
        "linear-dinov2",
        "--set",
        "linear-dinov2.batch=128",
        "--set",
        "linear-dinov2.iterations=2",
        "--no-record",
    ];
    let output = probe(&world, "train", "test", &settings);
    ok(&output);
    let result = json_of(&output);
    assert_eq!(result["networks"]["teacher"]["linear_dinov2"]["details"]["n_heads"], 48);
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        stdout.contains("but for its settings")
            && stdout.contains("iterations: 2 of 128 images; the best of 48 heads"),
        "{stdout}"
    );
}

#[test]
fn misleading_sets_cause_warnings() {
    let world = world_with_run();
    let same = probe(&world, "train", "train", &["--protocol", "knn"]);
    ok(&same);
    check_message("evaluation::misleading_sets_cause_warnings.same", &lines_with(&stderr(&same), "warning:"));
    pack(&world, "single", 0..10, |_| Some("cat".into()));
    let one = probe(&world, "single", "single", &["--protocol", "knn"]);
    ok(&one);
    check_message("evaluation::misleading_sets_cause_warnings.one", &lines_with(&stderr(&one), "warning:"));
    pack(&world, "named", 0..10, |i| Some(["cat", "dog"][i % 2].into()));
    pack(&world, "other", 10..20, |i| Some(["dog", "yak"][i % 2].into()));
    let names = probe(&world, "named", "other", &["--protocol", "knn"]);
    ok(&names);
    assert_eq!(json_of(&names)["classes"], serde_json::json!(["cat", "dog", "yak"]));
    check_message(
        "evaluation::misleading_sets_cause_warnings.names",
        &lines_with(&stderr(&names), "warning:"),
    );
    let small = probe(&world, "train", "test", &["--protocol", "knn", "--image-px", "8"]);
    ok(&small);
    check_message(
        "evaluation::misleading_sets_cause_warnings.small",
        &lines_with(&stderr(&small), "warning:"),
    );
}

#[test]
fn sets_and_settings_that_cannot_be_scored_are_refused() {
    let world = world_with_run();
    pack(&world, "bare", 0..10, |_| None);
    let output = probe(&world, "bare", "test", &[]);
    check_message(
        "evaluation::sets_and_settings_that_cannot_be_scored_are_refused.no_class",
        &fails(&output, 3),
    );
    let unknown = fails(&probe(&world, "train", "test", &["--protocol", "svm"]), 2);
    assert!(unknown.contains("'svm'") && unknown.contains("linear-dinov2"), "{unknown}");
    let output = probe(&world, "train", "test", &["--protocol", "knn", "--set", "knn.epochs=3"]);
    check_message(
        "evaluation::sets_and_settings_that_cannot_be_scored_are_refused.unknown_setting",
        &fails(&output, 2),
    );
    for zero in ["knn.k=0", "linear-honest.epochs=0", "few-shot.shots=0"] {
        let args = ["--protocol", "knn,linear-honest,few-shot", "--set", zero];
        let name = format!("evaluation::sets_and_settings_that_cannot_be_scored_are_refused.{zero}");
        check_message(&name, &fails(&probe(&world, "train", "test", &args), 2));
    }
    for bad in ["k=5", "svm.k=5", "logreg.c=1", "knn.temperature=0.1,0.2"] {
        let output = probe(&world, "train", "test", &["--protocol", "knn", "--set", bad]);
        check_message(
            &format!("evaluation::sets_and_settings_that_cannot_be_scored_are_refused.{bad}"),
            &fails(&output, 2),
        );
    }
    // A checkpoint with a truncated weights file.
    let step = world.path("run/checkpoints/step-0000000012");
    let weights = step.join("rank-00000.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    let step = step.display().to_string();
    let train = shard(&world, "train");
    let test = shard(&world, "test");
    let half = fails(&world.ocelli(&["probe", "--checkpoint", &step, "--train", &train, "--test", &test]), 3);
    assert!(half.contains("rank-00000.safetensors"), "{half}");
    // The previous checkpoint is complete, and is used when the folder of the run is given.
    ok(&probe(&world, "train", "test", &["--protocol", "knn"]));
}

/// Returns the scores of the networks by a probe with a feature cache of this size.
fn scores(world: &World, more: &[&str], cache_gb: &str) -> Value {
    let train = shard(world, "train");
    let test = shard(world, "test");
    let run = world.text("run");
    let cache = world.text("cache");
    let args = ["probe", "--checkpoint", &run, "--train", &train, "--test", &test, "--json", "--no-record"];
    let env = [("OCELLI_CACHE", cache.as_str()), ("OCELLI_FEATURES_GB", cache_gb)];
    let output = world.ocelli_with(&[&args[..], more].concat(), &env);
    ok(&output);
    json_of(&output)["networks"].clone()
}

/// Writes the features of the training images to the file `out`, and returns its bytes.
fn features(world: &World, out: &str, more: &[&str]) -> Vec<u8> {
    let train = shard(world, "train");
    let run = world.text("run");
    let out = world.text(out);
    let args = ["embed", "--checkpoint", &run, "--shards", &train, "--out", &out];
    ok(&world.ocelli(&[&args[..], more].concat()));
    fs::read(&out).unwrap()
}

/// Returns the files of the feature cache.
fn cached_files(world: &World) -> Vec<PathBuf> {
    let entries = fs::read_dir(world.path("cache/features")).unwrap();
    entries.flatten().map(|entry| entry.path()).collect()
}

/// Cached rows of one network are never used for another, and a damaged entry is computed again.
#[test]
fn cached_features_equal_computed_ones() {
    let world = world_with_run();
    assert_ne!(
        features(&world, "teacher.npy", &[]),
        features(&world, "student.npy", &["--network", "student"]),
        "features that could be confused"
    );
    let teacher = scores(&world, &[], "0");
    let student = scores(&world, &["--network", "student"], "0");
    assert!(!world.path("cache/features").exists());
    for _ in 0..2 {
        assert_eq!(scores(&world, &[], "1"), teacher);
        assert_eq!(scores(&world, &["--network", "student"], "1"), student);
    }
    let files = cached_files(&world);
    assert_eq!(files.len(), 8, "rows and a description of two sets by two networks");
    for path in files.iter().filter(|path| path.extension().is_some_and(|extension| extension == "f32")) {
        let bytes = fs::read(path).unwrap();
        fs::write(path, &bytes[..bytes.len() - 4]).unwrap();
    }
    assert_eq!(scores(&world, &[], "1"), teacher);
    // A cache without room for any entry keeps the latest one.
    assert!(scores(&world, &["--image-px", "8"], "1e-9")["teacher"].is_object());
    assert_eq!(cached_files(&world).len(), 2);
}

#[test]
fn measures_need_no_labels() {
    let world = world_with_run();
    pack(&world, "bare", 0..30, |_| None);
    let run = world.text("run");
    let bare = world.text("bare/bare-000000.tar");
    let output = world.ocelli(&["probe", "--checkpoint", &run, "--label-free", "--test", &bare, "--json"]);
    ok(&output);
    let result = json_of(&output);
    let measures = result["measures"].as_object().unwrap();
    assert_eq!(measures.len(), 6);
    let [rankme, lidar, uniformity, alignment, retrieval] =
        ["rankme", "lidar", "uniformity", "alignment", "retrieval"]
            .map(|name| measures[name].as_f64().unwrap());
    assert!(rankme > 1.0 && lidar > 1.0 && uniformity < 0.0, "{result}");
    assert!((0.0..=100.0).contains(&retrieval), "{result}");
    assert!(alignment > 0.0 && alignment < 4.0, "{result}");
    let rows = fs::read_to_string(world.path("run/evaluations.jsonl")).unwrap();
    assert_eq!(rows.lines().count(), 6);
}

/// Starts the program without a feature cache.
fn spawn(world: &World, args: &[String]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ocelli-under-test"));
    command.args(args).env("OCELLI_CACHE", world.text("cache")).env("OCELLI_FEATURES_GB", "0");
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for the end of a process, and returns its standard error.
fn wait_for_stderr(mut child: Child) -> String {
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    child.wait().unwrap();
    text
}

/// A run that prunes its checkpoints, and two watchers, one of them killed repeatedly: each
/// checkpoint is scored once, or reported as pruned.
#[test]
fn watchers_score_every_checkpoint_once_or_report_it_as_pruned() {
    let world = world_with_run();
    let sets = ["optim.length={ steps = 40 }", "run.checkpoint_every_steps=2", "run.keep_checkpoints=3"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
    let watched = world.text("watched");
    let train = shard(&world, "train");
    let test = shard(&world, "test");
    let watch = ["probe", "--watch", &watched, "--train", &train, "--test", &test, "--protocol", "knn"];
    let watch: Vec<String> = watch.iter().map(ToString::to_string).collect();
    let mut first = spawn(&world, &watch);
    let mut run = spawn(&world, &world.pretrain_args("watched", &sets));
    let mut messages = String::new();
    for wait_ms in [400, 700, 300] {
        std::thread::sleep(Duration::from_millis(wait_ms));
        first.kill().unwrap();
        let killed = std::mem::replace(&mut first, spawn(&world, &watch));
        messages += &wait_for_stderr(killed);
    }
    let second = spawn(&world, &watch);
    assert!(wait_for_end(&mut run).success());
    messages += &wait_for_stderr(first);
    messages += &wait_for_stderr(second);

    let rows = fs::read_to_string(world.path("watched/evaluations.jsonl")).unwrap();
    let mut scored: BTreeMap<u64, usize> = BTreeMap::new();
    for row in rows.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        *scored.entry(row["about"]["step"].as_u64().unwrap()).or_default() += 1;
    }
    assert!(scored.values().all(|n| *n == 2), "a row for each k of which there are images: {scored:?}");
    assert!(scored.contains_key(&40) && scored.len() > 3, "{scored:?}: {messages}");
    for step in (2..=40).step_by(2) {
        let pruned = messages.contains(&format!("step {step} was pruned before it was scored"));
        assert!(pruned != scored.contains_key(&step), "step {step}, scored {scored:?}: {messages}");
    }
    let entries = fs::read_dir(world.path("watched/checkpoints")).unwrap().flatten();
    let n_held = entries.filter(|entry| entry.file_name().to_string_lossy().contains("held")).count();
    assert!(n_held <= 3, "killed watchers leave a file each at most");
    // Another watcher has nothing to do.
    let again = world.ocelli(&watch.iter().map(String::as_str).chain(["--json"]).collect::<Vec<_>>());
    ok(&again);
    assert_eq!(json_of(&again)["scored"], 0);
}

#[test]
fn leave_one_out_scores_images_against_the_others() {
    let world = world_with_run();
    let run = world.text("run");
    let test = shard(&world, "train");
    let args = [
        "probe",
        "--checkpoint",
        &run,
        "--test",
        &test,
        "--protocol",
        "knn",
        "--leave-one-out",
        "--set",
        "knn.k=1",
        "--json",
    ];
    let output = world.ocelli(&args);
    let messages = ok(&output);
    assert!(!messages.contains("warning"), "{messages}");
    let number = &json_of(&output)["networks"]["teacher"]["knn_loo_1"];
    let with_itself = json_of(&probe(&world, "train", "train", &["--protocol", "knn", "--set", "knn.k=1"]));
    assert_eq!(with_itself["networks"]["teacher"]["knn_1"]["accuracy"], 100.0);
    assert!(number["accuracy"].as_f64().unwrap() < 100.0, "{number}");
    let output = world.ocelli(&[&args[..5], &["--protocol", "logreg", "--leave-one-out"]].concat());
    check_message("evaluation::leave_one_out_scores_images_against_the_others", &fails(&output, 2));
}
