//! Frozen networks: their files are read at every start, recorded in the plan, and not written to
//! checkpoints.

use crate::messages::check_message;
use crate::support::{TINY, World, fails, ok};

/// Returns the tiny recipe with another method.
fn recipe_with_method(method: &str) -> String {
    let (before, rest) = TINY.split_once("[method]\n").unwrap();
    let (_, after) = rest.split_once("[views]").unwrap();
    format!("{before}[method]\n{method}\n[views]{after}")
}

/// Creates a world with a weights file, and a recipe that distills them into a network with larger
/// patches.
fn world(image_px: usize) -> (World, String) {
    let world = World::new(30);
    ok(&world.pretrain("a", &[]));
    let file = world.text("a.safetensors");
    ok(&world.ocelli(&[
        "export",
        "--checkpoint",
        &world.text("a"),
        "--out",
        &file,
        "--format",
        "safetensors",
    ]));
    let method = format!("name = 'distillation'\nteacher = {{ weights = '{file}' }}");
    let recipe = recipe_with_method(&method).replace("patch_px = 4", "patch_px = 8");
    let recipe = recipe.replace("global_px = 16", &format!("global_px = {image_px}"));
    std::fs::write(world.path("tiny.toml"), recipe).unwrap();
    (world, file)
}

/// Returns the last row of a run's metrics.
fn last_row(world: &World, run: &str) -> serde_json::Value {
    let text = std::fs::read_to_string(world.path(run).join("metrics.jsonl")).unwrap();
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

#[test]
fn a_frozen_network_is_read_at_every_start_and_never_written() {
    let (world, file) = world(16);
    ok(&world.pretrain("whole", &[]));
    let plan = std::fs::read_to_string(world.path("whole/plan.toml")).unwrap();
    assert!(plan.contains("fingerprint = \"") && plan.contains("[recipe.method.teacher.model]"), "{plan}");
    let mut entries = std::fs::read_dir(world.path("whole/checkpoints")).unwrap().flatten();
    let manifest = entries.find_map(|entry| std::fs::read_to_string(entry.path().join("manifest.json")).ok());
    let manifest: serde_json::Value = serde_json::from_str(&manifest.unwrap()).unwrap();
    let units = manifest["units"].as_array().unwrap();
    assert!(units.iter().all(|unit| unit["network"] == "student"), "{manifest}");

    // A run resumes with the file at another path, and not without it.
    ok(&world.pretrain("parts", &["--set", "optim.length={steps=4}"]));
    let moved = world.text("moved.safetensors");
    std::fs::rename(&file, &moved).unwrap();
    let longer = ["--lengthen", "--set", "optim.length={steps=12}"];
    let output = world.pretrain("parts", &longer);
    check_message(
        "frozen::a_frozen_network_is_read_at_every_start_and_never_written.gone",
        &fails(&output, 2),
    );
    let elsewhere = format!("method.teacher.weights={moved}");
    ok(&world.pretrain("parts", &[&longer[..], &["--set", &elsewhere]].concat()));
    assert_eq!(last_row(&world, "parts")["step"], last_row(&world, "whole")["step"]);

    // The trained network is exported.
    let out = world.text("learned.safetensors");
    let export = world.ocelli(&["export", "--checkpoint", &world.text("whole"), "--out", &out]);
    ok(&export);
    assert!(String::from_utf8_lossy(&export.stdout).contains("student written"), "{export:?}");
    let output = world.ocelli(&[
        "export",
        "--checkpoint",
        &world.text("whole"),
        "--out",
        &out,
        "--overwrite",
        "--network",
        "teacher",
    ]);
    check_message(
        "frozen::a_frozen_network_is_read_at_every_start_and_never_written.no_teacher",
        &fails(&output, 3),
    );
}

#[test]
fn a_run_does_not_resume_with_other_weights_in_the_file() {
    let (world, file) = world(16);
    ok(&world.pretrain("b", &["--set", "optim.length={steps=4}"]));
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let longer = ["--lengthen", "--set", "optim.length={steps=6}"];
    let output = world.pretrain("b", &longer);
    check_message("frozen::a_run_does_not_resume_with_other_weights_in_the_file", &fails(&output, 2));
    assert_eq!(last_row(&world, "b")["step"], 3, "no step was done");
}

/// Asserts that the recipe with these settings is refused, with the message of the case `name`,
/// before the folder of the run is created.
fn assert_refused(world: &World, name: &str, sets: &[&str]) {
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let name = format!("frozen::recipes_that_do_not_fit_a_frozen_network_are_refused_before_any_work.{name}");
    check_message(&name, &fails(&world.pretrain("run", &sets), 2));
    assert!(!world.path("run").exists(), "no folder is created for a recipe that is refused");
}

#[test]
fn recipes_that_do_not_fit_a_frozen_network_are_refused_before_any_work() {
    let (world, file) = world(16);
    assert_refused(&world, "no_file", &["method.teacher.weights=nowhere.pth"]);
    assert_refused(&world, "zero_weights", &["method.pooled_weight=0", "method.patch_weight=0"]);
    assert_refused(&world, "negative_weight", &["method.pooled_weight=-1"]);
    // The file's patches are 4 px wide, the student's 6.
    let odd = ["model.patch_px=6", "model.image_px=18", "views.global_px=18", "views.local_px=6"];
    assert_refused(&world, "other_patches", &odd);
    let text = std::fs::read_to_string(world.path("tiny.toml")).unwrap();
    std::fs::write(world.path("tiny.toml"), text.replace(&file, &world.text("data"))).unwrap();
    assert_refused(&world, "shards", &[]);
}
