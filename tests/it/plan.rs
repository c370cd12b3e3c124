use std::path::Path;

use crate::messages::{check_message, lines_with};
use ranks::topology::Sharding;
use trainer::Recipe;
use trainer::cost::model_cost;
use trainer::estimate::{Gpu, Placement};

use crate::support::{World, fails, ok, program};

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
fn every_preset_can_be_planned_for_up_to_4096_ranks() {
    for preset in trainer::cost::PRESETS {
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

/// Bytes per parameter that a rank receives in a step, by the row of `mode` in a table.
fn traffic_per_parameter(table: &serde_json::Value, mode: &str) -> f64 {
    let row = table["rows"].as_array().unwrap().iter().find(|row| row["mode"] == mode).unwrap();
    (row["gather_bytes"].as_f64().unwrap() + row["reduce_bytes"].as_f64().unwrap())
        / table["parameters"].as_f64().unwrap()
}

/// The formulas of the reference: 6 bytes per parameter with sharded gradients, 8 with everything
/// sharded, in bf16 without the teacher, which adds 2. Heads are sent in f32: 12 bytes per
/// parameter in both.
#[test]
fn traffic_follows_the_formulas() {
    let args = ["--preset", "vit-7b", "--ranks", "4096", "--rank-batch", "1", "--bf16", "--keep", "0"];
    let table = json(&[&args[..], &["--memory-gb", "200"]].concat());
    let heads = table["head_parameters"].as_f64().unwrap() / table["parameters"].as_f64().unwrap();
    for (mode, backbone_bytes) in [("grad", 6.0), ("full", 8.0)] {
        let bytes = traffic_per_parameter(&table, mode);
        let expected = backbone_bytes * (1.0 - heads) + 12.0 * heads;
        assert!((bytes - expected).abs() < 0.1, "{mode}: {bytes}");
    }
}

/// Whole runs: their number of steps by the recipe and the size of the data set, and their time on
/// a GPU by its data sheet.
#[test]
fn steps_and_time_of_a_run_are_planned() {
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
    assert!(!text.contains("one failure per node"), "one rank: {text}");
    assert!(fails(&plan(&["--gpu", "h300"]), 2).contains("h200"));
}

/// Of four blocks, the last and the norm are trained.
#[test]
fn units_that_are_not_trained_take_less_time_and_memory() {
    let args = ["--recipe", "classify_cifar", "--ranks", "1", "--gpu", "h100", "--memory-gb", "200"];
    let all = json(&args);
    let last = json(&[&args[..], &["--set", "optim.trained_units=2"]].concat());
    for key in ["activation_bytes", "step_s"] {
        let before = all["rows"][0][key].as_f64().unwrap();
        let after = last["rows"][0][key].as_f64().unwrap();
        assert!(after < 0.8 * before, "{key}: {after}, with all units {before}");
    }
}

/// Adapters of four blocks have 28,672 parameters, and the head of the 1,000 classes that a plan
/// without images has, 129,000; the others of about 950,000 have neither moments nor gradients. The
/// head is trained in both runs: with it, a sixth of the gradients is left.
#[test]
fn adapters_take_less_memory() {
    let args = ["--recipe", "classify_cifar", "--ranks", "1", "--gpu", "h100", "--memory-gb", "200"];
    let adapter = ["--set", "optim.adapter={rank=4, alpha=8}"];
    let all = json(&args);
    let adapted = json(&[&args[..], &adapter].concat());
    for (key, most) in [("state_bytes", 0.5), ("gradient_bytes", 0.2)] {
        let before = all["rows"][0][key].as_f64().unwrap();
        let after = adapted["rows"][0][key].as_f64().unwrap();
        assert!(after > 0.0 && after < most * before, "{key}: {after}, without adapters {before}");
    }
    let output = plan(&[&args[..], &adapter].concat());
    ok(&output);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("adapters: 0.03 M parameters"), "{text}");
}

/// Published runs: recipe, GPU, number of GPUs, images of each, whether activations are recomputed,
/// and seconds of a step.
const PUBLISHED: [(&str, &str, usize, usize, bool, f64); 6] = [
    // DINO's README: 100 epochs of ImageNet on 8 GPUs in 1.75 days.
    ("dino_vits16", "v100", 8, 64, false, 0.604),
    // DINOv2's model card: 22,000 hours of A100s for 625,000 steps.
    ("dinov2_vitg14", "a100-80", 256, 12, false, 0.495),
    // DINOv2's README: 125,000 steps on 32 GPUs in about a day.
    ("dinov2_vitl16", "a100-80", 32, 64, false, 0.69),
    // DINOv2's README: 3.3 days on 96 GPUs for 625,000 steps.
    ("dinov2_vitl14", "a100-80", 96, 32, false, 0.456),
    // SwAV's README: an epoch of ImageNet in 3 min 40 s on 64 GPUs.
    ("swav_resnet50", "v100", 64, 64, false, 0.703),
    // SEER: 8,704 images in 6.125 s on 512 GPUs, with activation checkpoints.
    ("seer_regnety_256gf", "v100", 512, 17, true, 6.125),
];

#[test]
fn published_runs_come_out_within_a_factor_of_one_and_a_half() {
    for (name, gpu, world_size, rank_batch, recomputes, published_s) in PUBLISHED {
        let path = format!("{}/../scripts/recipes/{name}.toml", env!("CARGO_MANIFEST_DIR"));
        let recipe = Recipe::parse(&std::fs::read_to_string(path).unwrap(), name, &[]).unwrap();
        let precision = recipe.optim.precision;
        let model = model_cost(&trainer::resolve(recipe, 1 << 20).unwrap()).unwrap();
        let placement = Placement {
            world_size,
            group_size: world_size,
            sharding: Sharding::Full,
            segment: 1,
            keep: if recomputes { 0 } else { model.trained.backbone.len() },
            rank_batch,
            rank_micro_batches: 1,
            workers: 1,
            precision,
            exact_sums: true,
            offload: false,
            is_gpu: true,
        };
        let ratio = Gpu::named(gpu).unwrap().compute_s(&model, &placement) / published_s;
        assert!((1.0 / 1.5..1.5).contains(&ratio), "{name}: {ratio:.2} of the published time");
    }
}

#[test]
fn a_plan_without_enough_memory_is_refused_with_a_remedy() {
    let output = plan(&["--preset", "vit-7b", "--ranks", "2", "--memory-gb", "40", "--rank-batch", "2"]);
    check_message(
        "plan::a_plan_without_enough_memory_is_refused_with_a_remedy.more_ranks",
        &fails(&output, 2),
    );
    // One residual branch of 1.84 billion parameters is gathered on every rank, for any number of
    // ranks.
    let output = plan(&["--preset", "seer-rg10b", "--ranks", "496", "--memory-gb", "4", "--rank-batch", "1"]);
    check_message(
        "plan::a_plan_without_enough_memory_is_refused_with_a_remedy.no_number",
        &fails(&output, 2),
    );
    for bad in [&["--preset", "vit-x"][..], &["--ranks", "0"], &["--tflops", "0"], &["--group", "0"]] {
        fails(&plan(bad), 2);
    }
    let output = plan(&["--node-short-us=-1"]);
    check_message("plan::a_plan_without_enough_memory_is_refused_with_a_remedy.negative", &fails(&output, 2));
}

#[test]
fn the_doctor_reports_hardware_and_libraries() {
    let output = program().arg("doctor").output().unwrap();
    ok(&output);
    let text = String::from_utf8(output.stdout).unwrap();
    for word in ["cores", "instructions", "memory", "disk", "MPI", "NCCL", "all operations passed"] {
        assert!(text.contains(word), "{text}");
    }
}

/// Starts a run in `folder` with environment variables of a launcher, which fails; returns standard
/// error.
fn launch_error(folder: &Path, variables: &[(&str, &str)]) -> String {
    let workdir = folder.join("run").display().to_string();
    let args = ["pretrain", "--recipe", "dino_cifar", "--shards", "none.tar", "--workdir", &workdir];
    fails(&program().args(args).envs(variables.iter().copied()).output().unwrap(), 2)
}

/// Ranks that a launcher announces but this program cannot join are an error, not one run each.
#[test]
fn ranks_without_an_engine_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let stderr = launch_error(folder.path(), &[("RANK", "1"), ("WORLD_SIZE", "2")]);
    assert!(stderr.contains("rank 1 of 2"), "{stderr}");
    let stderr = launch_error(folder.path(), &[("JOB_COMPLETION_INDEX", "1")]);
    assert!(stderr.contains("WORLD_SIZE"), "{stderr}");
    let stderr = launch_error(folder.path(), &[("RANK", "2"), ("WORLD_SIZE", "2")]);
    check_message("plan::ranks_without_an_engine_are_refused", &stderr);
}

/// Returns the peak of a step of `recipe` on one rank, and the planned one, in bytes.
fn peaks(recipe: &str, batch: &str, sets: &[&str]) -> [f64; 2] {
    let args =
        ["bench", "shard", "--recipe", recipe, "--batch", batch, "--as-set", "--repeats", "1", "--json"];
    let mut command = program();
    // Every thread that takes part in a product keeps a buffer.
    command.env("RAYON_NUM_THREADS", "1");
    command.args(args).args(sets.iter().flat_map(|set| ["--set", set]));
    let output = command.output().unwrap();
    ok(&output);
    let text = String::from_utf8(output.stdout).unwrap();
    let row: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    ["peak_bytes", "planned_peak_bytes"].map(|key| row["modes"][0][key].as_f64().unwrap())
}

/// On one rank, no peak depends on the time when a transfer ends.
#[test]
fn planned_peaks_of_memory_match_measured_ones() {
    let bf16 = "optim.precision={compute='bf16',memory='bf16',gather='bf16',reduce='bf16'}";
    // In the last run, scores of views and masked patches are most of the memory.
    let runs = [
        ("simclr_cifar", "8", None),
        ("dino_cifar", "64", None),
        ("dinov2_cifar", "32", Some("method.prototypes=65536")),
    ];
    for (recipe, batch, more) in runs {
        for keep in ["run.keep=100", "run.keep=0"] {
            for precision in [None, Some(bf16)] {
                let sets: Vec<&str> =
                    [keep, "run.workers=1"].into_iter().chain(more).chain(precision).collect();
                let [peak, planned] = peaks(recipe, batch, &sets);
                assert!(
                    (peak - planned).abs() < 0.06 * planned,
                    "{recipe} {sets:?}: {peak}, planned {planned}"
                );
            }
        }
    }
}

/// Returns the peak of a step with `n_blocks` blocks whose graphs are kept, and the planned one, in
/// bytes.
fn peaks_of_blocks(n_blocks: usize, batch: &str, variant: &[&str]) -> [f64; 2] {
    let depth = format!("model.depth={n_blocks}");
    peaks("dinov2_cifar", batch, &[&["run.workers=1", "run.keep=100", &depth], variant].concat())
}

/// Memory of kept graphs, measured by the memory that four more blocks take.
#[test]
fn planned_memory_of_kept_graphs_matches_the_measured_one() {
    // With patches of one pixel, views of 32 px are sequences whose attention weights are not kept.
    let variants: [(&str, &[&str]); 5] = [
        ("32", &[]),
        ("32", &["model.layer_scale=0.1"]),
        ("32", &["model.positions='rope'", "model.registers=4", "model.mlp='swiglu'"]),
        (
            "32",
            &[
                "model.layer_scale=0.1",
                "optim.precision={compute='bf16',memory='bf16',gather='bf16',reduce='bf16'}",
            ],
        ),
        ("4", &["model.patch_px=1"]),
    ];
    for (batch, variant) in variants {
        let small = peaks_of_blocks(2, batch, variant);
        let large = peaks_of_blocks(6, batch, variant);
        let peak = large[0] - small[0];
        let planned = large[1] - small[1];
        assert!((peak - planned).abs() < 0.06 * planned, "{variant:?}: {peak} bytes, planned {planned}");
    }
}

/// A plan tells when there are few images for a network, from random weights or from others.
#[test]
fn few_images_are_told() {
    let world = World::new(40);
    ok(&world.pretrain("run", &["--set", "optim.length={steps=2}"]));
    let run = world.text("run");
    for (name, args) in [
        ("random", &["--recipe", "lejepa_cifar", "--images", "299"][..]),
        ("large", &["--recipe", "dino_vits16", "--images", "99999"]),
        (
            "weights",
            &["--recipe", "lejepa_cifar", "--images", "299", "--set", "model=from_init", "--init", &run],
        ),
    ] {
        let output = world.ocelli(&[&["plan"], args].concat());
        ok(&output);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        check_message(&format!("plan::few_images_are_told.{name}"), &lines_with(&text, "may be too few"));
    }
    let enough = world.ocelli(&["plan", "--recipe", "lejepa_cifar", "--images", "300"]);
    ok(&enough);
    assert!(!String::from_utf8_lossy(&enough.stdout).contains("too few"), "{enough:?}");
}
