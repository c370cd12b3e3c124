//! Twelve steps of DINO from equal weights and equal views: loss, center, students, teachers and moments.

use augment::{Batch, Views};
use burn_tensor::{Device, Tensor};

use super::{Golden, assert_near};
use crate::comm::communicator::Comm;
use crate::optim::state::UnitShard;
use crate::step::Trainer;
use crate::{Plan, Recipe};

const BATCH: usize = 8;
const STEPS: u64 = 12;

/// As the paper has it; `BALANCED` are the losses and the clipping of DINOv2.
const RECIPE: &str = r#"
name = "golden"
[model]
arch = "vit"
image_px = 16
patch_px = 4
width = 12
depth = 2
heads = 2
mlp_ratio = 2.0
[method]
name = "dino"
prototypes = 16
head_hidden = 10
head_bottleneck = 6
teacher_temp = [0.05, 0.05]
teacher_temp_warmup = { steps = 0 }
freeze_last_layer = { steps = 4 }
[views]
preset = "dino"
global_px = 16
local_px = 8
n_local = 2
[optim]
batch_size = 8
length = { steps = 12 }
lr = 0.16
warmup = { steps = 4 }
clip_norm = 0.3
[teacher]
decay = [0.9, 1.0]
[run]
workers = 1
"#;

const BALANCED: [&str; 6] = [
    "method.centering=sinkhorn",
    "method.teacher_temp=[0.07,0.07]",
    "method.koleo_weight=0.1",
    "method.norm_last_layer=false",
    "method.freeze_last_layer={steps=0}",
    "optim.clip=per_module",
];

/// Through a network, and twelve steps.
const TOLERANCE: f32 = 1e-4;

fn batch(golden: &Golden, number: u64) -> Batch {
    let groups = [0, 1].map(|group| golden.bytes(&format!("views_{number}.{group}")));
    let image = |i: usize| Views {
        groups: groups.iter().map(|all| all[i * all.len() / BATCH..][..all.len() / BATCH].to_vec()).collect(),
    };
    Batch {
        index: number,
        samples: (0..BATCH).map(image).collect(),
        labels: vec![None; BATCH],
        sample_ids: (0..BATCH as u64).collect(),
    }
}

/// `values` with the golden ones where keys have their biases: softmax is blind to these, so that their gradient is
/// nothing but rounding, and AdamW turns rounding into steps of full size.
fn without_key_biases(values: &Tensor<1>, golden: Tensor<1>, shard: &UnitShard) -> Tensor<1> {
    let Some(qkv) = shard.layout.position("attn.qkv.bias") else { return values.clone() };
    let bias = shard.layout.params[qkv].range();
    let keys = bias.start + bias.len() / 3..bias.end - bias.len() / 3;
    values.clone().slice_assign(keys.clone(), golden.slice(keys))
}

fn check(file: &str, overrides: &[&str]) {
    let golden = Golden::open(file);
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    let plan = Plan::resolve(Recipe::parse(RECIPE, file, &overrides).unwrap(), 32).unwrap();
    let mut trainer: Trainer = plan.trainer(Comm::solo(), &Device::flex()).unwrap();
    for shard in &mut trainer.state.shards {
        shard.student = golden.flat("param", shard);
        shard.followers[0].values = shard.student.clone();
    }
    let knobs = plan.schedules().at(0);
    let first = trainer.gradients(&batch(&golden, 0), &knobs, &mut |_| {}).unwrap();
    for (shard, grad) in trainer.state.shards.iter().zip(first.shards()) {
        golden.assert_params("grad", shard, grad, TOLERANCE);
    }
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let report = trainer.step(&batch(&golden, step % 3), &plan.schedules().at(step)).unwrap();
        losses.push(report.loss as f32);
    }
    assert_near("loss", &losses, &golden.values("loss"), TOLERANCE);
    for shard in &trainer.state.shards {
        for (name, values) in shard.buffers() {
            golden.assert_params(
                name,
                shard,
                &without_key_biases(values, golden.flat(name, shard), shard),
                TOLERANCE,
            );
        }
    }
    let center = trainer.state.method.state().into_iter().find(|(name, _)| name == "center").unwrap().1;
    assert_near("center", &center, &golden.values("center"), TOLERANCE);
}

#[test]
fn a_run_equals_that_of_pytorch() {
    for more in [&[][..], &["optim.micro_batches=4", "run.workers=2", "run.keep=0"]] {
        check("dino", more);
        check("dino_balanced", &[&BALANCED[..], more].concat());
    }
}
