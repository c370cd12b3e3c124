//! Classifiers of images that have several classes, or none, and classes that are shown equally
//! often.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::Output;
use std::sync::Arc;

use burn_tensor::Device;
use eval::image_sets::SplitShards;
use pipeline::shard::write::{ShardLimits, ShardWriter};
use pipeline::{Cursor, Dataset, NoProgress, Order, SampleId, Share};
use serde_json::Value;
use session::{Classifier, NetworkSettings, Session, classified_images};
use trainer::run::Labels;
use trainer::run::data::batches;
use trainer::{Plan, Recipe};

use crate::messages::{check_message, lines_with};
use crate::methods::{LEJEPA, VIT, recipe};
use crate::report::page_data;
use crate::support::{World, fails, json_of, metrics, ok, open};

/// Classes of the images, in the order in which a classifier has them.
const CLASSES: [&str; 2] = ["blue", "red"];

/// The method for images of several classes, as a recipe names it.
const SEVERAL: &str = "name = 'classification'\nloss = 'binary_cross_entropy'";

/// The method for images of one class each.
const SINGLE: &str = "name = 'classification'";

/// Returns the classes of the image `number`: none, one or both.
fn classes_of(number: u32) -> Vec<&'static str> {
    let mut classes = Vec::new();
    if number & 1 == 1 {
        classes.push("red");
    }
    if number & 2 == 2 {
        classes.push("blue");
    }
    classes
}

/// Draws the image `number` in the colors of `classes`, different from all other numbers.
fn draw(number: u32, classes: &[&str]) -> Vec<u8> {
    let [blue, red] = CLASSES.map(|class| if classes.contains(&class) { 160 } else { 10 });
    let picture = image::RgbImage::from_fn(20, 20, |x, y| {
        let shade = ((3 * x + 2 * y + 5 * number) % 90) as u8;
        image::Rgb([red + shade, shade, blue + shade])
    });
    let mut bytes = std::io::Cursor::new(Vec::new());
    picture.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    bytes.into_inner()
}

/// Writes a shard `sets/NAME-000000.tar` of the images `numbers`, with lists of their classes, and
/// of one more image that states nothing about its classes. Returns the path.
fn write_several(world: &World, name: &str, numbers: Range<u32>) -> String {
    let limits = ShardLimits { max_samples: 1000, max_bytes: Some(1 << 30) };
    let mut writer = ShardWriter::new(&world.path("sets"), name, limits).unwrap();
    for number in numbers {
        let classes = classes_of(number);
        let image = draw(number, &classes);
        let list = serde_json::json!({ "labels": classes }).to_string();
        let key = format!("{number:08}");
        // A list is written in either way.
        if number.is_multiple_of(5) {
            let lines = classes.join("\n");
            writer.add(&key, &[("png", image.as_slice()), ("cls", lines.as_bytes())]).unwrap();
        } else {
            writer.add(&key, &[("png", image.as_slice()), ("json", list.as_bytes())]).unwrap();
        }
    }
    let image = draw(77, &[]);
    writer.add("unknown", &[("png", image.as_slice())]).unwrap();
    writer.finish().unwrap();
    world.text(&format!("sets/{name}-000000.tar"))
}

/// Returns a folder with shards of images of several classes, to train on and to score a classifier
/// on, and recipes.
fn prepare() -> World {
    let world = World::new(2);
    write_several(&world, "train", 0..40);
    write_several(&world, "val", 40..56);
    fs::write(world.path("several.toml"), recipe(VIT, SEVERAL, 0, "")).unwrap();
    fs::write(world.path("single.toml"), recipe(VIT, SINGLE, 0, "")).unwrap();
    fs::write(world.path("lejepa.toml"), recipe(VIT, LEJEPA, 2, "")).unwrap();
    world
}

/// Runs `ocelli finetune` with a recipe of the folder on the shards `sets`, to train on and to
/// score on, in the folder `run`.
fn finetune(world: &World, recipe: &str, sets: [&str; 2], run: &str, more: &[&str]) -> Output {
    let [train, val] = sets.map(|set| world.text(&format!("sets/{set}-000000.tar")));
    let recipe = world.text(recipe);
    let workdir = world.text(run);
    let args = ["finetune", "--recipe", &recipe, "--shards", &train, "--val-shards", &val];
    world.ocelli(&[&args[..], &["--workdir", &workdir], more].concat())
}

/// Scores the classifier in `path`, a run or an exported file, on the validation images; returns
/// its mean average precision.
fn mean_average_precision(world: &World, path: &Path) -> f64 {
    let classifier = Classifier::open(path, &NetworkSettings::default(), &Device::flex()).unwrap();
    assert!(classifier.head.is_multi_label, "{}", path.display());
    assert_eq!(classifier.head.classes, CLASSES, "{}", path.display());
    let images = SplitShards { test: vec![world.text("sets/val-000000.tar")], ..SplitShards::default() };
    let network = &classifier.network;
    let images = images.open_test(network.transform, network.rules, &world.storage()).unwrap();
    let images = classified_images(images, &classifier.head.classes, true).unwrap();
    assert_eq!(images.len(), 16, "images of no class are kept, and the unknown one is not");
    let classified = classifier.score(&images, None, &NoProgress).unwrap();
    let rows = classifier.rows(&classified, &images, path).unwrap();
    let metrics: Vec<&str> = rows.iter().map(|row| row.metric.as_str()).collect();
    assert_eq!(metrics, ["mAP", "F1"]);
    classified.outcome.value()
}

/// An empty list says that an image is of no class; a negative number, or nothing at all, does not.
/// The class member decides if there is one.
#[test]
fn images_state_that_they_are_of_no_class() {
    let world = World::new(2);
    let cases: [(&[(&str, &str)], bool); 9] = [
        (&[("json", "{\"labels\": []}")], true),
        (&[("json", "{\"label\": []}")], true),
        (&[("cls", "")], true),
        (&[("cls", ""), ("json", "{\"labels\": [\"cat\"]}")], true),
        (&[("cls", "-1"), ("json", "{\"labels\": []}")], false),
        (&[("cls", "-1")], false),
        (&[("json", "{\"label\": null}")], false),
        (&[("json", "{\"labels\": [\"cat\"]}")], false),
        (&[], false),
    ];
    let limits = ShardLimits { max_samples: 1000, max_bytes: Some(1 << 30) };
    let mut writer = ShardWriter::new(&world.path("sets"), "none", limits).unwrap();
    for (number, (members, _)) in cases.iter().enumerate() {
        let image = draw(number as u32, &[]);
        let mut all = vec![("png", image.as_slice())];
        for (extension, text) in *members {
            all.push((*extension, text.as_bytes()));
        }
        writer.add(&format!("{number:08}"), &all).unwrap();
    }
    writer.finish().unwrap();
    let dataset = open(&world, &world.text("sets/none-000000.tar")).unwrap();
    for (number, (members, expected)) in cases.iter().enumerate() {
        let states_none = dataset.states_no_class(SampleId(number as u64)).unwrap();
        assert_eq!(states_none, *expected, "{members:?}");
    }
}

/// From shards with lists of classes to a classifier that is better than chance, whose scores are
/// printed, recorded and shown, and which is exported as what it is.
#[test]
fn several_classes_are_learned_scored_and_exported() {
    let world = prepare();
    let more = [
        "--set",
        "optim.length={steps=60}",
        "--set",
        "method.smoothing=0.1",
        "--baseline",
        "--export",
        "safetensors",
        "--json",
    ];
    let output = finetune(&world, "several.toml", ["train", "val"], "run", &more);
    let stderr = ok(&output);
    check_message(
        "multilabel::several_classes_are_learned_scored_and_exported",
        &lines_with(&stderr, "have no class"),
    );
    let answer = json_of(&output);
    let map = answer["mAP"].as_f64().unwrap();
    let f1 = answer["F1"].as_f64().unwrap();
    assert!(answer["top1"].is_null(), "{answer}");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(stdout.contains(&format!("mean average precision in %  {map:.2} (")), "{stdout}");
    assert!(stdout.contains(&format!("F1 of classes above 50 % in %  {f1:.2} (")), "{stdout}");
    assert!(stdout.contains("16 images of sets/val, 2 classes"), "{stdout}");
    assert!(stdout.contains("mAP of the classifier"), "{stdout}");
    assert!(stdout.contains("knn_20 of the features") && !stdout.contains("linear_honest"), "{stdout}");

    let plan = fs::read_to_string(world.path("run/plan.toml")).unwrap();
    let plan: toml::Table = plan.parse().unwrap();
    assert_eq!(plan["n_samples"].as_integer(), Some(40), "images of no class are shown");
    assert_eq!(plan["recipe"]["method"]["loss"].as_str(), Some("binary_cross_entropy"));
    let mut f1_by_step = Vec::new();
    for row in metrics(&world.path("run")) {
        f1_by_step.push(row["train/f1"].as_f64().unwrap());
        assert!(row["train/accuracy"].is_null(), "{row}");
    }
    let first: f64 = f1_by_step[..10].iter().sum();
    let last: f64 = f1_by_step[50..].iter().sum();
    assert!(last > first, "the F1 of ten steps has not risen: {f1_by_step:?}");

    let evaluations = fs::read_to_string(world.path("run/evaluations.jsonl")).unwrap();
    let rows: Vec<Value> = evaluations.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let before = rows.iter().find(|row| row["metric"] == "mAP" && row["about"]["step"] == 0).unwrap();
    let before = before["mAP"].as_f64().unwrap();
    assert!(map > before + 5.0, "{map} after training, {before} before");
    let row = rows.iter().rfind(|row| row["metric"] == "mAP").unwrap();
    assert_eq!((row["mAP"].as_f64(), &row["confusion"]), (Some(map), &Value::Null), "{row}");
    let by_class: Vec<f64> =
        row["by_class"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect();
    assert!((by_class.iter().sum::<f64>() / 2.0 - map).abs() < 1e-9, "{row}");
    let bins = row["details"]["calibration"]["bins"].as_array().unwrap();
    let n_binned: u64 = bins.iter().map(|bin| bin["n"].as_u64().unwrap()).sum();
    assert_eq!(n_binned, 32, "a decision about each class of each image");
    let worst = row["details"]["worst"].as_array().unwrap();
    let mut classes: Vec<&str> = worst.iter().map(|image| image["class"].as_str().unwrap()).collect();
    classes.sort_unstable();
    classes.dedup();
    assert_eq!((worst.len(), classes), (16, vec!["blue", "blue, red", "no class", "red"]));
    let row = rows.iter().rfind(|row| row["metric"] == "F1").unwrap();
    let interval = row["interval"].as_array().unwrap();
    assert_eq!((row["F1"].as_f64(), interval.len()), (Some(f1), 2), "{row}");

    let page = page_data(&fs::read_to_string(world.path("run/report.html")).unwrap());
    let run = &page["runs"][0];
    assert_eq!(run["classifiers"][0]["by_class"].as_array().unwrap().len(), 2, "{run}");
    assert!(run["confusions"].as_array().unwrap().is_empty(), "{run}");
    let listed = json_of(&world.ocelli(&["runs", &world.text("run"), "--json"]))[0].clone();
    let best = &listed["best"];
    assert_eq!((&best["metric"], best["last"]["value"].as_f64()), (&"mAP".into(), Some(map)), "{listed}");

    assert_eq!(mean_average_precision(&world, &world.path("run")), map);
    let exported = answer["export"].as_str().unwrap();
    assert_eq!(mean_average_precision(&world, Path::new(exported)), map);
    let graph = world.text("classifier.onnx");
    ok(&world.ocelli(&["export", "--checkpoint", exported, "--out", &graph, "--softmax"]));
    assert_eq!(mean_average_precision(&world, Path::new(&graph)), map);
    let card = fs::read_to_string(world.path("classifier.onnx.md")).unwrap();
    assert!(card.contains("It returns one probability per class:\n\n"), "{card}");
    assert!(card.contains("| 0 | blue |\n| 1 | red |\n"), "{card}");
    let folder = world.text("folder");
    let export = ["export", "--checkpoint", exported, "--out", &folder, "--format", "transformers"];
    ok(&world.ocelli(&export));
    let config = fs::read_to_string(world.path("folder/config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["problem_type"], "multi_label_classification");
}

/// Killed in its seventh step, a run on mixed images of several classes resumes from the checkpoint
/// of the fourth with the same bits.
#[test]
fn a_run_on_mixed_images_of_several_classes_resumes() {
    let world = prepare();
    let mixed = ["--set", "method.mixup=0.8", "--set", "method.cutmix=1.0"];
    let sets = ["train", "val"];
    ok(&finetune(&world, "several.toml", sets, "whole", &mixed));
    let fault = ["--inject-fault", "kill:step=6,phase=backward"];
    let killed = finetune(&world, "several.toml", sets, "parts", &[&mixed[..], &fault].concat());
    assert_eq!(killed.status.code(), None);
    ok(&finetune(&world, "several.toml", sets, "parts", &mixed));
    assert_eq!(metrics(&world.path("parts")), metrics(&world.path("whole")));
}

/// Several classes need a setting, and classes are balanced only where they are known.
#[test]
fn labels_and_settings_that_do_not_fit_are_refused() {
    const NAME: &str = "multilabel::labels_and_settings_that_do_not_fit_are_refused";
    let world = prepare();
    let sets = ["train", "val"];
    let output = finetune(&world, "single.toml", sets, "single", &[]);
    check_message(&format!("{NAME}.several_classes"), &fails(&output, 2));
    let output = finetune(&world, "several.toml", sets, "large", &["--set", "data.balance=1.5"]);
    check_message(&format!("{NAME}.balance"), &fails(&output, 2));
    let recipe = world.text("lejepa.toml");
    let workdir = world.text("unlabeled");
    let shards = world.text("sets/train-000000.tar");
    let args = ["pretrain", "--recipe", &recipe, "--shards", &shards, "--workdir", &workdir];
    let output = world.ocelli(&[&args[..], &["--set", "data.balance=0.5"]].concat());
    check_message(&format!("{NAME}.balance_without_labels"), &fails(&output, 2));
    let source = format!("a={shards}");
    let recipe = world.text("several.toml");
    let workdir = world.text("mixed");
    let args = ["finetune", "--recipe", &recipe, "--val-shards", &shards, "--workdir", &workdir];
    let mix = ["--shards", &source, "--set", "data.mix={ a = 1.0 }", "--set", "data.balance=0.5"];
    check_message(&format!("{NAME}.balance_of_a_mix"), &fails(&world.ocelli(&[&args[..], &mix].concat()), 2));
}

/// Writes a shard `sets/NAME-000000.tar` of 90 images of the class common, 10 of the class rare,
/// and 3 without a class.
fn write_unbalanced(world: &World, name: &str) {
    let limits = ShardLimits { max_samples: 1000, max_bytes: Some(1 << 30) };
    let mut writer = ShardWriter::new(&world.path("sets"), name, limits).unwrap();
    for number in 0..103 {
        let image = draw(number, &[]);
        let class = if number % 10 == 3 { "rare" } else { "common" };
        let mut members: Vec<(&str, &[u8])> = vec![("png", image.as_slice())];
        if number < 100 {
            members.push(("cls", class.as_bytes()));
        }
        writer.add(&format!("{number:08}"), &members).unwrap();
    }
    writer.finish().unwrap();
}

/// Opens the unbalanced images with the setting `balance`, as a run does.
fn open_balanced(world: &World, balance: f64) -> (Arc<Dataset>, Labels, Plan) {
    let mut recipe = Recipe::parse(&recipe(VIT, SINGLE, 0, ""), "single", &[]).unwrap();
    recipe.data.shards = vec![world.text("sets/train-000000.tar")];
    recipe.data.balance = balance;
    let session = Session::new(recipe, world.path("none")).unwrap();
    let connected = session.open(&world.storage()).unwrap();
    let dataset = Arc::clone(connected.dataset());
    let labels = connected.labels().unwrap().clone();
    let plan = connected.resolve().unwrap().plan().clone();
    (dataset, labels, plan)
}

/// Returns the shares of the positions of many epochs at which images of the classes common and
/// rare are shown.
fn shares(dataset: &Dataset, labels: &Labels) -> [f64; 2] {
    let order = Order::for_dataset(dataset, 3, 16);
    let n_positions = 40 * dataset.n_samples();
    let mut counts = [0u64; 2];
    for position in 0..n_positions {
        let place = order.place(position, 0);
        let index = dataset.id(place.shard, place.sample).0 as usize;
        for class in labels.classes(index) {
            counts[*class as usize] += 1;
        }
    }
    counts.map(|count| count as f64 / n_positions as f64)
}

/// Returns the addresses of the samples of `n` global batches from `first` on, gathered from all
/// ranks in the order of positions.
fn sample_ids(world: &World, dataset: &Arc<Dataset>, plan: &Plan, ranks: usize, first: u64) -> Vec<u64> {
    let n_batches = 12;
    let mut global = vec![0; n_batches * 8];
    for rank in 0..ranks {
        let share = Share::new(rank, ranks, 8).unwrap();
        let ledger = world.path(&format!("ledger-{rank}"));
        let mut pool = batches(Arc::clone(dataset), plan, share, Cursor(first), &ledger).unwrap();
        for batch in 0..n_batches {
            let ids = pool.next_batch().unwrap().unwrap().sample_ids;
            for (slot, id) in ids.into_iter().enumerate() {
                global[batch * 8 + slot * ranks + rank] = id;
            }
        }
    }
    global
}

/// Of 90 images of one class and 10 of another, each class has half of the positions; with an
/// exponent of 0.5, the classes have shares of 3 to 1. Ranks and restarts see the same order.
#[test]
fn classes_are_shown_equally_often() {
    let world = World::new(2);
    write_unbalanced(&world, "train");
    for (balance, expected) in [(0.0, [0.9, 0.1]), (0.5, [0.75, 0.25]), (1.0, [0.5, 0.5])] {
        let (dataset, labels, plan) = open_balanced(&world, balance);
        assert_eq!(plan.n_samples, 100, "an epoch is as long as without");
        let shares = shares(&dataset, &labels);
        for (share, expected) in shares.iter().zip(expected) {
            assert!((share - expected).abs() < 0.01, "{balance}: {shares:?}");
        }
        let reference = sample_ids(&world, &dataset, &plan, 1, 0);
        assert_eq!(sample_ids(&world, &dataset, &plan, 2, 0), reference, "{balance}: two ranks");
        let resumed = sample_ids(&world, &dataset, &plan, 2, 5);
        assert_eq!(resumed[..7 * 8], reference[5 * 8..], "{balance}: resumed");
        let (again, ..) = open_balanced(&world, balance);
        assert_eq!(again.sampling(), dataset.sampling(), "{balance}");
    }
}

/// A run of balanced classes says how often they are shown, resumes with the same bits, and not
/// with other weights of classes.
#[test]
fn a_run_of_balanced_classes_resumes() {
    const NAME: &str = "multilabel::a_run_of_balanced_classes_resumes";
    let world = prepare();
    write_unbalanced(&world, "unbalanced");
    let balance = ["--set", "data.balance=1"];
    let sets = ["unbalanced", "unbalanced"];
    let stderr = ok(&finetune(&world, "single.toml", sets, "whole", &balance));
    check_message(&format!("{NAME}.shown"), &lines_with(&stderr, "data.balance"));
    let fault = ["--inject-fault", "kill:step=6,phase=backward"];
    let killed = finetune(&world, "single.toml", sets, "parts", &[&balance[..], &fault].concat());
    assert_eq!(killed.status.code(), None);
    ok(&finetune(&world, "single.toml", sets, "parts", &balance));
    assert_eq!(metrics(&world.path("parts")), metrics(&world.path("whole")));
    ok(&finetune(&world, "single.toml", sets, "plain", &[]));
    assert_ne!(metrics(&world.path("plain")), metrics(&world.path("whole")));
    let output = finetune(&world, "single.toml", sets, "whole", &["--set", "data.balance=0.5"]);
    check_message(&format!("{NAME}.other"), &fails(&output, 2));
}
