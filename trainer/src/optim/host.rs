//! The update on the host's memory, in one pass.

use burn_tensor::Tensor;
use multiversion::multiversion;

use super::state::UnitShard;
use super::{Constants, EPSILON, Segments};
use crate::device::host::{on_host, with_slice};

/// AdamW on `shard`, given this rank's part of the mean gradient; then the teacher follows.
pub(super) fn update(shard: &mut UnitShard, grad: &Tensor<1>, segments: Segments, teacher_decay: f64) {
    let UnitShard { student, exp_avg, exp_avg_sq, .. } = shard;
    with_slice(grad, |grad| {
        on_host(student, |student| {
            on_host(exp_avg, |m| {
                on_host(exp_avg_sq, |v| {
                    for (range, constants) in segments {
                        let part = range.clone();
                        adam(
                            constants,
                            &mut student[part.clone()],
                            &mut m[part.clone()],
                            &mut v[part],
                            &grad[range],
                        );
                    }
                });
            });
        });
    });
    move_teacher(shard, teacher_decay);
}

/// The teacher follows.
pub(super) fn move_teacher(shard: &mut UnitShard, decay: f64) {
    let UnitShard { student, teacher, .. } = shard;
    with_slice(student, |student| {
        on_host(teacher, |teacher| average(teacher, student, decay as f32, (1.0 - decay) as f32));
    });
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn adam(c: Constants, param: &mut [f32], m: &mut [f32], v: &mut [f32], grad: &[f32]) {
    for (((param, m), v), grad) in param.iter_mut().zip(m).zip(v).zip(grad) {
        let g = grad * c.clip;
        *m = c.beta1 * *m + (1.0 - c.beta1) * g;
        *v = c.beta2 * *v + (1.0 - c.beta2) * g * g;
        *param = *param * c.keep - c.rate * *m / (v.sqrt() * c.root + EPSILON);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl", "x86_64+avx2"))]
fn average(teacher: &mut [f32], student: &[f32], decay: f32, rest: f32) {
    for (teacher, student) in teacher.iter_mut().zip(student) {
        *teacher = decay * *teacher + rest * student;
    }
}
