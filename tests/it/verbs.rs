use std::path::Path;
use std::process::Output;

use image::{ImageBuffer, Rgb};
use serde_json::Value;

use crate::messages::check_message;
use crate::support::{World, fails, json_of, metrics, ok};

fn save_image(path: &Path, color: u8) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    ImageBuffer::from_fn(24, 18, |x, y| Rgb([color, x as u8 * 9, y as u8 * 9])).save(path).unwrap();
}

#[test]
fn help_names_every_verb() {
    let output = crate::support::program().arg("--help").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for verb in ["quickstart", "shards", "pretrain", "finetune", "probe", "export", "bench"] {
        assert!(text.contains(verb), "{text}");
    }
}

/// Packs the folder `images` into the folder `out`; returns the report.
fn pack_images(world: &World, out: &str) -> Value {
    let args = [
        "shards",
        "pack",
        &world.text("images"),
        "--out",
        &world.text(out),
        "--samples-per-shard",
        "3",
        "--json",
    ];
    let output = world.ocelli(&args);
    ok(&output);
    json_of(&output)
}

/// Returns what a command, which must succeed, prints.
fn printed(world: &World, args: &[&str]) -> String {
    let output = world.ocelli(args);
    ok(&output);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn numbers_have_separated_thousands_and_agree_with_their_nouns() {
    let world = World::new(1);
    let many = world.text("many");
    let synth = ["shards", "synth", "--size-px", "8", "--out"];
    let text = printed(&world, &[&synth[..], &[&many, "--count", "1200"]].concat());
    assert_eq!(text, format!("1,200 images in 2 shards in {many}\n"));
    let one = world.text("one");
    let text = printed(&world, &[&synth[..], &[&one, "--count", "1"]].concat());
    assert_eq!(text, format!("1 image in 1 shard in {one}\n"));
    save_image(&world.path("images/cats/a.png"), 10);
    let text = printed(&world, &["shards", "pack", &world.text("images"), "--out", &world.text("packed")]);
    assert!(text.starts_with("1 sample of 1 class in 1 shard:\n"), "{text}");
    let shard = world.text("many/train-000000.tar");
    let text = printed(&world, &["shards", "verify", &shard]);
    assert!(text.starts_with("1 shard, 0 bad; 1,000 samples, "), "{text}");
}

#[test]
fn packing_a_folder_of_classes_is_repeatable() {
    let world = World::new(1);
    for (i, name) in ["cats/a.b.jpg", "cats/b.png", "dogs/deep/c.webp", "dogs/d.JPG"].iter().enumerate() {
        save_image(&world.path("images").join(name), 60 * i as u8);
    }
    let report = pack_images(&world, "one");
    assert_eq!(
        (&report["samples"], &report["classes"], &report["shards"]),
        (&4.into(), &2.into(), &2.into())
    );
    pack_images(&world, "two");
    for file in ["train-000000.tar", "train-000001.tar", "train-000000.tar.idx.json", "classes.txt"] {
        let first = std::fs::read(world.path("one").join(file)).unwrap();
        let second = std::fs::read(world.path("two").join(file)).unwrap();
        assert_eq!(first, second, "{file}");
    }
    assert_eq!(std::fs::read_to_string(world.path("one/classes.txt")).unwrap(), "cats\ndogs\n");
    let shards = format!("{}/train-{{000000..000001}}.tar", world.text("one"));
    ok(&world.ocelli(&["shards", "verify", &shards]));
    let listing = world.ocelli(&["shards", "ls", &shards]);
    assert_eq!(String::from_utf8_lossy(&listing.stdout).lines().count(), 4);
    // Repeating the same command reuses its shards; another one into the same folder must not
    // overwrite them, whether or not the job that wrote them is known.
    assert_eq!(pack_images(&world, "one")["shards_there"], 2);
    let args = ["shards", "pack", &world.text("images"), "--out", &world.text("one")];
    check_message(
        "verbs::packing_a_folder_of_classes_is_repeatable.known_job",
        &fails(&world.ocelli(&args), 2),
    );
    std::fs::remove_file(world.path("one/train.job.json")).unwrap();
    check_message(
        "verbs::packing_a_folder_of_classes_is_repeatable.unknown_job",
        &fails(&world.ocelli(&args), 3),
    );
}

#[test]
fn lists_pack_like_folders() {
    let world = World::new(1);
    save_image(&world.path("x/a.png"), 10);
    save_image(&world.path("x/b.png"), 90);
    std::fs::write(world.path("list.csv"), "path,label\nx/a.png,cat\nx/b.png,dog\n").unwrap();
    std::fs::write(
        world.path("list.jsonl"),
        "{\"path\":\"x/a.png\",\"label\":\"cat\"}\n{\"path\":\"x/b.png\",\"label\":\"dog\"}\n",
    )
    .unwrap();
    for (list, out) in [("list.csv", "csv"), ("list.jsonl", "jsonl")] {
        ok(&world.ocelli(&["shards", "pack", &world.text(list), "--out", &world.text(out)]));
    }
    let csv = std::fs::read(world.path("csv/train-000000.tar")).unwrap();
    let jsonl = std::fs::read(world.path("jsonl/train-000000.tar")).unwrap();
    assert_eq!(csv, jsonl);
}

/// Packs `input` into the folder `out` with more flags.
fn pack(world: &World, input: &str, out: &str, more: &[&str]) -> Output {
    let mut args = vec!["shards", "pack", input, "--out", out];
    args.extend(more);
    world.ocelli(&args)
}

/// Labels of the first shard in `folder`.
fn labels(world: &World, folder: &str) -> Vec<Option<u32>> {
    let shard = pipeline::Shard::open(&world.path(folder).join("train-000000.tar")).unwrap();
    (0..shard.len()).map(|i| shard.label(i).unwrap()).collect()
}

/// Train and test sets must number their classes identically, even if some classes do not occur.
#[test]
fn classes_are_numbered_by_the_given_list() {
    let world = World::new(1);
    for (i, name) in
        ["train/cat/a.png", "train/dog/b.png", "train/owl/c.png", "test/owl/d.png"].iter().enumerate()
    {
        save_image(&world.path(name), 50 * i as u8);
    }
    let train = world.text("train");
    let test = world.text("test");
    ok(&pack(&world, &train, &world.text("a"), &[]));
    let list = world.text("a/classes.txt");
    ok(&pack(&world, &test, &world.text("b"), &["--classes", &list]));
    assert_eq!(labels(&world, "b"), [Some(2)]);
    let output = pack(&world, &test, &world.text("a"), &["--prefix", "test"]);
    check_message("verbs::classes_are_numbered_by_the_given_list.other_list", &fails(&output, 2));
    let other_file = world.text("tiny.toml");
    let output = pack(&world, &train, &world.text("c"), &["--classes", &other_file]);
    check_message("verbs::classes_are_numbered_by_the_given_list.unlisted", &fails(&output, 2));
    // Numeric labels are kept, and an empty cell means no label.
    let list = "path,label\ntrain/cat/a.png,10\ntrain/dog/b.png,9\ntest/owl/d.png,\n";
    std::fs::write(world.path("numbers.csv"), list).unwrap();
    ok(&pack(&world, &world.text("numbers.csv"), &world.text("n"), &[]));
    let mut numbers = labels(&world, "n");
    numbers.sort();
    assert_eq!(numbers, [None, Some(9), Some(10)]);
}

#[test]
fn the_loader_benchmark_reports_each_stage() {
    let world = World::new(60);
    let shard = world.text("data/train-000000.tar");
    for recipe in ["single", "read"] {
        let args =
            ["bench", "loader", &shard, "--recipe", recipe, "--seconds", "0.3", "--batch", "8", "--json"];
        let output = world.ocelli(&args);
        ok(&output);
        let report = json_of(&output);
        assert!(report["images_per_s"].as_f64().unwrap() > 10.0, "{report}");
        assert!(report["mb_per_s"].as_f64().unwrap() > 0.0, "{report}");
        assert_eq!(report["stages"]["decode"]["p99_ms"].is_f64(), recipe == "single", "{report}");
    }
}

/// Number of evaluations at `step`.
fn n_evaluations(evaluations: &[Value], step: u64) -> usize {
    evaluations.iter().filter(|row| row["about"]["step"] == step).count()
}

/// Probes a checkpoint on `shard`; returns the report.
fn probe(world: &World, checkpoint: &str, shard: &str) -> Value {
    let args = [
        "probe",
        "--checkpoint",
        &world.text(checkpoint),
        "--train",
        shard,
        "--test",
        shard,
        "--baseline",
        "--json",
    ];
    let output = world.ocelli(&args);
    ok(&output);
    json_of(&output)
}

/// Exports the backbone of the run `run` to `out` with more flags.
fn export(world: &World, out: &str, more: &[&str]) -> Output {
    let args = ["export", "--checkpoint", &world.text("run"), "--out", &world.text(out)];
    world.ocelli(&[&args[..], more].concat())
}

#[test]
fn a_run_is_probed_and_exported() {
    let world = World::new(60);
    let shard = world.text("data/train-000000.tar");
    let probes = ["--probe-train", &shard, "--probe-test", &shard, "--set", "run.probe_every_steps=6"];
    ok(&world.pretrain("run", &probes));
    let rows = metrics(&world.path("run"));
    assert!(rows[5]["probe/knn_20"].is_f64() && rows[11]["probe/knn_20"].is_f64(), "{:?}", rows[5]);
    let evaluations = std::fs::read_to_string(world.path("run/evaluations.jsonl")).unwrap();
    let evaluations: Vec<Value> =
        evaluations.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let counts = [0, 6, 12].map(|step: u64| n_evaluations(&evaluations, step));
    assert_eq!((counts, evaluations.len()), ([2, 2, 2], 6), "each k of k-NN, at the start and at each step");
    assert_eq!(evaluations[3]["accuracy"], rows[5]["probe/knn_20"]);
    assert_eq!(evaluations[3]["test"]["set"], "data/train");
    assert_eq!(evaluations[3]["about"]["network"], "teacher");
    for name in
        ["train/loss", "health/feature_std", "health/effective_rank", "health/teacher_entropy", "knobs/lr"]
    {
        assert!(rows.iter().all(|row| row[name].is_f64()), "{name}");
    }
    let files = std::fs::read_dir(world.path("run")).unwrap().flatten();
    let events = files.filter(|file| file.file_name().to_string_lossy().starts_with("events.out.tfevents."));
    assert!(events.count() > 1, "of the run, and of its pictures");
    let checkpoints = std::fs::read_dir(world.path("run/checkpoints")).unwrap().flatten();
    let n_checkpoints =
        checkpoints.filter(|entry| entry.file_name().to_string_lossy().starts_with("step-")).count();
    assert_eq!(n_checkpoints, 2, "old checkpoints are pruned");

    let networks = probe(&world, "run", &shard)["networks"].clone();
    assert_eq!(networks["teacher"]["knn_20"]["accuracy"], rows[11]["probe/knn_20"]);
    assert!(networks["random_init"]["linear_honest"]["accuracy"].is_f64());
    assert!(networks["pixels"]["knn_10"].is_object());
    ok(&export(&world, "vit.safetensors", &[]));
    let exported = probe(&world, "vit.safetensors", &shard)["networks"].clone();
    assert_eq!(exported, networks, "the exported file holds the teacher");
    assert!(fails(&export(&world, "vit.safetensors", &[]), 2).contains("--overwrite"));
    ok(&export(&world, "vit.safetensors", &["--overwrite", "--network", "student"]));
    std::fs::write(world.path("classes.txt"), "0\tcat\n").unwrap();
    assert!(fails(&export(&world, "classes.txt", &["--overwrite"]), 2).contains(".safetensors"));
    assert_eq!(std::fs::read_to_string(world.path("classes.txt")).unwrap(), "0\tcat\n");

    // The metrics of the run contain no evaluations: these are in a file of their own, with the
    // network that they describe.
    assert!(metrics(&world.path("run")).iter().all(|row| row.get("probe/linear").is_none()));
    let evaluations = std::fs::read_to_string(world.path("run/evaluations.jsonl")).unwrap();
    let evaluations: Vec<Value> =
        evaluations.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let linear = evaluations.iter().find(|row| row["metric"] == "linear_honest").unwrap();
    assert_eq!(linear["about"]["step"], 12);
    assert_eq!(linear["test"]["set"], "data/train");
    assert_eq!(linear["protocol"], "linear-honest");
    assert_eq!(linear["test"]["images"], 60);
}

/// Number under `key` in a report.
fn number(report: &Value, key: &str) -> f64 {
    report[key].as_f64().unwrap()
}

#[test]
fn the_step_benchmark_reports_every_phase() {
    let world = World::new(1);
    let recipe = world.text("tiny.toml");
    let output =
        world.ocelli(&["bench", "step", "--recipe", &recipe, "--batch", "4", "--repeats", "1", "--json"]);
    ok(&output);
    let report = json_of(&output);
    let phases = report["phases_ms"].as_object().unwrap();
    assert!(phases.len() == 6 && phases.values().all(|ms| ms.as_f64().unwrap() > 0.0), "{phases:?}");
    assert!((number(&report, "images_per_s") - 4e3 / number(&report, "step_ms")).abs() < 1e-6);
    for key in ["tflops", "matrix_peak_tflops", "memory_bytes"] {
        assert!(number(&report, key) > 0.0, "{key}: {report}");
    }
    let output =
        world.ocelli(&["bench", "step", "--recipe", &recipe, "--backbone", "--repeats", "1", "--json"]);
    let report = json_of(&output);
    assert!(number(&report, "kept_ms") > 0.0);
    // A graph that is recomputed unit by unit needs less memory than one that is kept.
    assert!(number(&report, "recomputed_peak_bytes") > 0.0);
    assert!(number(&report, "recomputed_peak_bytes") < number(&report, "kept_peak_bytes"), "{report}");
}

/// Compares `device` with the CPU over two steps.
fn bench_device(world: &World, device: &str) -> Output {
    let recipe = world.text("tiny.toml");
    world.ocelli(&["bench", "device", "--recipe", &recipe, "--steps", "2", "--json", "--device", device])
}

/// The CPU does not differ from itself; a missing device is an error that names it.
#[test]
fn a_device_is_compared_with_the_cpu() {
    let world = World::new(1);
    let output = bench_device(&world, "cpu");
    ok(&output);
    let report = json_of(&output);
    assert_eq!(report["differences"]["gradients"].as_f64(), Some(0.0));
    assert_eq!(report["losses"].as_array().unwrap().len(), 2);
    assert!(fails(&bench_device(&world, "gpu"), 2).contains("cuda:1"));
    if cfg!(not(feature = "wgpu")) {
        assert!(fails(&bench_device(&world, "wgpu"), 2).contains("--features wgpu"));
    }
}

/// A folder of the user with the name of one of quickstart's is left unchanged.
#[test]
fn quickstart_does_not_delete_files_of_the_user() {
    let world = World::new(1);
    save_image(&world.path("mine/data/train/photo.png"), 3);
    let output = world.ocelli(&["quickstart", "--workdir", &world.text("mine")]);
    check_message("verbs::quickstart_does_not_delete_files_of_the_user", &fails(&output, 2));
    assert!(world.path("mine/data/train/photo.png").exists());
}

/// Runs quickstart with few images and steps; returns the report.
fn quickstart(world: &World) -> Value {
    let output = world.ocelli(&[
        "quickstart",
        "--workdir",
        &world.text("quick"),
        "--json",
        "--train-images",
        "300",
        "--test-images",
        "100",
        "--set",
        "optim.length={steps=6}",
        "--set",
        "run.log_every_steps=1",
        "--set",
        "optim.batch_size=16",
    ]);
    ok(&output);
    json_of(&output)
}

/// The whole job with a run of a few steps, twice: the second call only reads the results.
#[test]
fn quickstart_writes_pictures_and_scores() {
    let world = World::new(1);
    let first = quickstart(&world);
    for key in ["seconds", "knn", "linear", "random_knn", "random_linear", "pixel_knn"] {
        assert!(first[key].as_f64().is_some_and(|v| (0.0..=1000.0).contains(&v)), "{key}: {first}");
    }
    for picture in ["views.png", "neighbors.png"] {
        let image = image::open(world.path("quick").join(picture)).unwrap().to_rgb8();
        let distinct: std::collections::HashSet<_> = image.pixels().map(|p| p.0).collect();
        assert!(distinct.len() > 50, "{picture} shows something");
    }
    let page = std::fs::read_to_string(world.path("quick/report.html")).unwrap();
    assert!(
        page.contains("linear_honest") && page.contains("data:image/"),
        "the page has scores and pictures"
    );
    let second = quickstart(&world);
    assert_eq!((&first["knn"], &first["linear"]), (&second["knn"], &second["linear"]));
}
