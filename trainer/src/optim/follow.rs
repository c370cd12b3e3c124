//! Followers: networks whose weights are a moving average or a copy of those of another network.
//!
//! ```text
//! θ_F ← d θ_F + (1 - d) θ       d the decay of the follower
//! ```

use kernels::device::host::{is_host, on_host, with_slice};
use multiversion::multiversion;

use super::weights::ShardWeights;

/// A shard of a follower.
pub struct Follower<'a> {
    /// Weights of the shard.
    pub weights: &'a mut ShardWeights,
    /// Factor of the previous weights, d.
    pub decay: f64,
    /// Whether the weights are also rounded to bf16, by an update that supports it.
    pub is_rounded: bool,
}

/// Updates all `followers` from the weights `leader`.
pub(super) fn follow_all(followers: Vec<Follower<'_>>, leader: &ShardWeights) {
    for follower in followers {
        follow(follower, leader);
    }
}

/// Updates `follower` from the weights `leader`.
pub(crate) fn follow(Follower { weights, decay, .. }: Follower<'_>, leader: &ShardWeights) {
    let factor = decay as f32;
    let rest = (1.0 - decay) as f32;
    match decay {
        1.0 => {}
        0.0 => *weights = leader.clone(),
        _ if is_host(leader.values()) => with_slice(leader.values(), |leader| {
            on_host(weights.values_mut(), |weights| average(weights, leader, factor, rest));
        }),
        _ => *weights = (weights.values().clone() * factor + leader.values().clone() * rest).into(),
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
pub(super) fn average(follower: &mut [f32], leader: &[f32], decay: f32, rest: f32) {
    for (follower, leader) in follower.iter_mut().zip(leader) {
        *follower = decay * *follower + rest * leader;
    }
}
