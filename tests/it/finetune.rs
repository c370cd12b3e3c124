//! Classifiers that are trained with labels: where labels come from, what a run with them leaves
//! behind, and what is refused.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::Output;
use std::sync::Arc;

use burn_tensor::Device;
use eval::image_sets::SplitShards;
use pipeline::NoProgress;
use serde_json::Value;
use session::{Classifier, NetworkSettings, Session, classified_images};
use trainer::Recipe;
use trainer::checkpoint::Checkpoint;

use crate::browser::{browser, check_page};
use crate::messages::{check_message, lines_with};
use crate::methods::{LEJEPA, RESNET, VIT, recipe};
use crate::parquet_sets::write_labeled;
use crate::report::page_data;
use crate::support::{World, fails, json_of, metrics, ok, samples};

/// Classes of the images, in the order in which a classifier has them.
pub(crate) const CLASSES: [&str; 2] = ["cat", "dog"];

/// Colors of the images of the classes.
const COLORS: [[u8; 3]; 2] = [[140, 10, 20], [10, 20, 140]];

/// The method, as a recipe names it.
const CLASSIFICATION: &str = "name = 'classification'";

/// Writes images of about the color `rgb` into `folder`, which is created: one, different from all
/// others, for each of `numbers`, which are below 20.
fn write_images(folder: &Path, numbers: Range<u8>, rgb: [u8; 3]) {
    fs::create_dir_all(folder).unwrap();
    for number in numbers {
        let image = image::RgbImage::from_fn(20, 20, |x, y| {
            let shade = (3 * x + 2 * y) as u8 + number;
            image::Rgb(rgb.map(|channel| channel + shade))
        });
        image.save(folder.join(format!("{number}.png"))).unwrap();
    }
}

/// Writes images of both classes into sub-folders of the folder `name`.
fn write_classes(world: &World, name: &str, numbers: Range<u8>) {
    for (class, rgb) in CLASSES.into_iter().zip(COLORS) {
        write_images(&world.path(name).join(class), numbers.clone(), rgb);
    }
}

/// Returns a folder with images of two classes to train on, in `sets/train`, and to score a
/// classifier on, in `sets/val`; recipes of a classifier, with a backbone of its own or with that
/// of the weights; and a recipe that needs no labels.
pub(crate) fn prepare() -> World {
    let world = World::new(2);
    write_classes(&world, "sets/train", 0..12);
    write_classes(&world, "sets/val", 12..20);
    fs::write(world.path("alone.toml"), recipe(VIT, CLASSIFICATION, 0, "")).unwrap();
    fs::write(world.path("classifier.toml"), recipe("arch = 'from_init'", CLASSIFICATION, 0, "")).unwrap();
    fs::write(world.path("lejepa.toml"), recipe(VIT, LEJEPA, 2, "")).unwrap();
    world
}

/// Runs `ocelli finetune` with a recipe of the folder on the images in `train` in the folder `run`;
/// the classifier is scored on those in `val`.
pub(crate) fn finetune_on(world: &World, recipe: &str, sets: [&str; 2], run: &str, more: &[&str]) -> Output {
    let [train, val] = sets.map(|set| world.text(set));
    let recipe = world.text(recipe);
    let workdir = world.text(run);
    let args = ["finetune", "--recipe", &recipe, "--shards", &train, "--val-shards", &val];
    world.ocelli(&[&args[..], &["--workdir", &workdir], more].concat())
}

/// Runs `ocelli finetune` on the images of both classes, from the weights of the run `weights`.
fn finetune(world: &World, weights: &str, run: &str, more: &[&str]) -> Output {
    let weights = world.text(weights);
    let more = [&["--checkpoint", &weights], more].concat();
    finetune_on(world, "classifier.toml", ["sets/train", "sets/val"], run, &more)
}

/// Trains without labels in the folder `run`.
fn pretrain(world: &World, run: &str, more: &[&str]) {
    let recipe = world.text("lejepa.toml");
    let shards = world.text("sets/train");
    let workdir = world.text(run);
    let args = ["pretrain", "--recipe", &recipe, "--shards", &shards, "--workdir", &workdir];
    ok(&world.ocelli(&[&args[..], more].concat()));
}

/// Returns the plan of the run `run`.
pub(crate) fn plan(world: &World, run: &str) -> toml::Table {
    fs::read_to_string(world.path(run).join("plan.toml")).unwrap().parse().unwrap()
}

/// Returns the classes of the images of `set`, as a run has them, by the bytes of the images.
fn classes_by_image(world: &World, set: &str) -> BTreeMap<Vec<u8>, Vec<String>> {
    let mut recipe = Recipe::parse(&recipe(VIT, CLASSIFICATION, 0, ""), "alone", &[]).unwrap();
    recipe.data.shards = vec![world.text(set)];
    let session = Session::new(recipe, world.path("none")).unwrap();
    let connected = session.open(&world.storage()).unwrap();
    let dataset = Arc::clone(connected.dataset());
    let labels = connected.labels().unwrap().clone();
    let resolved = connected.resolve().unwrap();
    let plan = resolved.plan();
    assert_eq!(plan.n_samples, labels.n_labeled(), "an epoch shows the images that have a class");
    let classes = plan.recipe.method.classes().unwrap();
    assert_eq!(classes, CLASSES, "{set}");
    let mut by_image = BTreeMap::new();
    for (index, (_, image, _)) in samples(&dataset).into_iter().enumerate() {
        let names = labels.classes(index).iter().map(|class| classes[*class as usize].clone());
        by_image.insert(image, names.collect());
    }
    by_image
}

/// A folder of images per class, shards with numbers of classes and their list, and Parquet files
/// with names give an image the same class; an image without one has none in all of them.
#[test]
fn labels_are_the_same_in_folders_shards_and_parquet_files() {
    let world = prepare();
    fs::rename(world.path("sets/train/dog/11.png"), world.path("sets/train/neither.png")).unwrap();
    let mut expected = BTreeMap::new();
    let mut images = Vec::new();
    let mut numbers = Vec::new();
    for number in 0..12 {
        for (label, class) in CLASSES.into_iter().enumerate() {
            let Ok(image) = fs::read(world.path(&format!("sets/train/{class}/{number}.png"))) else {
                continue;
            };
            expected.insert(image.clone(), vec![class.to_string()]);
            images.push(image);
            numbers.push(label as i64);
        }
    }
    let neither = fs::read(world.path("sets/train/neither.png")).unwrap();
    expected.insert(neither.clone(), Vec::new());
    images.push(neither);
    numbers.push(-1);
    fs::create_dir(world.path("sets/hub")).unwrap();
    write_labeled(&world.path("sets/hub/train.parquet"), &images, &numbers);
    ok(&world.ocelli(&["shards", "pack", &world.text("sets/train"), "--out", &world.text("sets/packed")]));
    for set in ["sets/train", "sets/packed", "sets/hub"] {
        assert!(classes_by_image(&world, set) == expected, "{set}: classes of images differ");
    }
}

/// Returns the accuracy of each of `rows` of metrics.
fn accuracies(rows: &[Value]) -> Vec<f64> {
    rows.iter().map(|row| row["train/accuracy"].as_f64().unwrap()).collect()
}

/// From the weights of a run without labels to a classifier that is better than chance, whose score
/// is printed and recorded, and whose run is a run as any other.
#[test]
fn a_classifier_is_trained_from_weights_and_scored() {
    let world = prepare();
    pretrain(&world, "a", &[]);
    let output = finetune(&world, "a", "f", &["--set", "optim.length={steps=60}", "--json"]);
    ok(&output);
    let answer = json_of(&output);
    let top1 = answer["top1"].as_f64().unwrap();
    assert!(top1 > 75.0, "{answer}");
    let interval = answer["interval"].as_array().unwrap();
    assert!(interval[0].as_f64().unwrap() <= top1 && top1 <= interval[1].as_f64().unwrap(), "{answer}");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(stdout.contains(&format!("top-1 in %  {top1:.2} (")), "{stdout}");
    assert!(stdout.contains("16 images of sets/val, 2 classes"), "{stdout}");

    let method = &plan(&world, "f")["recipe"]["method"];
    let classes: Vec<&str> =
        method["classes"].as_array().unwrap().iter().map(|class| class.as_str().unwrap()).collect();
    assert_eq!(classes, CLASSES);
    let rows = metrics(&world.path("f"));
    assert_eq!(rows.len(), 60);
    let accuracies = accuracies(&rows);
    let first: f64 = accuracies[..10].iter().sum();
    let last: f64 = accuracies[50..].iter().sum();
    assert!(last > first, "the accuracy of ten steps has not risen: {accuracies:?}");
    let evaluations = fs::read_to_string(world.path("f/evaluations.jsonl")).unwrap();
    let row: Value = serde_json::from_str(evaluations.lines().last().unwrap()).unwrap();
    assert_eq!((&row["metric"], &row["about"]["step"]), (&"top1".into(), &60.into()), "{row}");

    let run = world.text("f");
    let listed = json_of(&world.ocelli(&["runs", &run, "--json"]))[0].clone();
    let best = &listed["best"];
    assert_eq!((&best["metric"], best["last"]["value"].as_f64()), (&"top1".into(), Some(top1)), "{listed}");
    let train = world.text("sets/train");
    let val = world.text("sets/val");
    let probe = ["probe", "--checkpoint", &run, "--train", &train, "--test", &val, "--protocol", "knn"];
    ok(&world.ocelli(&probe));
    let features = world.text("features.npy");
    ok(&world.ocelli(&["embed", "--checkpoint", &run, "--shards", &val, "--out", &features]));
    let exported = world.text("backbone.safetensors");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--backbone-only", "--out", &exported]));
    ok(&world.ocelli(&["report", &run]));
    // The backbone is one to start from, without the classifier.
    ok(&finetune(&world, "f", "again", &["--set", "optim.length={steps=4}"]));
}

/// Returns the scores of the features of `checkpoint` that `ocelli probe` computes with the images
/// of both classes, by metric.
fn probe(world: &World, checkpoint: &str) -> Value {
    let run = world.text(checkpoint);
    let train = world.text("sets/train");
    let val = world.text("sets/val");
    let sets = ["--train", &train, "--test", &val, "--no-record", "--json"];
    let output = world.ocelli(&[&["probe", "--checkpoint", &run], &sets[..]].concat());
    ok(&output);
    json_of(&output)["networks"].as_object().unwrap().values().next().unwrap().clone()
}

/// The scores of the features are those of `ocelli probe` on the weights before and after, are
/// printed beside the classifier's, and are recorded as those of the first and the last step.
#[test]
fn features_before_and_after_are_scored_beside_the_classifier() {
    let world = prepare();
    pretrain(&world, "a", &["--set", "optim.length={steps=4}"]);
    let output = finetune(&world, "a", "f", &["--baseline", "--json"]);
    ok(&output);
    let answer = json_of(&output);
    let expected = [("before", probe(&world, "a")), ("after", probe(&world, "f"))];
    for (name, expected) in expected {
        let scores = &answer["baseline"][name];
        for metric in ["knn_10", "knn_20", "linear_honest"] {
            let accuracy = &scores[metric]["accuracy"];
            assert!(accuracy.is_f64(), "{name} {metric}: {answer}");
            assert_eq!(accuracy, &expected[metric]["accuracy"], "{name} {metric}");
        }
    }
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    for text in [
        "top1 of the classifier",
        "knn_20 of the features",
        "linear_honest of the features",
        "before: the weights that the run began with, ",
        "after: the backbone of the run after 12 steps",
        "fitted on 24 images of sets/train",
    ] {
        assert!(stdout.contains(text), "{text}:\n{stdout}");
    }
    let page = fs::read_to_string(world.path("f/report.html")).unwrap();
    let data = page_data(&page);
    let scores = data["runs"][0]["scores"].as_array().unwrap();
    let knn = scores.iter().find(|score| score["kind"]["metric"] == "knn_20").unwrap();
    let steps: Vec<u64> =
        knn["points"].as_array().unwrap().iter().map(|point| point["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [0, 12]);
    let listed = json_of(&world.ocelli(&["runs", &world.text("f"), "--json"]))[0].clone();
    assert_eq!(listed["best"]["metric"], "top1", "{listed}");

    // A run can be scored without the weights that it began with.
    fs::rename(world.path("a"), world.path("gone")).unwrap();
    let again = finetune(&world, "a", "f", &["--baseline", "--json"]);
    let warning = lines_with(&ok(&again), "cannot score the weights that the run began with");
    assert!(warning.contains("--baseline"), "{warning}");
    let again = json_of(&again);
    assert!(again["baseline"]["before"].is_null(), "{again}");
    assert_eq!(again["baseline"]["after"], answer["baseline"]["after"]);
    let sets = ["sets/train", "sets/val"];
    let random = finetune_on(&world, "alone.toml", sets, "random", &["--baseline"]);
    ok(&random);
    let stdout = String::from_utf8_lossy(&random.stdout).into_owned();
    assert!(stdout.contains("before: the random weights that the run began with"), "{stdout}");
}

/// The row of a classifier, and the page of its run, have its calibration and the images with the
/// largest losses. Names of classes and images are no markup.
#[test]
fn calibration_and_worst_images_are_recorded_and_shown() {
    let world = prepare();
    write_images(&world.path("sets/train/<b>owl"), 0..12, [90, 90, 90]);
    write_images(&world.path("sets/val/<b>owl"), 12..20, [90, 90, 90]);
    let output = finetune_on(&world, "alone.toml", ["sets/train", "sets/val"], "run", &[]);
    ok(&output);
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(stdout.contains("expected calibration error in %  "), "{stdout}");
    let evaluations = fs::read_to_string(world.path("run/evaluations.jsonl")).unwrap();
    let row: Value = serde_json::from_str(evaluations.lines().last().unwrap()).unwrap();
    assert_eq!(row["metric"], "top1", "{row}");
    let details = &row["details"];
    let bins = details["calibration"]["bins"].as_array().unwrap();
    assert_eq!(bins.len(), 15);
    let n_binned: u64 = bins.iter().map(|bin| bin["n"].as_u64().unwrap()).sum();
    assert_eq!(n_binned, 24);
    let ece = details["calibration"]["ece"].as_f64().unwrap();
    assert!((0.0..=100.0).contains(&ece), "{details}");
    let worst = details["worst"].as_array().unwrap();
    assert_eq!(worst.len(), 24);
    let losses: Vec<f64> = worst.iter().map(|image| image["loss"].as_f64().unwrap()).collect();
    assert!(losses.is_sorted_by(|a, b| a >= b), "{losses:?}");
    for image in worst {
        let is_wrong = image["class"] != image["predicted"];
        // A loss below log 2 is a probability above a half.
        assert!(!is_wrong || image["loss"].as_f64().unwrap() > 0.69, "{image}");
        assert!((33.0..=100.0).contains(&image["probability"].as_f64().unwrap()), "{image}");
        assert!(image["key"].is_string() && image["shard"].is_string(), "{image}");
    }
    let drawn = fs::read(world.path("run/worst-sets-val.png")).unwrap();
    let picture = image::load_from_memory(&drawn).unwrap();
    assert!(picture.width() >= 8 * 116 && picture.height() >= 3 * 116);

    let path = world.text("run/report.html");
    let page = fs::read_to_string(&path).unwrap();
    assert!(!page.contains("<b>owl"), "names are no markup");
    let run = &page_data(&page)["runs"][0];
    let classifier = &run["classifiers"][0];
    assert_eq!(classifier["step"], 12);
    let shown = classifier["worst"].as_array().unwrap();
    assert_eq!(shown.len(), 24);
    for (image, expected) in shown.iter().zip(worst) {
        assert_eq!((&image["key"], &image["class"]), (&expected["key"], &expected["class"]));
    }
    assert!((classifier["calibration"]["ece"].as_f64().unwrap() - ece).abs() < 1e-9, "{classifier}");
    let embedded = classifier["worst_picture"].as_str().unwrap();
    let encoded = embedded.strip_prefix("data:image/png;base64,").unwrap();
    assert_eq!(encoded.len(), 4 * drawn.len().div_ceil(3), "the picture of this set");
    // Left out if there is no browser.
    if let Some(browser) = browser() {
        let copy = world.text("copy.html");
        fs::copy(&path, &copy).unwrap();
        check_page(browser, &copy, 1, 0);
    }

    // Scored on another set, the run has a picture of each, which is shown with its own list.
    ok(&finetune_on(&world, "alone.toml", ["sets/train", "sets/train"], "run", &[]));
    assert!(fs::read(world.path("run/worst-sets-val.png")).unwrap() == drawn, "another picture");
    assert!(world.path("run/worst-sets-train.png").exists());
    let data = page_data(&fs::read_to_string(&path).unwrap());
    let classifiers = data["runs"][0]["classifiers"].as_array().unwrap();
    let sets: Vec<&str> = classifiers.iter().map(|of| of["kind"]["set"].as_str().unwrap()).collect();
    assert_eq!(sets, ["sets/train", "sets/val"]);
    assert_eq!(classifiers[1]["worst_picture"], embedded);
    assert!(classifiers[0]["worst_picture"].is_string());
    assert_ne!(classifiers[0]["worst_picture"], classifiers[1]["worst_picture"]);
}

/// Killed in its seventh step, a run resumes from the checkpoint of the fourth, with the same
/// labels for the same images.
#[test]
fn a_killed_run_resumes_with_the_same_bits() {
    let world = prepare();
    pretrain(&world, "a", &["--set", "optim.length={steps=4}"]);
    ok(&finetune(&world, "a", "whole", &[]));
    let killed = finetune(&world, "a", "parts", &["--inject-fault", "kill:step=6,phase=backward"]);
    assert_eq!(killed.status.code(), None);
    ok(&finetune(&world, "a", "parts", &[]));
    assert_eq!(metrics(&world.path("parts")), metrics(&world.path("whole")));
    let weights = "checkpoints/step-0000000012/rank-00000.safetensors";
    let resumed = fs::read(world.path("parts").join(weights)).unwrap();
    let expected = fs::read(world.path("whole").join(weights)).unwrap();
    assert!(resumed == expected, "weights differ");
}

/// A classifier begins with the network that is named, and a run says that it leaves out the
/// classifier of its weights, and how to keep it. A folder with another kind of run is refused.
#[test]
fn the_network_and_the_head_of_weights_are_named() {
    const NAME: &str = "finetune::the_network_and_the_head_of_weights_are_named";
    let world = prepare();
    ok(&world.pretrain("dino", &["--set", "optim.length={steps=2}"]));
    ok(&finetune(&world, "dino", "teacher", &[]));
    ok(&finetune(&world, "dino", "student", &["--network", "student"]));
    let fingerprints =
        ["teacher", "student"].map(|run| plan(&world, run)["recipe"]["init"]["fingerprint"].clone());
    assert_ne!(fingerprints[0], fingerprints[1], "both began with the same weights");
    // The network is in the plan.
    let longer = ["--lengthen", "--set", "optim.length={steps=13}"];
    ok(&finetune(&world, "dino", "student", &[&longer[..], &["--baseline"]].concat()));
    let other = [&longer[..], &["--network", "teacher"]].concat();
    let stderr = fails(&finetune(&world, "dino", "student", &other), 2);
    check_message(&format!("{NAME}.other"), &lines_with(&stderr, "another network"));
    let stderr = fails(&finetune(&world, "dino", "none", &["--network", "other"]), 2);
    check_message(&format!("{NAME}.unknown"), &lines_with(&stderr, "other"));

    let stderr = ok(&finetune(&world, "teacher", "again", &[]));
    check_message(&format!("{NAME}.head"), &lines_with(&stderr, "a new classifier"));
    let stderr = ok(&finetune(&world, "teacher", "kept", &["--set", "init.heads=true"]));
    assert!(!stderr.contains("a new classifier"), "{stderr}");

    pretrain(&world, "unlabeled", &["--set", "optim.length={steps=2}"]);
    let stderr = fails(&finetune(&world, "teacher", "unlabeled", &[]), 2);
    check_message(&format!("{NAME}.folder"), &lines_with(&stderr, "holds a run"));

    // The flag holds for weights that the recipe names, too.
    let weights = format!("init.weights='{}'", world.text("dino"));
    let named = ["--set", &weights, "--network", "student"];
    ok(&finetune_on(&world, "classifier.toml", ["sets/train", "sets/val"], "named", &named));
    assert_eq!(plan(&world, "named")["recipe"]["init"]["fingerprint"], fingerprints[1]);
}

/// A head that has learned other classes is not begun with, even if there are as many.
#[test]
fn a_head_of_other_classes_is_refused() {
    let world = prepare();
    ok(&world.pretrain("dino", &["--set", "optim.length={steps=2}"]));
    ok(&finetune(&world, "dino", "pets", &[]));
    for (class, rgb) in ["ant", "bee"].into_iter().zip(COLORS) {
        write_images(&world.path("sets/insects").join(class), 0..12, rgb);
    }
    let weights = world.text("pets");
    let flags = ["--checkpoint", &weights, "--set", "init.heads=true"];
    let sets = ["sets/insects", "sets/insects"];
    let output = finetune_on(&world, "classifier.toml", sets, "insects", &flags);
    check_message("finetune::a_head_of_other_classes_is_refused", &fails(&output, 2));
}

/// A classifier is trained for a time, and resumed with the steps of its plan.
#[test]
fn a_classifier_is_trained_for_hours() {
    let world = prepare();
    let sets = ["sets/train", "sets/val"];
    let hours = ["--hours", "0.003"];
    let fault = ["--inject-fault", "kill:step=5,phase=backward"];
    let killed = finetune_on(&world, "alone.toml", sets, "run", &[&hours[..], &fault].concat());
    assert_eq!(killed.status.code(), None);
    let begun = plan(&world, "run");
    assert_eq!(begun["minutes"].as_float(), Some(0.18));
    ok(&finetune_on(&world, "alone.toml", sets, "run", &hours));
    assert_eq!(plan(&world, "run"), begun);
    let steps = begun["total_steps"].as_integer().unwrap();
    let checkpoint = format!("run/checkpoints/step-{steps:010}");
    assert!(world.path(&checkpoint).exists(), "{checkpoint}");
    let twice = [&hours[..], &["--set", "optim.length.epochs=3"]].concat();
    let stderr = fails(&finetune_on(&world, "alone.toml", sets, "other", &twice), 2);
    assert!(stderr.contains("--hours 0.003 and --set optim.length.epochs=3 are both"), "{stderr}");
    assert!(!world.path("other").exists());
}

/// Mixed and erased images are a function of the recipe and the step: a run that is killed resumes
/// with the same bits, and its accuracy is one of mixed labels.
#[test]
fn a_run_on_mixed_images_resumes_with_the_same_bits() {
    let world = prepare();
    let mixed = [
        "--set",
        "method.mixup=0.8",
        "--set",
        "method.cutmix=1.0",
        "--set",
        "method.smoothing=0.1",
        "--set",
        "views.crops.0.erase={p=0.5}",
    ];
    let sets = ["sets/train", "sets/val"];
    ok(&finetune_on(&world, "alone.toml", sets, "plain", &[]));
    ok(&finetune_on(&world, "alone.toml", sets, "whole", &mixed));
    let fault = ["--inject-fault", "kill:step=6,phase=backward"];
    let killed = finetune_on(&world, "alone.toml", sets, "parts", &[&mixed[..], &fault].concat());
    assert_eq!(killed.status.code(), None);
    ok(&finetune_on(&world, "alone.toml", sets, "parts", &mixed));
    assert_eq!(metrics(&world.path("parts")), metrics(&world.path("whole")));
    assert_ne!(metrics(&world.path("plain")), metrics(&world.path("whole")));
    let plain = accuracies(&metrics(&world.path("plain")));
    let mixed = accuracies(&metrics(&world.path("whole")));
    assert_ne!(plain, mixed, "the accuracy is that of mixed images");
}

/// A run goes on only with the labels that it began with: other classes, and images that have
/// another class than before, are refused.
#[test]
fn a_run_is_not_resumed_with_other_labels() {
    let world = prepare();
    let more = ["--set", "optim.length={steps=2}"];
    let sets = ["sets/train", "sets/val"];
    ok(&finetune_on(&world, "alone.toml", sets, "run", &more));
    let before = metrics(&world.path("run"));
    fs::rename(world.path("sets/train/cat/0.png"), world.path("sets/train/dog/100.png")).unwrap();
    let output = finetune_on(&world, "alone.toml", sets, "run", &more);
    check_message("finetune::a_run_is_not_resumed_with_other_labels.images", &fails(&output, 2));
    write_images(&world.path("sets/train/owl"), 0..2, [90, 90, 90]);
    let output = finetune_on(&world, "alone.toml", sets, "run", &more);
    check_message("finetune::a_run_is_not_resumed_with_other_labels.classes", &fails(&output, 2));
    assert_eq!(metrics(&world.path("run")), before);
}

/// The normalization of weights is that of the images unless the command, a recipe file or the plan
/// of a run has another.
#[test]
fn images_are_normalized_as_for_the_weights() {
    let world = prepare();
    let half = "data.normalization={mean=[0.5,0.5,0.5],std=[0.25,0.25,0.25]}";
    let other = "data.normalization={mean=[0.4,0.4,0.4],std=[0.2,0.2,0.2]}";
    pretrain(&world, "a", &["--set", "optim.length={steps=2}", "--set", half]);
    let steps = ["--set", "optim.length={steps=2}"];
    let stderr = ok(&finetune(&world, "a", "taken", &steps));
    let note = lines_with(&stderr, "note: data.normalization.");
    assert!(note.contains("as for the weights; --set data.normalization."), "{note}");
    ok(&finetune(&world, "a", "given", &[&steps[..], &["--set", other]].concat()));
    let sets = ["sets/train", "sets/val"];
    let stderr = ok(&finetune_on(&world, "given/plan.toml", sets, "planned", &[]));
    assert!(!stderr.contains("as for the weights"), "a plan states everything: {stderr}");
    let stated = recipe("arch = 'from_init'", CLASSIFICATION, 0, "");
    let stated = format!("{stated}[data.normalization]\nmean = [0.3, 0.3, 0.3]\nstd = [0.1, 0.1, 0.1]\n");
    fs::write(world.path("stated.toml"), stated).unwrap();
    let weights = world.text("a");
    let more = [&steps[..], &["--checkpoint", &weights]].concat();
    ok(&finetune_on(&world, "stated.toml", sets, "stated", &more));
    for (run, expected) in
        [("taken", [0.5, 0.25]), ("given", [0.4, 0.2]), ("planned", [0.4, 0.2]), ("stated", [0.3, 0.1])]
    {
        let plan = plan(&world, run);
        let normalization = &plan["recipe"]["data"]["normalization"];
        for (key, expected) in ["mean", "std"].into_iter().zip(expected) {
            let values = normalization[key].as_array().unwrap();
            assert!(
                values.iter().all(|value| (value.as_float().unwrap() - expected).abs() < 1e-6),
                "{run}: {normalization}"
            );
        }
    }
}

/// Images without a class are counted, and neither shown nor scored.
#[test]
fn images_without_a_class_are_left_out() {
    let world = prepare();
    write_images(&world.path("sets/train"), 0..2, [90, 90, 90]);
    write_images(&world.path("sets/val"), 12..14, [90, 90, 90]);
    let more = ["--set", "optim.length={steps=2}"];
    let output = finetune_on(&world, "alone.toml", ["sets/train", "sets/val"], "run", &more);
    let stderr = ok(&output);
    check_message("finetune::images_without_a_class_are_left_out", &lines_with(&stderr, "have no class"));
    assert_eq!(plan(&world, "run")["n_samples"].as_integer(), Some(24));
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(stdout.contains("16 images of sets/val"), "{stdout}");
}

/// What cannot be learned from, or scored, is refused before the first step, with what to do.
#[test]
fn labels_and_weights_that_do_not_fit_are_refused() {
    const NAME: &str = "finetune::labels_and_weights_that_do_not_fit_are_refused";
    let world = prepare();
    write_images(&world.path("sets/flat"), 0..4, COLORS[0]);
    write_images(&world.path("sets/one/cat"), 0..4, COLORS[0]);
    write_classes(&world, "sets/several", 0..2);
    fs::write(world.path("sets/several/dog/1.cls"), "cat\ndog\n").unwrap();
    write_classes(&world, "sets/strange", 0..2);
    write_images(&world.path("sets/strange/owl"), 0..2, [90, 90, 90]);
    let sets = ["sets/train", "sets/val"];
    let unlisted = ["--set", "method.classes=[\"cat\",\"owl\"]"];
    let unused = ["--set", "method.classes=[\"cat\",\"dog\",\"owl\"]"];
    let odd = ["method.mixup=0.8", "optim.batch_size=3", "optim.micro_batches=1"];
    let odd: Vec<&str> = odd.into_iter().flat_map(|setting| ["--set", setting]).collect();
    let cases: [(&str, &str, [&str; 2], &[&str]); 9] = [
        ("no_class", "alone.toml", ["sets/flat", "sets/val"], &[]),
        ("one_class", "alone.toml", ["sets/one", "sets/val"], &[]),
        ("several_classes", "alone.toml", ["sets/several", "sets/val"], &[]),
        ("unlisted", "alone.toml", sets, &unlisted),
        ("unused", "alone.toml", sets, &unused),
        ("odd_batch", "alone.toml", sets, &odd),
        ("validation_without_class", "alone.toml", ["sets/train", "sets/flat"], &[]),
        ("validation_of_other_classes", "alone.toml", ["sets/train", "sets/strange"], &[]),
        ("no_labels", "lejepa.toml", sets, &[]),
    ];
    for (name, recipe, sets, more) in cases {
        let output = finetune_on(&world, recipe, sets, name, more);
        check_message(&format!("{NAME}.{name}"), &fails(&output, 2));
        assert!(!world.path(name).join("checkpoints").exists(), "{name}");
    }
    let train = world.text("sets/train");
    let workdir = world.text("no_weights");
    let args = ["finetune", "--shards", &train, "--val-shards", &train, "--workdir", &workdir];
    check_message(&format!("{NAME}.no_weights"), &fails(&world.ocelli(&args), 2));
}

/// A run without labels has no classifier to score.
#[test]
fn a_run_without_labels_is_no_classifier() {
    let world = prepare();
    pretrain(&world, "a", &["--set", "optim.length={steps=1}"]);
    let opened = Classifier::open(&world.path("a"), &NetworkSettings::default(), &Device::flex());
    let error = opened.err().unwrap().to_string();
    check_message("finetune::a_run_without_labels_is_no_classifier", &error);
}

/// Returns the percentage of the validation images that the classifier in `path` classifies
/// correctly.
fn top1(world: &World, path: &Path) -> f64 {
    let classifier = Classifier::open(path, &NetworkSettings::default(), &Device::flex()).unwrap();
    assert_eq!(classifier.head.classes, CLASSES, "{}", path.display());
    let images = SplitShards { test: vec![world.text("sets/val")], ..SplitShards::default() };
    let network = &classifier.network;
    let images = images.open_test(network.transform, network.rules, &world.storage()).unwrap();
    let images = classified_images(images, &classifier.head.classes, false).unwrap();
    let classified = classifier.score(&images, None, &NoProgress).unwrap();
    let rows = classifier.rows(&classified, &images, path).unwrap();
    assert_eq!((rows.len(), rows[0].metric.as_str()), (1, "top1"));
    classified.outcome.value()
}

/// An exported classifier is read back, and scores as that of the run; what cannot be exported is
/// refused, with what to do.
#[test]
fn an_exported_classifier_scores_as_that_of_the_run() {
    const NAME: &str = "finetune::an_exported_classifier_scores_as_that_of_the_run";
    let world = prepare();
    let sets = ["sets/train", "sets/val"];
    let steps = ["--set", "optim.length={steps=20}"];
    let refused =
        finetune_on(&world, "alone.toml", sets, "f", &[&steps[..], &["--export", "dinov2"]].concat());
    check_message(&format!("{NAME}.format_of_the_run"), &fails(&refused, 2));
    assert!(!world.path("f").exists());
    let more = [&steps[..], &["--export", "safetensors", "--json"]].concat();
    let output = finetune_on(&world, "alone.toml", sets, "f", &more);
    ok(&output);
    let answer = json_of(&output);
    let exported = answer["export"].as_str().unwrap().to_string();
    assert!(exported.ends_with("export-safetensors/classifier.safetensors"), "{exported}");
    let expected = answer["top1"].as_f64().unwrap();
    assert_eq!(top1(&world, &world.path("f")), expected);
    assert_eq!(top1(&world, Path::new(&exported)), expected);
    // From the file to another one, as from the run.
    let graph = world.text("classifier.onnx");
    ok(&world.ocelli(&["export", "--checkpoint", &exported, "--out", &graph, "--probabilities"]));
    assert_eq!(top1(&world, Path::new(&graph)), expected);

    let run = world.text("f");
    let backbone = world.text("backbone.safetensors");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &backbone, "--backbone-only"]));
    let opened = Classifier::open(Path::new(&backbone), &NetworkSettings::default(), &Device::flex());
    check_message(&format!("{NAME}.backbone"), &opened.err().unwrap().to_string());
    let out = world.text("refused.pth");
    let export = ["export", "--checkpoint", &run, "--format", "dinov2", "--out", &out];
    check_message(&format!("{NAME}.format"), &fails(&world.ocelli(&export), 2));
    ok(&world.ocelli(&[&export[..], &["--backbone-only"]].concat()));
    let folder = world.text("folder");
    let export = ["export", "--checkpoint", &run, "--format", "timm", "--out", &folder, "--softmax"];
    check_message(&format!("{NAME}.softmax_of_weights"), &fails(&world.ocelli(&export), 2));
    let graph = world.text("backbone.onnx");
    let export = ["export", "--checkpoint", &backbone, "--out", &graph, "--softmax"];
    check_message(&format!("{NAME}.softmax_of_a_backbone"), &fails(&world.ocelli(&export), 2));
}

/// Adapters and the classifier alone are trained; a run that is killed goes on with the same bits;
/// and what is exported are the sums, which score as the run and are weights to start from.
#[test]
fn adapters_are_trained_resumed_and_exported() {
    let world = prepare();
    pretrain(&world, "a", &["--set", "optim.length={steps=4}"]);
    let adapter = ["--set", "optim.adapter={rank=2, alpha=8}"];
    let export = ["--export", "safetensors", "--json"];
    let output = finetune(&world, "a", "whole", &[&adapter[..], &export].concat());
    ok(&output);
    let answer = json_of(&output);
    let fault = ["--inject-fault", "kill:step=6,phase=backward"];
    let killed = finetune(&world, "a", "parts", &[&adapter[..], &fault].concat());
    assert_eq!(killed.status.code(), None);
    ok(&finetune(&world, "a", "parts", &adapter));
    assert_eq!(metrics(&world.path("parts")), metrics(&world.path("whole")));
    let weights = "checkpoints/step-0000000012/rank-00000.safetensors";
    let resumed = fs::read(world.path("parts").join(weights)).unwrap();
    let expected = fs::read(world.path("whole").join(weights)).unwrap();
    assert!(resumed == expected, "weights differ");

    let start = Checkpoint::open(&world.path("a")).unwrap();
    let end = Checkpoint::open(&world.path("whole")).unwrap();
    let (start_tensors, start_name) = start.backbone(None).unwrap();
    let (end_tensors, end_name) = end.backbone(None).unwrap();
    let start_block = start.buffer(&start_name, "blocks.0").unwrap();
    assert!(end.buffer(&end_name, "blocks.0/base").unwrap() == start_block, "the base is fixed");
    for (start, end) in start_tensors.iter().zip(&end_tensors) {
        assert_eq!((&start.name, &start.shape), (&end.name, &end.shape));
    }
    assert!(start_tensors != end_tensors, "adapters are added to the base");
    let top1_of_run = answer["top1"].as_f64().unwrap();
    assert_eq!(top1(&world, &world.path("whole")), top1_of_run);
    assert_eq!(top1(&world, Path::new(answer["export"].as_str().unwrap())), top1_of_run);

    // Another method goes on from the sums, with adapters or without.
    let whole = world.text("whole");
    let init = ["--init", &whole, "--set", "optim.length={steps=2}"];
    pretrain(&world, "adapted", &[&init[..], &adapter].concat());
    pretrain(&world, "plain", &init);
    let adapted = metrics(&world.path("adapted"))[0]["train/loss"].clone();
    let plain = metrics(&world.path("plain"))[0]["train/loss"].clone();
    assert_eq!(adapted, plain, "the first loss is that of the sums");
}

/// Adapters that would not be trained, or whose base is no network, are refused before the first
/// step.
#[test]
fn adapters_that_do_not_fit_are_refused() {
    const NAME: &str = "finetune::adapters_that_do_not_fit_are_refused";
    let world = prepare();
    fs::write(world.path("resnet.toml"), recipe(RESNET, CLASSIFICATION, 0, "")).unwrap();
    let sets = ["sets/train", "sets/val"];
    let adapter = ["--set", "optim.adapter={rank=2, alpha=8}"];
    let last = [&adapter[..], &["--set", "optim.trained_units=1"]].concat();
    let cases: [(&str, &str, &[&str]); 4] = [
        ("random_weights", "alone.toml", &adapter),
        ("backbone", "resnet.toml", &adapter),
        ("trained_units", "alone.toml", &last),
        ("rank", "alone.toml", &["--set", "optim.adapter={rank=0, alpha=8}"]),
    ];
    for (name, recipe, more) in cases {
        let output = finetune_on(&world, recipe, sets, name, more);
        check_message(&format!("{NAME}.{name}"), &fails(&output, 2));
        assert!(!world.path(name).join("checkpoints").exists(), "{name}");
    }
    pretrain(&world, "a", &["--set", "optim.length={steps=1}"]);
    let steps = ["--set", "optim.length={steps=1}", "--set", "optim.warmup={steps=0}"];
    for (name, setting) in
        [("last_units", "optim.trained_units=2"), ("frozen", "optim.freeze_backbone={percent=100}")]
    {
        let more = [&adapter[..], &steps, &["--set", setting]].concat();
        let warning = lines_with(&ok(&finetune(&world, "a", name, &more)), "adapter");
        check_message(&format!("{NAME}.{name}"), &warning);
    }
    let whole = world.text("a");
    let lejepa = world.text("lejepa.toml");
    let train = world.text("sets/train");
    let fork = world.text("fork");
    let args = ["pretrain", "--recipe", &lejepa, "--shards", &train, "--workdir", &fork, "--fork", &whole];
    let output = world.ocelli(&[&args[..], &adapter].concat());
    check_message(&format!("{NAME}.fork"), &fails(&output, 2));
}
