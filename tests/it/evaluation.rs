//! `ocelli probe` as a user calls it: protocols, settings, what is said of bad sets, and what a run keeps.

use std::fs;
use std::process::Output;

use pipeline::shard::write::{ShardLimits, ShardWriter};
use serde_json::Value;

use crate::support::{World, fails, json_of, ok};

/// A world with a run of a few steps, and shards `train` and `test` of other images.
fn probed() -> World {
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
    let mut writer =
        ShardWriter::new(&folder, name, ShardLimits { max_samples: 1000, max_bytes: 1 << 30 }).unwrap();
    for i in numbers {
        let image = dataset.read(pipeline::SampleId(i as u64)).unwrap().image;
        let class = class(i);
        let mut members: Vec<(&str, &[u8])> = vec![("jpg", &image)];
        members.extend(class.iter().map(|class| ("cls", class.as_bytes())));
        writer.add(&format!("{i:08}"), &members).unwrap();
    }
    writer.finish().unwrap();
}

fn probe(world: &World, train: &str, test: &str, more: &[&str]) -> Output {
    let shard = |name: &str| world.text(&format!("{name}/{name}-000000.tar"));
    let (run, train, test) = (world.text("run"), shard(train), shard(test));
    let args = ["probe", "--checkpoint", &run, "--train", &train, "--test", &test, "--json"];
    world.ocelli(&[&args[..], more].concat())
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn every_protocol_gives_numbers_that_say_what_they_are_of() {
    let world = probed();
    let protocols = "knn,linear-honest,linear-dino,linear-dinov2,logreg,few-shot";
    let settings = ["--protocol", protocols, "--k", "1,5", "--epochs", "2", "--tries", "2", "--shots", "1,3"];
    let output = probe(&world, "train", "test", &settings);
    ok(&output);
    assert!(!stderr(&output).contains("warning"), "{}", stderr(&output));
    let said = json_of(&output);
    let numbers = said["networks"]["teacher"].as_object().unwrap();
    let expected =
        ["few_shot_1", "few_shot_3", "knn_1", "knn_5", "linear", "linear_dino", "linear_dinov2", "logreg"];
    assert_eq!(numbers.keys().collect::<Vec<_>>(), expected);
    for (name, number) in numbers {
        let (accuracy, interval) =
            (number["accuracy"].as_f64().unwrap(), number["interval"].as_array().unwrap());
        let bounds: Vec<f64> = interval.iter().map(|bound| bound.as_f64().unwrap()).collect();
        assert!(bounds[0] <= accuracy && accuracy <= bounds[1], "{name}: {number}");
        let confusion: u64 = number["confusion"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|row| row.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()))
            .sum();
        // Few shots are drawn twice.
        assert_eq!(confusion, if name.starts_with("few") { 40 } else { 20 }, "{name}");
    }
    assert_eq!(numbers["linear_dinov2"]["details"]["heads"].as_array().unwrap().len(), 52);
    assert_eq!((&said["train"]["images"], &said["test"]["images"]), (&40.into(), &20.into()));
    assert_eq!(said["classes"], serde_json::json!(["0", "1", "2", "3"]));
    assert_eq!((&said["about"]["step"], &said["about"]["network"]), (&12.into(), &"teacher".into()));

    let rows = fs::read_to_string(world.path("run/evaluations.jsonl")).unwrap();
    assert_eq!(rows.lines().count(), expected.len());
    ok(&probe(&world, "train", "test", &["--no-record"]));
    assert_eq!(fs::read_to_string(world.path("run/evaluations.jsonl")).unwrap(), rows);
}

#[test]
fn what_misleads_is_said() {
    let world = probed();
    let same = probe(&world, "train", "train", &["--protocol", "knn"]);
    ok(&same);
    assert!(
        stderr(&same).contains("40 of the 40 test images are among the training images"),
        "{}",
        stderr(&same)
    );
    pack(&world, "single", 0..10, |_| Some("cat".into()));
    let one = probe(&world, "single", "single", &["--protocol", "knn"]);
    ok(&one);
    assert!(stderr(&one).contains("all training images are of one class"), "{}", stderr(&one));
    pack(&world, "named", 0..10, |i| Some(["cat", "dog"][i % 2].into()));
    pack(&world, "other", 10..20, |i| Some(["dog", "yak"][i % 2].into()));
    let names = probe(&world, "named", "other", &["--protocol", "knn"]);
    ok(&names);
    assert_eq!(json_of(&names)["classes"], serde_json::json!(["cat", "dog", "yak"]));
    assert!(stderr(&names).contains("no training image is of the class yak"), "{}", stderr(&names));
    let small = probe(&world, "train", "test", &["--protocol", "knn", "--image-px", "8"]);
    ok(&small);
    assert!(stderr(&small).contains("and sees 8 px"), "{}", stderr(&small));
}

#[test]
fn what_cannot_be_scored_is_refused() {
    let world = probed();
    pack(&world, "bare", 0..10, |_| None);
    assert!(
        fails(&probe(&world, "bare", "test", &[]), 3)
            .contains("none of the 10 images of bare/bare has a class")
    );
    let unknown = fails(&probe(&world, "train", "test", &["--protocol", "svm"]), 2);
    assert!(unknown.contains("svm") && unknown.contains("linear-dinov2"), "{unknown}");
    let setting = fails(&probe(&world, "train", "test", &["--protocol", "knn", "--epochs", "3"]), 2);
    assert!(setting.contains("--epochs is no setting of knn"), "{setting}");
    for zero in [["knn", "--k", "0"], ["linear-honest", "--epochs", "0"], ["few-shot", "--shots", "0"]] {
        let args = ["--protocol", zero[0], zero[1], zero[2]];
        assert!(fails(&probe(&world, "train", "test", &args), 2).contains("at least 1"), "{zero:?}");
    }
    // A checkpoint whose weights are half written.
    let step = world.path("run/checkpoints/step-0000000012/rank-00000.safetensors");
    let bytes = fs::read(&step).unwrap();
    fs::write(&step, &bytes[..bytes.len() / 2]).unwrap();
    let half = fails(&probe(&world, "train", "test", &[]), 3);
    assert!(half.contains("rank-00000.safetensors"), "{half}");
}

/// Rows of one network are never taken for those of another, and a damaged entry is made again.
#[test]
fn the_cache_gives_what_would_be_computed() {
    let world = probed();
    let shard = |name: &str| world.text(&format!("{name}/{name}-000000.tar"));
    let (run, train, test, cache) = (world.text("run"), shard("train"), shard("test"), world.text("cache"));
    let scores = |more: &[&str], gigabytes: &str| -> Value {
        let args =
            ["probe", "--checkpoint", &run, "--train", &train, "--test", &test, "--json", "--no-record"];
        let env = [("OCELLI_CACHE", cache.as_str()), ("OCELLI_FEATURES_GB", gigabytes)];
        let output = world.ocelli_with(&[&args[..], more].concat(), &env);
        ok(&output);
        json_of(&output)["networks"].clone()
    };
    let (teacher, student) = (scores(&[], "0"), scores(&["--student"], "0"));
    assert!(!world.path("cache/features").exists());
    for _ in 0..2 {
        assert_eq!((scores(&[], "1"), scores(&["--student"], "1")), (teacher.clone(), student.clone()));
    }
    let entries = || fs::read_dir(world.path("cache/features")).unwrap().flatten().map(|entry| entry.path());
    assert_eq!(entries().count(), 8, "rows and a description of two sets by two networks");
    for rows in entries().filter(|path| path.extension().is_some_and(|extension| extension == "f32")) {
        let bytes = fs::read(&rows).unwrap();
        fs::write(&rows, &bytes[..bytes.len() - 4]).unwrap();
    }
    assert_eq!(scores(&[], "1"), teacher);
    // Where there is room for nothing, what was made last stays.
    assert_eq!(scores(&["--image-px", "8"], "1e-9")["teacher"].is_object(), true);
    assert_eq!(entries().count(), 2);
}

#[test]
fn measures_need_no_labels() {
    let world = probed();
    pack(&world, "bare", 0..30, |_| None);
    let (run, bare) = (world.text("run"), world.text("bare/bare-000000.tar"));
    let output = world.ocelli(&["probe", "--checkpoint", &run, "--label-free", "--test", &bare, "--json"]);
    ok(&output);
    let said = json_of(&output);
    let measures = said["measures"].as_object().unwrap();
    assert_eq!(measures.len(), 5);
    let at = |name: &str| measures[name].as_f64().unwrap();
    assert!(at("rankme") > 1.0 && at("lidar") > 1.0 && at("uniformity") < 0.0, "{said}");
    assert!(at("alignment") > 0.0 && at("alignment") < 4.0, "{said}");
    let rows = fs::read_to_string(world.path("run/evaluations.jsonl")).unwrap();
    assert_eq!(rows.lines().count(), 5);
}
