//! Outputs and gradients of the vision transformer and the projection head.

use burn_tensor::Device;
use kernels::ops::add_term;
use networks::backbone::{ModelConfig, Readout};
use networks::draws::Draws;
use networks::head::mlp::Mlp;
use networks::head::prototypes::{Lengths, Prototypes};
use networks::leaves::Leaves;
use networks::patches::{PixelInput, Pixels};
use networks::tokens::Tokens;
use networks::unit::{Context, StatSets, Types, Unit};
use ranks::topology::Topology;

use super::Golden;
use crate::optim::state::UnitShard;

/// Tolerance of the outputs and gradients of a network.
const TOLERANCE: f32 = 1e-5;

fn shards(golden: &Golden, prefix: &str, units: &[Box<dyn Unit>]) -> Vec<UnitShard> {
    let mut shards = Vec::with_capacity(units.len());
    for unit in units {
        let mut shard = UnitShard::init(unit.as_ref(), 0, Topology::SINGLE_RANK, &[], &Device::flex());
        shard.weights = golden.flat(prefix, &shard).into();
        shards.push(shard);
    }
    shards
}

/// Returns the output of `units`, one stream for each size of views.
fn forward(units: &[Box<dyn Unit>], leaves: &[Leaves<'_>], mut streams: Vec<Tokens>) -> Vec<Tokens> {
    let draws = Draws::default();
    let sets = StatSets::per_size(streams.len());
    for (unit, leaves) in units.iter().zip(leaves) {
        let cx = Context { leaves, draws: &draws, totals: &[], sets: &sets, types: Types::F32 };
        streams = unit.forward(0, streams, &cx).streams;
    }
    streams.iter().flat_map(Tokens::split_sizes).collect()
}

/// Three sizes of images: that of the position embedding, a smaller one and a larger one.
#[test]
fn the_vision_transformer_equals_timm() {
    let golden = Golden::open("vit");
    let base =
        "arch = 'vit'\nimage_px = 16\npatch_px = 4\nwidth = 12\ndepth = 2\nheads = 2\nmlp_ratio = 2.0\n";
    for (kind, more) in [("plain", ""), ("full", "layer_scale = 0.5\npos_offset = 0.1\n")] {
        let model: ModelConfig = toml::from_str(&format!("{base}{more}")).unwrap();
        let units = model.units(Readout::All);
        let shards = shards(&golden, &format!("{kind}.param"), &units);
        let leaves: Vec<_> =
            shards.iter().map(|shard| Leaves::new(&shard.layout, shard.weights.values(), true)).collect();
        let input = PixelInput { cell_px: model.cell_px(), pixels: Pixels::default() };
        let sizes = [16, 8, 24];
        let mut inputs = Vec::new();
        for size in sizes {
            let images = golden.bytes(&format!("{kind}.{size}.images"));
            let tokens = input.tokens(&[&images], size, &Device::flex());
            inputs.push(tokens.with(tokens.x.clone().autodiff()));
        }
        let outputs = forward(&units, &leaves, inputs);
        let mut total = None;
        for (size, group) in sizes.iter().zip(outputs) {
            let x = group.by_sequence();
            golden.assert_tensor(&format!("{kind}.{size}.tokens"), x.clone().inner(), TOLERANCE);
            let weights = golden.tensor::<3>(&format!("{kind}.{size}.weights")).autodiff();
            let term = (x * weights).sum();
            total = Some(add_term(total, term));
        }
        let mut grads = total.unwrap().backward();
        for (shard, leaves) in shards.iter().zip(&leaves) {
            golden.assert_params(&format!("{kind}.grad"), shard, &leaves.gradient(&mut grads), TOLERANCE);
        }
    }
}

#[test]
fn the_projection_head_equals_pytorch() {
    let golden = Golden::open("head");
    let mlp = Mlp { name: "mlp".into(), input: 12, hidden: 10, output: 6, init_std: 0.02 };
    let last = Prototypes {
        name: "last_layer".into(),
        input: 6,
        count: 16,
        lengths: Lengths::Gain,
        frozen_steps: 0,
        warms_moments: false,
    };
    let units: Vec<Box<dyn Unit>> = vec![Box::new(mlp), Box::new(last)];
    let shards = shards(&golden, "param", &units);
    let leaves: Vec<_> =
        shards.iter().map(|shard| Leaves::new(&shard.layout, shard.weights.values(), true)).collect();
    let x = golden.tensor::<2>("x").autodiff().require_grad();
    let logits = forward(&units, &leaves, vec![Tokens::vectors(x.clone())]).remove(0).x;
    golden.assert_tensor("logits", logits.clone().inner(), TOLERANCE);
    let mut grads = (logits * golden.tensor::<2>("weights").autodiff()).sum().backward();
    golden.assert_tensor("grad_x", x.grad(&grads).unwrap(), TOLERANCE);
    for (shard, leaves) in shards.iter().zip(&leaves) {
        golden.assert_params("grad", shard, &leaves.gradient(&mut grads), TOLERANCE);
    }
}
