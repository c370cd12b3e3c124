//! Convolutions, batch normalization and the networks that are made of them
//! (`scripts/golden/convolution.py`).

use burn_tensor::{Device, Tensor};
use kernels::device::host::to_host;
use kernels::ops::{Window, conv, max_pool, normalize};
use networks::backbone::{ModelConfig, Readout};
use networks::batch_norm::BatchNorm;
use networks::draws::Draws;
use networks::features::Features;
use networks::layout::UnitLayout;
use networks::leaves::Leaves;
use networks::patches::{PixelInput, Pixels};
use networks::unit::{Context, StatSets, Types, Unit};
use ranks::topology::Topology;

use super::names::{uniform, weights};
use super::{Golden, assert_near};
use crate::optim::state::UnitShard;

const TOLERANCE: f32 = 1e-5;

/// Tolerance behind a whole network.
const OF_NETWORK: f32 = 1e-4;

/// Returns the names of a golden file's tensors that begin with `begin` and end with `end`, without
/// both.
fn named(golden: &Golden, begin: &str, end: &str) -> Vec<String> {
    golden
        .names()
        .iter()
        .filter_map(|name| Some(name.strip_prefix(begin)?.strip_suffix(end)?.to_string()))
        .collect()
}

#[test]
fn convolutions_equal_pytorch() {
    let golden = Golden::open("convolutions");
    let cases = named(&golden, "conv.", ".gx");
    assert_eq!(cases.len(), 8);
    for case in cases {
        let of = |key: &str| format!("conv.{case}.{key}");
        let sizes: Vec<usize> = case.split('_').map(|size| size.parse().unwrap()).collect();
        let grid = [sizes[1], sizes[2]];
        let window = Window { stride: sizes[8], padding: sizes[9] };
        let x = golden.tensor::<3>(&of("x")).autodiff().require_grad();
        let weight = golden.tensor::<4>(&of("weight")).autodiff().require_grad();
        let (y, _) = conv(x.clone(), grid, weight.clone(), window);
        golden.assert_tensor(&of("y"), y.clone().inner(), TOLERANCE);
        let grads = (y * golden.tensor::<3>(&of("g")).autodiff()).sum().backward();
        golden.assert_tensor(&of("gx"), x.grad(&grads).unwrap(), TOLERANCE);
        golden.assert_tensor(&of("gw"), weight.grad(&grads).unwrap(), TOLERANCE);
    }
    let cases = named(&golden, "pool.", ".gx");
    assert_eq!(cases.len(), 3);
    for case in cases {
        let of = |key: &str| format!("pool.{case}.{key}");
        let sizes: Vec<usize> = case.split('_').map(|size| size.parse().unwrap()).collect();
        let window = Window { stride: sizes[3], padding: sizes[4] };
        let x = golden.tensor::<3>(&of("x")).autodiff().require_grad();
        let (y, _) = max_pool(x.clone(), [sizes[0], sizes[1]], sizes[2], window);
        golden.assert_tensor(&of("y"), y.clone().inner(), 0.0);
        let grads = (y * golden.tensor::<3>(&of("g")).autodiff()).sum().backward();
        golden.assert_tensor(&of("gx"), x.grad(&grads).unwrap(), TOLERANCE);
    }
}

/// Three steps: values, gradients and running statistics. In the last a channel is constant: its
/// rounding is multiplied by 1/√ε, and its gradient is within a tenth while the running mean is far
/// from it.
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
        let of = |key: &str| format!("{step}.{key}");
        let constant = step == 2;
        let tolerance = if constant { 30.0 * TOLERANCE } else { TOLERANCE };
        let of_input = if constant { 0.1 } else { TOLERANCE };
        let leaves = Leaves::new(&layout, &Tensor::from_floats(flat.as_slice(), &Device::flex()), true);
        let draws = Draws::default();
        let sets = StatSets::joint(1);
        let cx = Context { leaves: &leaves, draws: &draws, totals: &[], sets: &sets, types: Types::F32 };
        let x = golden.tensor::<3>(&of("x")).autodiff().require_grad();
        let (passed, sums) = norm.moments(x.clone(), &cx);
        let y = normalize(passed, norm.affine(Some(sums.clone()), &cx), None, false);
        golden.assert_tensor(&of("y"), y.clone().inner(), tolerance);
        let mut grads = (y * golden.tensor::<3>(&of("g")).autodiff()).sum().backward();
        golden.assert_tensor(&of("gx"), x.grad_remove(&mut grads).unwrap(), of_input);
        let of_params = to_host(leaves.gradient(&mut grads));
        for (name, golden_name) in [("norm.weight", "gw"), ("norm.bias", "gb")] {
            let range = layout.params[layout.position(name).unwrap()].range();
            assert_near(name, &of_params[range], &golden.values(&of(golden_name)), tolerance);
        }
        for (name, values) in norm.observe([sums.inner()], &cx) {
            let values = to_host(values.inner_or_self());
            assert_near(&name, &values, &golden.values(&of(&name.replace("norm.", ""))), tolerance);
            flat[layout.params[layout.position(&name).unwrap()].range()].copy_from_slice(&values);
        }
    }
}

/// One value per channel has no variance; outputs and gradients stay finite.
#[test]
fn one_value_a_channel_stays_finite() {
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

/// A unit's shard with the weights that the script gives networks.
fn filled(unit: &dyn Unit) -> UnitShard {
    let mut shard = UnitShard::init(unit, 0, Topology::SINGLE_RANK, &[], &Device::flex());
    shard.weights = weights(&shard).into();
    shard
}

/// Returns the output of a network, with statistics of the batch or the running ones, and the
/// values that each unit observes.
fn through(
    units: &[Box<dyn Unit>],
    leaves: &[Leaves<'_>],
    input: Features,
    trains: bool,
) -> (Tensor<2>, Vec<(String, Tensor<1>)>) {
    let draws = Draws::default();
    let sets = StatSets::joint(1);
    let mut groups = vec![input];
    let mut observed = Vec::new();
    for (unit, leaves) in units.iter().zip(leaves) {
        let mut given = vec![Vec::new()];
        for stage in 0..unit.n_stages() {
            let totals = if trains { &given[stage][..] } else { &[] };
            let cx = Context { leaves, draws: &draws, totals, sets: &sets, types: Types::F32 };
            let output = unit.forward(stage, groups, &cx);
            groups = output.features;
            given.push(output.sums);
        }
        let cx = Context { leaves, draws: &draws, totals: &[], sets: &sets, types: Types::F32 };
        let stages: Vec<Vec<Tensor<1>>> = given[1..unit.n_stages()].to_vec();
        let prefix = |name: String| match unit.name() {
            name_of_unit if name_of_unit.starts_with('.') => name,
            name_of_unit => format!("{name_of_unit}.{name}"),
        };
        if trains {
            observed
                .extend(unit.observe(&stages, &cx).into_iter().map(|(name, values)| (prefix(name), values)));
        }
    }
    (groups.remove(0).x.squeeze_dim::<2>(1), observed)
}

#[test]
fn networks_equal_torchvision() {
    let golden = Golden::open("convnets");
    let resnet =
        |depth: usize, more: &str| format!("arch = 'resnet'\nimage_px = 64\ndepth = {depth}\n{more}");
    let regnet = |size: &str| format!("arch = 'regnet_y'\nimage_px = 64\nsize = {size}");
    let mut networks = vec![
        ("tiny", 32, regnet("{ depth = 4, w_0 = 16, w_a = 9.0, w_m = 2.0, group_width = 8 }")),
        ("resnet18_small", 32, resnet(18, "stem = 'small'")),
        ("resnet14", 64, resnet(14, "")),
        ("resnet10", 64, resnet(10, "")),
        ("regnet_y_400mf", 64, regnet("'400mf'")),
    ];
    if std::env::var_os("RUN_SLOW_TESTS").is_some() {
        networks.extend([18, 34, 50].map(|depth| match depth {
            18 => ("resnet18", 64, resnet(18, "")),
            34 => ("resnet34", 64, resnet(34, "")),
            _ => ("resnet50", 96, resnet(50, "")),
        }));
        networks.push(("regnet_y_800mf", 64, regnet("'800mf'")));
    }
    for (name, size_px, recipe) in networks {
        let model: ModelConfig = toml::from_str(&recipe).unwrap();
        let units = model.units(Readout::Pooled);
        let shards: Vec<UnitShard> = units.iter().map(|unit| filled(unit.as_ref())).collect();
        let input = PixelInput { cell_px: 1, pixels: Pixels::default() };
        let input = input.features(&[&images(name, size_px)], size_px, &Device::flex());
        let is_tiny = name == "tiny";
        let leaves: Vec<_> =
            shards.iter().map(|shard| Leaves::new(&shard.layout, shard.weights.values(), is_tiny)).collect();
        let input = if is_tiny { input.map(|x| x.clone().autodiff()) } else { input };
        let (evaluated, _) = through(&units, &leaves, input.clone(), false);
        golden.assert_tensor(&format!("{name}.evaluated"), evaluated.inner_or_self(), OF_NETWORK);
        let (trained, observed) = through(&units, &leaves, input, true);
        golden.assert_tensor(&format!("{name}.trained"), trained.clone().inner_or_self(), OF_NETWORK);
        if !is_tiny {
            continue;
        }
        let mut grads = (trained * golden.tensor::<2>("tiny.weights").autodiff()).sum().backward();
        for (shard, leaves) in shards.iter().zip(&leaves) {
            let flat = to_host(leaves.gradient(&mut grads));
            for slot in shard.layout.params.iter().filter(|slot| slot.spec.role.is_trained()) {
                let name = format!("tiny.grad.{}", shard.layout.full_name(slot));
                assert_near(&name, &flat[slot.range()], &golden.values(&name), OF_NETWORK);
            }
        }
        for (param, values) in observed {
            let name = format!("tiny.after.{param}");
            assert_near(&name, &to_host(values.inner_or_self()), &golden.values(&name), OF_NETWORK);
        }
    }
}

/// The value of a tensor, without its graph if it has one.
trait InnerOrSelf {
    fn inner_or_self(self) -> Self;
}

impl<const D: usize> InnerOrSelf for Tensor<D> {
    fn inner_or_self(self) -> Self {
        if self.is_autodiff() { self.inner() } else { self }
    }
}
