use std::path::Path;

use image::{ImageBuffer, Rgb};
use serde_json::Value;

use crate::support::{World, fails, json_of, metrics, ok};

fn save_image(path: &Path, color: u8) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    ImageBuffer::from_fn(24, 18, |x, y| Rgb([color, x as u8 * 9, y as u8 * 9])).save(path).unwrap();
}

#[test]
fn help_names_every_verb() {
    let world = tempfile::tempdir().unwrap();
    drop(world);
    let output = crate::support::program().arg("--help").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for verb in ["quickstart", "shards", "pretrain", "probe", "export", "bench"] {
        assert!(text.contains(verb), "{text}");
    }
}

#[test]
fn packing_a_folder_of_classes_is_repeatable() {
    let world = World::new(1);
    for (i, name) in ["cats/a.b.jpg", "cats/b.png", "dogs/deep/c.webp", "dogs/d.JPG"].iter().enumerate() {
        save_image(&world.path("images").join(name), 60 * i as u8);
    }
    let pack = |out: &str| {
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
    };
    let report = pack("one");
    assert_eq!(
        (&report["samples"], &report["classes"], &report["shards"]),
        (&4.into(), &2.into(), &2.into())
    );
    pack("two");
    for file in ["train-000000.tar", "train-000001.tar", "train-000000.tar.idx.json", "classes.txt"] {
        let read = |folder: &str| std::fs::read(world.path(folder).join(file)).unwrap();
        assert_eq!(read("one"), read("two"), "{file}");
    }
    assert_eq!(std::fs::read_to_string(world.path("one/classes.txt")).unwrap(), "cats\ndogs\n");
    let shards = format!("{}/train-{{000000..000001}}.tar", world.text("one"));
    ok(&world.ocelli(&["shards", "verify", &shards]));
    let listing = world.ocelli(&["shards", "ls", &shards]);
    assert_eq!(String::from_utf8_lossy(&listing.stdout).lines().count(), 4);
    // The same pack again finds its shards; another one into the same folder must not overwrite,
    // whoever made the shards.
    assert_eq!(pack("one")["shards_there"], 2);
    let args = ["shards", "pack", &world.text("images"), "--out", &world.text("one")];
    assert!(fails(&world.ocelli(&args), 2).contains("of another job"));
    std::fs::remove_file(world.path("one/train.job.json")).unwrap();
    assert!(fails(&world.ocelli(&args), 3).contains("train-000000.tar exists"));
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
    let read = |folder: &str| std::fs::read(world.path(folder).join("train-000000.tar")).unwrap();
    assert_eq!(read("csv"), read("jsonl"));
}

/// Train and test must number their classes alike, even if some do not occur.
#[test]
fn classes_are_numbered_by_a_list_that_is_given() {
    let world = World::new(1);
    for (i, name) in
        ["train/cat/a.png", "train/dog/b.png", "train/owl/c.png", "test/owl/d.png"].iter().enumerate()
    {
        save_image(&world.path(name), 50 * i as u8);
    }
    let pack = |input: &str, out: &str, more: &[&str]| {
        let mut args = vec!["shards", "pack", input, "--out", out];
        args.extend(more);
        world.ocelli(&args)
    };
    let labels = |folder: &str| -> Vec<Option<u32>> {
        let shard = pipeline::Shard::open(&world.path(folder).join("train-000000.tar")).unwrap();
        (0..shard.len()).map(|i| shard.label(i).unwrap()).collect()
    };
    ok(&pack(&world.text("train"), &world.text("a"), &[]));
    let list = world.text("a/classes.txt");
    ok(&pack(&world.text("test"), &world.text("b"), &["--classes", &list]));
    assert_eq!(labels("b"), [Some(2)]);
    let stderr = fails(&pack(&world.text("test"), &world.text("a"), &["--prefix", "test"]), 2);
    assert!(stderr.contains("holds other classes") && stderr.contains("--classes"), "{stderr}");
    let stderr =
        fails(&pack(&world.text("train"), &world.text("c"), &["--classes", &world.text("tiny.toml")]), 2);
    assert!(stderr.contains("is not in the list"), "{stderr}");
    // Numbers stay what they are, and an empty cell is no label.
    let list = "path,label\ntrain/cat/a.png,10\ntrain/dog/b.png,9\ntest/owl/d.png,\n";
    std::fs::write(world.path("numbers.csv"), list).unwrap();
    ok(&pack(&world.text("numbers.csv"), &world.text("n"), &[]));
    let mut found = labels("n");
    found.sort();
    assert_eq!(found, [None, Some(9), Some(10)]);
}

#[test]
fn the_loader_is_measured_by_stage() {
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

#[test]
fn a_run_is_probed_and_exported() {
    let world = World::new(60);
    let shard = world.text("data/train-000000.tar");
    let probes = ["--probe-train", &shard, "--probe-test", &shard, "--set", "run.probe_every_steps=6"];
    ok(&world.pretrain("run", &probes));
    let rows = metrics(&world.path("run"));
    assert!(rows[5]["probe/knn_20"].is_f64() && rows[11]["probe/knn_20"].is_f64(), "{:?}", rows[5]);
    let kept = std::fs::read_to_string(world.path("run/evaluations.jsonl")).unwrap();
    let kept: Vec<serde_json::Value> = kept.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of_step = |step: u64| kept.iter().filter(move |row| row["about"]["step"] == step).count();
    assert_eq!([of_step(6), of_step(12), kept.len()], [2, 2, 4], "each k of k-NN, at each step");
    assert_eq!(kept[1]["accuracy"], rows[5]["probe/knn_20"]);
    assert_eq!(
        (&kept[1]["test"]["set"], &kept[1]["about"]["network"]),
        (&"data/train".into(), &"teacher".into())
    );
    for name in
        ["train/loss", "health/feature_std", "health/effective_rank", "health/teacher_entropy", "knobs/lr"]
    {
        assert!(rows.iter().all(|row| row[name].is_f64()), "{name}");
    }
    let files = std::fs::read_dir(world.path("run")).unwrap().flatten();
    let events = files.filter(|file| file.file_name().to_string_lossy().starts_with("events.out.tfevents."));
    assert!(events.count() > 1, "of the run, and of its pictures");
    let kept = std::fs::read_dir(world.path("run/checkpoints")).unwrap().flatten();
    let kept = kept.filter(|e| e.file_name().to_string_lossy().starts_with("step-")).count();
    assert_eq!(kept, 2, "old checkpoints are pruned");

    let probe = |checkpoint: &str| {
        let args = [
            "probe",
            "--checkpoint",
            &world.text(checkpoint),
            "--train",
            &shard,
            "--test",
            &shard,
            "--baseline",
            "--json",
        ];
        let output = world.ocelli(&args);
        ok(&output);
        json_of(&output)
    };
    let of_run = probe("run")["networks"].clone();
    assert_eq!(of_run["teacher"]["knn_20"]["accuracy"], rows[11]["probe/knn_20"]);
    assert!(
        of_run["random_init"]["linear_honest"]["accuracy"].is_f64() && of_run["pixels"]["knn_10"].is_object()
    );
    ok(&world.ocelli(&[
        "export",
        "--checkpoint",
        &world.text("run"),
        "--out",
        &world.text("vit.safetensors"),
    ]));
    assert_eq!(probe("vit.safetensors")["networks"], of_run, "the exported file holds the teacher");
    let export = |out: &str, more: &[&str]| {
        let args = ["export", "--checkpoint", &world.text("run"), "--out", &world.text(out)];
        world.ocelli(&[&args[..], more].concat())
    };
    assert!(fails(&export("vit.safetensors", &[]), 2).contains("--overwrite"));
    ok(&export("vit.safetensors", &["--overwrite", "--network", "student"]));
    std::fs::write(world.path("classes.txt"), "0\tcat\n").unwrap();
    assert!(fails(&export("classes.txt", &["--overwrite"]), 2).contains(".safetensors"));
    assert_eq!(std::fs::read_to_string(world.path("classes.txt")).unwrap(), "0\tcat\n");

    // The metrics of the run have no evaluations; these are in a file of their own, with their
    // subject.
    assert!(metrics(&world.path("run")).iter().all(|row| row.get("probe/linear").is_none()));
    let evaluations = std::fs::read_to_string(world.path("run/evaluations.jsonl")).unwrap();
    let evaluations: Vec<Value> =
        evaluations.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let linear = evaluations.iter().find(|row| row["metric"] == "linear_honest").unwrap();
    assert_eq!((&linear["about"]["step"], &linear["test"]["set"]), (&12.into(), &"data/train".into()));
    assert_eq!((&linear["protocol"], &linear["test"]["images"]), (&"linear-honest".into(), &60.into()));
}

#[test]
fn the_benchmark_reports_every_phase() {
    let world = World::new(1);
    let recipe = world.text("tiny.toml");
    let output =
        world.ocelli(&["bench", "step", "--recipe", &recipe, "--batch", "4", "--repeats", "1", "--json"]);
    ok(&output);
    let report = json_of(&output);
    let number = |key: &str| report[key].as_f64().unwrap();
    let phases = report["phases_ms"].as_object().unwrap();
    assert!(phases.len() == 6 && phases.values().all(|ms| ms.as_f64().unwrap() > 0.0), "{phases:?}");
    assert!((number("images_per_s") - 4e3 / number("step_ms")).abs() < 1e-6);
    assert!(number("tflops") > 0.0 && number("matrix_peak_tflops") > 0.0 && number("memory_bytes") > 0.0);
    let output =
        world.ocelli(&["bench", "step", "--recipe", &recipe, "--backbone", "--repeats", "1", "--json"]);
    let report = json_of(&output);
    let number = |key: &str| report[key].as_f64().unwrap();
    assert!(number("kept_ms") > 0.0);
    // A graph that is recomputed unit by unit needs less memory than one that is kept.
    assert!(number("recomputed_peak_bytes") > 0.0);
    assert!(number("recomputed_peak_bytes") < number("kept_peak_bytes"), "{report}");
}

/// The CPU does not differ from itself; a missing device is named.
#[test]
fn a_device_is_held_against_the_cpu() {
    let world = World::new(1);
    let recipe = world.text("tiny.toml");
    let device = |name: &str| {
        world.ocelli(&["bench", "device", "--recipe", &recipe, "--steps", "2", "--json", "--device", name])
    };
    let output = device("cpu");
    ok(&output);
    let report = json_of(&output);
    assert_eq!(report["differences"]["gradients"].as_f64(), Some(0.0));
    assert_eq!(report["losses"].as_array().unwrap().len(), 2);
    assert!(fails(&device("gpu"), 2).contains("cuda:1"));
    if cfg!(not(feature = "wgpu")) {
        assert!(fails(&device("wgpu"), 2).contains("--features wgpu"));
    }
}

/// A folder of the user with the name of one of quickstart's is left unchanged.
#[test]
fn quickstart_takes_nothing_away_that_is_not_its_own() {
    let world = World::new(1);
    save_image(&world.path("mine/data/train/photo.png"), 3);
    let output = world.ocelli(&["quickstart", "--workdir", &world.text("mine")]);
    assert!(fails(&output, 2).contains("is not quickstart's"));
    assert!(world.path("mine/data/train/photo.png").exists());
}

/// The whole job with a run of a few steps, twice: the second time everything is done.
#[test]
fn quickstart_leaves_pictures_and_numbers() {
    let world = World::new(1);
    let run = || {
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
    };
    let first = run();
    for key in ["seconds", "knn", "linear", "random_knn", "random_linear", "pixel_knn"] {
        assert!(first[key].as_f64().is_some_and(|v| (0.0..=1000.0).contains(&v)), "{key}: {first}");
    }
    for picture in ["views.png", "curves.png", "neighbors.png"] {
        let image = image::open(world.path("quick").join(picture)).unwrap().to_rgb8();
        let distinct: std::collections::HashSet<_> = image.pixels().map(|p| p.0).collect();
        assert!(distinct.len() > 50, "{picture} shows something");
    }
    let page = std::fs::read_to_string(world.path("quick/report.html")).unwrap();
    assert!(
        page.contains("linear_honest") && page.contains("data:image/"),
        "the page has scores and pictures"
    );
    let second = run();
    assert_eq!((&first["knn"], &first["linear"]), (&second["knn"], &second["linear"]));
}
