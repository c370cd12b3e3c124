//! Damage that could go unnoticed: holes in shards, values that are not finite, damaged rows of the
//! feature cache, a missing plan.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, ok};

#[test]
fn a_hole_in_a_shard_is_reported_and_the_other_shards_are_verified() {
    let world = World::new(24);
    let intact = fs::read(world.shard()).unwrap();
    let good = world.text("good.tar");
    let bad = world.text("bad.tar");
    fs::write(&good, &intact).unwrap();
    let header_offset = (0..intact.len() / 512)
        .map(|block| block * 512)
        .filter(|offset| &intact[offset + 257..offset + 262] == b"ustar")
        .nth(30)
        .unwrap();
    let mut zeroed_header = intact.clone();
    zeroed_header[header_offset..][..512].fill(0);
    let mut zeroed_tail = intact.clone();
    zeroed_tail[header_offset..].fill(0);
    // More zeros than two blocks or a usual record, and an odd number of blocks, which is not a
    // multiple of larger records.
    let n_blocks = (header_offset / 512 + 41) | 1;
    zeroed_tail.resize(n_blocks * 512, 0);
    for (damage, bytes) in [
        ("zeroed_header", zeroed_header),
        ("zeroed_tail", zeroed_tail),
        ("doubled", [&intact[..], &intact].concat()),
        ("junk", [&intact[..], b"junk"].concat()),
    ] {
        fs::write(&bad, bytes).unwrap();
        let output = world.ocelli(&["shards", "verify", &bad, &good]);
        assert_eq!(output.status.code(), Some(3));
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(stdout.contains("2 shards, 1 bad; 24 samples"), "{stdout}");
        let name =
            format!("damage::a_hole_in_a_shard_is_reported_and_the_other_shards_are_verified.{damage}");
        let bad_line = lines_with(&String::from_utf8_lossy(&output.stderr), "bad.tar");
        check_message(&format!("{name}.verify"), &bad_line);
        let output = world.pretrain("run", &["--shards", &bad]);
        check_message(&format!("{name}.pretrain"), &fails(&output, 3));
    }
}

/// Overwrites `n` values of a safetensors file with `value`.
fn overwrite_weights(path: &str, value: f32, n: usize) {
    let mut bytes = fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for weight in bytes[8 + header + 4 * 100..].chunks_exact_mut(4).take(n) {
        weight.copy_from_slice(&value.to_le_bytes());
    }
    fs::write(path, bytes).unwrap();
}

#[test]
fn weights_that_are_not_finite_are_refused_by_name() {
    let world = World::new(40);
    ok(&world.pretrain("run", &[]));
    let run = world.text("run");
    let shard = world.text("data/train-000000.tar");
    let weights = world.text("weights.safetensors");
    for value in [f32::NAN, f32::INFINITY] {
        ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &weights, "--overwrite"]));
        overwrite_weights(&weights, value, 1);
        let features = world.text("f.npy");
        let onnx = world.text("w.onnx");
        let second = world.text("second");
        for args in [
            &["probe", "--checkpoint", &weights, "--train", &shard, "--test", &shard][..],
            &["embed", "--checkpoint", &weights, "--shards", &shard, "--out", &features],
            &["export", "--checkpoint", &weights, "--out", &onnx],
            &[
                "pretrain",
                "--recipe",
                &world.text("tiny.toml"),
                "--shards",
                &shard,
                "--workdir",
                &second,
                "--init",
                &weights,
            ],
        ] {
            let name = format!("damage::weights_that_are_not_finite_are_refused_by_name.{}", args[0]);
            check_message(&name, &fails(&world.ocelli(args), 3));
        }
        assert!(!world.path("f.npy").exists() && !world.path("w.onnx").exists());
    }
    // Finite weights whose features are not finite.
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &weights, "--overwrite"]));
    overwrite_weights(&weights, 9e17, 4000);
    let args = ["probe", "--checkpoint", &weights, "--train", &shard, "--test", &shard];
    let output = world.ocelli(&args);
    check_message("damage::weights_that_are_not_finite_are_refused_by_name.features", &fails(&output, 78));
}

/// Probes the run `run` with a feature cache; returns the scores, and whether damaged rows were
/// reported.
fn probe_with_cache(world: &World) -> (String, bool) {
    let run = world.text("run");
    let shard = world.text("data/train-000000.tar");
    let cache = world.text("cache");
    let args = ["probe", "--checkpoint", &run, "--train", &shard, "--test", &shard, "--json", "--no-record"];
    let env = [("OCELLI_CACHE", cache.as_str()), ("OCELLI_FEATURES_GB", "1")];
    let output = world.ocelli_with(&args, &env);
    let stderr = ok(&output);
    let stdout = String::from_utf8_lossy(&output.stdout);
    let scores = stdout.lines().last().unwrap().split("\"networks\"").nth(1).unwrap().to_string();
    (scores, stderr.contains("are damaged"))
}

/// Returns the files of the feature cache that have this extension.
fn cached_feature_files(world: &World, extension: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(world.path("cache/features")).unwrap().flatten().map(|entry| entry.path());
    files.filter(|path| path.extension().is_some_and(|other| other == extension)).collect()
}

#[test]
fn damaged_rows_of_the_cache_are_computed_again() {
    let world = World::new(40);
    ok(&world.pretrain("run", &[]));
    let (scores, _) = probe_with_cache(&world);
    for path in cached_feature_files(&world, "f32") {
        let len = fs::read(&path).unwrap().len();
        fs::write(&path, (0..len).map(|i| (i * 31 % 127) as u8).collect::<Vec<_>>()).unwrap();
    }
    assert_eq!(probe_with_cache(&world), (scores.clone(), true));
    assert_eq!(probe_with_cache(&world), (scores.clone(), false));
    for path in cached_feature_files(&world, "json") {
        let text = fs::read_to_string(&path).unwrap();
        fs::write(
            &path,
            text.replacen("\"average\":", "\"average\": ", 1).replace("\"checksum\":\"", "\"checksum\":\"0"),
        )
        .unwrap();
    }
    assert_eq!(probe_with_cache(&world), (scores, true));
}

/// Returns the setting of the length of a run.
fn length_setting(steps: u64) -> String {
    format!("optim.length={{steps={steps}}}")
}

/// The checkpoint holds the plan of its run.
#[test]
fn a_run_without_its_plan_file_still_has_its_recipe() {
    let world = World::new(24);
    ok(&world.pretrain("run", &["--set", &length_setting(8)]));
    let plan = fs::read_to_string(world.path("run/plan.toml")).unwrap();
    for change in ["optim.lr=0.5", "seed=9", "optim.batch_size=4"] {
        fs::remove_file(world.path("run/plan.toml")).unwrap();
        let stderr = fails(&world.pretrain("run", &["--set", &length_setting(8), "--set", change]), 2);
        assert!(stderr.contains(change.split('=').next().unwrap()), "{stderr}");
        fs::write(world.path("run/plan.toml"), &plan).unwrap();
    }
    // A plan that was changed together with the recipe.
    fs::write(world.path("run/plan.toml"), plan.replace("seed = 3", "seed = 9")).unwrap();
    let stderr = fails(&world.pretrain("run", &["--set", &length_setting(8), "--set", "seed=9"]), 2);
    assert!(stderr.contains("seed"), "{stderr}");
    fs::remove_file(world.path("run/plan.toml")).unwrap();
    ok(&world.pretrain("run", &["--set", &length_setting(8)]));
    assert_eq!(fs::read_to_string(world.path("run/plan.toml")).unwrap(), plan);
    ok(&world.pretrain("run", &["--set", &length_setting(12), "--lengthen"]));

    // A fork begins with the checkpoint of another recipe, and is then a separate run.
    let from = world.text("run");
    let fork = ["--set", &length_setting(16), "--set", "optim.lr=0.001", "--fork", &from];
    ok(&world.pretrain("forked", &fork));
    fs::remove_file(world.path("forked/plan.toml")).unwrap();
    let stderr = fails(
        &world.pretrain("forked", &["--set", &length_setting(16), "--set", "optim.lr=0.5", "--fork", &from]),
        2,
    );
    assert!(stderr.contains("optim.lr"), "{stderr}");
    ok(&world.pretrain("forked", &fork));
}

/// Two jobs in one folder would mix their samples.
#[test]
fn one_job_at_a_time_writes_into_a_folder() {
    let world = World::new(8);
    let out = world.text("out");
    let images = world.text("images");
    ok(&world.ocelli(&["shards", "extract", &world.text("data/train-000000.tar"), "--out", &images]));
    fs::create_dir(&out).unwrap();
    let held = fs::File::open(&out).unwrap();
    held.lock().unwrap();
    for args in
        [&["shards", "pack", &images, "--out", &out][..], &["shards", "synth", "--out", &out, "--count", "4"]]
    {
        check_message(
            &format!("damage::one_job_at_a_time_writes_into_a_folder.{}", args[1]),
            &fails(&world.ocelli(args), 2),
        );
    }
    assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
    drop(held);
    ok(&world.ocelli(&["shards", "pack", &images, "--out", &out]));
}

/// Rejects a lock file that is a symbolic link, a network of 65,536 blocks and 20,000 groups of
/// braces.
#[test]
fn linked_locks_and_absurd_sizes_are_refused_at_once() {
    let world = World::new(24);
    let notes = world.path("notes");
    fs::write(&notes, "text").unwrap();
    fs::create_dir(world.path("run")).unwrap();
    std::os::unix::fs::symlink(&notes, world.path("run/.lock")).unwrap();
    fails(&world.pretrain("run", &[]), 3);
    assert_eq!(fs::read(&notes).unwrap(), b"text");
    let start = std::time::Instant::now();
    let stderr = fails(&world.pretrain("deep", &["--set", "model.depth=65536"]), 2);
    assert!(stderr.contains("model.depth") && start.elapsed().as_secs() < 20, "{stderr}");
    let braces = "{a}".repeat(20_000);
    let stderr = fails(&world.pretrain("braces", &["--shards", &braces]), 2);
    check_message("damage::linked_locks_and_absurd_sizes_are_refused_at_once", &stderr);
    assert!(stderr.len() < 1000, "{}", stderr.len());
}

/// Returns 1,000 entries like the first of `params`, whose rows begin `step` times their number of
/// values apart.
fn repeat_first_entry(params: &Value, step: u64) -> Value {
    let shape = params[0]["shape"].as_array().unwrap();
    let numel: u64 = shape.iter().map(|side| side.as_u64().unwrap()).product();
    let mut entries = Vec::new();
    for number in 0..1000_u64 {
        let mut entry = params[0].clone();
        entry["first"] = (step * number * numel).into();
        entries.push(entry);
    }
    entries.into()
}

/// A manifest without a checksum, as earlier versions wrote it, is not trusted.
#[test]
fn a_forged_manifest_is_refused() {
    let world = World::new(24);
    ok(&world.pretrain("run", &[]));
    let paths = fs::read_dir(world.path("run/checkpoints")).unwrap().map(|entry| entry.unwrap().path());
    let folder = paths.filter(|path| path.is_dir()).max().unwrap();
    let checkpoint = folder.display().to_string();
    let path = folder.join("manifest.json");
    let mut manifest: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    manifest["checksum"] = "".into();
    let mut parent_folder = manifest.clone();
    parent_folder["files"][0]["name"] = "../../secret".into();
    let mut same_folder = manifest.clone();
    same_folder["files"][0]["name"] = ".".into();
    let mut large_unit = manifest.clone();
    large_unit["units"][0]["numel"] = (1_u64 << 40).into();
    large_unit["units"][0]["padded"] = (1_u64 << 40).into();
    for (name, forged) in
        [("parent_folder", parent_folder), ("same_folder", same_folder), ("large_unit", large_unit)]
    {
        fs::write(&path, forged.to_string()).unwrap();
        let out = world.text("forged.safetensors");
        let output = world.ocelli(&["export", "--checkpoint", &checkpoint, "--out", &out]);
        check_message(&format!("damage::a_forged_manifest_is_refused.{name}"), &fails(&output, 3));
    }

    // Heads are read as the manifest lists them, and no more values than the files hold.
    let units = manifest["units"].as_array().unwrap();
    let head = units.iter().rposition(|unit| unit["network"] == "teacher").unwrap();
    let params = &manifest["units"][head]["params"];
    let mut large_shape = params.clone();
    large_shape[0]["shape"] = serde_json::json!([1_u64 << 40, 1_u64 << 40]);
    let mut large_offset = params.clone();
    large_offset[0]["offset"] = (u64::MAX - 4).into();
    for (name, head_params) in [
        ("large_shape", large_shape),
        ("large_offset", large_offset),
        ("many_rows", repeat_first_entry(params, 1)),
        ("same_rows", repeat_first_entry(params, 0)),
    ] {
        let mut forged = manifest.clone();
        forged["units"][head]["params"] = head_params;
        fs::write(&path, forged.to_string()).unwrap();
        let output = world.pretrain("b", &["--init", &checkpoint, "--set", "init.heads=true"]);
        check_message(&format!("damage::a_forged_manifest_is_refused.{name}"), &fails(&output, 3));
    }
}

/// A configuration of a network that Ocelli does not have must not be read as that of a similar
/// one.
#[test]
fn a_configuration_of_another_network_is_refused() {
    let world = World::new(24);
    ok(&world.pretrain("run", &[]));
    for (format, key, value) in [
        ("transformers", "hidden_act", serde_json::json!("relu")),
        ("transformers", "num_attention_heads", serde_json::json!("two")),
        ("timm", "model_args", serde_json::json!({ "act_layer": "quick_gelu" })),
    ] {
        let run = world.text("run");
        let out = world.text(format);
        let args = ["export", "--checkpoint", &run, "--out", &out, "--format", format, "--overwrite"];
        ok(&world.ocelli(&args));
        let path = world.path(format).join("config.json");
        let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        config[key] = value;
        fs::write(&path, config.to_string()).unwrap();
        let features = world.text("features.npy");
        let args = [
            "embed",
            "--checkpoint",
            &out,
            "--shards",
            &world.shard().display().to_string(),
            "--out",
            &features,
        ];
        let stderr = fails(&world.ocelli(&args), 3);
        assert!(stderr.contains(key.trim_end_matches("model_args")), "{stderr}");
    }
    // A configuration that another export left would be read with these weights.
    let args = [
        "export",
        "--checkpoint",
        &world.text("run"),
        "--out",
        &world.text("transformers"),
        "--format",
        "timm",
    ];
    let output = world.ocelli(&[&args[..], &["--overwrite"]].concat());
    check_message("damage::a_configuration_of_another_network_is_refused", &fails(&output, 2));
}

/// A run of an earlier version, whose views differ, must not continue silently with other pixels.
#[test]
fn a_run_with_another_version_of_views_is_refused() {
    let world = World::new(24);
    ok(&world.pretrain("run", &[]));
    let path = world.path("run/plan.toml");
    let plan = fs::read_to_string(&path).unwrap();
    let line = plan.lines().find(|line| line.starts_with("views_version")).unwrap();
    fs::write(&path, plan.replace(line, "")).unwrap();
    let output = world.pretrain("run", &["--lengthen", "--set", "optim.length={steps=20}"]);
    check_message("damage::a_run_with_another_version_of_views_is_refused", &fails(&output, 2));
}

/// Runs the program with a limit on its address space.
fn run_with_memory_limit(world: &World, kilobytes: u64, args: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_ocelli-under-test");
    let script = format!("ulimit -v {kilobytes}; exec \"$0\" \"$@\"");
    let mut command = std::process::Command::new("sh");
    command
        .args(["-c", &script, program])
        .args(args)
        .env("OCELLI_CACHE", world.path("cache"))
        .output()
        .unwrap()
}

/// A limit on memory or an absurd size must not exit like a lost rank (134) or a bug (101).
#[test]
fn sizes_beyond_memory_exit_like_errors_of_configuration() {
    let world = World::new(24);
    ok(&world.pretrain("run", &[]));
    let run = world.text("run");
    let shard = world.text("data/train-000000.tar");
    let probe = ["probe", "--checkpoint", &run, "--train", &shard, "--test", &shard, "--no-record"];
    let stderr = fails(&run_with_memory_limit(&world, 300_000, &probe), 2);
    assert!(stderr.contains("ulimit -v"), "{stderr}");
    for px in ["8192", "65536"] {
        let args = [&probe[..], &["--image-px", px]].concat();
        let stderr = fails(&run_with_memory_limit(&world, 4_000_000, &args), 2);
        assert!(stderr.contains("--image-px") || stderr.contains("must lie in"), "{stderr}");
    }
    let onnx = world.text("large.onnx");
    let export = ["export", "--checkpoint", &run, "--out", &onnx, "--image-px", "65536"];
    let output = run_with_memory_limit(&world, 4_000_000, &export);
    check_message("damage::sizes_beyond_memory_exit_like_errors_of_configuration", &fails(&output, 2));
    assert!(!world.path("large.onnx").exists());
}

/// Flips one bit of the file at `path` at `n` offsets, evenly spread over its bytes and all bits,
/// and returns each offset with the output of `run`. The file is restored afterwards.
fn with_flipped_bits(path: &Path, n: usize, run: impl Fn() -> Output) -> Vec<(usize, Output)> {
    let intact = fs::read(path).unwrap();
    let mut outputs = Vec::new();
    for number in 0..n {
        let offset = number * (intact.len() - 1) / (n - 1);
        let mut bytes = intact.clone();
        bytes[offset] ^= 1 << (number % 8);
        fs::write(path, bytes).unwrap();
        outputs.push((offset, run()));
    }
    fs::write(path, intact).unwrap();
    outputs
}

/// Balances the features `x.npy` into the folder `out`.
fn balance(world: &World, out: &str, more: &[&str]) -> Output {
    let out = world.text(out);
    let features = world.text("x.npy");
    let args = ["curate", "balance", "--out", &out, "--overwrite", "--features", &features];
    world.ocelli(&[&args[..], more].concat())
}

/// A flipped bit at any offset of a file that a verb reads back is detected: clusters, and results
/// of parts of every verb.
#[test]
fn flipped_bits_in_saved_results_are_detected() {
    let world = World::new(40);
    let run = world.text("run");
    let short = ["--set", "optim.length={steps=1}", "--set", "optim.warmup={steps=0}"];
    ok(&world.pretrain("run", &short));
    let data = world.text("data");
    let features = world.text("x.npy");
    ok(&world.ocelli(&["embed", "--checkpoint", &run, "--shards", &data, "--out", &features]));

    let clusters = ["--clusters", "5,2", "--resample-rows", "2,1", "--count", "12"];
    ok(&balance(&world, "first", &clusters));
    let first = world.text("first");
    let reuse = ["--clusters-of", first.as_str(), "--count", "12"];
    ok(&balance(&world, "second", &reuse));
    let saved_clusters = world.path("first/clusters.safetensors");
    for (offset, output) in with_flipped_bits(&saved_clusters, 60, || balance(&world, "second", &reuse)) {
        assert!(!output.status.success(), "byte {offset} of the clusters: {output:?}");
    }

    let found = world.text("found");
    let unique = world.text("unique");
    let removed = world.text("removed");
    let parts = world.text("parts/x.npy");
    let jobs: [(&[&str], &str); 5] = [
        (&["shards", "verify", &data, "--out", &found], "found/verify.part-00001-of-00002.json"),
        (&["shards", "stats", &data, "--out", &found], "found/stats.part-00001-of-00002.json"),
        (&["shards", "dedup", &data, "--out", &unique], "unique/dedup.part-00001-of-00002.json"),
        (
            &[
                "curate",
                "remove",
                "--features",
                &features,
                "--like-features",
                &features,
                "--threshold",
                "0.5",
                "--out",
                &removed,
            ],
            "removed/remove.part-00001-of-00002.json",
        ),
        (&["embed", "--checkpoint", &run, "--shards", &data, "--out", &parts], "parts/x-00000-of-00002.npy"),
    ];
    for (args, file) in jobs {
        for part in ["1/2", "2/2"] {
            ok(&world.ocelli(&[args, &["--part", part]].concat()));
        }
        let join = [args, &["--join", "2"]].concat();
        let mut paths = vec![world.path(file)];
        for extension in ["rows.jsonl", "about.json"] {
            let path = world.path(&format!("{file}.{extension}"));
            if path.exists() {
                paths.push(path);
            }
        }
        for path in paths {
            for (offset, output) in with_flipped_bits(&path, 12, || world.ocelli(&join)) {
                assert!(!output.status.success(), "byte {offset} of {}: {output:?}", path.display());
                let stderr = String::from_utf8_lossy(&output.stderr);
                assert!(!stderr.contains("panicked") && !stderr.contains("bug in"), "{stderr}");
            }
        }
        ok(&world.ocelli(&join));
    }
}
