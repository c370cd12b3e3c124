//! Assembly of sequences: prefix tokens before the patch tokens, and a position embedding added to
//! each token.
//!
//! ```text
//! y  = [prefix; patches] + positions
//! gpatches = g[:, P..]     gprefix = Σ_B g[:, ..P]     gpositions = Σ_B g
//! ```
//!
//! prefix `[1, P, D]`, patches `[B, N, D]`, positions `[1, P+N, D]`, y `[B, P+N, D]`.

use burn_flex::{Flex, FlexTensor};
use burn_tensor::Tensor;

use super::bridge::{Kernel, run};
use super::cast::cast;
use super::cpu::{add, contiguous, dims, is_flex, slice, tensor};

/// Returns the sequences, in the type of the prefix.
pub fn sequence(prefix: Tensor<3>, patches: Tensor<3>, positions: Tensor<3>) -> Tensor<3> {
    let patches = cast(patches, prefix.dtype());
    if is_flex(&patches) {
        run(Sequence, [prefix.into(), patches.into(), positions.into()])
    } else {
        plain(prefix, patches, positions)
    }
}

fn plain(prefix: Tensor<3>, patches: Tensor<3>, positions: Tensor<3>) -> Tensor<3> {
    let [b, _, d] = patches.dims();
    let [_, p, _] = prefix.dims();
    Tensor::cat(vec![prefix.expand([b, p, d]), patches], 1) + positions
}

#[derive(Debug, Clone)]
struct Sequence;

impl Kernel<Flex, 3> for Sequence {
    /// Numbers of elements of the prefix and of a sequence.
    type Saved = [usize; 2];

    fn forward(&self, [prefix, patches, positions]: [FlexTensor; 3]) -> (FlexTensor, Self::Saved) {
        let [_, p, _]: [usize; 3] = dims(&prefix);
        let [b, n, d]: [usize; 3] = dims(&patches);
        let prefix = contiguous(&prefix);
        let patches = contiguous(&patches);
        let positions = contiguous(&positions);
        let mut y = Vec::with_capacity(b * (p + n) * d);
        let prefix = slice(&prefix);
        let positions = slice(&positions);
        for patches in slice(&patches).chunks_exact(n * d) {
            let start = y.len();
            y.extend_from_slice(prefix);
            y.extend_from_slice(patches);
            add(&mut y[start..], positions);
        }
        (tensor(y, [b, p + n, d]), [p * d, (p + n) * d])
    }

    fn backward(
        &self,
        [n_prefix, len]: Self::Saved,
        grad: FlexTensor,
        wanted: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let [b, n, d]: [usize; 3] = dims(&grad);
        let grad = contiguous(&grad);
        let mut sums = vec![0.0; len];
        if wanted[0] || wanted[2] {
            for sequence in slice(&grad).chunks_exact(len) {
                add(&mut sums, sequence);
            }
        }
        let p = n_prefix / d;
        let gpatches = wanted[1].then(|| {
            let mut patches = Vec::with_capacity(b * (n - p) * d);
            for sequence in slice(&grad).chunks_exact(len) {
                patches.extend_from_slice(&sequence[n_prefix..]);
            }
            tensor(patches, [b, n - p, d])
        });
        let gprefix = wanted[0].then(|| tensor(sums[..n_prefix].to_vec(), [1, p, d]));
        [gprefix, gpatches, wanted[2].then(|| tensor(sums, [1, n, d]))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, assert_gradients_close, backward, devices, leaves};

    #[test]
    fn matches_plain_forward_and_backward() {
        for device in devices() {
            let inputs = leaves(&device, &[[1, 2, 7], [3, 5, 7], [1, 7, 7]], 1);
            let y = sequence(inputs[0].clone(), inputs[1].clone(), inputs[2].clone());
            let expected = plain(inputs[0].clone(), inputs[1].clone(), inputs[2].clone());
            assert_close("sequence", y.clone().inner(), expected.clone().inner(), 1e-6);
            let grads = backward(y);
            let expected = backward(expected);
            for (name, input) in ["prefix", "patches", "positions"].iter().zip(&inputs) {
                assert_gradients_close(name, input, &grads, &expected, 1e-6);
            }
        }
    }
}
