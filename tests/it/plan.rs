use crate::support::{fails, ok, program};

fn plan(args: &[&str]) -> std::process::Output {
    program().arg("plan").args(args).output().unwrap()
}

fn json(args: &[&str]) -> serde_json::Value {
    let output = plan(&[args, &["--json"]].concat());
    ok(&output);
    let text = String::from_utf8(output.stdout).unwrap();
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

#[test]
fn every_preset_has_a_table_to_4096_ranks() {
    for preset in trainer::estimate::PRESETS {
        let args = ["--preset", preset, "--ranks", "8", "64", "512", "4096", "--rank-batch", "1", "--bf16"];
        let table = json(&[&args[..], &["--gpu", "h100", "--memory-gb", "200", "--simulate"]].concat());
        let rows = table["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 3 + 3 * 4, "none, grad and full each, and groups beyond a node");
        let parameters = table["parameters"].as_f64().unwrap();
        let others = table["others"].as_array().unwrap().iter();
        let others: f64 = others.map(|network| network["parameters"].as_f64().unwrap()).sum();
        let moments = table["moments"].as_f64().unwrap();
        for row in rows.iter().filter(|row| row["mode"] != "none") {
            // All networks and moments without the gradient, over the group, plus padding.
            let expected = 4.0 * ((1.0 + moments) * parameters + others) / row["group"].as_f64().unwrap();
            let state = row["state_bytes"].as_f64().unwrap();
            assert!(state >= expected && state < 1.02 * expected + 4e6, "{preset}: {row}");
        }
    }
}

/// The formulas of the reference: 6 bytes per parameter with sharded gradients, 8 with everything
/// sharded, in bf16 without the teacher, which adds 2. Heads are sent in f32: 12 bytes per
/// parameter in both.
#[test]
fn traffic_follows_the_formulas() {
    let args = ["--preset", "vit-7b", "--ranks", "4096", "--rank-batch", "1", "--bf16", "--keep", "0"];
    let table = json(&[&args[..], &["--memory-gb", "200"]].concat());
    let of = |mode: &str| {
        let row = table["rows"].as_array().unwrap().iter().find(|row| row["mode"] == mode).unwrap().clone();
        (row["gather_bytes"].as_f64().unwrap() + row["reduce_bytes"].as_f64().unwrap())
            / table["parameters"].as_f64().unwrap()
    };
    let heads = table["head_parameters"].as_f64().unwrap() / table["parameters"].as_f64().unwrap();
    let expected = |backbone: f64| backbone * (1.0 - heads) + 12.0 * heads;
    assert!((of("grad") - expected(6.0)).abs() < 0.1, "{}", of("grad"));
    assert!((of("full") - expected(8.0)).abs() < 0.1, "{}", of("full"));
}

/// Whole runs: steps of the recipe's length in images of the data set, and their time on a GPU by
/// its data sheet.
#[test]
fn a_run_has_a_total() {
    let args = ["--recipe", "dino_vits16", "--gpu", "v100", "--ranks", "8", "--images", "1281167"];
    let table = json(&args);
    let row = &table["rows"][0];
    assert_eq!(row["steps"], 128_116_700 / 512 + 1, "100 epochs");
    let run_s = row["run_s"].as_f64().unwrap();
    let step_s = row["step_s"].as_f64().unwrap();
    assert!((run_s / step_s - row["steps"].as_f64().unwrap()).abs() < 1.0, "{row}");
    // Published: 1.75 days.
    assert!((1.75 / 1.5..1.75 * 1.5).contains(&(run_s / 86_400.0)), "{row}");
    let output = plan(&["--recipe", "dino_cifar", "--images", "50000"]);
    ok(&output);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("measured on this machine") && text.contains("rank-h"), "{text}");
    assert!(!text.contains("failing"), "one rank: {text}");
    assert!(fails(&plan(&["--gpu", "h300"]), 2).contains("h200"));
}

#[test]
fn what_cannot_fit_is_refused_with_what_would() {
    let output = plan(&["--preset", "vit-7b", "--ranks", "2", "--memory-gb", "40", "--rank-batch", "2"]);
    let stderr = fails(&output, 2);
    assert!(stderr.contains("nothing fits into 40.0 GB"), "{stderr}");
    assert!(stderr.contains("ranks would") && !stderr.contains("tensor parallelism"), "{stderr}");
    // One residual branch of 1.84 billion parameters is gathered whole, whatever the number of
    // ranks.
    let output = plan(&["--preset", "seer-rg10b", "--ranks", "496", "--memory-gb", "4", "--rank-batch", "1"]);
    let stderr = fails(&output, 2);
    assert!(
        stderr.contains("No number of ranks is enough") && stderr.contains("tensor parallelism"),
        "{stderr}"
    );
    for bad in [&["--preset", "vit-x"][..], &["--ranks", "0"], &["--tflops", "0"], &["--group", "0"]] {
        fails(&plan(bad), 2);
    }
    let stderr = fails(&plan(&["--node-short-us=-1"]), 2);
    assert!(
        stderr.contains("--node-short-us is -1 and must be a finite number that is not negative"),
        "{stderr}"
    );
}

#[test]
fn the_doctor_says_what_there_is() {
    let output = program().arg("doctor").output().unwrap();
    ok(&output);
    let text = String::from_utf8(output.stdout).unwrap();
    for word in ["cores", "instructions", "memory", "disk", "MPI", "NCCL", "all operations passed"] {
        assert!(text.contains(word), "{text}");
    }
}

/// Ranks that a launcher announces but this program cannot join are an error, not one run each.
#[test]
fn ranks_without_an_engine_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = |variables: &[(&str, &str)]| {
        let workdir = folder.path().join("run").display().to_string();
        let args = ["pretrain", "--recipe", "dino_cifar", "--shards", "none.tar", "--workdir", &workdir];
        program().args(args).envs(variables.iter().copied()).output().unwrap()
    };
    let stderr = fails(&run(&[("RANK", "1"), ("WORLD_SIZE", "2")]), 2);
    assert!(stderr.contains("rank 1 of 2"), "{stderr}");
    let stderr = fails(&run(&[("JOB_COMPLETION_INDEX", "1")]), 2);
    assert!(stderr.contains("WORLD_SIZE"), "{stderr}");
    let stderr = fails(&run(&[("RANK", "2"), ("WORLD_SIZE", "2")]), 2);
    assert!(stderr.contains("counted from 0"), "{stderr}");
}

/// Returns the peak of a step of `recipe` on one rank, and the planned one, in bytes.
fn peaks(recipe: &str, batch: &str, sets: &[&str]) -> [f64; 2] {
    let args =
        ["bench", "shard", "--recipe", recipe, "--batch", batch, "--as-set", "--repeats", "1", "--json"];
    // Every thread that takes part in a product keeps a buffer.
    let program = || {
        let mut program = program();
        program.env("RAYON_NUM_THREADS", "1");
        program
    };
    let output = program().args(args).args(sets.iter().flat_map(|set| ["--set", set])).output().unwrap();
    ok(&output);
    let text = String::from_utf8(output.stdout).unwrap();
    let row: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    ["peak_bytes", "planned_peak_bytes"].map(|key| row["modes"][0][key].as_f64().unwrap())
}

/// On one rank no peak depends on when a transfer ends.
#[test]
fn peaks_are_planned() {
    let bf16 = "optim.precision={compute='bf16',memory='bf16',gather='bf16',reduce='bf16'}";
    // In the last run, scores of views and masked patches are most of the memory.
    let runs = [
        ("simclr_cifar", "8", None),
        ("dino_cifar", "64", None),
        ("dinov2_cifar", "32", Some("method.prototypes=65536")),
    ];
    let sets = ["run.keep=100", "run.keep=0"].map(|keep| [keep, "run.workers=1"]);
    for ((recipe, batch, set), sets) in runs.into_iter().flat_map(|run| sets.map(|sets| (run, sets))) {
        let sets: Vec<&str> = sets.into_iter().chain(set).collect();
        for sets in [sets.clone(), [&sets[..], &[bf16]].concat()] {
            let [peak, planned] = peaks(recipe, batch, &sets);
            assert!((peak - planned).abs() < 0.06 * planned, "{recipe} {sets:?}: {peak}, planned {planned}");
        }
    }
}

/// Memory of graphs that are kept, by what four more blocks take.
#[test]
fn graphs_of_transformer_blocks_are_planned() {
    let bytes = |depth: usize, variant: &[&str]| {
        let depth = format!("model.depth={depth}");
        peaks("dinov2_cifar", "32", &[&["run.workers=1", "run.keep=100", &depth], variant].concat())
    };
    let variants: [&[&str]; 4] = [
        &[],
        &["model.layer_scale=0.1"],
        &["model.positions='rope'", "model.registers=4", "model.mlp='swiglu'"],
        &[
            "model.layer_scale=0.1",
            "optim.precision={compute='bf16',memory='bf16',gather='bf16',reduce='bf16'}",
        ],
    ];
    for variant in variants {
        let [small, large] = [2, 6].map(|depth| bytes(depth, variant));
        let [peak, planned] = [0, 1].map(|at| large[at] - small[at]);
        assert!((peak - planned).abs() < 0.06 * planned, "{variant:?}: {peak} bytes, planned {planned}");
    }
}
