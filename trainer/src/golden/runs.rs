//! Recipes and tolerances of the runs that are compared with runs of official or written-out code.

/// A run of an official program.
pub(super) struct Run {
    pub(super) file: &'static str,
    /// Name from which its views are generated.
    pub(super) views: &'static str,
    pub(super) recipe: String,
    /// Tolerance of a loss, relative to the loss.
    pub(super) loss: f32,
    /// Tolerance of the values of a parameter, relative to the largest.
    pub(super) weights: f32,
    /// Parameters that are not compared since the loss does not depend on them: their gradients are
    /// rounding errors, which AdamW scales to steps of full size. These are biases before a batch
    /// normalization, and running means that follow them.
    pub(super) not_compared: &'static [&'static str],
}

const VIT: &str = r#"
[model]
arch = "vit"
image_px = 32
patch_px = 8
width = 24
depth = 2
heads = 2
mlp_ratio = 2.0
"#;

const RESNET: &str = r#"
[model]
arch = "resnet"
image_px = 64
depth = 10
width = 4
"#;

pub(super) fn views(global_px: u32, local_px: u32, n_local: usize) -> String {
    format!("[views]\npreset = 'dino'\nglobal_px = {global_px}\nlocal_px = {local_px}\nn_local = {n_local}\n")
}

fn recipe(parts: &[&str]) -> String {
    let run = "[run]\nworkers = 1\n";
    format!("name = 'official'\nseed = 0\n{}{run}", parts.concat())
}

pub(super) fn swav(file: &'static str, queue: usize) -> Run {
    let method = format!(
        "[method]\nname = 'swav'\nprototypes = 10\nhead_hidden = [12]\nhead_output = 8\n\
         freeze_prototypes = {{ steps = 3 }}\nqueue = {queue}\nqueue_start = {{ steps = 4 }}\n"
    );
    let optim = r#"
[optim]
batch_size = 16
length = { steps = 12 }
algorithm = "larc"
lr = 0.3
lr_scaling = "fixed"
start_lr = 0.03
min_lr = 0.006
warmup = { steps = 4 }
weight_decay = [0.01, 0.01]
decay_vectors = true
"#;
    let recipe = recipe(&[RESNET, &method, &views(64, 32, 2), optim]);
    Run { file, views: file, recipe, loss: 5e-5, weights: 1e-4, not_compared: &[] }
}

pub(super) fn simclr() -> Run {
    let method = "[method]\nname = 'simclr'\ntemperature = 0.1\nhead_hidden = [12]\nhead_output = 8\n\
                  head_batch_norm = false\n";
    let optim = r#"
[optim]
batch_size = 16
length = { steps = 12 }
algorithm = "larc"
lr = 0.6
lr_scaling = "fixed"
min_lr = 0.0
warmup = { steps = 0 }
weight_decay = [0.01, 0.01]
decay_vectors = true
"#;
    let recipe = recipe(&[RESNET, method, &views(64, 32, 0), optim]);
    Run { file: "simclr", views: "simclr", recipe, loss: 5e-5, weights: 1e-4, not_compared: &[] }
}

pub(super) fn lejepa(file: &'static str, center: &str, views: &str) -> Run {
    let method = format!(
        "pos_antialias = true\n[method]\nname = 'lejepa'\nsigreg_weight = 0.05\ndirections = 256\n\
         head_hidden = [16, 16]\nhead_output = 8\ncenter = '{center}'\n"
    );
    let optim = r#"
[optim]
batch_size = 16
length = { steps = 20 }
lr = 2e-3
lr_scaling = "fixed"
start_lr = 2e-5
min_lr = 1e-3
warmup = { steps = 1 }
weight_decay = [0.05, 0.05]
decay_vectors = true
clip_norm = 0.0
"#;
    let not_compared = &[
        "norm.bias",
        "head.projection.linear0.bias",
        "head.projection.linear1.bias",
        "head.projection.norm0.running_mean",
        "head.projection.norm1.running_mean",
    ];
    let recipe = recipe(&[VIT, &method, views, optim]);
    Run { file, views: file, recipe, loss: 4e-5, weights: 5e-5, not_compared }
}

/// Three views of one size.
pub(super) const ONE_SIZE: &str = r#"
[views]
preset = "custom"
[[views.crops]]
count = 3
size_px = 32
scale = [0.08, 1.0]
flip_p = 0.5
jitter = { brightness = 0.4, contrast = 0.4, saturation = 0.2, hue = 0.1, p = 0.8 }
gray_p = 0.2
blur_p = 0.5
blur_sigma = [0.1, 2.0]
solarize_p = 0.2
"#;

pub(super) fn dino(file: &'static str, views_name: &'static str, more: &str) -> Run {
    let method = format!(
        "pos_offset = 0.1\n[method]\nname = 'dino'\nprototypes = 16\nhead_hidden = 12\nhead_bottleneck = 8\n\
         teacher_temp_warmup = {{ steps = 0 }}\nteacher_decay = [0.9, 1.0]\n{more}"
    );
    let optim = r#"
[optim]
batch_size = 16
length = { steps = 16 }
lr = 0.02
lr_scaling = "linear"
min_lr = 1e-5
warmup = { steps = 4 }
weight_decay = [0.04, 0.4]
clip_norm = 0.3
"#;
    let recipe = recipe(&[VIT, &method, &views(32, 16, 3), optim]);
    Run { file, views: views_name, recipe, loss: 1e-5, weights: 5e-5, not_compared: &[] }
}

pub(super) const DINO: &str = "teacher_temp = [0.05, 0.05]\nfreeze_last_layer = { steps = 4 }\n";

pub(super) fn dino_resnet() -> Run {
    let method = format!(
        "[method]\nname = 'dino'\nprototypes = 16\nhead_hidden = 12\nhead_bottleneck = 8\n\
         teacher_temp_warmup = {{ steps = 0 }}\nteacher_decay = [0.9, 1.0]\nnorm_last_layer = true\n{DINO}"
    );
    let optim = r#"
[optim]
batch_size = 16
length = { steps = 16 }
algorithm = "sgd"
lr = 0.16
min_lr = 1e-5
warmup = { steps = 4 }
weight_decay = [0.01, 0.05]
clip_norm = 0.3
"#;
    let recipe = recipe(&[RESNET, &method, &views(64, 32, 2), optim]);
    Run { file: "dino_resnet", views: "dino_resnet_c", recipe, loss: 5e-5, weights: 1e-4, not_compared: &[] }
}

const MOCO_OPTIM: &str = "[optim]\nbatch_size = 16\nlength = { steps = 12 }\nlr_scaling = 'fixed'\nmin_lr = 0.0\n\
                          warmup = { steps = 4 }\nschedule = 'half_cosine'\nclip_norm = 0.0\n";

pub(super) fn moco_vit() -> Run {
    let method = "positions = 'sin_cos'\nfreeze_patches = true\ninitialization = 'xavier'\n[method]\nname = 'moco_v3'\n\
                  projector_hidden = [12, 12]\npredictor_hidden = [12]\noutput = 8\nmomentum = [0.9, 1.0]\n\
                  [views]\npreset = 'moco_v3'\nsize_px = 32\n";
    let optim = "lr = 0.02\nweight_decay = [0.1, 0.1]\ndecay_vectors = true\n";
    let not_compared = &["norm.bias", "projector.mlp.norm0.running_mean"];
    let recipe = recipe(&[VIT, method, MOCO_OPTIM, optim]);
    Run { file: "moco_vit", views: "moco_vit", recipe, loss: 5e-5, weights: 1e-4, not_compared }
}

pub(super) fn moco_resnet() -> Run {
    let method = "[method]\nname = 'moco_v3'\ntemperature = 1.0\nprojector_hidden = [12]\npredictor_hidden = [12]\n\
                  output = 8\npredictor_output_norm = false\nmomentum = [0.9, 1.0]\n\
                  [views]\npreset = 'moco_v3'\nsize_px = 64\n";
    let optim = "algorithm = 'lars'\nlr = 0.02\nweight_decay = [0.01, 0.01]\n";
    let recipe = recipe(&[RESNET, method, MOCO_OPTIM, optim]);
    Run { file: "moco_resnet", views: "moco_resnet_e", recipe, loss: 5e-5, weights: 1e-4, not_compared: &[] }
}

pub(super) fn byol() -> Run {
    let method = "[method]\nname = 'byol'\nprojector_hidden = [12]\npredictor_hidden = [12]\noutput = 8\n\
                  target_decay = [0.9, 1.0]\n[views]\npreset = 'moco_v3'\nsize_px = 32\n";
    let optim = "algorithm = 'sgd'\nlr = 0.1\nweight_decay = [0.01, 0.01]\ndecay_vectors = true\n";
    let recipe = recipe(&[VIT, method, MOCO_OPTIM, optim]);
    Run { file: "byol", views: "byol_c", recipe, loss: 5e-5, weights: 1e-4, not_compared: &[] }
}

/// LARS with a warm-up of ten steps, and a thousandth of the scaled rate at the end.
const TWINS_OPTIM: &str = r#"
[optim]
batch_size = 16
length = { steps = 14 }
algorithm = "lars"
trust = 0.02
lr = 0.1
lr_scaling = "linear"
min_lr = 6.25e-6
warmup = { steps = 10 }
schedule = "half_cosine"
weight_decay = [0.01, 0.01]
"#;

pub(super) fn barlow_twins() -> Run {
    let method = "[method]\nname = 'barlow_twins'\nprojector_hidden = [12, 12]\noutput = 8\n\
                  [views]\npreset = 'moco_v3'\nsize_px = 64\n";
    let recipe = recipe(&[RESNET, method, TWINS_OPTIM]);
    let views = "barlow_twins_f";
    Run { file: "barlow_twins", views, recipe, loss: 5e-5, weights: 1e-4, not_compared: &[] }
}

pub(super) fn vicreg() -> Run {
    let method = "[method]\nname = 'vicreg'\nprojector_hidden = [12, 12]\noutput = 8\n\
                  [views]\npreset = 'moco_v3'\nsize_px = 64\n";
    let recipe = recipe(&[RESNET, method, TWINS_OPTIM]);
    Run { file: "vicreg", views: "vicreg_g", recipe, loss: 5e-5, weights: 1e-4, not_compared: &[] }
}

pub(super) fn distillation(file: &'static str, distance: &str) -> Run {
    let method = format!(
        "[method]\nname = 'distillation'\ndistance = '{distance}'\npooled_weight = 0.7\npatch_weight = 0.4\n\
         [method.teacher]\nweights = 'w'\nfingerprint = 'f'\n\
         model = {{ arch = 'vit', image_px = 32, patch_px = 4, width = 16, depth = 1, heads = 2, mlp_ratio = 2.0 }}\n\
         normalization = {{ mean = [0.485, 0.456, 0.406], std = [0.229, 0.224, 0.225] }}\n"
    );
    let optim = r#"
[optim]
batch_size = 16
length = { steps = 12 }
lr = 4e-3
lr_scaling = "fixed"
min_lr = 0.0
warmup = { steps = 0 }
weight_decay = [0.05, 0.05]
decay_vectors = true
clip_norm = 0.0
"#;
    let recipe = recipe(&[VIT, &method, &views(32, 16, 0), optim]);
    Run { file, views: "distillation", recipe, loss: 2e-5, weights: 5e-5, not_compared: &[] }
}

pub(super) fn dinov2(file: &'static str, lr: f64, more: &str) -> Run {
    let method = format!(
        "layer_scale = 0.5\n{more}prototypes = 16\nhead_hidden = 12\nhead_bottleneck = 8\n\
         freeze_last_layer = {{ steps = 4 }}\nteacher_temp = [0.04, 0.07]\nteacher_temp_warmup = {{ steps = 8 }}\n\
         teacher_decay = [0.9, 1.0]\n"
    );
    let optim = format!(
        "[optim]\nbatch_size = 16\nlength = {{ steps = 16 }}\nlr = {lr}\nlr_scaling = 'fixed'\nmin_lr = 1e-5\n\
         warmup = {{ steps = 4 }}\nweight_decay = [0.04, 0.4]\nclip = 'per_module'\nclip_norm = 0.3\nlayer_decay = 0.9\n\
         patch_rate = 0.2\n"
    );
    let recipe = recipe(&[VIT, &method, &views(32, 16, 2), &optim]);
    Run { file, views: file, recipe, loss: 1e-5, weights: 1e-4, not_compared: &[] }
}

/// Returns the section of two crops of `size_px`.
fn two_crops(size_px: u32, more: &str) -> String {
    format!(
        "[[views.crops]]\ncount = 2\nsize_px = {size_px}\nscale = [0.3, 1.0]\nflip_p = 0.5\n\
         jitter = {{ brightness = 0.4, contrast = 0.4, saturation = 0.2, hue = 0.1, p = 0.8 }}\ngray_p = 0.2\n\
         blur_p = 0.5\nblur_sigma = [0.1, 2.0]\nsolarize_p = 0.2\n{more}"
    )
}

pub(super) fn dinov3() -> Run {
    let method = "layer_scale = 0.5\nregisters = 2\npositions = 'rope'\nqkv_bias = 'without_keys'\n[method]\nname = 'dinov3'\n\
                  prototypes = 16\nhead_hidden = 12\nhead_bottleneck = 8\n\
                  patch_head = { prototypes = 20, hidden = 10, bottleneck = 6 }\nfreeze_last_layer = { steps = 2 }\n\
                  teacher_temp = [0.04, 0.07]\nteacher_temp_warmup = { steps = 4 }\nteacher_decay = [0.9, 1.0]\n\
                  local_weight = 0.5\ngram = { weight = 2.0, from = { steps = 0 }, every = { steps = 4 }, max_updates = 2, ramp = { steps = 4 } }\n";
    let global_crops = two_crops(32, "");
    let local_crops = two_crops(16, "");
    let gram_crops = two_crops(64, "like = 0\n");
    let views = format!("[views]\npreset = 'custom'\n{global_crops}{local_crops}{gram_crops}");
    let optim = "[optim]\nbatch_size = 16\nlength = { steps = 12 }\nlr = 0.005\nlr_scaling = 'fixed'\nmin_lr = 1e-5\n\
                 warmup = { steps = 4 }\nweight_decay = [0.04, 0.4]\nclip = 'per_module'\nclip_norm = 0.3\n\
                 layer_decay = 0.9\npatch_rate = 0.2\n";
    let recipe = recipe(&[VIT, method, &views, optim]);
    Run { file: "dinov3", views: "dinov3", recipe, loss: 1e-5, weights: 1e-4, not_compared: &[] }
}

/// A transformer on an 8 × 8 grid of cells, whose positions are a formula.
const MASKED_VIT: &str = r#"
[model]
arch = "vit"
image_px = 32
patch_px = 4
width = 24
depth = 2
heads = 2
positions = "sin_cos"
"#;

/// One view.
const ONE_VIEW: &str = r#"
[views]
preset = "custom"
[[views.crops]]
count = 1
size_px = 32
scale = [0.2, 1.0]
flip_p = 0.5
jitter = { brightness = 0.0, contrast = 0.0, saturation = 0.0, hue = 0.0, p = 0.0 }
gray_p = 0.0
blur_p = 0.0
blur_sigma = [0.1, 2.0]
solarize_p = 0.0
"#;

const MASKED_OPTIM: &str = r#"
[optim]
batch_size = 16
length = { steps = 12 }
lr_scaling = "fixed"
min_lr = 1e-5
warmup = { steps = 4 }
schedule = "half_cosine"
clip_norm = 0.0
"#;

pub(super) fn mae() -> Run {
    let method = r#"
[method]
name = "mae"
mask_ratio = 0.75
decoder_width = 16
decoder_depth = 2
decoder_heads = 2
normalize_pixels = true
"#;
    let optim = "lr = 0.01\nweight_decay = [0.05, 0.05]\nbetas = [0.9, 0.95]\n";
    let recipe = recipe(&[MASKED_VIT, method, ONE_VIEW, MASKED_OPTIM, optim]);
    Run { file: "mae", views: "mae", recipe, loss: 1e-5, weights: 5e-5, not_compared: &[] }
}

pub(super) fn ijepa() -> Run {
    let method = r#"
class_token = false
[method]
name = "ijepa"
predictor_width = 16
predictor_depth = 2
predictor_heads = 2
target_blocks = 4
target_scale = [0.15, 0.2]
target_aspect = [0.75, 1.5]
context_scale = [0.85, 1.0]
min_context = 15
teacher_decay = [0.9, 1.0]
"#;
    let optim = "lr = 5e-3\nstart_lr = 1e-3\nweight_decay = [0.04, 0.4]\n";
    let recipe = recipe(&[MASKED_VIT, method, ONE_VIEW, MASKED_OPTIM, optim]);
    Run { file: "ijepa", views: "ijepa", recipe, loss: 1e-5, weights: 5e-5, not_compared: &[] }
}

/// A transformer of three blocks on an 8 × 8 grid of cells.
const THREE_BLOCKS: &str = r#"
[model]
arch = "vit"
image_px = 32
patch_px = 4
width = 24
depth = 3
heads = 2
mlp_ratio = 2.0
"#;

/// Ten steps with labels or masks.
const TEN_STEPS: &str = r#"
[optim]
batch_size = 16
length = { steps = 10 }
lr = 5e-3
lr_scaling = "fixed"
min_lr = 1e-5
warmup = { steps = 3 }
schedule = "half_cosine"
weight_decay = [0.05, 0.05]
clip_norm = 0.0
"#;

/// Returns the run whose file is `file`, with these settings of the method and of the optimizer as
/// well.
pub(super) fn classification(file: &'static str, method_settings: &str, optimizer_settings: &str) -> Run {
    let method = "[method]\nname = 'classification'\nclasses = ['a', 'b', 'c', 'd', 'e']\nlabels = 'f'\nsmoothing = 0.1\n";
    let recipe = recipe(&[
        VIT,
        method,
        method_settings,
        ONE_VIEW,
        TEN_STEPS,
        "layer_decay = 0.65\n",
        optimizer_settings,
    ]);
    Run { file, views: "classification", recipe, loss: 1e-5, weights: 5e-5, not_compared: &[] }
}

/// Returns the run with the decoder `decoder`, whose file is `file`.
pub(super) fn segmentation(file: &'static str, decoder: &str) -> Run {
    let method = format!(
        "[method]\nname = 'segmentation'\nclasses = ['a', 'b', 'c']\nmasks = 'f'\ndecoder = '{decoder}'\n\
         decoder_width = 12\n"
    );
    let recipe = recipe(&[VIT, &method, ONE_VIEW, TEN_STEPS]);
    Run { file, views: "segmentation", recipe, loss: 1e-5, weights: 5e-5, not_compared: &[] }
}

pub(super) fn data2vec() -> Run {
    let method = r#"
[method]
name = "data2vec"
averaged_blocks = 2
beta = 0.7
mask_ratio = 0.6
smallest_block = 4
teacher_decay = [0.9, 0.99]
teacher_decay_ramp = { steps = 8 }
"#;
    let optim = "lr = 5e-3\nweight_decay = [0.05, 0.05]\ndecay_vectors = true\n";
    let recipe = recipe(&[THREE_BLOCKS, method, ONE_VIEW, MASKED_OPTIM, optim]);
    Run { file: "data2vec", views: "data2vec", recipe, loss: 1e-5, weights: 5e-5, not_compared: &[] }
}
