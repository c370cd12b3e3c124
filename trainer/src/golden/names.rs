//! Numbers that are a function of names, and therefore are not stored: `uniform` and `fill` of the
//! scripts.

use burn_tensor::{Device, Tensor};
use networks::init::fill;
use networks::params::Init;

use crate::optim::state::UnitShard;

/// Returns `n` numbers in 0..1 that depend only on the name and their position: SplitMix64 from the
/// FNV-1a hash of the name.
pub(super) fn uniform(name: &str, n: usize) -> Vec<f64> {
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325, |seed: u64, byte: u8| {
        (seed ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    (1..=n as u64)
        .map(|i: u64| {
            let z = seed.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) >> 40) as f64 / f64::from(1u32 << 24)
        })
        .collect()
}

/// Returns the weights of the scripts for the parameters of `shard`. The gain of a
/// weight-normalized layer is one.
pub(super) fn weights(shard: &UnitShard) -> Tensor<1> {
    let mut flat = vec![0.0; shard.layout.padded];
    for slot in &shard.layout.params {
        if matches!(slot.spec.init, Init::SinCos { .. }) {
            // The official code has the same formula.
            fill(slot.spec.init, 0, "", 0, &mut flat[slot.range()]);
            continue;
        }
        let name = shard.layout.full_name(slot);
        let shape = &slot.spec.shape;
        let bound = (6.0 / shape[1..].iter().product::<usize>() as f64).sqrt();
        let numbers = uniform(&name, slot.spec.numel());
        for (value, number) in flat[slot.range()].iter_mut().zip(numbers) {
            let number = if name.ends_with("weight_g") {
                1.0
            } else if shape.len() > 1 {
                (number * 2.0 - 1.0) * bound
            } else if name.ends_with("running_var") || name.ends_with("weight") {
                number + 0.5
            } else {
                number * 0.2 - 0.1
            };
            *value = number as f32;
        }
    }
    Tensor::from_floats(flat.as_slice(), &Device::flex())
}
