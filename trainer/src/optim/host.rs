//! The update on the host's memory, in one pass.

use burn_tensor::Tensor;
use multiversion::multiversion;

use super::state::UnitShard;
use super::update::{Constants, EPSILON, Update, decay_of};
use crate::device::host::{on_host, with_slice};

/// AdamW on `shard`, given this rank's shard of the mean gradient.
pub(super) fn update(shard: &mut UnitShard, grad: &Tensor<1>, update: Update) {
    let UnitShard { student, moments, .. } = shard;
    // AdamW::MOMENTS are two.
    let [m, v] = moments.as_mut_slice() else { return };
    with_slice(grad, |grad| {
        on_host(student, |student| {
            on_host(&mut m.values, |m| {
                on_host(&mut v.values, |v| {
                    for (range, constants) in update {
                        let [student, m, v] =
                            [&mut *student, &mut *m, &mut *v].map(|values| &mut values[range.clone()]);
                        adam(constants, student, m, v, &grad[range]);
                    }
                });
            });
        });
    });
}

/// The followers follow.
pub(super) fn follow(shard: &mut UnitShard, decays: &[(&'static str, f64)]) {
    let UnitShard { student, followers, .. } = shard;
    for follower in followers {
        let decay = decay_of(decays, follower.name);
        match decay {
            1.0 => {}
            0.0 => follower.values = student.clone(),
            _ => with_slice(student, |student| {
                let rest = (1.0 - decay) as f32;
                on_host(&mut follower.values, |values| average(values, student, decay as f32, rest));
            }),
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn adam(c: Constants, param: &mut [f32], m: &mut [f32], v: &mut [f32], grad: &[f32]) {
    for (((param, m), v), grad) in param.iter_mut().zip(m).zip(v).zip(grad) {
        let g = grad * c.clip;
        *m = c.beta1 * *m + (1.0 - c.beta1) * g;
        *v = c.beta2 * *v + (1.0 - c.beta2) * g * g;
        *param = *param * c.shrink - c.rate * *m / (v.sqrt() * c.root + EPSILON);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn average(follower: &mut [f32], student: &[f32], decay: f32, rest: f32) {
    for (follower, student) in follower.iter_mut().zip(student) {
        *follower = decay * *follower + rest * student;
    }
}
