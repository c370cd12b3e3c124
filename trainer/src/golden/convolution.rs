//! Convolutions, batch normalization and convolutional networks (`scripts/golden/convolution.py`).

use burn_tensor::{Device, Tensor};
use kernels::device::host::to_host;
use kernels::ops::{Window, conv, max_pool, normalize};
use networks::backbone::{ModelConfig, Readout};
use networks::batch_norm::BatchNorm;
use networks::draws::Draws;
use networks::layout::UnitLayout;
use networks::leaves::Leaves;
use networks::patches::{PixelInput, Pixels};
use networks::tokens::Tokens;
use networks::unit::{Context, StatSets, Types, Unit};
use ranks::topology::Topology;

use super::names::{uniform, weights};
use super::{Golden, assert_near};
use crate::optim::state::UnitShard;

const TOLERANCE: f32 = 1e-5;

/// Tolerance of the outputs and gradients of a network.
const NETWORK_TOLERANCE: f32 = 1e-4;

/// Returns the names of the tensors of a golden file that begin with `prefix` and end with
/// `suffix`, without both.
fn names_between(golden: &Golden, prefix: &str, suffix: &str) -> Vec<String> {
    let mut names = Vec::new();
    for name in golden.names() {
        if let Some(name) = name.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(suffix)) {
            names.push(name.to_string());
        }
    }
    names
}

#[test]
fn convolutions_equal_pytorch() {
    let golden = Golden::open("convolutions");
    let cases = names_between(&golden, "conv.", ".gx");
    assert_eq!(cases.len(), 8);
    for case in cases {
        let prefix = format!("conv.{case}");
        let sizes: Vec<usize> = case.split('_').map(|size| size.parse().unwrap()).collect();
        let grid = [sizes[1], sizes[2]];
        let window = Window { stride: sizes[8], padding: sizes[9] };
        let x = golden.tensor::<3>(&format!("{prefix}.x")).autodiff().require_grad();
        let weight = golden.tensor::<4>(&format!("{prefix}.weight")).autodiff().require_grad();
        let (y, _) = conv(x.clone(), grid, weight.clone(), window);
        golden.assert_tensor(&format!("{prefix}.y"), y.clone().inner(), TOLERANCE);
        let grads = (y * golden.tensor::<3>(&format!("{prefix}.g")).autodiff()).sum().backward();
        golden.assert_tensor(&format!("{prefix}.gx"), x.grad(&grads).unwrap(), TOLERANCE);
        golden.assert_tensor(&format!("{prefix}.gw"), weight.grad(&grads).unwrap(), TOLERANCE);
    }
    let cases = names_between(&golden, "pool.", ".gx");
    assert_eq!(cases.len(), 3);
    for case in cases {
        let prefix = format!("pool.{case}");
        let sizes: Vec<usize> = case.split('_').map(|size| size.parse().unwrap()).collect();
        let window = Window { stride: sizes[3], padding: sizes[4] };
        let x = golden.tensor::<3>(&format!("{prefix}.x")).autodiff().require_grad();
        let (y, _) = max_pool(x.clone(), [sizes[0], sizes[1]], sizes[2], window);
        golden.assert_tensor(&format!("{prefix}.y"), y.clone().inner(), 0.0);
        let grads = (y * golden.tensor::<3>(&format!("{prefix}.g")).autodiff()).sum().backward();
        golden.assert_tensor(&format!("{prefix}.gx"), x.grad(&grads).unwrap(), TOLERANCE);
    }
}

/// Values, gradients and running statistics of three steps. In the last step one channel is
/// constant: its rounding error is multiplied by 1/√ε, so the tolerance of the input gradient is a
/// tenth, since the running mean is far from the constant.
#[test]
fn batch_normalization_equals_pytorch() {
    let golden = Golden::open("batch_norm");
    let norm = BatchNorm::new("norm", 6);
    let layout = UnitLayout::new("unit", norm.params(), 1);
    let mut flat = vec![0.0; layout.padded];
    for slot in &layout.params {
        let name = slot.spec.name.replace("norm.", "before.");
        flat[slot.range()].copy_from_slice(&golden.values(&name));
    }
    for step in 0..3 {
        let has_constant_channel = step == 2;
        let tolerance = if has_constant_channel { 30.0 * TOLERANCE } else { TOLERANCE };
        let gradient_tolerance = if has_constant_channel { 0.1 } else { TOLERANCE };
        let leaves = Leaves::new(&layout, &Tensor::from_floats(flat.as_slice(), &Device::flex()), true);
        let draws = Draws::default();
        let sets = StatSets::joint(1);
        let cx = Context { leaves: &leaves, draws: &draws, totals: &[], sets: &sets, types: Types::F32 };
        let x = golden.tensor::<3>(&format!("{step}.x")).autodiff().require_grad();
        let (passed, sums) = norm.moments(x.clone(), &cx);
        let y = normalize(passed, norm.affine(Some(sums.clone()), &cx), None, false);
        golden.assert_tensor(&format!("{step}.y"), y.clone().inner(), tolerance);
        let mut grads = (y * golden.tensor::<3>(&format!("{step}.g")).autodiff()).sum().backward();
        let gx = x.grad_remove(&mut grads).unwrap();
        golden.assert_tensor(&format!("{step}.gx"), gx, gradient_tolerance);
        let gradients = to_host(leaves.gradient(&mut grads));
        for (name, golden_name) in [("norm.weight", "gw"), ("norm.bias", "gb")] {
            let range = layout.params[layout.position(name).unwrap()].range();
            let expected = golden.values(&format!("{step}.{golden_name}"));
            assert_near(name, &gradients[range], &expected, tolerance);
        }
        for (name, values) in norm.observe([sums.inner()], &cx) {
            let values = to_host(values.inner_or_self());
            let golden_name = name.replace("norm.", "");
            let expected = golden.values(&format!("{step}.{golden_name}"));
            assert_near(&name, &values, &expected, tolerance);
            flat[layout.params[layout.position(&name).unwrap()].range()].copy_from_slice(&values);
        }
    }
}

/// One value per channel has no variance; outputs and gradients stay finite.
#[test]
fn batch_normalization_of_one_value_per_channel_is_finite() {
    let norm = BatchNorm::new("norm", 6);
    let layout = UnitLayout::new("unit", norm.params(), 1);
    let flat = Tensor::<1>::ones([layout.padded], &Device::flex());
    let leaves = Leaves::new(&layout, &flat, true);
    let draws = Draws::default();
    let sets = StatSets::joint(1);
    let cx = Context { leaves: &leaves, draws: &draws, totals: &[], sets: &sets, types: Types::F32 };
    let x = Tensor::<3>::full([1, 1, 6], 30.1, &Device::flex()).autodiff().require_grad();
    let (passed, sums) = norm.moments(x.clone(), &cx);
    let y = normalize(passed, norm.affine(Some(sums.clone()), &cx), None, false);
    let grads = y.clone().sum().backward();
    for values in [y.inner(), x.grad(&grads).unwrap()] {
        assert!(to_host(values.flatten::<1>(0, 2)).iter().all(|value| value.is_finite()));
    }
    for (name, values) in norm.observe([sums.inner()], &cx) {
        assert!(to_host(values.inner_or_self()).iter().all(|value| value.is_finite()), "{name}");
    }
}

fn images(name: &str, size_px: usize) -> Vec<u8> {
    let color = uniform(&format!("{name}.colors"), 12);
    let noise = uniform(&format!("{name}.noise"), 12 * size_px * size_px);
    let plane = size_px * size_px;
    noise.iter().enumerate().map(|(i, noise)| (color[i / plane] * 160.0 + noise * 95.0) as u8).collect()
}

/// Creates a shard with the weights of the script.
fn golden_shard(unit: &dyn Unit) -> UnitShard {
    let mut shard = UnitShard::init(unit, 0, Topology::SINGLE_RANK, &[], &Device::flex());
    shard.weights = weights(&shard).into();
    shard
}

/// Returns the output of a network, with statistics of the batch or the running ones, and the
/// values that each unit observes.
fn forward(
    units: &[Box<dyn Unit>],
    leaves: &[Leaves<'_>],
    input: Tokens,
    trains: bool,
) -> (Tensor<2>, Vec<(String, Tensor<1>)>) {
    let draws = Draws::default();
    let sets = StatSets::joint(1);
    let mut streams = vec![input];
    let mut observed = Vec::new();
    for (unit, leaves) in units.iter().zip(leaves) {
        let mut stage_sums = vec![Vec::new()];
        for stage in 0..unit.n_stages() {
            let totals = if trains { &stage_sums[stage][..] } else { &[] };
            let cx = Context { leaves, draws: &draws, totals, sets: &sets, types: Types::F32 };
            let output = unit.forward(stage, streams, &cx);
            streams = output.streams;
            stage_sums.push(output.sums);
        }
        let cx = Context { leaves, draws: &draws, totals: &[], sets: &sets, types: Types::F32 };
        if !trains {
            continue;
        }
        for (name, values) in unit.observe(&stage_sums[1..unit.n_stages()], &cx) {
            let has_prefix = !unit.name().starts_with('.');
            let name = if has_prefix { format!("{}.{name}", unit.name()) } else { name };
            observed.push((name, values));
        }
    }
    (streams.remove(0).x, observed)
}

fn resnet(depth: usize, more: &str) -> String {
    format!("arch = 'resnet'\nimage_px = 64\ndepth = {depth}\n{more}")
}

fn regnet(size: &str) -> String {
    format!("arch = 'regnet_y'\nimage_px = 64\nsize = {size}")
}

#[test]
fn networks_equal_torchvision() {
    check_networks(vec![
        ("tiny", 32, regnet("{ depth = 4, w_0 = 16, w_a = 9.0, w_m = 2.0, group_width = 8 }")),
        ("resnet18_small", 32, resnet(18, "stem = 'small'")),
        ("resnet14", 64, resnet(14, "")),
        ("resnet10", 64, resnet(10, "")),
        ("regnet_y_400mf", 64, regnet("'400mf'")),
    ]);
}

#[test]
#[ignore = "minutes"]
fn larger_networks_equal_torchvision() {
    check_networks(vec![
        ("resnet18", 64, resnet(18, "")),
        ("resnet34", 64, resnet(34, "")),
        ("resnet50", 96, resnet(50, "")),
        ("regnet_y_800mf", 64, regnet("'800mf'")),
    ]);
}

/// Compares networks, each with the size of its images and its section of a recipe, with
/// torchvision's.
fn check_networks(networks: Vec<(&str, usize, String)>) {
    let golden = Golden::open("convnets");
    for (name, size_px, recipe) in networks {
        let model: ModelConfig = toml::from_str(&recipe).unwrap();
        let units = model.units(Readout::Pooled);
        let shards: Vec<UnitShard> = units.iter().map(|unit| golden_shard(unit.as_ref())).collect();
        let input = PixelInput { cell_px: 1, pixels: Pixels::default() };
        let input = input.tokens(&[&images(name, size_px)], size_px, &Device::flex());
        let is_tiny = name == "tiny";
        let leaves: Vec<_> =
            shards.iter().map(|shard| Leaves::new(&shard.layout, shard.weights.values(), is_tiny)).collect();
        let input = if is_tiny { input.map(|x| x.clone().autodiff()) } else { input };
        let (evaluated, _) = forward(&units, &leaves, input.clone(), false);
        golden.assert_tensor(&format!("{name}.evaluated"), evaluated.inner_or_self(), NETWORK_TOLERANCE);
        let (trained, observed) = forward(&units, &leaves, input, true);
        golden.assert_tensor(&format!("{name}.trained"), trained.clone().inner_or_self(), NETWORK_TOLERANCE);
        if !is_tiny {
            continue;
        }
        let mut grads = (trained * golden.tensor::<2>("tiny.weights").autodiff()).sum().backward();
        for (shard, leaves) in shards.iter().zip(&leaves) {
            let flat = to_host(leaves.gradient(&mut grads));
            for slot in shard.layout.params.iter().filter(|slot| slot.spec.role.is_trained()) {
                let name = format!("tiny.grad.{}", shard.layout.full_name(slot));
                assert_near(&name, &flat[slot.range()], &golden.values(&name), NETWORK_TOLERANCE);
            }
        }
        for (param, values) in observed {
            let name = format!("tiny.after.{param}");
            assert_near(&name, &to_host(values.inner_or_self()), &golden.values(&name), NETWORK_TOLERANCE);
        }
    }
}

/// Detaches tensors that may have a graph.
trait InnerOrSelf {
    /// Returns the tensor without its graph.
    fn inner_or_self(self) -> Self;
}

impl<const D: usize> InnerOrSelf for Tensor<D> {
    fn inner_or_self(self) -> Self {
        if self.is_autodiff() { self.inner() } else { self }
    }
}
