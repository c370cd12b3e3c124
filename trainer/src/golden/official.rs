//! Comparison with runs of the official training code (`scripts/golden/official`) from equal
//! weights and equal views: learning rates and losses of every step, weights of all networks at the
//! end, the queue of SwAV and the center of DINO. Of runs with labels, also the gradients of the
//! first step.
//!
//! Runs have 10 to 20 steps. Losses agree to 1e-5 to 5e-5, and parameters to 1e-4 of the largest
//! value or better.

use augment::{Batch, IGNORED_CLASS, SoftLabel, Views};
use burn_tensor::{Device, Tensor};
use kernels::device::host::to_host;
use ranks::communicator::Communicator;

use super::names::{uniform, weights};
use super::runs::{
    DINO, ONE_SIZE, Run, barlow_twins, byol, classification, data2vec, dino, dino_resnet, dinov2, dinov3,
    distillation, ijepa, lejepa, mae, moco_resnet, moco_vit, segmentation, simclr, swav, vicreg, views,
};
use super::{Golden, assert_near};
use crate::optim::state::UnitShard;
use crate::step::Trainer;
use crate::{Plan, Recipe};

const BATCH: usize = 16;

/// Tolerance of the gradients of a parameter, relative to the largest.
const GRADIENTS: f32 = 2e-5;

/// Number of different batches, which a run repeats.
const N_BATCHES: u64 = 3;

/// Returns batch `index` of the views `name`: noise around one color per image. The classes of
/// images, if there are any, follow one another; if an image may have several, every third has a
/// second one, and every seventh none. Those of pixels form a staircase.
fn batch(plan: &Plan, name: &str, index: u64) -> Batch {
    let colors = uniform(&format!("{name}.{index}.colors"), 3 * BATCH);
    let mut samples: Vec<Views> = vec![Views::default(); BATCH];
    for (i, group) in plan.multicrop().groups().into_iter().enumerate() {
        let plane = (group.size_px * group.size_px) as usize;
        let n_values = group.n_views * 3 * plane;
        let noise = uniform(&format!("{name}.{index}.{i}.noise"), BATCH * n_values);
        for (image, noise) in noise.chunks(n_values).enumerate() {
            let mut pixels = Vec::with_capacity(n_values);
            for (position, noise) in noise.iter().enumerate() {
                let color = colors[3 * image + position / plane % 3];
                pixels.push((color * 160.0 + noise * 95.0) as u8);
            }
            samples[image].groups.push(pixels);
        }
    }
    if let Some(classes) = plan.recipe.method.pixel_classes() {
        let side = plan.multicrop().groups()[0].size_px as usize;
        for (image, views) in samples.iter_mut().enumerate() {
            views.masks = vec![staircase(side, image + index as usize, image, classes.len())];
        }
    }
    let n_classes = plan.recipe.method.classes().map_or(0, <[String]>::len) as u64;
    let mut labels: Vec<SoftLabel> = Vec::new();
    if n_classes > 0 {
        let is_multi_label = plan.recipe.method.is_multi_label();
        for image in 0..BATCH as u64 {
            let mut label = vec![(((image + index) % n_classes) as u32, 1.0)];
            if is_multi_label && image.is_multiple_of(3) {
                label.push((((image + index + 2) % n_classes) as u32, 1.0));
            }
            if is_multi_label && image % 7 == 6 {
                label.clear();
            }
            labels.push(label);
        }
    }
    Batch { index, samples, labels, sample_ids: (0..BATCH as u64).collect() }
}

/// Returns the mask of a view: steps of `n_classes` classes, of which `first` comes first, and
/// pixels that do not count, in another place for every `image`.
fn staircase(side: usize, first: usize, image: usize, n_classes: usize) -> Vec<u8> {
    let mut mask = Vec::with_capacity(side * side);
    for y in 0..side {
        for x in 0..side {
            let is_counted = !(x + 3 * y + image).is_multiple_of(7);
            let class = (x / 4 + y / 8 + first) % n_classes;
            mask.push(if is_counted { class as u8 } else { IGNORED_CLASS });
        }
    }
    mask
}

/// Returns the trainer of the run `run` with `overrides`, at its first step, and its plan.
fn start(run: &Run, overrides: &[&str]) -> (Plan, Trainer) {
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    let plan = crate::resolve(Recipe::parse(&run.recipe, run.file, &overrides).unwrap(), 64).unwrap();
    let mut trainer: Trainer = plan.trainer(Communicator::solo(), &Device::flex()).unwrap();
    for network in &mut trainer.state.networks {
        for shard in network.shards.iter_mut().chain(network.bases.values_mut()) {
            shard.weights = weights(shard).into();
        }
    }
    (plan, trainer)
}

/// Returns `values` with the golden biases of keys. Softmax does not depend on these, so their
/// gradients are rounding errors, which AdamW scales to steps of full size.
fn with_golden_key_biases(values: &Tensor<1>, golden: Tensor<1>, shard: &UnitShard) -> Tensor<1> {
    let Some(qkv) = shard.layout.position("attn.qkv.bias") else { return values.clone() };
    let bias = shard.layout.params[qkv].range();
    let keys = bias.start + bias.len() / 3..bias.end - bias.len() / 3;
    values.clone().slice_assign(keys.clone(), golden.slice(keys))
}

/// Checks the losses and rates of all steps of a run, and its weights at the end.
fn check(run: &Run, overrides: &[&str]) {
    let golden = Golden::open_in("official", run.file);
    let (plan, mut trainer) = start(run, overrides);
    let batches: Vec<Batch> = (0..N_BATCHES).map(|index| batch(&plan, run.views, index)).collect();
    let losses = golden.values("loss");
    let rates = golden.values("lr");
    assert_eq!(losses.len() as u64, plan.total_steps);
    for (step, (loss, rate)) in (0..).zip(losses.iter().zip(&rates)) {
        let scheduled_values = plan.schedules().at(step);
        assert!(
            (scheduled_values.lr as f32 - rate).abs() <= 1e-6 * rate.abs(),
            "{} {step}: {}",
            run.file,
            scheduled_values.lr
        );
        let batch = &batches[(step % N_BATCHES) as usize];
        let our_loss = trainer.step(batch, &scheduled_values).unwrap().loss as f32;
        let is_near = (our_loss - loss).abs() <= run.loss * loss.abs();
        assert!(is_near, "{} step {step}: {our_loss} {loss}", run.file);
    }
    for network in &trainer.state.networks {
        for shard in network.buffers() {
            let golden_flat = golden.flat(network.name, shard);
            let flat = to_host(with_golden_key_biases(shard.weights.values(), golden_flat, shard));
            for slot in &shard.layout.params {
                let param = shard.layout.full_name(slot);
                if !run.not_compared.contains(&param.as_str()) {
                    let key = format!("{}.{param}", network.name);
                    assert_near(&key, &flat[slot.range()], &golden.values(&key), run.weights);
                }
            }
        }
    }
    for (name, values) in trainer.state.method.state() {
        if golden.names().contains(&name) {
            assert_near(&name, &values, &golden.values(&name), run.weights);
        }
    }
}

/// Checks a run with one micro-batch whose graphs are kept, and with four whose graphs are
/// recomputed, on two workers.
fn check_both(run: &Run) {
    check(run, &[]);
    check(run, &["optim.micro_batches=4", "run.workers=2", "run.keep=0"]);
}

/// Checks the gradients of the first step of a run. Those of parameters that are never trained are
/// not in its file.
fn check_gradients(run: &Run, overrides: &[&str]) {
    let golden = Golden::open_in("official", run.file);
    let (plan, trainer) = start(run, overrides);
    let first = batch(&plan, run.views, 0);
    let gradients = trainer.gradients(&first, &plan.schedules().at(0), &mut |_| {}).unwrap();
    let mut n_compared = 0;
    for (shard, gradient) in trainer.trained().iter().zip(gradients.shards()) {
        let name = shard.layout.full_name(&shard.layout.params[0]);
        if !golden.names().contains(&format!("grad.{name}")) {
            assert!(to_host(gradient.clone()).iter().all(|value| *value == 0.0), "{name} is not trained");
            continue;
        }
        let gradient = with_golden_key_biases(gradient, golden.flat("grad", shard), shard);
        golden.assert_params("grad", shard, &gradient, GRADIENTS);
        n_compared += 1;
    }
    assert!(n_compared > 2, "gradients of {n_compared} units");
}

#[test]
fn swav_is_the_official_run() {
    check_both(&swav("swav", 0));
    check_both(&swav("swav_queue", 32));
}

#[test]
fn simclr_is_vissls_run() {
    check_both(&simclr());
}

#[test]
fn lejepa_is_the_official_run() {
    check_both(&lejepa("lejepa_all", "all", ONE_SIZE));
    check_both(&lejepa("lejepa_global", "global", &views(32, 16, 2)));
}

/// The teacher has smaller patches, so that feature maps are resampled.
#[test]
fn distillation_is_the_run_in_pytorch() {
    check_both(&distillation("distillation_squared", "squared"));
    check_both(&distillation("distillation_cosine", "cosine"));
}

#[test]
fn moco_v3_is_the_official_run() {
    check_both(&moco_vit());
    check_both(&moco_resnet());
}

#[test]
fn byol_is_the_run_in_pytorch() {
    check_both(&byol());
}

#[test]
fn barlow_twins_is_the_official_run() {
    check_both(&barlow_twins());
}

#[test]
fn vicreg_is_the_official_run() {
    check_both(&vicreg());
}

#[test]
fn dino_is_the_official_run() {
    let trained = format!("{DINO}norm_last_layer = false\n");
    check_both(&dino("dino", "dino_official", &trained));
    let fixed = format!("{DINO}norm_last_layer = true\n");
    check_both(&dino("dino_norm", "dino_official_norm", &fixed));
}

#[test]
fn dino_with_a_resnet_is_the_official_run() {
    check_both(&dino_resnet());
}

/// Sinkhorn-Knopp, KoLeo and clipping by module of DINOv2's code, in DINO's loop.
#[test]
fn dino_with_dinov2s_losses_is_the_official_run() {
    let balanced = "teacher_temp = [0.07, 0.07]\nfreeze_last_layer = { steps = 0 }\nnorm_last_layer = false\n\
                    centering = 'sinkhorn'\nkoleo_weight = 0.1\n";
    let mut run = dino("dino_balanced", "dinov2_balanced", balanced);
    run.recipe = run.recipe.replace("clip_norm = 0.3", "clip_norm = 0.3\nclip = 'per_module'");
    check_both(&run);
}

/// Masks, one head for views and patches, centers, layer-wise rates and frozen last layers.
#[test]
fn dinov2_is_the_official_run() {
    check_both(&dinov2("dinov2_shared", 0.02, "pos_offset = 0.1\n[method]\nname = 'dinov2'\n"));
}

/// Registers, a gated MLP, separate heads, and Sinkhorn-Knopp over masked patches.
#[test]
fn dinov2_with_separate_heads_is_the_official_run() {
    let more = "pos_antialias = true\nregisters = 2\nmlp = 'swiglu'\n[method]\nname = 'dinov2'\ncentering = 'sinkhorn'\n\
                patch_head = { prototypes = 20, hidden = 10, bottleneck = 6 }\n";
    check_both(&dinov2("dinov2_apart", 0.005, more));
}

/// Exact masks, rotary positions, plain last layers, a weight of local views and Gram anchoring
/// with ramps.
#[test]
fn dinov3_is_the_official_run() {
    check_both(&dinov3());
}

/// Rates by layer, weight decay, smoothed labels and a cosine after a warm-up; with all units, with
/// the last block and the norm alone, with adapters, and with several classes per image.
#[test]
fn classification_is_the_run_in_pytorch() {
    let runs = [
        classification("classification", "", ""),
        classification("classification_last", "", "trained_units = 2\n"),
        classification("classification_adapter", "", "adapter = { rank = 2, alpha = 0.4 }\n"),
        classification("classification_several", "loss = 'binary_cross_entropy'\n", ""),
    ];
    for run in runs {
        check_both(&run);
        check_gradients(&run, &[]);
        check_gradients(&run, &["optim.micro_batches=4", "run.workers=2", "run.keep=0"]);
    }
}

/// Scores of patches that are interpolated to pixels, of which some do not count; a linear decoder,
/// and one with a convolution.
#[test]
fn segmentation_is_the_run_in_pytorch() {
    for run in [segmentation("segmentation_linear", "linear"), segmentation("segmentation_conv", "conv")] {
        check_both(&run);
        check_gradients(&run, &[]);
        check_gradients(&run, &["optim.micro_batches=4", "run.workers=2", "run.keep=0"]);
    }
}

/// Visible cells only, a decoder with mask tokens, and pixels that are normalized by patch.
#[test]
fn mae_is_the_official_run() {
    check_both(&mae());
}

/// Contexts of different lengths, blocks of one size per step, and a target network without a class
/// token whose decay is linear.
#[test]
fn ijepa_is_the_official_run() {
    check_both(&ijepa());
}

/// Tokens in place of masked patches, and the mean of the teacher's last two of three blocks, whose
/// decay has a ramp.
#[test]
fn data2vec_is_the_run_in_pytorch() {
    check_both(&data2vec());
}
