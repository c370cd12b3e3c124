//! The update by tensor operations, on whatever device the shards lie.

use burn_tensor::Tensor;

use super::clip::joined;
use super::state::UnitShard;
use super::{Constants, EPSILON, Segments};

/// AdamW on `shard`, given this rank's part of the mean gradient; then the teacher follows.
pub(super) fn update(shard: &mut UnitShard, grad: Tensor<1>, segments: Segments, teacher_decay: f64) {
    // Of a unit with parameters there is a segment; all have the same rates.
    let Some(&(_, Constants { beta1, beta2, rate, root, .. })) = segments.first() else { return };
    let grad = scaled(grad, &segments, |constants| constants.clip);
    shard.exp_avg = shard.exp_avg.clone() * beta1 + grad.clone() * (1.0 - beta1);
    shard.exp_avg_sq = shard.exp_avg_sq.clone() * beta2 + grad.clone() * grad * (1.0 - beta2);
    let step = shard.exp_avg.clone() * rate / (shard.exp_avg_sq.clone().sqrt() * root + EPSILON);
    shard.student = scaled(shard.student.clone(), &segments, |constants| constants.keep) - step;
    move_teacher(shard, teacher_decay);
}

/// The teacher follows.
pub(super) fn move_teacher(shard: &mut UnitShard, decay: f64) {
    let (decay, rest) = (decay as f32, (1.0 - decay) as f32);
    shard.teacher = shard.teacher.clone() * decay + shard.student.clone() * rest;
}

/// Every range of `values` times its factor; the padding after the last stays.
fn scaled(values: Tensor<1>, segments: &Segments, factor: impl Fn(&Constants) -> f32) -> Tensor<1> {
    let [len] = values.dims();
    let mut runs = joined(segments.iter().map(|(range, constants)| (range.clone(), factor(constants))));
    let end = runs.last().map_or(0, |(range, _)| range.end);
    if end < len {
        runs.push((end..len, 1.0));
    }
    if let [(_, factor)] = runs[..] {
        return values * factor;
    }
    let part = |(range, factor): (std::ops::Range<usize>, f32)| values.clone().slice([range]) * factor;
    Tensor::cat(runs.into_iter().map(part).collect(), 0)
}
