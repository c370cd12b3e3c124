//! Runs that begin with weights or with another run's checkpoint, and runs that are lengthened.

use serde_json::Value;

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, json_of, ok};

/// Returns the steps of the rows of a run's metrics.
fn logged_steps(world: &World, run: &str) -> Vec<u64> {
    let text = std::fs::read_to_string(world.path(run).join("metrics.jsonl")).unwrap();
    text.lines().map(|row| serde_json::from_str::<Value>(row).unwrap()["step"].as_u64().unwrap()).collect()
}

/// Returns the bytes of a file with the features of the world's images.
fn features(world: &World, weights: &str, more: &[&str]) -> Vec<u8> {
    let out = world.text("features.npy");
    let shard = world.text("data/train-000000.tar");
    let args = ["embed", "--checkpoint", weights, "--shards", &shard, "--out", &out, "--overwrite"];
    ok(&world.ocelli(&[&args[..], more].concat()));
    std::fs::read(out).unwrap()
}

/// Settings with which a step changes no weights: a rate of zero, no decay, and a teacher momentum
/// of one.
const WITHOUT_UPDATES: [&str; 8] = [
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
fn a_run_begins_with_weights_and_resumes_without_their_file() {
    let world = World::new(24);
    ok(&world.pretrain("a", &[]));
    let run = world.text("a");
    let file = world.text("a.pth");
    let args = ["export", "--checkpoint", &run, "--out", &file, "--format", "dinov2"];
    ok(&world.ocelli(&args));
    let before = features(&world, &run, &[]);
    let more = [&["--init", &file, "--heads", "2", "--set", "optim.length={steps=6}"], &WITHOUT_UPDATES[..]]
        .concat();
    ok(&world.pretrain("b", &more));
    assert!(features(&world, &world.text("b"), &[]) == before, "the teacher begins with the weights");
    assert!(
        features(&world, &world.text("b"), &["--network", "student"]) == before,
        "and so does the student"
    );
    let plan = std::fs::read_to_string(world.path("b/plan.toml")).unwrap();
    assert!(plan.contains("fingerprint = \""), "{plan}");
    std::fs::remove_file(&file).unwrap();
    let longer =
        [&["--init", &file, "--lengthen", "--set", "optim.length={steps=8}"], &WITHOUT_UPDATES[..]].concat();
    ok(&world.pretrain("b", &longer));
    assert_eq!(logged_steps(&world, "b"), [0, 1, 2, 3, 4, 5, 6, 7]);
    let without_init = [&["--lengthen", "--set", "optim.length={steps=9}"], &WITHOUT_UPDATES[..]].concat();
    let output = world.pretrain("b", &without_init);
    check_message("beginnings::a_run_begins_with_weights_and_resumes_without_their_file", &fails(&output, 2));
    // A new run needs the file.
    let error = fails(&world.pretrain("c", &more), 2);
    assert!(error.contains("a.pth"), "{error}");
}

#[test]
fn weights_of_another_network_are_refused_with_the_key_that_differs() {
    let world = World::new(24);
    ok(&world.pretrain("a", &["--set", "optim.length={steps=4}"]));
    let run = world.text("a");
    let output = world.pretrain("b", &["--init", &run, "--set", "model.heads=4"]);
    check_message(
        "beginnings::weights_of_another_network_are_refused_with_the_key_that_differs",
        &fails(&output, 2),
    );
    assert!(!world.path("b/checkpoints").exists());
}

#[test]
fn a_finished_run_is_lengthened_only_with_the_flag() {
    let world = World::new(24);
    ok(&world.pretrain("a", &["--set", "optim.length={steps=4}"]));
    let error = fails(&world.pretrain("a", &["--set", "optim.length={steps=8}"]), 2);
    assert!(error.contains("optim.length") && error.contains("--lengthen"), "{error}");
    let stderr = ok(&world.pretrain("a", &["--lengthen", "--set", "optim.length={steps=8}"]));
    check_message(
        "beginnings::a_finished_run_is_lengthened_only_with_the_flag",
        &lines_with(&stderr, "4 to 8"),
    );
    assert_eq!(logged_steps(&world, "a"), (0..8).collect::<Vec<u64>>());
    // Only the length may change, and it may not decrease.
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
    let stderr = ok(&world.pretrain("b", &["--fork", &from, "--set", "optim.lr=1e-3"]));
    check_message("beginnings::a_run_is_forked_from_a_checkpoint", &lines_with(&stderr, "forked"));
    assert_eq!(logged_steps(&world, "b"), [8, 9, 10, 11]);
    assert_eq!(
        std::fs::read(world.path("a/metrics.jsonl")).unwrap(),
        metrics,
        "the other run is not changed"
    );
    // The same command resumes the fork, and a fork with the same recipe has the same weights.
    ok(&world.pretrain("b", &["--fork", &from, "--set", "optim.lr=1e-3"]));
    ok(&world.pretrain("c", &["--fork", &from]));
    // What has begun with one checkpoint is not resumed as a fork of another one.
    for run in ["b", "a"] {
        let output = world.pretrain(run, &["--fork", &world.text("c")]);
        assert!(fails(&output, 2).contains("not forked from"), "{run}");
    }
    // A fork of a finished run needs a larger length.
    let fork_of_end = ["--fork", &world.text("a")];
    assert!(fails(&world.pretrain("d", &fork_of_end), 2).contains("it would take no step"));
    ok(&world.pretrain("d", &[&fork_of_end[..], &["--set", "optim.length={steps=13}"]].concat()));
    let expected = features(&world, &world.text("a"), &[]);
    assert!(features(&world, &world.text("c"), &[]) == expected);
    assert!(features(&world, &world.text("b"), &[]) != expected);
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

/// Returns the steps at which a run was evaluated.
fn evaluated_steps(world: &World, run: &str) -> Vec<u64> {
    let text = std::fs::read_to_string(world.path(run).join("evaluations.jsonl")).unwrap();
    let rows = text.lines().map(|row| serde_json::from_str::<Value>(row).unwrap());
    let mut steps: Vec<u64> = rows.map(|row| row["about"]["step"].as_u64().unwrap()).collect();
    steps.dedup();
    steps
}

/// The weights of another library give the recipe its backbone; they are scored before the first
/// step, do not change while the backbone is frozen, and change afterwards.
#[test]
fn training_continues_with_the_weights_of_another_library() {
    let world = World::new(40);
    ok(&world.pretrain("a", &["--set", "optim.length={steps=4}"]));
    let run = world.text("a");
    let file = world.text("a.pth");
    let shard = world.text("data/train-000000.tar");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &file, "--format", "dinov2"]));
    let workdir = world.text("b");
    let mut args = vec!["pretrain", "--recipe", "dinov2_continue", "--shards", &shard, "--workdir", &workdir];
    args.extend(SMALL.iter().flat_map(|set| ["--set", set]));
    let output = world.ocelli(&args);
    check_message("beginnings::training_continues_with_the_weights_of_another_library", &fails(&output, 2));
    assert!(!world.path("b").exists());
    args.extend(["--init", &file, "--heads", "2", "--probe-train", &shard, "--probe-test", &shard]);
    ok(&world.ocelli(&args));
    let plan = std::fs::read_to_string(world.path("b/plan.toml")).unwrap();
    let plan: toml::Table = plan.parse().unwrap();
    let model = &plan["recipe"]["model"];
    assert_eq!((model["arch"].as_str(), model["width"].as_integer()), (Some("vit"), Some(32)));
    assert_eq!((model["patch_px"].as_integer(), model["depth"].as_integer()), (Some(4), Some(2)));
    assert_eq!(evaluated_steps(&world, "b"), [0, 6]);
    let given = features(&world, &run, &["--image-px", "16"]);
    // The student: the teacher changes by the rounding of an average of equal values.
    let frozen = features(&world, &world.text("b/checkpoints/step-0000000004"), &["--network", "student"]);
    assert!(frozen == given, "the backbone is frozen for four steps");
    let trained = features(&world, &world.text("b/checkpoints/step-0000000006"), &["--network", "student"]);
    assert!(trained != given);
}

/// Returns the number of parameters of the backbone in a plan on one GPU.
fn planned_parameters(world: &World, more: &[&str]) -> u64 {
    let args = [&["plan", "--gpu", "a100-40", "--ranks", "1", "--json"], more].concat();
    let output = world.ocelli(&args);
    ok(&output);
    let plan = json_of(&output);
    plan["parameters"].as_u64().unwrap() - plan["head_parameters"].as_u64().unwrap()
}

/// A run whose backbone comes from weights is planned with the flags with which it is started.
#[test]
fn a_plan_takes_the_weights_that_a_run_begins_with() {
    let world = World::new(24);
    ok(&world.pretrain("a", &["--set", "optim.length={steps=1}"]));
    let run = world.text("a");
    let file = world.text("a.pth");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &file, "--format", "dinov2"]));
    let recipe = world.text("tiny.toml");
    let sets: Vec<&str> = SMALL.iter().flat_map(|set| ["--set", set]).collect();
    let n_params = planned_parameters(&world, &["--recipe", &recipe]);
    let continued = ["--recipe", "dinov2_continue", "--heads", "2", "--init"];
    let n_continued = planned_parameters(&world, &[&continued[..], &[file.as_str()], &sets].concat());
    // The method also trains a token for masked patches.
    assert!((n_params..n_params + 100).contains(&n_continued), "{n_continued} for {n_params}");
    let other = ["plan", "--recipe", &recipe, "--init", &run, "--set", "model.heads=4"];
    check_message(
        "beginnings::a_plan_takes_the_weights_that_a_run_begins_with",
        &fails(&world.ocelli(&other), 2),
    );
}

/// Settings of masks, anchors and weights that cannot be run are refused with their key, before
/// anything is written.
#[test]
fn settings_that_cannot_be_run_are_refused_with_their_key() {
    let world = World::new(24);
    ok(&world.pretrain("a", &["--set", "optim.length={steps=2}"]));
    let run = world.text("a");
    let shard = world.text("data/train-000000.tar");
    let workdir = world.text("b");
    let weights = world.text("a.pth");
    ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &weights, "--format", "dinov2"]));
    let truncated = world.text("truncated.pth");
    std::fs::write(&truncated, &std::fs::read(&weights).unwrap()[..20_000]).unwrap();
    let resnet = "model={arch=\"resnet\",image_px=32,depth=18,stem=\"small\"}";
    let gram = "method.gram={weight=2.0,from={steps=1},every={steps=2}}";
    let cases: [(&str, &[&str]); 8] = [
        ("mask_ratio", &["dinov2_cifar", "--set", "method.mask_ratio=[0.1,1.5]"]),
        ("resnet", &["dinov2_cifar", "--set", resnet]),
        ("gram", &["dinov3_cifar", "--set", gram]),
        ("rope_rescale", &["dinov3_cifar", "--set", "model.rope_rescale=0.5"]),
        ("truncated", &["dinov2_continue", "--init", &truncated]),
        ("image_px", &["dinov2_continue", "--init", &run, "--set", "model.image_px=225"]),
        ("width", &["dinov2_continue", "--init", &run, "--set", "model.width=48"]),
        ("registers", &["dinov2_cifar", "--init", &run, "--set", "model.registers=2"]),
    ];
    for (name, more) in cases {
        let more = [more, &["--set", "optim.batch_size=8", "--set", "optim.length={steps=4}"]].concat();
        let args = [&["pretrain", "--shards", &shard, "--workdir", &workdir, "--recipe"], &more[..]].concat();
        let name = format!("beginnings::settings_that_cannot_be_run_are_refused_with_their_key.{name}");
        check_message(&name, &fails(&world.ocelli(&args), 2));
        assert!(!world.path("b").exists(), "{more:?}");
    }
}

/// A fork with a recipe of another backbone is refused with the keys that differ, and the work
/// directory can then be used with the right recipe.
#[test]
fn a_fork_of_another_backbone_is_refused_by_key() {
    let world = World::new(20);
    ok(&world.pretrain("a", &["--set", "optim.length={steps=2}"]));
    let from = world.text("a");
    let other = ["--fork", &from, "--set", "optim.length={steps=4}", "--set", "model.depth=3"];
    let output = world.pretrain("b", &other);
    check_message("beginnings::a_fork_of_another_backbone_is_refused_by_key", &fails(&output, 2));
    ok(&world.pretrain("b", &other[..4]));
    // The folders of an export are created, as by `pack`.
    let out = world.text("deep/down/backbone.safetensors");
    ok(&world.ocelli(&["export", "--checkpoint", &from, "--out", &out]));
    // The probe of a run prints the warnings of `probe`.
    let shard = world.text("data/train-000000.tar");
    let steps = ["--set", "optim.length={steps=2}"];
    let probe = ["--probe-train", &shard, "--probe-test", &shard, "--set", "run.probe_every_steps=2"];
    let stderr = ok(&world.pretrain("c", &[steps.as_slice(), &probe].concat()));
    check_message(
        "beginnings::a_fork_of_another_backbone_is_refused_by_key.same_images",
        &lines_with(&stderr, "of the 20 test images"),
    );
}

/// Returns the weights of the run `run` after `n_steps` steps.
fn weights_after(world: &World, run: &str, n_steps: u64) -> Vec<u8> {
    let path = format!("{run}/checkpoints/step-{n_steps:010}/rank-00000.safetensors");
    std::fs::read(world.path(&path)).unwrap()
}

/// Minutes become a number of steps that the plan has: a killed run continues with it, and a run
/// with the same plan has the same weights.
#[test]
fn minutes_become_steps_of_the_plan() {
    const NAME: &str = "beginnings::minutes_become_steps_of_the_plan";
    let world = World::new(24);
    let more = ["--set", "optim.length.minutes=0.2", "--set", "optim.warmup={percent=50}"];
    let fault = ["--inject-fault", "kill:rank=0,step=9,phase=backward"];
    let killed = world.pretrain("a", &[&more[..], &fault].concat());
    assert!(!killed.status.success());
    let stderr = String::from_utf8_lossy(&killed.stderr).into_owned();
    let (before, _) = stderr.split_once(" steps in 0.2 minutes, of ").unwrap();
    let n_steps: u64 = before.rsplit(' ').next().unwrap().replace(',', "").parse().unwrap();
    let stderr = ok(&world.pretrain("a", &more));
    assert!(stderr.contains("resuming at step") && !stderr.contains("in 0.2 minutes"), "{stderr}");
    assert_eq!(logged_steps(&world, "a"), (0..n_steps).collect::<Vec<u64>>());

    let plan: toml::Table = std::fs::read_to_string(world.path("a/plan.toml")).unwrap().parse().unwrap();
    let expected = n_steps as i64;
    assert_eq!((plan["total_steps"].as_integer(), plan["minutes"].as_float()), (Some(expected), Some(0.2)));
    assert_eq!(plan["recipe"]["optim"]["length"]["steps"].as_integer(), Some(expected));
    assert_eq!(plan["warmup_steps"].as_integer(), Some((n_steps as f64 / 2.0).round() as i64));

    let shard = world.text("data/train-000000.tar");
    let recipe = world.text("a/plan.toml");
    let same = ["pretrain", "--recipe", &recipe, "--shards", &shard, "--workdir"];
    ok(&world.ocelli(&[&same[..], &[&world.text("b")]].concat()));
    assert!(weights_after(&world, "a", n_steps) == weights_after(&world, "b", n_steps), "weights differ");
    // The recipe of the plan is that of the run, whose plan keeps the minutes.
    ok(&world.ocelli(&[&same[..], &[&world.text("a")]].concat()));
    ok(&world.pretrain("a", &more));

    let other =
        world.pretrain("a", &["--set", "optim.length.minutes=0.3", "--set", "optim.warmup={percent=50}"]);
    check_message(&format!("{NAME}.other"), &fails(&other, 2));
    let none = world.pretrain("c", &["--set", "optim.length.minutes=0"]);
    check_message(&format!("{NAME}.none"), &fails(&none, 2));
    let warmup = world.pretrain("c", &["--set", "optim.warmup={minutes=1}"]);
    check_message(&format!("{NAME}.warmup"), &fails(&warmup, 2));
    let percent = world.pretrain("c", &["--set", "optim.length={percent=50}"]);
    check_message(&format!("{NAME}.percent"), &fails(&percent, 2));
}
