//! Damage that a program could overlook: holes in shards, numbers that are not finite, rows of a
//! cache, a missing plan.

use std::fs;
use std::path::Path;

use crate::support::{World, fails, ok};

#[test]
fn a_hole_in_a_shard_is_told_and_the_other_shards_are_verified() {
    let world = World::new(24);
    let whole = fs::read(world.shard()).unwrap();
    let good = world.text("good.tar");
    let bad = world.text("bad.tar");
    fs::write(&good, &whole).unwrap();
    let header_of_the_middle = (0..whole.len() / 512)
        .map(|block| block * 512)
        .filter(|at| &whole[at + 257..at + 262] == b"ustar")
        .nth(30)
        .unwrap();
    let mut holed = whole.clone();
    holed[header_of_the_middle..][..512].fill(0);
    let mut tail = whole.clone();
    tail[header_of_the_middle..].fill(0);
    // More zeros than two blocks or a usual record, and an odd number of blocks, which larger
    // records do not divide.
    let n_blocks = (header_of_the_middle / 512 + 41) | 1;
    tail.resize(n_blocks * 512, 0);
    for (what, bytes) in [
        ("something else", holed),
        ("bytes of zeros follow", tail),
        ("another member or archive", [&whole[..], &whole].concat()),
        ("something else", [&whole[..], b"junk"].concat()),
    ] {
        fs::write(&bad, bytes).unwrap();
        let output = world.ocelli(&["shards", "verify", &bad, &good]);
        assert_eq!(output.status.code(), Some(3));
        let told = String::from_utf8_lossy(&[output.stderr, output.stdout].concat()).into_owned();
        assert!(told.contains(what) && told.contains("bad.tar"), "{told}");
        assert!(told.contains("2 shard(s), 1 bad; 24 samples"), "{told}");
        let told = fails(&world.pretrain("run", &["--shards", &bad]), 3);
        assert!(told.contains(what), "{told}");
    }
}

/// Overwrites `n` values of a file of weights.
fn spoil(path: &str, value: f32, n: usize) {
    let mut bytes = fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for place in bytes[8 + header + 4 * 100..].chunks_exact_mut(4).take(n) {
        place.copy_from_slice(&value.to_le_bytes());
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
        spoil(&weights, value, 1);
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
            let told = fails(&world.ocelli(args), 3);
            assert!(told.contains("parameter") && told.contains("not finite"), "{args:?}: {told}");
        }
        assert!(!world.path("f.npy").exists() && !world.path("w.onnx").exists());
    }
    // Finite weights whose features are not.
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &weights, "--overwrite"]));
    spoil(&weights, 9e17, 4000);
    let args = ["probe", "--checkpoint", &weights, "--train", &shard, "--test", &shard];
    let told = fails(&world.ocelli(&args), 78);
    assert!(told.contains("features") && told.contains("not finite"), "{told}");
}

#[test]
fn damaged_rows_of_the_cache_are_made_anew() {
    let world = World::new(40);
    ok(&world.pretrain("run", &[]));
    let run = world.text("run");
    let shard = world.text("data/train-000000.tar");
    let cache = world.text("cache");
    let probe = || {
        let args =
            ["probe", "--checkpoint", &run, "--train", &shard, "--test", &shard, "--json", "--no-record"];
        let env = [("OCELLI_CACHE", cache.as_str()), ("OCELLI_FEATURES_GB", "1")];
        let output = world.ocelli_with(&args, &env);
        ok(&output);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let scores =
            text(&output.stdout).lines().last().unwrap().split("\"networks\"").nth(1).unwrap().to_string();
        (scores, text(&output.stderr).contains("are damaged"))
    };
    let (scores, _) = probe();
    let rows = |extension: &str| {
        let files = fs::read_dir(world.path("cache/features")).unwrap().flatten().map(|entry| entry.path());
        files.filter(|path| path.extension().is_some_and(|found| found == extension)).collect::<Vec<_>>()
    };
    for path in rows("f32") {
        let len = fs::read(&path).unwrap().len();
        fs::write(&path, (0..len).map(|i| (i * 31 % 127) as u8).collect::<Vec<_>>()).unwrap();
    }
    assert_eq!(probe(), (scores.clone(), true));
    assert_eq!(probe(), (scores.clone(), false));
    for path in rows("json") {
        let text = fs::read_to_string(&path).unwrap();
        fs::write(
            &path,
            text.replacen("\"average\":", "\"average\": ", 1).replace("\"checksum\":\"", "\"checksum\":\"0"),
        )
        .unwrap();
    }
    assert_eq!(probe(), (scores, true));
}

/// The checkpoint holds the plan of its run.
#[test]
fn a_run_whose_plan_is_gone_is_still_that_run() {
    let world = World::new(24);
    let steps = |n: u64| format!("optim.length={{steps={n}}}");
    ok(&world.pretrain("run", &["--set", &steps(8)]));
    let plan = fs::read_to_string(world.path("run/plan.toml")).unwrap();
    for change in ["optim.lr=0.5", "seed=9", "optim.batch_size=4"] {
        fs::remove_file(world.path("run/plan.toml")).unwrap();
        let told = fails(&world.pretrain("run", &["--set", &steps(8), "--set", change]), 2);
        assert!(told.contains(change.split('=').next().unwrap()), "{told}");
        fs::write(world.path("run/plan.toml"), &plan).unwrap();
    }
    // A plan that was changed together with the recipe.
    fs::write(world.path("run/plan.toml"), plan.replace("seed = 3", "seed = 9")).unwrap();
    let told = fails(&world.pretrain("run", &["--set", &steps(8), "--set", "seed=9"]), 2);
    assert!(told.contains("seed"), "{told}");
    fs::remove_file(world.path("run/plan.toml")).unwrap();
    ok(&world.pretrain("run", &["--set", &steps(8)]));
    assert_eq!(fs::read_to_string(world.path("run/plan.toml")).unwrap(), plan);
    ok(&world.pretrain("run", &["--set", &steps(12), "--lengthen"]));

    // A fork begins with the checkpoint of another recipe, and is then a run of its own.
    let from = world.text("run");
    let fork = ["--set", &steps(16), "--set", "optim.lr=0.001", "--fork", &from];
    ok(&world.pretrain("forked", &fork));
    fs::remove_file(world.path("forked/plan.toml")).unwrap();
    let told =
        fails(&world.pretrain("forked", &["--set", &steps(16), "--set", "optim.lr=0.5", "--fork", &from]), 2);
    assert!(told.contains("optim.lr"), "{told}");
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
        let told = fails(&world.ocelli(args), 2);
        assert!(told.contains("another job"), "{told}");
    }
    assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
    drop(held);
    ok(&world.ocelli(&["shards", "pack", &images, "--out", &out]));
}

/// Rejects a lock file that is a symbolic link, a network of 65,536 blocks and 20,000 groups of
/// braces.
#[test]
fn what_is_planted_or_absurd_is_refused_at_once() {
    let world = World::new(24);
    let notes = world.path("notes");
    fs::write(&notes, "text").unwrap();
    fs::create_dir(world.path("run")).unwrap();
    std::os::unix::fs::symlink(&notes, world.path("run/.lock")).unwrap();
    fails(&world.pretrain("run", &[]), 3);
    assert_eq!(fs::read(&notes).unwrap(), b"text");
    let begun = std::time::Instant::now();
    let told = fails(&world.pretrain("deep", &["--set", "model.depth=65536"]), 2);
    assert!(told.contains("model.depth") && begun.elapsed().as_secs() < 20, "{told}");
    let many = "{a}".repeat(20_000);
    let told = fails(&world.pretrain("braces", &["--shards", &many]), 2);
    assert!(told.contains("groups of braces") && told.len() < 1000, "{}", told.len());
}

/// A manifest without a checksum, as older releases wrote it, is not trusted.
#[test]
fn a_forged_manifest_is_refused() {
    let world = World::new(24);
    ok(&world.pretrain("run", &[]));
    let step = fs::read_dir(world.path("run/checkpoints")).unwrap().map(|entry| entry.unwrap().path());
    let folder = step.filter(|path| path.is_dir()).max().unwrap();
    let path = folder.join("manifest.json");
    let honest: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let refused = |change: &dyn Fn(&mut serde_json::Value), reason: &str| {
        let mut manifest = honest.clone();
        manifest["checksum"] = "".into();
        change(&mut manifest);
        fs::write(&path, manifest.to_string()).unwrap();
        let checkpoint = folder.display().to_string();
        let out = world.text("forged.safetensors");
        let told = fails(&world.ocelli(&["export", "--checkpoint", &checkpoint, "--out", &out]), 3);
        assert!(told.contains(reason), "{told}");
    };
    refused(
        &|manifest: &mut serde_json::Value| manifest["files"][0]["name"] = "../../secret".into(),
        "is not the name of a file",
    );
    refused(
        &|manifest: &mut serde_json::Value| manifest["files"][0]["name"] = ".".into(),
        "is not a regular file",
    );
    refused(
        &|manifest: &mut serde_json::Value| {
            manifest["units"][0]["numel"] = (1_u64 << 40).into();
            manifest["units"][0]["padded"] = (1_u64 << 40).into();
        },
        "other parameters than the network",
    );

    // Heads are read as the manifest lists them.
    let with_heads = |change: &dyn Fn(&mut serde_json::Value), reason: &str| {
        let mut manifest = honest.clone();
        manifest["checksum"] = "".into();
        let mut units = manifest["units"].as_array_mut().unwrap().iter_mut().rev();
        change(&mut units.find(|unit| unit["network"] == "teacher").unwrap()["params"]);
        fs::write(&path, manifest.to_string()).unwrap();
        let checkpoint = folder.display().to_string();
        let told = fails(&world.pretrain("b", &["--init", &checkpoint, "--set", "init.heads=true"]), 3);
        assert!(told.contains(reason), "{told}");
    };
    let longer = "is longer than its unit";
    with_heads(&|params| params[0]["shape"] = serde_json::json!([1_u64 << 40, 1_u64 << 40]), longer);
    with_heads(&|params| params[0]["offset"] = (u64::MAX - 4).into(), longer);
    // As many numbers as the files hold are read, and no more.
    let repeated = |params: &mut serde_json::Value, step: u64| {
        let shape = params[0]["shape"].as_array().unwrap();
        let numel: u64 = shape.iter().map(|side| side.as_u64().unwrap()).product();
        let rows = (0..1000).map(|number| {
            let mut rows = params[0].clone();
            rows["first"] = (step * number * numel).into();
            rows
        });
        *params = rows.collect::<Vec<_>>().into();
    };
    with_heads(&|params| repeated(params, 1), longer);
    with_heads(&|params| repeated(params, 0), "does not continue the rows before it");
}

/// A network that computes another function must not be read as if it did not.
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
        let mut config: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
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
        let told = fails(&world.ocelli(&args), 3);
        assert!(told.contains(key.trim_end_matches("model_args")), "{told}");
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
    let told = fails(&world.ocelli(&[&args[..], &["--overwrite"]].concat()), 2);
    assert!(told.contains("preprocessor_config.json of another export"), "{told}");
}

/// A run of an older release, whose views differ, must not continue silently with other pixels.
#[test]
fn a_run_whose_views_were_other_ones_is_refused() {
    let world = World::new(24);
    ok(&world.pretrain("run", &[]));
    let path = world.path("run/plan.toml");
    let plan = fs::read_to_string(&path).unwrap();
    let line = plan.lines().find(|line| line.starts_with("views_version")).unwrap();
    fs::write(&path, plan.replace(line, "")).unwrap();
    let told = fails(&world.pretrain("run", &["--lengthen", "--set", "optim.length={steps=20}"]), 2);
    assert!(told.contains("another way"), "{told}");
}

/// A limit on memory or an absurd size must not exit like a lost rank (134) or a bug (101).
#[test]
fn what_does_not_fit_into_memory_is_a_matter_of_configuration() {
    let world = World::new(24);
    ok(&world.pretrain("run", &[]));
    let run = world.text("run");
    let shard = world.text("data/train-000000.tar");
    let limited = |kilobytes: u64, args: &[&str]| {
        let program = env!("CARGO_BIN_EXE_ocelli-under-test");
        let script = format!("ulimit -v {kilobytes}; exec \"$0\" \"$@\"");
        let mut command = std::process::Command::new("sh");
        command
            .args(["-c", &script, program])
            .args(args)
            .env("OCELLI_CACHE", world.path("cache"))
            .output()
            .unwrap()
    };
    let probe = ["probe", "--checkpoint", &run, "--train", &shard, "--test", &shard, "--no-record"];
    let told = fails(&limited(300_000, &probe), 2);
    assert!(told.contains("ulimit -v"), "{told}");
    for px in ["4096", "65536"] {
        let told = fails(&limited(4_000_000, &[&probe[..], &["--image-px", px]].concat()), 2);
        assert!(told.contains("--image-px") || told.contains("must lie in"), "{told}");
    }
    let onnx = world.text("large.onnx");
    let export = ["export", "--checkpoint", &run, "--out", &onnx, "--image-px", "65536"];
    assert!(fails(&limited(4_000_000, &export), 2).contains("must lie in"));
    assert!(!world.path("large.onnx").exists());
}

/// Flips one bit of the file at `path` in each of `n` places, evenly spread over its bytes and all
/// bits, and returns what `run` gives each time. The file is whole again afterwards.
fn with_flipped_bits<T>(path: &Path, n: usize, run: impl Fn() -> T) -> Vec<(usize, T)> {
    let whole = std::fs::read(path).unwrap();
    let flipped = (0..n).map(|number| {
        let at = number * (whole.len() - 1) / (n - 1);
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (number % 8);
        std::fs::write(path, bytes).unwrap();
        (at, run())
    });
    let found = flipped.collect();
    std::fs::write(path, whole).unwrap();
    found
}

/// One flipped bit in what a verb reads back is told, wherever it is: clusters, and results of
/// parts of every verb.
#[test]
fn damaged_states_give_no_result() {
    let world = World::new(40);
    let run = world.text("run");
    let short = ["--set", "optim.length={steps=1}", "--set", "optim.warmup={steps=0}"];
    ok(&world.pretrain("run", &short));
    let data = world.text("data");
    let features = world.text("x.npy");
    ok(&world.ocelli(&["embed", "--checkpoint", &run, "--shards", &data, "--out", &features]));

    let clusters = ["--features", &features, "--clusters", "5,2", "--resample-rows", "2,1", "--count", "12"];
    let balance = |out: &str, more: &[&str]| {
        let out = world.text(out);
        world.ocelli(&[&["curate", "balance", "--out", &out, "--overwrite"], &clusters[..2], more].concat())
    };
    ok(&balance("whole", &clusters[2..]));
    let whole = world.text("whole");
    let again = ["--clusters-of", whole.as_str(), "--count", "12"];
    ok(&balance("again", &again));
    for (at, output) in
        with_flipped_bits(&world.path("whole/clusters.safetensors"), 60, || balance("again", &again))
    {
        assert!(!output.status.success(), "byte {at} of the clusters: {output:?}");
    }

    let out = |name: &str| world.text(name);
    let found = out("found");
    let unique = out("unique");
    let removed = out("removed");
    let parts = out("parts/x.npy");
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
        let mut files = vec![world.path(file)];
        files.extend(["rows.jsonl", "about.json"].iter().filter_map(|ending| {
            let beside = world.path(&format!("{file}.{ending}"));
            beside.exists().then_some(beside)
        }));
        for path in files {
            for (at, output) in
                with_flipped_bits(&path, 12, || world.ocelli(&[args, &["--join", "2"]].concat()))
            {
                assert!(!output.status.success(), "byte {at} of {}: {output:?}", path.display());
                let said = String::from_utf8_lossy(&output.stderr);
                assert!(!said.contains("panicked") && !said.contains("bug in"), "{said}");
            }
        }
        ok(&world.ocelli(&[args, &["--join", "2"]].concat()));
    }
}
