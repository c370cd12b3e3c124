//! Networks that are trained to label pixels: where masks come from, what a run with them leaves
//! behind, and what is refused.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::Output;

use burn_tensor::Device;
use eval::image_sets::SplitShards;
use pipeline::NoProgress;
use serde_json::Value;
use session::{NetworkSettings, Segmenter, Session, segmented_images};
use trainer::Recipe;

use crate::browser::{browser, check_page};
use crate::messages::{check_message, lines_with};
use crate::methods::{LEJEPA, RESNET, VIT, recipe};
use crate::report::page_data;
use crate::support::{World, encode_png, fails, json_of, metrics, ok, shard_writer};

/// The method with a linear decoder, as a recipe names it.
const LINEAR: &str = "name = 'segmentation'";

/// The method with a convolution before the linear layer.
const CONV: &str = "name = 'segmentation'\ndecoder = 'conv'\ndecoder_width = 8";

/// Side of the images in pixels.
const SIZE_PX: u32 = 16;

/// Few steps.
const SHORT: [&str; 2] = ["--set", "optim.length={steps=2}"];

/// Returns whether a pixel is in the bright square of an image.
fn is_in_square(number: u32, x: u32, y: u32) -> bool {
    let side = 6 + number % 5;
    let left = number * 7 % (SIZE_PX - side);
    let top = number * 5 % (SIZE_PX - side);
    (left..left + side).contains(&x) && (top..top + side).contains(&y)
}

/// Draws a bright square on a dark ground.
fn picture(number: u32) -> Vec<u8> {
    let picture = image::RgbImage::from_fn(SIZE_PX, SIZE_PX, |x, y| {
        let noise = ((x * 31 + y * 17 + number * 13) % 23) as u8;
        image::Rgb([if is_in_square(number, x, y) { 200 + noise } else { noise }; 3])
    });
    encode_png(&picture.into())
}

/// Draws the mask of an image: class 1 in the square, 0 around it; pixels of the first row do not
/// count.
fn mask(number: u32) -> Vec<u8> {
    gray(SIZE_PX, |x, y| if y == 0 { 255 } else { u8::from(is_in_square(number, x, y)) })
}

/// Draws the mask of an image with its classes swapped.
fn swapped_mask(number: u32) -> Vec<u8> {
    gray(SIZE_PX, |x, y| if y == 0 { 255 } else { u8::from(!is_in_square(number, x, y)) })
}

/// Draws a mask of `size_px` with these classes of pixels.
fn gray(size_px: u32, class: impl Fn(u32, u32) -> u8) -> Vec<u8> {
    let mask = image::GrayImage::from_fn(size_px, size_px, |x, y| image::Luma([class(x, y)]));
    encode_png(&mask.into())
}

/// Writes the shard `name` of the images `numbers`, each with the mask that `mask_of` returns.
fn pack(world: &World, name: &str, numbers: Range<u32>, mask_of: impl Fn(u32) -> Option<Vec<u8>>) {
    let folder = world.path(name);
    fs::create_dir_all(&folder).unwrap();
    let mut writer = shard_writer(&folder, name);
    for number in numbers {
        let image = picture(number);
        let mask = mask_of(number);
        let mut members: Vec<(&str, &[u8])> = vec![("png", image.as_slice())];
        if let Some(mask) = &mask {
            members.push(("seg.png", mask.as_slice()));
        }
        writer.add(&format!("{number:08}"), &members).unwrap();
    }
    writer.finish().unwrap();
}

/// Returns the path of the shard `name`.
fn shard(world: &World, name: &str) -> String {
    world.text(&format!("{name}/{name}-000000.tar"))
}

/// Returns a folder with images to train on, in `train`, and to score on, in `val`, and recipes
/// with both decoders, with a backbone of their own or with that of the weights, and one that needs
/// no masks.
fn prepare() -> World {
    let world = World::new(2);
    pack(&world, "train", 0..24, |number| Some(mask(number)));
    pack(&world, "val", 100..116, |number| Some(mask(number)));
    fs::write(world.path("linear.toml"), recipe(VIT, LINEAR, 0, "")).unwrap();
    fs::write(world.path("conv.toml"), recipe(VIT, CONV, 0, "")).unwrap();
    fs::write(world.path("resnet.toml"), recipe(RESNET, LINEAR, 0, "")).unwrap();
    fs::write(world.path("of_weights.toml"), recipe("arch = 'from_init'", LINEAR, 0, "")).unwrap();
    fs::write(world.path("lejepa.toml"), recipe(VIT, LEJEPA, 2, "")).unwrap();
    world
}

/// Runs `ocelli finetune` with a recipe of the folder on the shard `train` in the folder `run`; the
/// network is scored on the shard `val`.
fn finetune_on(world: &World, recipe: &str, sets: [&str; 2], run: &str, more: &[&str]) -> Output {
    let [train, val] = sets.map(|set| shard(world, set));
    let recipe = world.text(recipe);
    let workdir = world.text(run);
    let args = ["finetune", "--recipe", &recipe, "--shards", &train, "--val-shards", &val];
    world.ocelli(&[&args[..], &["--workdir", &workdir], more].concat())
}

fn finetune(world: &World, recipe: &str, run: &str, more: &[&str]) -> Output {
    finetune_on(world, recipe, ["train", "val"], run, more)
}

/// Runs `ocelli finetune` with a linear decoder on the shard `set` in the folder `run`; a part of
/// the shard is held out to score the network on.
fn train_on(world: &World, set: &str, run: &str, more: &[&str]) -> Output {
    let recipe = world.text("linear.toml");
    let shards = shard(world, set);
    let workdir = world.text(run);
    let args = ["finetune", "--recipe", &recipe, "--shards", &shards, "--workdir", &workdir];
    world.ocelli(&[&args[..], more].concat())
}

/// Returns the rows of the evaluations of the run `run`.
fn evaluations(world: &World, run: &str) -> Vec<Value> {
    let text = fs::read_to_string(world.path(run).join("evaluations.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the plan of the run `run`.
fn plan(world: &World, run: &str) -> toml::Table {
    fs::read_to_string(world.path(run).join("plan.toml")).unwrap().parse().unwrap()
}

/// From the weights of a run without labels to a network that finds the squares: better than one
/// that calls every pixel ground. Its scores are printed, recorded and shown.
#[test]
fn a_decoder_is_trained_from_weights_and_scored() {
    let world = prepare();
    let train = shard(&world, "train");
    let weights = world.text("a");
    let pretrain = world.text("lejepa.toml");
    let args = ["pretrain", "--recipe", &pretrain, "--shards", &train, "--workdir", &weights];
    ok(&world.ocelli(&[&args[..], &SHORT].concat()));
    let more = ["--checkpoint", &weights, "--set", "optim.length={steps=60}", "--json"];
    let output = finetune(&world, "of_weights.toml", "run", &more);
    ok(&output);
    let answer = json_of(&output);
    let miou = answer["miou"].as_f64().unwrap();
    assert!(miou > 60.0, "all pixels of the ground class give less than 45 %: {answer}");
    let accuracy = answer["pixel_accuracy"].as_f64().unwrap();
    assert!(accuracy > 85.0, "{answer}");
    let by_class = answer["by_class"].as_array().unwrap();
    let mean = (by_class[0].as_f64().unwrap() + by_class[1].as_f64().unwrap()) / 2.0;
    assert!((mean - miou).abs() < 1e-9, "{answer}");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    for words in ["16 images of val/val, 2 classes", "mIoU in %  ", "pixel accuracy in %  "] {
        assert!(stdout.contains(words), "{words}: {stdout}");
    }

    let method = plan(&world, "run")["recipe"]["method"].clone();
    assert_eq!(method["classes"].as_array().unwrap().len(), 2, "{method}");
    assert_eq!(method["masks"].as_str().unwrap().len(), 16, "{method}");
    let rows = evaluations(&world, "run");
    let rows: Vec<&Value> = rows.iter().filter(|row| row["protocol"] == "decoder").collect();
    // Those before them are of validations while it trained.
    let [.., first, second] = rows[..] else { panic!("{rows:?}") };
    assert_eq!([&first["metric"], &second["metric"]], ["miou", "pixel_accuracy"]);
    assert_eq!(first["mIoU"], answer["miou"]);
    assert_eq!(second["accuracy"], answer["pixel_accuracy"]);
    for row in [first, second] {
        let value = row["mIoU"].as_f64().or(row["accuracy"].as_f64()).unwrap();
        let low = row["interval"][0].as_f64().unwrap();
        let high = row["interval"][1].as_f64().unwrap();
        assert!(low <= value && value <= high, "{row}");
        assert_eq!([&row["test"]["images"], &row["train"]["images"]], [16, 24]);
    }
    let mut n_pixels = 0;
    for counts in first["confusion"].as_array().unwrap() {
        n_pixels += counts.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum::<u64>();
    }
    assert_eq!(n_pixels, 16 * 16 * 15, "pixels of class 255 do not count");
    let worst = first["details"]["worst_masks"].as_array().unwrap();
    let shares: Vec<f64> = worst.iter().map(|image| image["accuracy"].as_f64().unwrap()).collect();
    assert!(shares.len() == 16 && shares.is_sorted(), "{shares:?}");

    let drawn = image::open(world.path("run/masks-val-val.png")).unwrap();
    assert!(drawn.width() >= 6 * 128 && drawn.height() >= 6 * 128, "twelve images in six rows");
    let path = world.text("run/report.html");
    let page = fs::read_to_string(&path).unwrap();
    let shown = &page_data(&page)["runs"][0];
    assert_eq!(shown["masks"][0]["worst_masks"].as_array().unwrap().len(), 16);
    assert!(shown["masks"][0]["mask_picture"].as_str().unwrap().starts_with("data:image/png;base64,"));
    assert!(shown["overview"]["best"]["words"].as_str().unwrap().starts_with("mIoU "), "{shown}");
    // Left out if there is no browser.
    if let Some(browser) = browser() {
        let copy = world.text("copy.html");
        fs::copy(&path, &copy).unwrap();
        check_page(browser, &copy, 1, 0);
    }
}

/// Without images to validate on, a part of those with masks is held out, by their keys alone, and
/// is not trained on.
#[test]
fn a_part_of_the_images_with_masks_is_held_out() {
    const NAME: &str = "segment::a_part_of_the_images_with_masks_is_held_out";
    let world = prepare();
    pack(&world, "some", 0..24, |number| if number < 4 { None } else { Some(mask(number)) });
    let quarter = ["--set", "data.validation=0.25"];
    let output = train_on(&world, "some", "run", &[&SHORT[..], &quarter].concat());
    check_message(NAME, &lines_with(&ok(&output), "held out"));
    assert_eq!(plan(&world, "run")["n_samples"].as_integer(), Some(15));
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(stdout.contains("5 images of some/some held-out, 2 classes"), "{stdout}");
    ok(&train_on(&world, "some", "run", &[&SHORT[..], &quarter].concat()));

    let mut recipe = Recipe::parse(&recipe(VIT, LINEAR, 0, ""), "linear", &[]).unwrap();
    recipe.data.shards = vec![shard(&world, "some")];
    recipe.data.validation = Some(0.25);
    let session = Session::new(recipe, world.path("none")).unwrap();
    let fitted = session.open(&world.storage()).unwrap().resolve().unwrap().fit().unwrap();
    let classes = ["0", "1"].map(String::from);
    let held_out = segmented_images(fitted.held_out_images().unwrap(), &classes).unwrap();
    assert_eq!(held_out.len(), 5, "a quarter of the images with masks");
    let weights = fitted.dataset().sampling().weights.clone().unwrap();
    assert_eq!(weights.iter().filter(|weight| **weight > 0.0).count(), 15);
    for image in 0..held_out.len() {
        let number: usize = held_out.describe(image).1.parse().unwrap();
        assert!(number >= 4 && weights[number] == 0.0, "{number} is held out, and shown");
    }
}

/// The decoder is scored while it trains; the best weights are the result of a run with patience,
/// and the test set is scored once.
#[test]
fn a_decoder_is_validated_while_it_trains() {
    let world = prepare();
    pack(&world, "test", 200..208, |number| Some(mask(number)));
    let test = shard(&world, "test");
    let more = ["--test-shards", &test, "--set", "run.patience=100", "--json"];
    let output = finetune(&world, "linear.toml", "run", &more);
    ok(&output);
    let answer = json_of(&output);
    let mut best = (0, f64::NEG_INFINITY);
    let mut steps = vec![0];
    for row in metrics(&world.path("run")) {
        let Some(miou) = row["val/miou"].as_f64() else { continue };
        assert!(row["val/pixel_accuracy"].as_f64().is_some(), "{row}");
        // Rows have the index of their step.
        let step = row["step"].as_u64().unwrap() + 1;
        steps.push(step);
        if miou > best.1 {
            best = (step, miou);
        }
    }
    assert_eq!(steps, [0, 2, 4, 6, 8, 10, 12]);
    assert_eq!((&answer["steps"], answer["best_step"].as_u64()), (&12.into(), Some(best.0)), "{answer}");
    // The best is scored again from its checkpoint, where sums may be rounded differently.
    let miou = answer["miou"].as_f64().unwrap();
    assert!((miou - best.1).abs() < 0.2, "{miou} {}", best.1);
    let tested = answer["test"]["miou"].as_f64().unwrap();
    let mut recorded_steps = Vec::new();
    for row in evaluations(&world, "run") {
        if row["metric"] != "miou" {
            continue;
        }
        if row["test"]["set"] == "test/test" {
            assert_eq!(row["mIoU"].as_f64(), Some(tested), "{row}");
        } else {
            recorded_steps.push(row["about"]["step"].as_u64().unwrap());
        }
    }
    steps.push(best.0);
    assert_eq!(recorded_steps, steps);
    assert!(world.path("run/masks-test-test.png").exists());
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    for words in ["the best of 6 validations by miou", "8 images of test/test, 2 classes"] {
        assert!(stdout.contains(words), "{words}: {stdout}");
    }
}

/// Decoders on the last stage of a convolutional network, whose cells are larger, run as well.
#[test]
fn a_convolutional_network_labels_pixels() {
    let world = prepare();
    let more = ["--set", "optim.length={steps=24}", "--json"];
    let output = finetune(&world, "resnet.toml", "run", &more);
    ok(&output);
    let answer = json_of(&output);
    let by_class = answer["by_class"].as_array().unwrap();
    let mean = (by_class[0].as_f64().unwrap() + by_class[1].as_f64().unwrap()) / 2.0;
    assert!((mean - answer["miou"].as_f64().unwrap()).abs() < 1e-9, "{answer}");
    let mut losses = Vec::new();
    for row in metrics(&world.path("run")) {
        losses.push(row["train/loss"].as_f64().unwrap());
    }
    let first: f64 = losses[..4].iter().sum();
    let last: f64 = losses[20..].iter().sum();
    assert!(last < first, "the loss of four steps has not fallen: {losses:?}");
}

/// A test set with the name of the validation set has rows and pictures of its own, and images that
/// are trained on cause a warning when the run begins.
#[test]
fn sets_of_one_name_are_told_apart() {
    let world = prepare();
    pack(&world, "other", 200..208, |number| Some(mask(number)));
    let test = world.text("val/val-000001.tar");
    fs::copy(shard(&world, "other"), &test).unwrap();
    let more = [&SHORT[..], &["--test-shards", &test, "--json"]].concat();
    let output = finetune(&world, "linear.toml", "run", &more);
    let stderr = ok(&output);
    assert!(!stderr.contains("among the training images"), "{stderr}");
    let answer = json_of(&output);
    let mut tested = Vec::new();
    for row in evaluations(&world, "run") {
        if row["metric"] == "miou" && row["test"]["set"] == "val/val test" {
            tested.push(row["mIoU"].clone());
        }
    }
    assert_eq!(tested, [answer["test"]["miou"].clone()]);
    let mut n_pictures = 0;
    for entry in fs::read_dir(world.path("run")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        n_pictures += usize::from(name.starts_with("masks-val-val") && name.ends_with(".png"));
    }
    assert_eq!(n_pictures, 2, "one of each set");

    let sets = ["train", "train"];
    let warning = "warning: train/train: 24 of the 24 test images are among the training images";
    let stderr = ok(&finetune_on(&world, "linear.toml", sets, "shared", &SHORT));
    assert!(stderr.contains(warning), "{stderr}");
    let stderr = ok(&finetune_on(&world, "linear.toml", sets, "shared", &SHORT));
    assert!(!stderr.contains(warning), "the run has begun: {stderr}");
}

/// Held-out images whose masks cannot be used are left out; numbers that no pixel has cause a
/// warning.
#[test]
fn held_out_masks_and_numbers_that_cannot_be_used_are_told() {
    let world = prepare();
    // A mask in three has another size: of a half that is held out, some do, and some do not.
    pack(&world, "some", 0..24, |number| {
        Some(if number % 3 == 0 { gray(8, |x, _| u8::from(x > 3)) } else { mask(number) })
    });
    let more = ["--set", "data.validation=0.5", "--set", "data.max_bad_rate=0.9"];
    let stderr = ok(&train_on(&world, "some", "run", &[&SHORT[..], &more].concat()));
    assert!(stderr.contains("of some/some held-out have a mask that cannot be used"), "{stderr}");
    assert!(!stderr.contains("numbered from 0"), "{stderr}");

    pack(&world, "gaps", 0..24, |number| {
        Some(gray(SIZE_PX, |x, y| 3 * u8::from(is_in_square(number, x, y))))
    });
    let stderr = ok(&train_on(&world, "gaps", "gaps_run", &SHORT));
    assert!(stderr.contains("masks of gaps/gaps have pixels of 2 of 4 classes, numbered from 0"), "{stderr}");
    let names = ["--set", "method.classes=[\"a\",\"b\",\"c\",\"d\"]"];
    let stderr = ok(&train_on(&world, "gaps", "named_run", &[&SHORT[..], &names].concat()));
    assert!(!stderr.contains("numbered from 0"), "{stderr}");
}

/// Killed in its seventh step, a run resumes from the checkpoint of the fourth, with the same masks
/// of the same views.
#[test]
fn a_killed_run_resumes_with_the_same_bits() {
    let world = prepare();
    let erased = ["--set", "views.crops.0.erase={p=0.5}"];
    for recipe in ["linear.toml", "conv.toml"] {
        let whole = format!("{recipe}-whole");
        let parts = format!("{recipe}-parts");
        ok(&finetune(&world, recipe, &whole, &erased));
        let fault = ["--inject-fault", "kill:step=6,phase=backward"];
        let killed = finetune(&world, recipe, &parts, &[&erased[..], &fault].concat());
        assert_eq!(killed.status.code(), None);
        ok(&finetune(&world, recipe, &parts, &erased));
        assert_eq!(metrics(&world.path(&parts)), metrics(&world.path(&whole)));
        let weights = "checkpoints/step-0000000012/rank-00000.safetensors";
        let resumed = fs::read(world.path(&parts).join(weights)).unwrap();
        let expected = fs::read(world.path(&whole).join(weights)).unwrap();
        assert!(resumed == expected, "{recipe}: weights differ");
    }
}

/// A run goes on only with the masks that it began with: the classes of a pixel of one image, and
/// other names of classes, are told apart.
#[test]
fn a_run_is_not_resumed_with_other_masks() {
    const NAME: &str = "segment::a_run_is_not_resumed_with_other_masks";
    let world = prepare();
    ok(&finetune(&world, "linear.toml", "run", &SHORT));
    let before = metrics(&world.path("run"));
    let names = ["--set", "method.classes=[\"ground\",\"square\"]"];
    let output = finetune(&world, "linear.toml", "run", &[&SHORT[..], &names].concat());
    check_message(&format!("{NAME}.classes"), &fails(&output, 2));
    fs::remove_dir_all(world.path("train")).unwrap();
    pack(&world, "train", 0..24, |number| {
        Some(if number == 3 { swapped_mask(number) } else { mask(number) })
    });
    let output = finetune(&world, "linear.toml", "run", &SHORT);
    check_message(&format!("{NAME}.pixels"), &fails(&output, 2));
    assert_eq!(metrics(&world.path("run")), before);
}

/// Images without a mask are counted, and neither shown nor scored; one whose mask has another size
/// is replaced, as one that cannot be decoded.
#[test]
fn images_without_a_usable_mask_are_left_out() {
    const NAME: &str = "segment::images_without_a_usable_mask_are_left_out";
    let world = prepare();
    pack(&world, "some", 0..24, |number| match number {
        3 | 4 => None,
        5 => Some(gray(8, |x, _| u8::from(x > 3))),
        number => Some(mask(number)),
    });
    pack(&world, "some_val", 100..116, |number| if number == 103 { None } else { Some(mask(number)) });
    let more = ["--set", "data.max_bad_rate=0.5"];
    let output = finetune_on(&world, "linear.toml", ["some", "some_val"], "run", &more);
    let stderr = ok(&output);
    check_message(NAME, &lines_with(&stderr, "have no mask"));
    assert_eq!(plan(&world, "run")["n_samples"].as_integer(), Some(22));
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(stdout.contains("15 images of some_val/some_val"), "{stdout}");
    let ledger = fs::read_to_string(world.path("run/quarantine.jsonl")).unwrap();
    assert!(ledger.contains("00000005") && !ledger.contains("00000003"), "{ledger}");
    assert!(ledger.contains("8 x 8 pixels, but its image has 16 x 16"), "{ledger}");
}

/// Classes may have names, and masks fewer of them.
#[test]
fn listed_classes_name_the_values_of_masks() {
    let world = prepare();
    let names = ["--set", "method.classes=[\"ground\",\"square\",\"sky\"]"];
    let output = finetune(&world, "linear.toml", "run", &[&SHORT[..], &names].concat());
    ok(&output);
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(stdout.contains("  ground  ") && stdout.contains("  square  "), "{stdout}");
    assert!(!stdout.contains("sky"), "a class without pixels has no number: {stdout}");
    let row = &evaluations(&world, "run")[0];
    assert_eq!(row["classes"], serde_json::json!(["ground", "square", "sky"]), "{row}");
    assert_eq!(row["by_class"][2], Value::Null, "{row}");
}

/// What cannot be learned from, or scored, is refused before the first step, with what to do.
#[test]
fn masks_that_do_not_fit_are_refused() {
    const NAME: &str = "segment::masks_that_do_not_fit_are_refused";
    let world = prepare();
    pack(&world, "plain", 0..4, |_| None);
    pack(&world, "binary", 0..4, |_| Some(gray(SIZE_PX, |x, _| if x > 7 { 255 } else { 0 })));
    pack(&world, "colors", 0..4, |number| Some(picture(number)));
    pack(&world, "large", 0..4, |_| Some(gray(SIZE_PX, |x, _| (x / 4) as u8)));
    pack(&world, "small", 0..4, |_| Some(gray(8, |x, _| u8::from(x > 3))));
    let sets = ["train", "val"];
    let classes = ["--set", "method.classes=[\"ground\",\"square\"]"];
    let mixed = ["--set", "method.mixup=0.8"];
    let cases: [(&str, [&str; 2], &[&str], i32); 10] = [
        ("no_mask", ["plain", "val"], &[], 3),
        ("one_class", ["binary", "val"], &[], 3),
        ("not_masks", ["colors", "val"], &[], 3),
        ("unlisted", ["large", "val"], &classes, 2),
        ("validation_without_mask", ["train", "plain"], &[], 3),
        ("validation_of_other_classes", ["train", "large"], &[], 3),
        ("validation_of_another_size", ["train", "small"], &[], 3),
        ("mixed", sets, &mixed, 2),
        ("baseline", sets, &["--baseline"], 2),
        ("balance", sets, &["--set", "data.balance=1"], 2),
    ];
    for (name, sets, more, code) in cases {
        let output = finetune_on(&world, "linear.toml", sets, name, more);
        check_message(&format!("{NAME}.{name}"), &fails(&output, code));
        assert!(!world.path(name).join("checkpoints").exists(), "{name}");
    }
}

/// Returns the mIoU in percent of the network in `path` on the validation images.
fn miou(world: &World, path: &Path) -> f64 {
    let segmenter = Segmenter::open(path, &NetworkSettings::default(), &Device::flex()).unwrap();
    assert_eq!(segmenter.head.classes, ["0", "1"], "{}", path.display());
    let images = SplitShards { test: vec![shard(world, "val")], ..SplitShards::default() };
    let network = &segmenter.network;
    let images = images.open_test(network.transform, network.rules, &world.storage()).unwrap();
    let images = segmented_images(images, &segmenter.head.classes).unwrap();
    let segmented = segmenter.score(&images, &NoProgress).unwrap();
    let rows = segmenter.rows(&segmented, &images, path).unwrap();
    assert_eq!((rows[0].metric.as_str(), rows[1].metric.as_str()), ("miou", "pixel_accuracy"));
    segmented.counts.mean_iou()
}

/// An exported decoder is read back, and scores as that of the run; what cannot be exported is
/// refused, with what to do.
#[test]
fn an_exported_decoder_scores_as_that_of_the_run() {
    const NAME: &str = "segment::an_exported_decoder_scores_as_that_of_the_run";
    let world = prepare();
    let refused = finetune(&world, "conv.toml", "run", &["--export", "timm"]);
    check_message(&format!("{NAME}.format_of_the_run"), &fails(&refused, 2));
    assert!(!world.path("run").exists());
    let output = finetune(&world, "conv.toml", "run", &["--export", "safetensors", "--json"]);
    ok(&output);
    let answer = json_of(&output);
    let exported = answer["export"].as_str().unwrap().to_string();
    assert!(exported.ends_with("export-safetensors/segmenter.safetensors"), "{exported}");
    let expected = answer["miou"].as_f64().unwrap();
    let trained = miou(&world, &world.path("run"));
    assert!((trained - expected).abs() < 1e-9, "{trained} {expected}");
    assert_eq!(miou(&world, Path::new(&exported)), trained);
    // From the file to another one, as from the run.
    let graph = world.text("segmenter.onnx");
    ok(&world.ocelli(&["export", "--checkpoint", &exported, "--out", &graph]));
    // Positions are merged in a graph: scores that are nearly equal may differ by a rounding.
    let read = miou(&world, Path::new(&graph));
    assert!((read - expected).abs() < 0.2, "{read} {expected}");

    let run = world.text("run");
    let backbone = world.text("backbone.safetensors");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &backbone, "--backbone-only"]));
    let opened = Segmenter::open(Path::new(&backbone), &NetworkSettings::default(), &Device::flex());
    check_message(&format!("{NAME}.backbone"), &opened.err().unwrap().to_string());
    let folder = world.text("folder");
    let export = ["export", "--checkpoint", &run, "--format", "timm", "--out", &folder];
    check_message(&format!("{NAME}.format"), &fails(&world.ocelli(&export), 2));
    ok(&world.ocelli(&[&export[..], &["--backbone-only"]].concat()));
}

/// A run without masks does not label pixels.
#[test]
fn a_run_without_masks_does_not_label_pixels() {
    let world = prepare();
    let recipe = world.text("lejepa.toml");
    let train = shard(&world, "train");
    let workdir = world.text("a");
    let args = ["pretrain", "--recipe", &recipe, "--shards", &train, "--workdir", &workdir];
    ok(&world.ocelli(&[&args[..], &SHORT].concat()));
    let opened = Segmenter::open(Path::new(&workdir), &NetworkSettings::default(), &Device::flex());
    let error = opened.err().unwrap().to_string();
    check_message("segment::a_run_without_masks_does_not_label_pixels", &error);
}
