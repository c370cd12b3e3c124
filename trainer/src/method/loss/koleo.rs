//! The KoLeo regularizer (Sablayrolles et al. 2019; DINOv2, section 4): embeddings of a batch keep
//! away from one another, so that they spread over the sphere.
//!
//! ```text
//! x̂ᵢ = xᵢ / |xᵢ|      n(i) = argmax_{j≠i} x̂ᵢ · x̂ⱼ          no gradient through the choice
//! koleo(x) = -1/B · Σᵢ log(|x̂ᵢ - x̂ₙ₍ᵢ₎| + ε)              ε = 1e-8
//! ```
//!
//! Neighbors are searched in the whole batch, or in groups of consecutive images.

use burn_tensor::{Tensor, TensorData};
use kernels::device::readback::failure;
use kernels::ops::{log_distances, matmul, total, unit_rows};
use networks::features::Outputs;
use ranks::EngineError;
use ranks::peers::Peers;

use crate::method::Collective;

/// Keeps norms and the logarithm finite, as in DINOv2.
const EPSILON: f64 = 1e-8;

/// Images whose neighbors are searched at a time: all at once would take B² numbers several times
/// over.
const ROWS: usize = 512;

/// Nearest neighbors within a batch, for one kind of view.
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

/// Finds the neighbors over the whole batch for each view of the first size, within groups of
/// `group_size` images, 0 for the whole batch.
///
/// # Errors
/// [`EngineError`].
pub(crate) fn by_view(
    outputs: &[Outputs],
    group_size: usize,
    peers: Peers<'_>,
) -> Result<Vec<Neighbors>, EngineError> {
    let globals: Vec<Tensor<3>> = outputs.iter().map(|outputs| outputs.pooled(0)).collect();
    let [_, v, _] = globals[0].dims();
    (0..v)
        .map(|i: usize| {
            let rows: Vec<Tensor<2>> = globals.iter().map(|all| directions(view(all, i))).collect();
            let all = peers.gather("neighbors", &rows)?;
            let [batch_size, _] = all.dims();
            Neighbors::of(all, if group_size == 0 { batch_size } else { group_size })
        })
        .collect()
}

/// Returns the collectives of [`by_view`] for `n_views` embeddings of `d` channels of each image.
pub(crate) fn collectives(n_views: usize, d: usize) -> Vec<Collective> {
    vec![Collective::Gather(d); n_views]
}

impl Neighbors {
    /// Finds the neighbors among `directions` `[B, D]` of the whole batch, without a graph, within
    /// groups of `group_size` consecutive images.
    ///
    /// # Errors
    /// [`EngineError::Device`] when the device has failed.
    pub(crate) fn of(directions: Tensor<2>, group_size: usize) -> Result<Self, EngineError> {
        let [b, d] = directions.dims();
        let mut nearest = Vec::with_capacity(b);
        for group in (0..b).step_by(group_size) {
            let size = group_size.min(b - group);
            let all = directions.clone().slice([group..group + size, 0..d]).transpose();
            for start in (group..group + size).step_by(ROWS) {
                let n = ROWS.min(group + size - start);
                let mut itself = vec![0.0f32; n * size];
                // Cosines lie in -1..=1, so that taking 3 keeps an image from choosing itself.
                (0..n).for_each(|row| itself[row * size + start - group + row] = 3.0);
                let itself = Tensor::<2>::from_data(TensorData::new(itself, [n, size]), &directions.device());
                let rows = directions.clone().slice([start..start + n, 0..d]);
                let chosen = (matmul(rows, all.clone()) - itself).argmax(1).reshape([n]).try_into_data();
                let chosen = chosen.map_err(|error| failure(&error))?;
                nearest.extend(chosen.iter::<i64>().map(|i| group + i as usize));
            }
        }
        Ok(Self { directions, nearest, group_size })
    }

    /// Returns the regularizer of one micro-batch, `[1]`: `x` `[b, D]` are the embeddings of the
    /// images at `positions`, with a graph. Zero in groups of one, which have no neighbor.
    ///
    /// The value is the mean over the micro-batch. The gradient is that of the sum over the whole
    /// batch, divided by b: an image is also pushed by images elsewhere whose neighbor it is.
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
        // The value sums the own terms. Terms of other images count in their own micro-batch, and
        // add only a gradient here.
        let values = logs.clone().inner();
        let own = total(values.clone().slice(0..b)).autodiff();
        let still = total(values).autodiff();
        -(own + (total(logs) - still)) / b as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_tensor::Device;

    /// The regularizer of a whole batch, summed over the views of `embeddings` `[B, V, D]`, each
    /// view among its own kind, `[1]`.
    fn koleo(embeddings: Tensor<3>) -> Tensor<1> {
        let [b, v, d] = embeddings.dims();
        let positions: Vec<usize> = (0..b).collect();
        let of_view = |i: usize| {
            let x = embeddings.clone().slice([0..b, i..i + 1, 0..d]).reshape([b, d]);
            Neighbors::of(directions(x.clone().inner()), b).unwrap().koleo(x, &positions)
        };
        (1..v).fold(of_view(0), |sum, i| sum + of_view(i))
    }

    fn of(values: &[f32], shape: [usize; 3]) -> Tensor<3> {
        Tensor::from_data(TensorData::new(values.to_vec(), shape), &Device::flex()).autodiff().require_grad()
    }

    /// Four points of the circle, whose distances are known: 0 and 60 degrees are neighbors, 180
    /// degrees and 210 as well.
    #[test]
    fn it_equals_the_formula() {
        let points: Vec<f32> = [0.0, 60.0, 180.0, 210.0]
            .into_iter()
            .flat_map(|degrees: f32| [3.0 * degrees.to_radians().cos(), 3.0 * degrees.to_radians().sin()])
            .collect();
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

    /// Neighbors are searched within groups: the sum over groups is that of separate batches.
    #[test]
    fn groups_are_batches_of_their_own() {
        let values = [1.0, 0.0, 0.3, 0.2, 0.0, 1.0, -0.7, 0.1, 0.5, 0.6, 0.2, 0.9];
        let x = of(&values, [6, 1, 2]).reshape([6, 2]);
        let positions: Vec<usize> = (0..6).collect();
        let grouped = Neighbors::of(directions(x.clone().inner()), 3).unwrap().koleo(x.clone(), &positions);
        let apart: f32 = [0, 3]
            .map(|start| {
                koleo(x.clone().slice([start..start + 3, 0..2]).reshape([3, 1, 2])).into_scalar::<f32>()
            })
            .iter()
            .sum();
        assert!((grouped.into_scalar::<f32>() - apart / 2.0).abs() < 1e-6);
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
