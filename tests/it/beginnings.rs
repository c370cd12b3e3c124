//! Runs that begin with weights, with another run's checkpoint, or with more steps than they had.

use serde_json::Value;

use crate::support::{World, fails, ok};

/// Steps of the rows of a run's metrics.
fn logged(world: &World, run: &str) -> Vec<u64> {
    let text = std::fs::read_to_string(world.path(run).join("metrics.jsonl")).unwrap();
    text.lines().map(|row| serde_json::from_str::<Value>(row).unwrap()["step"].as_u64().unwrap()).collect()
}

/// Features of the world's images.
fn features(world: &World, weights: &str, more: &[&str]) -> Vec<u8> {
    let out = world.text("features.npy");
    let shard = world.text("data/train-000000.tar");
    let args = ["embed", "--checkpoint", weights, "--shards", &shard, "--out", &out, "--overwrite"];
    ok(&world.ocelli(&[&args[..], more].concat()));
    std::fs::read(out).unwrap()
}

/// Settings with which a step changes nothing: a rate of zero, no decay, and a teacher momentum of
/// one.
const STILL: [&str; 8] = [
    "--set",
    "optim.lr=0",
    "--set",
    "optim.weight_decay=[0,0]",
    "--set",
    "optim.min_lr=0",
    "--set",
    "method.teacher_decay=[1,1]",
];

#[test]
fn a_run_begins_with_weights_and_goes_on_without_their_file() {
    let world = World::new(24);
    ok(&world.pretrain("a", &[]));
    let run = world.text("a");
    let file = world.text("a.pth");
    let args = ["export", "--checkpoint", &run, "--out", &file, "--format", "dinov2"];
    ok(&world.ocelli(&args));
    let before = features(&world, &run, &[]);
    let more = [&["--init", &file, "--heads", "2", "--set", "optim.length={steps=6}"], &STILL[..]].concat();
    ok(&world.pretrain("b", &more));
    assert!(features(&world, &world.text("b"), &[]) == before, "the teacher begins with the weights");
    assert!(
        features(&world, &world.text("b"), &["--network", "student"]) == before,
        "and so does the student"
    );
    let plan = std::fs::read_to_string(world.path("b/plan.toml")).unwrap();
    assert!(plan.contains("fingerprint = \""), "{plan}");
    std::fs::remove_file(&file).unwrap();
    let longer = [&["--init", &file, "--lengthen", "--set", "optim.length={steps=8}"], &STILL[..]].concat();
    ok(&world.pretrain("b", &longer));
    assert_eq!(logged(&world, "b"), [0, 1, 2, 3, 4, 5, 6, 7]);
    let without = [&["--lengthen", "--set", "optim.length={steps=9}"], &STILL[..]].concat();
    let error = fails(&world.pretrain("b", &without), 2);
    assert!(error.contains(&format!("give --init {file} as before")), "{error}");
    // A new run needs them.
    let error = fails(&world.pretrain("c", &more), 3);
    assert!(error.contains("a.pth"), "{error}");
}

#[test]
fn weights_of_another_network_are_refused_by_what_differs() {
    let world = World::new(24);
    ok(&world.pretrain("a", &["--set", "optim.length={steps=4}"]));
    let run = world.text("a");
    let error = fails(&world.pretrain("b", &["--init", &run, "--set", "model.heads=4"]), 2);
    assert!(error.contains("model.heads is 4 in the recipe and 2 in the weights"), "{error}");
    assert!(!world.path("b/checkpoints").exists());
}

#[test]
fn a_finished_run_is_lengthened_by_a_flag_alone() {
    let world = World::new(24);
    ok(&world.pretrain("a", &["--set", "optim.length={steps=4}"]));
    let error = fails(&world.pretrain("a", &["--set", "optim.length={steps=8}"]), 2);
    assert!(error.contains("optim.length") && error.contains("--lengthen"), "{error}");
    let longer = world.pretrain("a", &["--lengthen", "--set", "optim.length={steps=8}"]);
    let said = ok(&longer);
    assert!(said.contains("from 4 to 8 steps"), "{said}");
    assert_eq!(logged(&world, "a"), (0..8).collect::<Vec<u64>>());
    // Only its length may change, and it may not shrink.
    let other =
        world.pretrain("a", &["--lengthen", "--set", "optim.length={steps=12}", "--set", "optim.lr=1"]);
    assert!(fails(&other, 2).contains("optim.lr"));
    fails(&world.pretrain("a", &["--lengthen", "--set", "optim.length={steps=6}"]), 2);
}

#[test]
fn a_run_is_forked_from_a_checkpoint() {
    let world = World::new(24);
    ok(&world.pretrain("a", &["--set", "run.keep_checkpoints=3"]));
    let from = world.text("a/checkpoints/step-0000000008");
    let metrics = std::fs::read(world.path("a/metrics.jsonl")).unwrap();
    let said = ok(&world.pretrain("b", &["--fork", &from, "--set", "optim.lr=1e-3"]));
    assert!(said.contains("forked from step 8"), "{said}");
    assert_eq!(logged(&world, "b"), [8, 9, 10, 11]);
    assert_eq!(std::fs::read(world.path("a/metrics.jsonl")).unwrap(), metrics, "the other run is as it was");
    // The same command goes on, and a fork with the same recipe is the same run.
    ok(&world.pretrain("b", &["--fork", &from, "--set", "optim.lr=1e-3"]));
    ok(&world.pretrain("c", &["--fork", &from]));
    let of = |run: &str| features(&world, &world.text(run), &[]);
    assert!(of("c") == of("a"));
    assert!(of("b") != of("a"));
}

/// Settings that make `dinov2_continue` small.
const SMALL: [&str; 12] = [
    "model.image_px=16",
    "views.global_px=16",
    "views.local_px=8",
    "views.n_local=2",
    "method.prototypes=32",
    "method.head_hidden=16",
    "method.head_bottleneck=8",
    "optim.batch_size=8",
    "optim.length={steps=6}",
    "optim.freeze_backbone={steps=4}",
    "run.checkpoint_every_steps=2",
    "run.keep_checkpoints=9",
];

/// Steps at which the evaluations of a run were made.
fn evaluated(world: &World, run: &str) -> Vec<u64> {
    let text = std::fs::read_to_string(world.path(run).join("evaluations.jsonl")).unwrap();
    let rows = text.lines().map(|row| serde_json::from_str::<Value>(row).unwrap());
    let mut steps: Vec<u64> = rows.map(|row| row["about"]["step"].as_u64().unwrap()).collect();
    steps.dedup();
    steps
}

/// Another library's weights give the recipe its backbone; they are scored before the first step,
/// stay as they are while the backbone is frozen, and change afterwards.
#[test]
fn training_goes_on_from_the_weights_of_another_library() {
    let world = World::new(40);
    ok(&world.pretrain("a", &["--set", "optim.length={steps=4}"]));
    let run = world.text("a");
    let file = world.text("a.pth");
    let shard = world.text("data/train-000000.tar");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &file, "--format", "dinov2"]));
    let workdir = world.text("b");
    let mut args = vec!["pretrain", "--recipe", "dinov2_continue", "--shards", &shard, "--workdir", &workdir];
    args.extend(SMALL.iter().flat_map(|set| ["--set", set]));
    let error = fails(&world.ocelli(&args), 2);
    assert!(error.contains("give --init WEIGHTS"), "{error}");
    assert!(!world.path("b").exists());
    args.extend(["--init", &file, "--heads", "2", "--probe-train", &shard, "--probe-test", &shard]);
    ok(&world.ocelli(&args));
    let plan = std::fs::read_to_string(world.path("b/plan.toml")).unwrap();
    let plan: toml::Table = plan.parse().unwrap();
    let model = &plan["recipe"]["model"];
    assert_eq!((model["arch"].as_str(), model["width"].as_integer()), (Some("vit"), Some(32)));
    assert_eq!((model["patch_px"].as_integer(), model["depth"].as_integer()), (Some(4), Some(2)));
    assert_eq!(evaluated(&world, "b"), [0, 6]);
    let given = features(&world, &run, &["--image-px", "16"]);
    let at = |step: u64, network: &str| {
        let checkpoint = world.text(&format!("b/checkpoints/step-{step:010}"));
        features(&world, &checkpoint, &["--network", network])
    };
    // The teacher moves by the rounding of an average of equal numbers.
    assert!(at(4, "student") == given, "the backbone is frozen for four steps");
    assert!(at(6, "student") != given);
}

/// Settings of masks, anchors and weights that cannot be run are refused with their key, before
/// anything is written.
#[test]
fn what_masked_training_cannot_do_is_said() {
    let world = World::new(24);
    ok(&world.pretrain("a", &["--set", "optim.length={steps=2}"]));
    let run = world.text("a");
    let shard = world.text("data/train-000000.tar");
    let workdir = world.text("b");
    let half = world.path("half.pth");
    let whole = world.text("a.pth");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &whole, "--format", "dinov2"]));
    std::fs::write(&half, &std::fs::read(&whole).unwrap()[..20_000]).unwrap();
    let half = half.display().to_string();
    let resnet = "model={arch=\"resnet\",image_px=32,depth=18,stem=\"small\"}";
    let gram = "method.gram={weight=2.0,from={steps=1},every={steps=2}}";
    let cases: [(&[&str], &str); 8] = [
        (&["dinov2_cifar", "--set", "method.mask_ratio=[0.1,1.5]"], "method.mask_ratio is 1.5"),
        (&["dinov2_cifar", "--set", resnet], "has no tokens to mask"),
        (&["dinov3_cifar", "--set", gram], "method.gram: the earlier teacher sees the last of the views"),
        (&["dinov3_cifar", "--set", "model.rope_rescale=0.5"], "model.rope_rescale 0.5"),
        (&["dinov2_continue", "--init", &half], "it is truncated"),
        (&["dinov2_continue", "--init", &run, "--set", "model.image_px=225"], "model.image_px 225"),
        (
            &["dinov2_continue", "--init", &run, "--set", "model.width=48"],
            "model.width is 48 in the recipe and 32",
        ),
        (&["dinov2_cifar", "--init", &run, "--set", "model.registers=2"], "model.registers"),
    ];
    for (more, told) in cases {
        let more = [more, &["--set", "optim.batch_size=8", "--set", "optim.length={steps=4}"]].concat();
        let args = [&["pretrain", "--shards", &shard, "--workdir", &workdir, "--recipe"], &more[..]].concat();
        let error = fails(&world.ocelli(&args), 2);
        assert!(error.contains(told), "{more:?}: {error}");
        assert!(!world.path("b").exists(), "{more:?}");
    }
}

/// A fork under a recipe with another backbone is refused with the keys that differ, and the work
/// directory takes the right recipe.
#[test]
fn a_fork_of_another_backbone_is_refused_by_key() {
    let world = World::new(20);
    ok(&world.pretrain("a", &["--set", "optim.length={steps=2}"]));
    let from = world.text("a");
    let other = ["--fork", &from, "--set", "optim.length={steps=4}", "--set", "model.depth=3"];
    let said = fails(&world.pretrain("b", &other), 2);
    assert!(
        said.contains("model.depth is 3 in the recipe and") && said.contains("--set model.depth="),
        "{said}"
    );
    ok(&world.pretrain("b", &other[..4]));
    // Folders on the way to an export are made, as by `pack`.
    let out = world.text("deep/down/backbone.safetensors");
    ok(&world.ocelli(&["export", "--checkpoint", &from, "--out", &out]));
    // The probe of a run says what `probe` says.
    let shard = world.text("data/train-000000.tar");
    let steps = ["--set", "optim.length={steps=2}"];
    let probe = ["--probe-train", &shard, "--probe-test", &shard, "--set", "run.probe_every_steps=2"];
    let said = ok(&world.pretrain("c", &[steps.as_slice(), &probe].concat()));
    assert!(said.contains("among the training images, byte for byte"), "{said}");
}
