//! The DINO loss (Caron et al. 2021, equations 1 to 4).
//!
//! ```text
//! P_t(v) = softmax((T_v - c) / τ_t)              v over the global views, no gradient
//! loss   = 1/n · Σ_v Σ_{u≠v} mean_B H(P_t(v), softmax(S_u / τ_s))
//! H(p,q) = -Σ_K p · log q                        n = number of pairs (v, u)
//! c      ← m · c + (1 - m) · mean_{B,v} T_v
//! ```
//!
//! The cross-entropy is linear in the target, so that each student view is scored once, against
//! the sum of the teacher views that it is paired with.

use burn_tensor::{Tensor, activation};

use crate::comm::engine::EngineError;
use crate::comm::peers::Peers;

/// Teacher probabilities of `logits` `[B, V, K]`, given `center` `[K]`.
pub fn targets(logits: Tensor<3>, center: Tensor<1>, teacher_temp: f64) -> Tensor<3> {
    activation::softmax((logits - center.unsqueeze()) / teacher_temp, 2)
}

/// Teacher probabilities by Sinkhorn and Knopp (Caron et al. 2020; DINOv2): rows are images' views and sum
/// to one, and every prototype gets the same share of the whole batch. `parts` are this rank's parts of it,
/// `[B / N, V, K]` each.
///
/// ```text
/// Q = exp((T - max T) / τ_t);  n_iterations times:  columns to sum B·V / K, then rows to sum 1
/// ```
///
/// # Errors
/// [`EngineError`].
pub fn sinkhorn_targets(
    parts: &[Tensor<3>],
    teacher_temp: f64,
    n_iterations: usize,
    peers: Peers<'_>,
) -> Result<Vec<Tensor<3>>, EngineError> {
    let [b, v, k] = parts[0].dims();
    let n_rows = b * v * peers.n_parts();
    // One maximum for all rows: the largest entry is 1, nothing overflows, and a row whose entries
    // all vanish is kept from dividing by zero by the floor.
    let largest: Vec<Tensor<1>> = parts.iter().map(|part| part.clone().max()).collect();
    let max = peers.max("sinkhorn", largest)?.unsqueeze::<2>();
    let start = |part: &Tensor<3>| {
        ((part.clone().reshape([b * v, k]) - max.clone()) / teacher_temp).exp().clamp_min(1e-30)
    };
    let mut parts: Vec<Tensor<2>> = parts.iter().map(start).collect();
    for _ in 0..n_iterations {
        let columns: Vec<Tensor<1>> = parts.iter().map(|q| q.clone().sum_dim(0).reshape([k])).collect();
        let columns = peers.sum("sinkhorn", &columns)? * (k as f64 / n_rows as f64);
        for q in &mut parts {
            let balanced = q.clone() / columns.clone().unsqueeze();
            let sums = balanced.clone().sum_dim(1);
            *q = balanced / sums;
        }
    }
    Ok(parts.into_iter().map(|q| q.reshape([b, v, k])).collect())
}

/// The loss of groups of student logits `[B, V, K]` against `targets` `[B, V_t, K]`. The first
/// `V_t` views of the first group are the views that the teacher saw.
pub fn loss(student: &[Tensor<3>], targets: &Tensor<3>, student_temp: f64) -> Tensor<1> {
    let [b, n_teacher, k] = targets.dims();
    let all = targets.clone().sum_dim(1);
    let mut total: Option<Tensor<1>> = None;
    let mut n_pairs = 0;
    for (i, logits) in student.iter().enumerate() {
        let [_, v, _] = logits.dims();
        let log_probs = activation::log_softmax(logits.clone() / student_temp, 2);
        let wanted = match i {
            0 => {
                n_pairs += v * n_teacher - n_teacher;
                others(&all, targets, v)
            }
            _ => {
                n_pairs += v * n_teacher;
                all.clone().expand([b, v, k])
            }
        };
        let sum = -(log_probs * wanted.autodiff()).sum();
        total = Some(match total {
            Some(total) => total + sum,
            None => sum,
        });
    }
    // Every method has at least one group of views; an empty one was refused with the recipe.
    total.expect("at least one group of student views") / (n_pairs * b) as f64
}

/// For each of `v` student views the sum of the teacher's other views, `[B, V, K]`.
fn others(all: &Tensor<3>, targets: &Tensor<3>, v: usize) -> Tensor<3> {
    let [b, n_teacher, k] = targets.dims();
    let own = all.clone().expand([b, n_teacher, k]) - targets.clone();
    match v - n_teacher {
        0 => own,
        rest => Tensor::cat(vec![own, all.clone().expand([b, rest, k])], 1),
    }
}

/// Mean teacher logits over the whole batch and its views, `[K]`, of which `parts` are this rank's.
///
/// # Errors
/// [`EngineError`].
pub fn batch_center(parts: &[Tensor<3>], peers: Peers<'_>) -> Result<Tensor<1>, EngineError> {
    let [b, v, k] = parts[0].dims();
    let sums: Vec<Tensor<1>> =
        parts.iter().map(|part| part.clone().reshape([b * v, k]).sum_dim(0).reshape([k])).collect();
    Ok(peers.sum("center", &sums)? / (b * v * peers.n_parts()) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::communicator::Comm;
    use burn_tensor::{Device, Distribution};

    /// The double loop of the reference, in f64.
    fn reference(student: &[Vec<f32>], teacher: &[Vec<f32>], center: &[f32], t_s: f64, t_t: f64) -> f64 {
        let softmax = |row: &[f64]| {
            let max = row.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = row.iter().map(|v| (v - max).exp()).sum();
            row.iter().map(|v| (v - max).exp() / sum).collect::<Vec<_>>()
        };
        let (mut total, mut n) = (0.0, 0);
        for (iv, t) in teacher.iter().enumerate() {
            let t: Vec<f64> =
                t.iter().zip(center).map(|(t, c)| (f64::from(*t) - f64::from(*c)) / t_t).collect();
            let p = softmax(&t);
            for (iu, s) in student.iter().enumerate() {
                if iu == iv {
                    continue;
                }
                let q = softmax(&s.iter().map(|s| f64::from(*s) / t_s).collect::<Vec<_>>());
                total -= p.iter().zip(&q).map(|(p, q)| p * q.ln()).sum::<f64>();
                n += 1;
            }
        }
        total / f64::from(n)
    }

    /// Rows sum to one exactly, columns nearly to their equal share, and what a row prefers it keeps.
    #[test]
    fn sinkhorn_balances_the_prototypes() {
        let device = Device::flex();
        device.seed(2);
        let logits = Tensor::<3>::random([32, 2, 8], Distribution::Normal(0.0, 1.0), &device);
        // One prototype that everybody prefers: a softmax would give it nearly all.
        let bias = Tensor::<1>::from_floats([3.0, 0., 0., 0., 0., 0., 0., 0.], &device);
        let comm = Comm::solo();
        let logits = logits + bias.unsqueeze();
        let q = sinkhorn_targets(&[logits], 0.5, 20, Peers::new(&comm, 1)).expect("one rank");
        let q = q[0].clone().reshape([64, 8]);
        let columns = q.clone().sum_dim(0).into_data().try_to_vec::<f32>().expect("f32");
        let rows = q.sum_dim(1).into_data().try_to_vec::<f32>().expect("f32");
        assert!(rows.iter().all(|sum| (sum - 1.0).abs() < 1e-5), "{rows:?}");
        assert!(columns.iter().all(|sum| (sum - 8.0).abs() < 0.1), "{columns:?}");
    }

    #[test]
    fn it_equals_the_double_loop() {
        let device = Device::flex();
        device.seed(1);
        let (b, k) = (3, 11);
        let random = |v| Tensor::<3>::random([b, v, k], Distribution::Normal(0.0, 1.0), &device);
        let (global, local, teacher) = (random(2), random(4), random(2));
        let center = Tensor::<1>::random([k], Distribution::Normal(0.0, 0.3), &device);
        let row = |t: &Tensor<3>, b: usize, v: usize| {
            t.clone().slice([b..b + 1, v..v + 1]).into_data().try_to_vec::<f32>().expect("f32")
        };
        let center_values = center.clone().into_data().try_to_vec::<f32>().expect("f32");
        let mut expected = 0.0;
        for i in 0..b {
            let mut student: Vec<_> = (0..2).map(|v| row(&global, i, v)).collect();
            student.extend((0..4).map(|v| row(&local, i, v)));
            let teacher: Vec<_> = (0..2).map(|v| row(&teacher, i, v)).collect();
            expected += reference(&student, &teacher, &center_values, 0.1, 0.04) / b as f64;
        }
        let p = targets(teacher, center, 0.04);
        let got = loss(&[global.autodiff(), local.autodiff()], &p, 0.1).into_scalar::<f32>();
        assert!((f64::from(got) - expected).abs() < 1e-4 * expected, "{got} {expected}");
    }
}
