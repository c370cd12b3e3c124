//! The stages of DINOv3 as a sequence of runs: pretraining, Gram anchoring in a fork, views of
//! several sizes that start from the weights and heads, and distillation into a smaller network.

use serde_json::Value;

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, ok};

/// First stage, small.
pub(crate) const FIRST: &str = r#"
name = "stage"
seed = 3
[model]
arch = "vit"
image_px = 16
patch_px = 4
width = 32
depth = 2
heads = 2
positions = "rope"
registers = 2
layer_scale = 0.5
drop_path = 0.4
drop_path_depth = "uniform"
drop_path_count = "exact"
local_class_norm = true
init_std = 0.1
[method]
name = "dinov3"
prototypes = 32
head_hidden = 16
head_bottleneck = 8
patch_head = { prototypes = 24, hidden = 16, bottleneck = 8 }
freeze_last_layer = { steps = 0 }
teacher_temp = [0.04, 0.07]
teacher_temp_warmup = { steps = 4 }
teacher_decay = [0.9, 0.9]
[views]
preset = "dinov2"
global_px = 16
local_px = 8
n_local = 2
flip_p = 0.0
[optim]
batch_size = 8
length = { steps = 8 }
lr = 1e-2
schedule = "constant"
warmup = { steps = 2 }
[run]
log_every_steps = 1
checkpoint_every_steps = 4
"#;

/// Views of the last stage.
const MIX: &str = "views.mix=[{share=0.5,sizes_px=[16,8,24]},{share=0.5,sizes_px=[24,12,32]}]";

/// A small student of another width, with the masks and views of the first stage.
fn student(teacher: &str) -> String {
    let (model, rest) = FIRST.split_once("[method]").unwrap();
    let (_, views) = rest.split_once("[views]").unwrap();
    let method = format!(
        "name = 'dinov3_distillation'\nteacher = {{ weights = '{teacher}' }}\nfreeze_last_layer = {{ steps = 0 }}\n\
         teacher_temp = [0.07, 0.07]\nteacher_temp_warmup = {{ steps = 0 }}\naverage_decay = [0.5, 1.0]\n"
    );
    let model = model.replace("width = 32", "width = 16").replace("local_class_norm = true\n", "");
    format!("{model}[method]\n{method}[views]{views}")
}

/// Runs `pretrain` with `recipe`, written to a file of the world.
fn pretrain(world: &World, recipe: &str, run: &str, more: &[&str]) -> std::process::Output {
    let file = world.text("stage.toml");
    let shard = world.text("data/train-000000.tar");
    let workdir = world.text(run);
    std::fs::write(&file, recipe).unwrap();
    let args = ["pretrain", "--recipe", &file, "--shards", &shard, "--workdir", &workdir];
    world.ocelli(&[&args[..], more].concat())
}

/// Values of `key` in the rows of the metrics of a run.
fn logged(world: &World, run: &str, key: &str) -> Vec<Option<f64>> {
    let text = std::fs::read_to_string(world.path(run).join("metrics.jsonl")).unwrap();
    text.lines().map(|row| serde_json::from_str::<Value>(row).unwrap()[key].as_f64()).collect()
}

/// Loss of the first step of a run.
fn first_loss(world: &World, run: &str) -> f64 {
    logged(world, run, "train/loss")[0].unwrap()
}

#[test]
fn each_stage_starts_from_the_previous_one() {
    let world = World::new(40);
    ok(&pretrain(&world, FIRST, "first", &[]));
    let first = world.text("first");

    // A fork with a Gram teacher, which is initialized with the teacher of the checkpoint, resumes
    // exactly after an interruption.
    let gram =
        ["--set", "views.gram_px=24", "--set", "method.gram={weight=2.0,from={steps=8},every={steps=3}}"];
    let longer = ["--fork", &first, "--set", "optim.length={steps=14}"];
    let forked = [&longer[..], &gram].concat();
    ok(&pretrain(&world, FIRST, "gram", &forked));
    let losses = logged(&world, "gram", "train/gram_loss");
    assert_eq!(losses.len(), 6, "{losses:?}");
    assert!(losses.iter().all(|loss| loss.is_some_and(|loss| loss > 0.0)), "{losses:?}");
    let stopped = [&forked[..], &["--inject-fault", "kill:step=13"]].concat();
    let _ = pretrain(&world, FIRST, "parts", &stopped);
    ok(&pretrain(&world, FIRST, "parts", &forked));
    assert_eq!(logged(&world, "parts", "train/loss"), logged(&world, "gram", "train/loss"));

    // Views of several sizes, with the heads and the training tokens of the previous stage.
    let stage = world.text("gram");
    let last = [
        "--init",
        &stage,
        "--set",
        "init.heads=true",
        "--set",
        MIX,
        "--set",
        "method.gram={weight=1.5,from={steps=0}}",
    ];
    let gram_px = ["--set", "views.gram_px=24"];
    ok(&pretrain(&world, FIRST, "last", &[&last[..], &gram_px].concat()));
    let fresh = ["--init", &stage, "--set", MIX, "--set", "method.gram={weight=1.5,from={steps=0}}"];
    ok(&pretrain(&world, FIRST, "fresh", &[&fresh[..], &gram_px].concat()));
    let trained_heads_loss = first_loss(&world, "last");
    let new_heads_loss = first_loss(&world, "fresh");
    assert!(
        trained_heads_loss < new_heads_loss,
        "trained heads begin with the smaller loss: {trained_heads_loss} {new_heads_loss}"
    );

    // Distillation of the result with its heads into half the width.
    let teacher = world.text("last");
    ok(&pretrain(&world, &student(&teacher), "student", &[]));
    let losses = logged(&world, "student", "train/loss");
    assert!(losses.last().unwrap() < &losses[0], "{losses:?}");
    let plan = std::fs::read_to_string(world.path("student/plan.toml")).unwrap();
    assert!(plan.contains("\"patch_head.last_layer.weight\" = ["), "{plan}");
    let out = world.text("student.pth");
    ok(&world.ocelli(&[
        "export",
        "--checkpoint",
        &world.text("student"),
        "--out",
        &out,
        "--format",
        "dinov3",
    ]));
}

/// Runs `pretrain` with a recipe that is refused, before anything is written, with the message of
/// the case `name`.
fn assert_refused(world: &World, name: &str, recipe: &str, more: &[&str]) {
    let name = format!("stages::heads_that_do_not_fit_are_refused.{name}");
    check_message(&name, &fails(&pretrain(world, recipe, "b", more), 2));
    assert!(!world.path("b").exists(), "{more:?}");
}

/// Missing heads, and heads of other sizes, are refused with the key and a remedy.
#[test]
fn heads_that_do_not_fit_are_refused() {
    let world = World::new(24);
    ok(&pretrain(&world, FIRST, "first", &["--set", "optim.length={steps=2}"]));
    let first = world.text("first");
    let file = world.text("first.pth");
    ok(&world.ocelli(&["export", "--checkpoint", &first, "--out", &file, "--format", "dinov3"]));
    let heads = ["--set", "init.heads=true", "--init"];
    assert_refused(&world, "backbone", FIRST, &[&heads[..], &[&file]].concat());
    assert_refused(&world, "no_run", FIRST, &["--set", "init.heads=true"]);
    let other = ["--set", "method.prototypes=40"];
    assert_refused(&world, "other_sizes", FIRST, &[&heads[..], &[&first], &other].concat());
    assert_refused(&world, "teacher", &student(&file), &[]);
    let coarse = student(&first).replace("patch_px = 4", "patch_px = 8");
    assert_refused(&world, "patches", &coarse, &[]);
    assert_refused(&world, "one_size", FIRST, &["--set", "views.mix=[{share=1.0,sizes_px=[16]}]"]);
    assert_refused(&world, "size", FIRST, &["--set", "views.mix=[{share=1.0,sizes_px=[18,8]}]"]);
    assert_refused(&world, "gram", FIRST, &["--set", "views.gram_px=24"]);
    let plain = FIRST.replace("name = \"dinov3\"", "name = \"dinov2\"");
    assert_refused(&world, "gram_of_dinov2", &plain, &["--set", "views.gram_px=24"]);
    let at_once = ["--set", "views.gram_px=24", "--set", "method.gram={weight=1.0,from={steps=0}}"];
    assert_refused(&world, "gram_at_once", FIRST, &at_once);
}

/// A run without masks warns of a setting of masked training, and it cannot be the teacher of a run
/// with masked patches.
#[test]
fn runs_without_masks_cannot_teach_masked_patches() {
    let world = World::new(24);
    let (model, rest) = FIRST.split_once("[method]").unwrap();
    let (_, views) = rest.split_once("[views]").unwrap();
    let method = "name = 'dino'\nprototypes = 16\nhead_hidden = 16\nhead_bottleneck = 8\nteacher_temp = [0.04, 0.07]\n\
                  teacher_temp_warmup = { steps = 2 }\nfreeze_last_layer = { steps = 0 }\n";
    let dino = format!("{model}[method]\n{method}[views]{views}");
    let stderr = ok(&pretrain(&world, &dino, "dino", &[]));
    let warning = lines_with(&stderr, "has no effect");
    check_message("stages::runs_without_masks_cannot_teach_masked_patches.student", &warning);
    let plain = ok(&pretrain(&world, &dino, "plain", &["--set", "model.local_class_norm=false"]));
    assert!(!plain.contains("has no effect"), "{plain}");
    assert_eq!(logged(&world, "plain", "train/loss"), logged(&world, "dino", "train/loss"));
    let output = pretrain(&world, &student(&world.text("plain")), "b", &[]);
    check_message("stages::runs_without_masks_cannot_teach_masked_patches.teacher", &fails(&output, 2));
}

/// A run whose views have one size, and whose backbone has a setting that needs smaller ones, is
/// resumed: earlier versions began such runs without a word.
#[test]
fn a_run_with_a_setting_without_effect_is_resumed() {
    let world = World::new(24);
    let one_size = ["--set", "views.n_local=0"];
    let stderr = ok(&pretrain(&world, FIRST, "whole", &one_size));
    let warning = lines_with(&stderr, "has no effect");
    check_message("stages::a_run_with_a_setting_without_effect_is_resumed", &warning);
    let killed = [&one_size[..], &["--inject-fault", "kill:step=6"]].concat();
    assert!(!pretrain(&world, FIRST, "parts", &killed).status.success());
    ok(&pretrain(&world, FIRST, "parts", &one_size));
    assert_eq!(logged(&world, "parts", "train/loss"), logged(&world, "whole", "train/loss"));
}

/// A recipe with `init.heads` whose run is given by a flag can be resumed without the flag, and
/// forked.
#[test]
fn recipes_with_heads_of_a_run_are_resumed_and_forked() {
    let world = World::new(24);
    ok(&pretrain(&world, FIRST, "first", &[]));
    let first = world.text("first");
    let recipe = FIRST.replace("[run]", "[init]\nheads = true\n[run]");
    let init = ["--init", &first];
    ok(&pretrain(&world, &recipe, "whole", &init));
    let _ = pretrain(&world, &recipe, "parts", &["--init", &first, "--inject-fault", "kill:step=6"]);
    ok(&pretrain(&world, &recipe, "parts", &[]));
    assert_eq!(logged(&world, "parts", "train/loss"), logged(&world, "whole", "train/loss"));
    let fork = ["--fork", &first, "--set", "optim.length={steps=10}"];
    ok(&pretrain(&world, &recipe, "fork", &fork));
    assert_eq!(logged(&world, "fork", "train/loss").len(), 2);
}
