//! The followers of a student, which move with it.
//!
//! ```text
//! θ_F ← d θ_F + (1 - d) θ       for every follower, d its decay
//! ```

use burn_tensor::Tensor;
use kernels::device::host::{is_host, on_host, with_slice};
use multiversion::multiversion;

use super::state::{Buffer, UnitShard};

/// Decays of followers, by name.
pub(super) type Decays<'a> = [(&'static str, f64)];

/// The decay of the follower `name`.
pub(super) fn decay_of(decays: &Decays<'_>, name: &str) -> f64 {
    // Shards are made for the followers that the method lists, and so are the decays.
    decays.iter().find(|(of, _)| *of == name).map_or(1.0, |(_, decay)| *decay)
}

/// The followers follow.
pub(super) fn follow(shard: &mut UnitShard, decays: &Decays<'_>) {
    for follower in &mut shard.followers {
        follow_one(follower, &shard.student, decay_of(decays, follower.name));
    }
}

/// One of them follows.
pub(super) fn follow_one(follower: &mut Buffer, student: &Tensor<1>, decay: f64) {
    let (stays, rest) = (decay as f32, (1.0 - decay) as f32);
    match decay {
        1.0 => {}
        0.0 => follower.values = student.clone(),
        _ if is_host(student) => with_slice(student, |student| {
            on_host(&mut follower.values, |values| average(values, student, stays, rest));
        }),
        _ => follower.values = follower.values.clone() * stays + student.clone() * rest,
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn average(follower: &mut [f32], student: &[f32], decay: f32, rest: f32) {
    for (follower, student) in follower.iter_mut().zip(student) {
        *follower = decay * *follower + rest * student;
    }
}
