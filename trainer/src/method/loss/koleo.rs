//! The KoLeo regularizer (Sablayrolles et al. 2019; DINOv2, section 4), which maximizes distances
//! between the embeddings of a batch, so that they spread over the sphere.
//!
//! ```text
//! x̂ᵢ = xᵢ / |xᵢ|      n(i) = argmax_{j≠i} x̂ᵢ · x̂ⱼ          no gradient through the choice
//! koleo(x) = -1/B · Σᵢ log(|x̂ᵢ - x̂ₙ₍ᵢ₎| + ε)              ε = 1e-8
//! ```
//!
//! Neighbors are searched in the global batch, or in groups of consecutive images.

use burn_tensor::{Tensor, TensorData};
use kernels::device::readback::failure;
use kernels::ops::{log_distances, matmul, total, unit_rows};
use networks::outputs::Outputs;
use ranks::EngineError;
use ranks::peers::Peers;

use crate::method::Collective;

/// Keeps norms and the logarithm finite, as in DINOv2.
const EPSILON: f64 = 1e-8;

/// Number of images whose neighbors are searched at a time. All at once would take several matrices
/// of B² numbers.
const ROWS: usize = 512;

/// Nearest neighbors in the global batch, for one kind of view.
pub(crate) struct Neighbors {
    /// Directions of all images, `[B, D]`, without a graph.
    directions: Tensor<2>,
    /// Nearest other image of each image.
    nearest: Vec<usize>,
    /// Number of consecutive images among which neighbors are searched.
    group_size: usize,
}

/// Normalizes the rows of `x` `[B, D]` to length one.
pub(crate) fn directions(x: Tensor<2>) -> Tensor<2> {
    unit_rows(x, EPSILON * EPSILON)
}

/// Returns view `i`, `[B, D]`, of embeddings `[B, V, D]`.
pub(crate) fn view(embeddings: &Tensor<3>, i: usize) -> Tensor<2> {
    let [b, _, d] = embeddings.dims();
    embeddings.clone().slice([0..b, i..i + 1, 0..d]).reshape([b, d])
}

/// Finds the neighbors in the global batch for each view of the first size, in groups of
/// `group_size` images; 0 for the global batch.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn neighbors_by_view(
    outputs: &[Outputs],
    group_size: usize,
    peers: Peers<'_>,
) -> Result<Vec<Neighbors>, EngineError> {
    let globals: Vec<Tensor<3>> = outputs.iter().map(|outputs| outputs.pooled(0)).collect();
    let [_, v, _] = globals[0].dims();
    let mut neighbors = Vec::with_capacity(v);
    for i in 0..v {
        let rows: Vec<Tensor<2>> = globals.iter().map(|embeddings| directions(view(embeddings, i))).collect();
        let all = peers.gather("neighbors", &rows)?;
        let [batch_size, _] = all.dims();
        neighbors.push(Neighbors::new(all, if group_size == 0 { batch_size } else { group_size })?);
    }
    Ok(neighbors)
}

/// Returns the collectives of [`neighbors_by_view`] for `n_views` embeddings of `d` channels of
/// each image.
pub(crate) fn collectives(n_views: usize, d: usize) -> Vec<Collective> {
    vec![Collective::Gather(d); n_views]
}

impl Neighbors {
    /// Finds the neighbors among `directions` `[B, D]` of the global batch, without a graph, in
    /// groups of `group_size` consecutive images.
    ///
    /// # Errors
    /// [`EngineError::Device`] when the device has failed.
    pub(crate) fn new(directions: Tensor<2>, group_size: usize) -> Result<Self, EngineError> {
        let [b, d] = directions.dims();
        let mut nearest = Vec::with_capacity(b);
        for group in (0..b).step_by(group_size) {
            let size = group_size.min(b - group);
            let all = directions.clone().slice([group..group + size, 0..d]).transpose();
            for start in (group..group + size).step_by(ROWS) {
                let n = ROWS.min(group + size - start);
                // Cosines lie in -1..=1: subtracting 3 from that of an image with itself excludes
                // it.
                let mut diagonal = vec![0.0f32; n * size];
                for row in 0..n {
                    diagonal[row * size + start - group + row] = 3.0;
                }
                let diagonal = TensorData::new(diagonal, [n, size]);
                let diagonal = Tensor::<2>::from_data(diagonal, &directions.device());
                let rows = directions.clone().slice([start..start + n, 0..d]);
                let indices = (matmul(rows, all.clone()) - diagonal).argmax(1).reshape([n]).try_into_data();
                let indices = indices.map_err(|error| failure(&error))?;
                nearest.extend(indices.iter::<i64>().map(|i| group + i as usize));
            }
        }
        Ok(Self { directions, nearest, group_size })
    }

    /// Returns the regularizer of one micro-batch, `[1]`, given the embeddings `x` `[b, D]` of the
    /// images at `positions`, with a graph. Zero for groups of one image, which has no neighbor.
    ///
    /// The value is the mean over the micro-batch. The gradient is the gradient of the sum over the
    /// global batch, divided by b: it includes the terms of images of other micro-batches whose
    /// neighbors are images of this one.
    pub(crate) fn koleo(&self, x: Tensor<2>, positions: &[usize]) -> Tensor<1> {
        let [b, _] = x.dims();
        if self.nearest.len() < 2 || self.group_size < 2 {
            return Tensor::zeros([1], &x.device());
        }
        let mut pairs: Vec<[usize; 2]> =
            positions.iter().enumerate().map(|(row, position)| [row, self.nearest[*position]]).collect();
        for (row, position) in positions.iter().enumerate() {
            let reverse_neighbors = (0..self.nearest.len()).filter(|i| self.nearest[*i] == *position);
            pairs.extend(reverse_neighbors.map(|i| [row, i]));
        }
        let logs = log_distances(directions(x), self.directions.clone(), pairs, EPSILON);
        // The value is the sum over the images of the micro-batch, the first b terms. The other
        // terms are part of the value in their own micro-batch, and only add to the gradient here.
        let values = logs.clone().inner();
        let value = total(values.clone().slice(0..b)).autodiff();
        let detached = total(values).autodiff();
        -(value + (total(logs) - detached)) / b as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_tensor::Device;

    /// Returns the regularizer of one view of a batch, `[B, D]`, without groups, `[1]`.
    fn view_koleo(x: Tensor<2>) -> Tensor<1> {
        let [b, _] = x.dims();
        let positions: Vec<usize> = (0..b).collect();
        Neighbors::new(directions(x.clone().inner()), b).unwrap().koleo(x, &positions)
    }

    /// Returns the sum of the regularizers of the views of `embeddings` `[B, V, D]`, `[1]`.
    fn koleo(embeddings: Tensor<3>) -> Tensor<1> {
        let [_, v, _] = embeddings.dims();
        let first = view_koleo(view(&embeddings, 0));
        (1..v).fold(first, |sum, i| sum + view_koleo(view(&embeddings, i)))
    }

    /// Returns the distance between points of the unit circle.
    fn chord(degrees: f64) -> f64 {
        2.0 * (degrees.to_radians() / 2.0).sin()
    }

    fn tracked_tensor(values: &[f32], shape: [usize; 3]) -> Tensor<3> {
        Tensor::from_data(TensorData::new(values.to_vec(), shape), &Device::flex()).autodiff().require_grad()
    }

    /// Four points of the circle: those at 0 and 60 degrees are neighbors, as are those at 180 and
    /// 210 degrees.
    #[test]
    fn value_equals_the_formula_for_points_of_the_circle() {
        let points: Vec<f32> = [0.0, 60.0, 180.0, 210.0]
            .into_iter()
            .flat_map(|degrees: f32| [3.0 * degrees.to_radians().cos(), 3.0 * degrees.to_radians().sin()])
            .collect();
        let value = koleo(tracked_tensor(&points, [4, 1, 2])).into_scalar::<f32>();
        let expected = -(2.0 * chord(60.0).ln() + 2.0 * chord(30.0).ln()) / 4.0;
        assert!((f64::from(value) - expected).abs() < 1e-6, "{value} {expected}");
    }

    #[test]
    fn views_are_regularized_separately_and_summed() {
        let values = [1.0, 0.0, 0.3, 0.2, 0.0, 1.0, -0.7, 0.1, 0.5, 0.6, 0.2, 0.9];
        let x = tracked_tensor(&values, [3, 2, 2]);
        let joint = koleo(x.clone()).into_scalar::<f32>();
        let [first, second] =
            [0, 1].map(|i| koleo(x.clone().slice([0..3, i..i + 1, 0..2])).into_scalar::<f32>());
        assert!((joint - (first + second)).abs() < 1e-6);
    }

    /// Neighbors are searched within groups, so that the sum over groups is that over separate
    /// batches.
    #[test]
    fn groups_equal_separate_batches() {
        let values = [1.0, 0.0, 0.3, 0.2, 0.0, 1.0, -0.7, 0.1, 0.5, 0.6, 0.2, 0.9];
        let x = tracked_tensor(&values, [6, 1, 2]).reshape([6, 2]);
        let positions: Vec<usize> = (0..6).collect();
        let grouped = Neighbors::new(directions(x.clone().inner()), 3).unwrap().koleo(x.clone(), &positions);
        let [first, second] =
            [0..3, 3..6].map(|images| view_koleo(x.clone().slice([images, 0..2])).into_scalar::<f32>());
        assert!((grouped.into_scalar::<f32>() - (first + second) / 2.0).abs() < 1e-6);
    }

    /// The reference is infinite or NaN for duplicates and for a batch of one (DINOv2's issue 143).
    #[test]
    fn value_and_gradient_are_finite_for_duplicates_and_a_single_image() {
        let duplicates = tracked_tensor(&[0.4, 0.2, 0.4, 0.2, 0.4, 0.2], [3, 1, 2]);
        let single = tracked_tensor(&[1.0, 2.0], [1, 1, 2]);
        for x in [duplicates, single] {
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
