//! Networks that take over weights of another one.
//!
//! ```text
//! θ_F ← d θ_F + (1 - d) θ       d the decay of the follower
//! ```

use burn_tensor::Tensor;
use kernels::device::host::{is_host, on_host, with_slice};
use multiversion::multiversion;

/// A shard that follows another one.
pub struct Follower<'a> {
    /// Its weights.
    pub weights: &'a mut Tensor<1>,
    /// Share of them that stays.
    pub decay: f64,
}

/// Moves all `followers` towards `leader`.
pub(super) fn follow_all(followers: Vec<Follower<'_>>, leader: &Tensor<1>) {
    for follower in followers {
        follow(follower, leader);
    }
}

/// Moves `follower` towards `leader`.
pub(crate) fn follow(Follower { weights, decay }: Follower<'_>, leader: &Tensor<1>) {
    let (stays, rest) = (decay as f32, (1.0 - decay) as f32);
    match decay {
        1.0 => {}
        0.0 => *weights = leader.clone(),
        _ if is_host(leader) => with_slice(leader, |leader| {
            on_host(weights, |weights| average(weights, leader, stays, rest));
        }),
        _ => *weights = weights.clone() * stays + leader.clone() * rest,
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn average(follower: &mut [f32], leader: &[f32], decay: f32, rest: f32) {
    for (follower, leader) in follower.iter_mut().zip(leader) {
        *follower = decay * *follower + rest * leader;
    }
}
