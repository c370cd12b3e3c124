//! The update by tensor operations, on whatever device the shards lie.

use burn_tensor::Tensor;

use super::runs::joined;
use super::state::{Buffer, UnitShard};
use super::update::{Constants, EPSILON, Update, decay_of};

/// AdamW on `shard`, given this rank's shard of the mean gradient.
pub(super) fn update(shard: &mut UnitShard, grad: Tensor<1>, update: Update) {
    // AdamW::MOMENTS are two.
    let [m, v] = shard.moments.as_mut_slice() else { return };
    // Of a unit with parameters there is a segment; all have the same decay rates.
    let Some(&(_, Constants { beta1, beta2, root, .. })) = update.first() else { return };
    let grad = scaled(grad, &update, |constants| constants.clip);
    m.values = m.values.clone() * beta1 + grad.clone() * (1.0 - beta1);
    v.values = v.values.clone() * beta2 + grad.clone() * grad * (1.0 - beta2);
    let direction = m.values.clone() / (v.values.clone().sqrt() * root + EPSILON);
    let step = scaled(direction, &update, |constants| constants.rate);
    shard.student = scaled(shard.student.clone(), &update, |constants| constants.shrink) - step;
}

/// The followers follow.
pub(super) fn follow(shard: &mut UnitShard, decays: &[(&'static str, f64)]) {
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
        _ => follower.values = follower.values.clone() * stays + student.clone() * rest,
    }
}

/// Every range of `values` times its factor; the padding after the last stays.
fn scaled(values: Tensor<1>, update: &Update, factor: impl Fn(&Constants) -> f32) -> Tensor<1> {
    let [len] = values.dims();
    let mut runs = joined(update.iter().map(|(range, constants)| (range.clone(), factor(constants))));
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
