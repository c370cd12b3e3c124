//! Cross-entropy between views (Caron et al. 2021, equations 2 and 3).
//!
//! ```text
//! loss   = 1/n · Σ_v Σ_{u≠v} mean_B H(P_v, softmax(S_u / τ))       v over the teacher's views, u over the student's
//! H(p,q) = -Σ_K p · log q                                          n = number of pairs (v, u)
//! ```
//!
//! The cross-entropy is linear in the target, so that each student view is compared once, with the
//! sum of the teacher views that it is paired with.

use burn_tensor::Tensor;
use kernels::ops::{Pairs, add_term, cross_entropy};

/// Returns the loss of groups of student logits `[B, V, K]` against `targets` `[B, V_t, K]`, `[1]`.
/// The first `V_t` views of the first group are the views that the teacher saw. Pairs with views of
/// other groups have the weight `other_weight`; the loss is divided by the number of all pairs,
/// without weights (DINOv3).
pub(crate) fn between_weighted_views(
    student: &[Tensor<3>],
    targets: &Tensor<3>,
    temperature: f64,
    other_weight: f64,
) -> Tensor<1> {
    let [b, n_teacher, _] = targets.dims();
    let mut n_pairs = 0;
    let mut total: Option<Tensor<1>> = None;
    for (i, logits) in student.iter().enumerate() {
        let [_, v, _] = logits.dims();
        let GroupPairs { pairs, n, weight } = GroupPairs::new(i, v, n_teacher, other_weight);
        n_pairs += n;
        let sum = cross_entropy(logits.clone(), targets.clone(), pairs, temperature);
        let sum = if weight == 1.0 { sum } else { sum * weight };
        total = Some(add_term(total, sum));
    }
    // Recipes without views are refused, so that there is at least one group.
    total.expect("at least one group of student views") / (n_pairs * b) as f64
}

/// Pairs of the student's views of a group with those of the teacher.
pub(crate) struct GroupPairs {
    pub(crate) pairs: Pairs,
    /// Number of pairs of an image.
    pub(crate) n: usize,
    /// Weight of a pair.
    pub(crate) weight: f64,
}

impl GroupPairs {
    /// Returns the pairs of group `index`, which has `v` views. The first group contains the
    /// `n_teacher` views of the teacher, which are not paired with themselves.
    pub(crate) fn new(index: usize, v: usize, n_teacher: usize, other_weight: f64) -> Self {
        if index == 0 {
            Self { pairs: Pairs::Others, n: v * n_teacher - n_teacher, weight: 1.0 }
        } else {
            Self { pairs: Pairs::All, n: v * n_teacher, weight: other_weight }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_tensor::{Device, Distribution};
    use kernels::ops::softmax_rows;

    fn softmax(row: &[f64]) -> Vec<f64> {
        let max = row.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = row.iter().map(|v| (v - max).exp()).sum();
        row.iter().map(|v| (v - max).exp() / sum).collect()
    }

    /// Double loop of the reference for one image, in f64.
    fn reference(student: &[Vec<f32>], teacher: &[Vec<f32>], center: &[f32], t_s: f64, t_t: f64) -> f64 {
        let mut total = 0.0;
        let mut n = 0;
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

    fn random(shape: [usize; 3], device: &Device) -> Tensor<3> {
        Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
    }

    /// Returns the logits of view `v` of image `b`.
    fn row_values(t: &Tensor<3>, b: usize, v: usize) -> Vec<f32> {
        t.clone().slice([b..b + 1, v..v + 1]).into_data().try_to_vec::<f32>().expect("f32")
    }

    #[test]
    fn loss_equals_the_double_loop_over_pairs_of_views() {
        let device = Device::flex();
        device.seed(1);
        let b = 3;
        let k = 11;
        let global = random([b, 2, k], &device);
        let local = random([b, 4, k], &device);
        let teacher = random([b, 2, k], &device);
        let center = Tensor::<1>::random([k], Distribution::Normal(0.0, 0.3), &device);
        let center_values = center.clone().into_data().try_to_vec::<f32>().expect("f32");
        let mut expected = 0.0;
        for i in 0..b {
            let mut student: Vec<_> = (0..2).map(|v| row_values(&global, i, v)).collect();
            student.extend((0..4).map(|v| row_values(&local, i, v)));
            let teacher: Vec<_> = (0..2).map(|v| row_values(&teacher, i, v)).collect();
            expected += reference(&student, &teacher, &center_values, 0.1, 0.04) / b as f64;
        }
        let p = softmax_rows(teacher, Some(center), 0.04);
        let student = [global.autodiff(), local.autodiff()];
        let loss = between_weighted_views(&student, &p, 0.1, 1.0).into_scalar::<f32>();
        assert!((f64::from(loss) - expected).abs() < 1e-4 * expected, "{loss} {expected}");
    }
}
