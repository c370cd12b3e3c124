//! The KoLeo regularizer (Sablayrolles et al. 2019; DINOv2, section 4): embeddings of a batch keep
//! away from one another, so that they spread over the sphere.
//!
//! ```text
//! x̂ᵢ = xᵢ / |xᵢ|      n(i) = argmax_{j≠i} x̂ᵢ · x̂ⱼ          no gradient through the choice
//! koleo(x) = -1/B · Σᵢ log(|x̂ᵢ - x̂ₙ₍ᵢ₎| + ε)              ε = 1e-8
//! ```

use burn::tensor::Tensor;

/// Keeps norms and the logarithm finite, as in DINOv2.
const EPSILON: f64 = 1e-8;

/// The regularizer summed over the views of `embeddings` `[B, V, D]`, each view among its own kind,
/// `[1]`. It is zero for a batch of one, which has no neighbor.
pub fn koleo(embeddings: Tensor<3>) -> Tensor<1> {
    let [b, v, d] = embeddings.dims();
    let view = |i: usize| embeddings.clone().slice([0..b, i..i + 1, 0..d]).reshape([b, d]);
    if b < 2 {
        return Tensor::zeros([1], &embeddings.device());
    }
    (1..v).fold(koleo_of_view(view(0)), |sum, i| sum + koleo_of_view(view(i)))
}

fn koleo_of_view(x: Tensor<2>) -> Tensor<1> {
    let [b, d] = x.dims();
    let norm = (x.clone().powi_scalar(2).sum_dim(1) + EPSILON * EPSILON).sqrt();
    let x = x / norm;
    let plain = x.clone().inner();
    let itself = Tensor::<2>::eye(b, &plain.device());
    // Cosines lie in -1..=1, so that taking 3 from the diagonal keeps an image from choosing itself.
    let nearest = (plain.clone().matmul(plain.transpose()) - itself * 3.0).argmax(1).reshape([b]);
    let gap = x.clone() - x.select(0, nearest);
    // The square root's slope is infinite at zero: duplicates are held off by ε before it.
    let distance = (gap.powi_scalar(2).sum_dim(1) + d as f64 * EPSILON * EPSILON).sqrt();
    -(distance + EPSILON).log().mean()
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};

    fn of(values: &[f32], shape: [usize; 3]) -> Tensor<3> {
        Tensor::from_data(TensorData::new(values.to_vec(), shape), &Device::flex()).autodiff().require_grad()
    }

    /// Four points of the circle, whose distances are known: 0 and 60 degrees are neighbors, 180
    /// degrees and 210 as well.
    #[test]
    fn it_equals_the_formula() {
        let at = |degrees: f32| [3.0 * degrees.to_radians().cos(), 3.0 * degrees.to_radians().sin()];
        let points: Vec<f32> = [0.0, 60.0, 180.0, 210.0].into_iter().flat_map(at).collect();
        let got = koleo(of(&points, [4, 1, 2])).into_scalar::<f32>();
        let chord = |degrees: f64| 2.0 * (degrees.to_radians() / 2.0).sin();
        let expected = -(2.0 * chord(60.0).ln() + 2.0 * chord(30.0).ln()) / 4.0;
        assert!((f64::from(got) - expected).abs() < 1e-6, "{got} {expected}");
    }

    #[test]
    fn views_are_scored_apart_and_summed() {
        let values = [1.0, 0.0, 0.3, 0.2, 0.0, 1.0, -0.7, 0.1, 0.5, 0.6, 0.2, 0.9];
        let x = of(&values, [3, 2, 2]);
        let view = |i: usize| x.clone().slice([0..3, i..i + 1, 0..2]);
        let both = koleo(x.clone()).into_scalar::<f32>();
        let apart = koleo(view(0)).into_scalar::<f32>() + koleo(view(1)).into_scalar::<f32>();
        assert!((both - apart).abs() < 1e-6);
    }

    /// Duplicates and a batch of one made the reference infinite or NaN (DINOv2's issue 143).
    #[test]
    fn duplicates_and_a_single_image_stay_finite() {
        for x in [of(&[0.4, 0.2, 0.4, 0.2, 0.4, 0.2], [3, 1, 2]), of(&[1.0, 2.0], [1, 1, 2])] {
            let loss = koleo(x.clone());
            assert!(loss.clone().into_scalar::<f32>().is_finite());
            if x.dims()[0] > 1 {
                let grads = loss.backward();
                let grad = x.grad(&grads).expect("a gradient").into_data().try_to_vec::<f32>().expect("f32");
                assert!(grad.iter().all(|g| g.is_finite()), "{grad:?}");
            }
        }
    }
}
