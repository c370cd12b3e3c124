//! Mistaken commands and their answers, as `mistakes.txt` lists them: commands as users of other
//! tools type them, files that are something else, and weights, runs and images that do not fit.
//!
//! An entry is a line `$ ocelli …`, and a line with the exit code and the words that the answer
//! must have, separated by bars; those after `without` it must not have. All commands are run in
//! one folder.

use std::fs;
use std::path::Path;

use crate::bands::npy_u16;
use crate::methods::{CONVNEXT, LEJEPA, SIMCLR, VIT, recipe};
use crate::support::{World, ok, program};

/// Smallest number of entries.
const LEAST: usize = 60;

/// A command with its answer.
struct Mistake {
    /// Words after the name of the program, as they are typed.
    command: String,
    code: i32,
    /// Texts that the answer has.
    words: Vec<String>,
    /// Texts that it does not have.
    absent: Vec<String>,
}

/// Reads the entries.
fn read_mistakes() -> Vec<Mistake> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/it/mistakes.txt");
    let text = fs::read_to_string(path).unwrap();
    let mut lines = text.lines();
    let mut mistakes = Vec::new();
    while let Some(line) = lines.next() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let command = line.strip_prefix("$ ocelli ").unwrap_or_else(|| panic!("no command: {line}"));
        let answer = lines.next().unwrap();
        let mut parts = answer.split(" | ");
        let code = parts.next().unwrap().parse().unwrap_or_else(|_| panic!("no exit code: {answer}"));
        let mut words = Vec::new();
        let mut absent = Vec::new();
        for part in parts {
            match part.strip_prefix("without ") {
                Some(part) => absent.push(part.to_string()),
                None => words.push(part.to_string()),
            }
        }
        assert!(!words.is_empty(), "no words for {command}");
        mistakes.push(Mistake { command: command.to_string(), code, words, absent });
    }
    mistakes
}

/// Encodes a small image.
fn encode(seed: u8, format: image::ImageFormat) -> Vec<u8> {
    let mut bytes = std::io::Cursor::new(Vec::new());
    image::RgbImage::from_fn(20, 20, |x: u32, y: u32| {
        image::Rgb([seed.wrapping_mul(37), (x * 9) as u8, (y * 11) as u8])
    })
    .write_to(&mut bytes, format)
    .unwrap();
    bytes.into_inner()
}

/// Writes eight images into `folder`, which is created.
fn write_images(folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    for number in 0..8u8 {
        fs::write(folder.join(format!("{number}.png")), encode(number, image::ImageFormat::Png)).unwrap();
    }
}

/// Writes eight tiles of four bands of 16 bits into `folder`, which is created.
fn write_tiles(folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    for number in 0..8u16 {
        let values: Vec<u16> =
            (0..4 * 24 * 20).map(|i: u16| i.wrapping_mul(31).wrapping_add(number)).collect();
        fs::write(folder.join(format!("{number}.npy")), npy_u16([4, 24, 20], &values)).unwrap();
    }
}

/// Creates the folder in which the commands are run: images with classes and without, tiles, a
/// shard, runs, weights of a convolutional network, and files that are not what their names say.
fn prepare() -> World {
    let world = World::new(24);
    write_images(&world.path("photos/cat"));
    write_images(&world.path("photos/dog"));
    write_images(&world.path("flat"));
    write_tiles(&world.path("tiles"));
    fs::write(world.path("lejepa.toml"), recipe(VIT, LEJEPA, 2, "")).unwrap();
    fs::write(world.path("convnext.toml"), recipe(CONVNEXT, SIMCLR, 0, "algorithm = 'adamw'")).unwrap();
    let one_step = ["--set", "optim.length={steps=1}"];
    for (file, run) in [("tiny.toml", "runs/mine"), ("convnext.toml", "runs/convnext")] {
        let mut args = world.pretrain_args(run, &one_step);
        args[2] = world.text(file);
        ok(&program().args(&args).output().unwrap());
    }
    let weights = world.text("convnext.safetensors");
    ok(&world.ocelli(&["export", "--checkpoint", &world.text("runs/convnext"), "--out", &weights]));
    fs::copy(&weights, world.path("weights.tar")).unwrap();
    let jpeg = encode(1, image::ImageFormat::Jpeg);
    for name in ["photo.tar", "photo.tar.gz", "photo.parquet", "photo.npy"] {
        fs::write(world.path(name), &jpeg).unwrap();
    }
    let page = "<!DOCTYPE html>\n<html><title>Please log in</title></html>\n";
    fs::write(world.path("page.tar"), page).unwrap();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1024\n";
    fs::write(world.path("pointer.tar"), pointer).unwrap();
    fs::write(world.path("list.csv"), "where,what\nphotos/cat/0.png,cat\n").unwrap();
    fs::write(world.path("x.yaml"), "optim:\n  lr: 0.001\n").unwrap();
    world
}

/// Runs the command of `mistake` in the folder of `world`; returns a description of what is wrong
/// with its answer, if anything is.
fn check(world: &World, mistake: &Mistake) -> Option<String> {
    let args = mistake.command.split_whitespace();
    let output = program().current_dir(world.folder.path()).args(args).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let answer = format!("{}{stderr}", String::from_utf8_lossy(&output.stdout));
    let mut faults = Vec::new();
    if output.status.code() != Some(mistake.code) {
        faults.push(format!("exit code {:?} instead of {}", output.status.code(), mistake.code));
    }
    let n_errors = usize::from(mistake.code != 0);
    if stderr.matches("error:").count() != n_errors || stderr.contains("panicked") {
        faults.push(format!("not {n_errors} error"));
    }
    for words in &mistake.words {
        if !answer.contains(words) {
            faults.push(format!("without {words:?}"));
        }
    }
    for words in &mistake.absent {
        if answer.contains(words) {
            faults.push(format!("with {words:?}"));
        }
    }
    if let Some(recipe) = trained_recipe(&mistake.command) {
        faults.extend(check_settings(world, recipe, &answer));
    }
    if faults.is_empty() {
        return None;
    }
    Some(format!("$ ocelli {}\n{}\n{answer}", mistake.command, faults.join("; ")))
}

/// Returns the recipe of a command that trains, unless it begins with weights, without which it has
/// no plan.
fn trained_recipe(command: &str) -> Option<&str> {
    if !command.starts_with("pretrain ") || command.contains(" --init ") {
        return None;
    }
    let (_, rest) = command.split_once(" --recipe ")?;
    rest.split(' ').next()
}

/// Returns the settings `KEY=VALUE` that `answer` advises with values that were typed, not with
/// words in capital letters.
fn advised_settings(answer: &str) -> Vec<&str> {
    let mut settings = Vec::new();
    for line in answer.lines() {
        let Some((_, advice)) = line.split_once("use --set ") else { continue };
        for part in advice.split("--set ") {
            let end = match part.strip_prefix('\'') {
                Some(quoted) => quoted.split('\'').next(),
                None => part.split([' ', ',', ';']).next(),
            };
            let setting = end.unwrap_or_default();
            let (_, value) = setting.split_once('=').unwrap_or_default();
            if value.chars().any(|c| !c.is_ascii_uppercase()) {
                settings.push(setting);
            }
        }
    }
    settings
}

/// Plans `recipe` with each setting that `answer` advises; returns those that fail.
fn check_settings(world: &World, recipe: &str, answer: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for setting in advised_settings(answer) {
        // The data sheet of a GPU with memory for any batch: nothing is measured.
        let args = ["plan", "--recipe", recipe, "--gpu", "a100-80", "--memory-gb", "1e6", "--ranks", "1"];
        let mut command = program();
        let output = command.current_dir(world.folder.path()).args(args).args(["--set", setting]).output();
        let output = output.unwrap();
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            faults.push(format!("{recipe} does not take {setting}: {stderr}"));
        }
    }
    faults
}

/// Settings are found in an answer, whether they are quoted or alternatives.
#[test]
fn advised_settings_are_found() {
    for (answer, settings) in [
        ("error: --lr is no flag: use --set optim.lr=0.1\n", vec!["optim.lr=0.1"]),
        ("use --set 'method.momentum=[0.9,1]', at the start", vec!["method.momentum=[0.9,1]"]),
        ("--set workers=1: use --set run.workers=1 or --set seed=1", vec!["run.workers=1", "seed=1"]),
        ("no lr; use --set optim.lr=1\n  --epochs: use --set seed=2", vec!["optim.lr=1", "seed=2"]),
        ("use --set optim.lr=VALUE", vec![]),
    ] {
        assert_eq!(advised_settings(answer), settings);
    }
}

/// Every mistake gets the exit code and the words of the table, and settings that the recipe takes.
#[test]
fn mistakes_are_answered() {
    let mistakes = read_mistakes();
    assert!(mistakes.len() >= LEAST, "{} entries", mistakes.len());
    let world = prepare();
    let faults: Vec<String> = mistakes.iter().filter_map(|mistake| check(&world, mistake)).collect();
    assert!(faults.is_empty(), "{} of {}:\n\n{}", faults.len(), mistakes.len(), faults.join("\n"));
    assert!(!world.path("runs/x").exists(), "a mistaken command has begun a run");
}

/// What the answers advise works: the commands that continue from convolutional weights.
#[test]
fn advice_for_convolutional_weights_works() {
    let world = prepare();
    let shards = world.text("photos");
    let workdir = world.text("runs/continued");
    let weights = world.text("convnext.safetensors");
    let small = ["--set", "optim.batch_size=4", "--set", "optim.length={steps=1}"];
    let views = ["--set", "views.crops.0.size_px=32", "--set", "views.crops.1.size_px=16"];
    let advised = ["--recipe", "lejepa_vits16", "--set", "model=from_init", "--init", &weights];
    let args = ["pretrain", "--shards", &shards, "--workdir", &workdir];
    ok(&world.ocelli(&[&args[..], &advised, &small, &views].concat()));
}
