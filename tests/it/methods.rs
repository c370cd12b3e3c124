use std::fs;

use crate::messages::{check_message, lines_with};
use crate::support::{World, fails, metrics, ok};

/// Returns a recipe that trains in seconds: `model` and `method` with views of 16 px, and the
/// settings in `optim`.
pub(crate) fn recipe(model: &str, method: &str, n_local: usize, optim: &str) -> String {
    let local = match n_local {
        0 => String::new(),
        n => crop(n, 8),
    };
    format!(
        r#"
name = "tiny"
seed = 3
[model]
image_px = 16
{model}
[method]
{method}
[views]
preset = "custom"
{}{local}
[optim]
batch_size = 8
micro_batches = 2
length = {{ steps = 12 }}
lr = 0.1
warmup = {{ steps = 3 }}
{optim}
[run]
log_every_steps = 1
checkpoint_every_steps = 4
workers = 2
data_threads = 2
"#,
        crop(2, 16),
    )
}

fn crop(count: usize, size_px: usize) -> String {
    format!(
        "[[views.crops]]\ncount = {count}\nsize_px = {size_px}\nscale = [0.3, 1.0]\nflip_p = 0.5\n\
         jitter = {{ brightness = 0.4, contrast = 0.4, saturation = 0.2, hue = 0.1, p = 0.8 }}\n\
         gray_p = 0.2\nblur_p = 0.0\nblur_sigma = [0.1, 1.0]\nsolarize_p = 0.0\n"
    )
}

pub(crate) const RESNET: &str = "arch = 'resnet'\ndepth = 10\nwidth = 4\nstem = 'small'";
pub(crate) const REGNET: &str =
    "arch = 'regnet_y'\nsize = { depth = 2, w_0 = 8, w_a = 8.0, w_m = 2.0, group_width = 8 }";
pub(crate) const VIT: &str = "arch = 'vit'\npatch_px = 4\nwidth = 16\ndepth = 1\nheads = 2";
pub(crate) const SWAV: &str = "name = 'swav'\nprototypes = 12\nhead_hidden = [16]\nhead_output = 8\nqueue = 12\n\
                    queue_start = { steps = 2 }\nfreeze_prototypes = { steps = 2 }";
pub(crate) const SIMCLR: &str = "name = 'simclr'\nhead_hidden = [16]\nhead_output = 8";
pub(crate) const LEJEPA: &str = "name = 'lejepa'\nhead_hidden = [16]\nhead_output = 8\ndirections = 16";
pub(crate) const CONVNEXT: &str = "arch = 'convnext'\ndepths = [1, 1, 1, 1]\nwidth = 4\npatch_px = 1";
const LARC: &str = "algorithm = 'larc'\nweight_decay = [1e-4, 1e-4]\ndecay_vectors = true";

/// Every method is trained, interrupted, resumed, scored and exported.
#[test]
fn every_method_trains_resumes_is_probed_and_exported() {
    for (name, model, method, n_local, optim) in [
        ("swav", RESNET, SWAV, 2, LARC),
        ("simclr", RESNET, SIMCLR, 0, "algorithm = 'lars'"),
        ("simclr", CONVNEXT, SIMCLR, 0, "algorithm = 'adamw'"),
        ("lejepa", VIT, LEJEPA, 2, "schedule = 'constant'\ncooldown = { steps = 4 }"),
    ] {
        let world = World::new(50);
        fs::write(world.path("tiny.toml"), recipe(model, method, n_local, optim)).unwrap();
        ok(&world.pretrain("whole", &[]));
        // Killed in its seventh step, the run resumes from the checkpoint of the fourth.
        let killed = world.pretrain("parts", &["--inject-fault", "kill:step=6,phase=backward"]);
        assert_eq!(killed.status.code(), None, "{name}");
        ok(&world.pretrain("parts", &[]));
        assert_eq!(metrics(&world.path("parts")), metrics(&world.path("whole")), "{name}");
        let weights = "checkpoints/step-0000000012/rank-00000.safetensors";
        let resumed = fs::read(world.path("parts").join(weights)).unwrap();
        let expected = fs::read(world.path("whole").join(weights)).unwrap();
        assert!(resumed == expected, "{name}: weights differ");
        let run = world.text("whole");
        let out = world.text(&format!("{name}.safetensors"));
        ok(&world.ocelli(&["export", "--checkpoint", &run, "--out", &out]));
        assert!(fs::metadata(&out).unwrap().len() > 1000, "{name}");
        let train = world.text("data/train-000000.tar");
        let test = world.text("data/train-000000.tar");
        let stderr = ok(&world.ocelli(&["probe", "--checkpoint", &run, "--train", &train, "--test", &test]));
        // About equal images, and about more neighbors than there are images.
        check_message(
            "methods::every_method_trains_resumes_is_probed_and_exported",
            &lines_with(&stderr, "warning"),
        );
    }
}

/// Asserts that a recipe with these settings is refused, with the message of the case `name`,
/// before the folder of the run is created.
fn assert_refused(world: &World, name: &str, recipe: &str, sets: &[&str]) {
    fs::write(world.path("tiny.toml"), recipe).unwrap();
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let name = format!("methods::settings_that_do_not_fit_together_are_refused_by_name.{name}");
    check_message(&name, &fails(&world.pretrain("run", &sets), 2));
    assert!(!world.path("run").exists(), "no folder is created for a recipe that is refused");
}

#[test]
fn settings_that_do_not_fit_together_are_refused_by_name() {
    let world = World::new(30);
    let swav = recipe(RESNET, SWAV, 2, LARC);
    assert_refused(&world, "teacher", &swav, &["teacher.decay=[0.9,1.0]"]);
    assert_refused(&world, "queue", &swav, &["method.queue=4"]);
    assert_refused(&world, "clip_norm", &swav, &["optim.clip_norm=3.0"]);
    assert_refused(&world, "betas", &swav, &["optim.betas=[0.9, 0.95]"]);
    for key in ["momentum=0.8", "nesterov=true", "trust=0.01"] {
        assert_refused(
            &world,
            &format!("adamw_{}", key.split('=').next().unwrap()),
            &swav,
            &["optim.algorithm=adamw", &format!("optim.{key}")],
        );
    }
    assert_refused(&world, "trust", &swav, &["optim.algorithm=sgd", "optim.trust=0.01"]);
    assert_refused(
        &world,
        "batch_norm",
        &swav,
        &["optim.batch_size=1", "optim.micro_batches=1", "method.queue=0"],
    );
    assert_refused(&world, "stat_images", &swav, &["optim.stat_images=1"]);
    assert_refused(&world, "stat_groups", &swav, &["optim.stat_groups=2"]);
    assert_refused(&world, "queue_start", &swav, &["method.queue_start={steps=11}"]);
    assert_refused(&world, "cooldown", &swav, &["optim.cooldown={steps=3}"]);
    assert_refused(
        &world,
        "cooldown_and_warmup",
        &swav,
        &["optim.schedule=constant", "optim.cooldown={steps=10}"],
    );
    assert_refused(&world, "uneven_stat_images", &swav, &["optim.stat_images=3"]);
    assert_refused(
        &world,
        "stat_images_and_micro_batches",
        &swav,
        &["optim.stat_images=2", "optim.micro_batches=2"],
    );
    assert_refused(&world, "depth", &swav, &["model.depth=20"]);
    assert_refused(&world, "stem", &swav, &["model.stem=imagenet"]);
    let regnet = recipe(REGNET, SIMCLR, 0, "");
    assert_refused(&world, "size", &regnet, &["model.size=900mf"]);
    assert_refused(&world, "size_key", &regnet, &["model.size.group=8"]);
    assert_refused(&world, "size_number", &regnet, &["model.size=3"]);
    assert_refused(
        &world,
        "batch_size",
        &recipe(VIT, SIMCLR, 0, ""),
        &["optim.batch_size=1", "optim.micro_batches=1"],
    );
    assert_refused(&world, "local_views", &recipe(VIT, SIMCLR, 2, ""), &[]);
    let dino =
        "name = 'dino'\nprototypes = 16\nteacher_temp = [0.04, 0.04]\nteacher_temp_warmup = { steps = 0 }";
    let decay = "method.teacher_decay=[0.9,1.1]";
    assert_refused(&world, "teacher_decay", &recipe(RESNET, dino, 2, ""), &[decay]);
}

/// The work directory of a run with another method or backbone is not changed.
#[test]
fn a_run_of_another_method_or_backbone_is_refused() {
    let world = World::new(30);
    fs::write(world.path("tiny.toml"), recipe(RESNET, SWAV, 2, LARC)).unwrap();
    ok(&world.pretrain("run", &[]));
    let before = metrics(&world.path("run"));
    for (name, other) in
        [("method", recipe(RESNET, LEJEPA, 2, LARC)), ("backbone", recipe(VIT, SWAV, 2, LARC))]
    {
        fs::write(world.path("tiny.toml"), other).unwrap();
        check_message(
            &format!("methods::a_run_of_another_method_or_backbone_is_refused.{name}"),
            &fails(&world.pretrain("run", &[]), 2),
        );
        assert_eq!(metrics(&world.path("run")), before);
    }
}
