//! Channel counts of a convolution, and the orders in which its passes read the weights.

use std::ops::Range;

use crate::ops::number::Number;

/// Number of input channels, and of output channels, of the squares in which weights are reordered.
const SQUARE: usize = 16;

/// Channel counts of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Channels {
    /// Input channels.
    pub input: usize,
    /// Output channels.
    pub output: usize,
    /// Groups that both are split into.
    pub groups: usize,
}

impl Channels {
    /// Returns the channels of the convolution that computes the input gradient of this one.
    pub(super) fn transposed(self) -> Self {
        Self { input: self.output, output: self.input, ..self }
    }

    /// Returns the numbers of input and output channels of one group.
    pub(super) fn per_group(self) -> [usize; 2] {
        [self.input / self.groups, self.output / self.groups]
    }
}

/// Reorders a weight of `[O, C/G, T]` into `[G, T·C/G, O/G]`.
pub(super) fn pack<W: Number>(weight: &[W], channels: Channels, n_taps: usize) -> Vec<W> {
    let mut packed = vec![W::default(); weight.len()];
    let taps = Taps::identity(n_taps);
    for_each_weight(channels, &taps, output_major(channels), |from, to| packed[to] = weight[from]);
    packed
}

/// Reorders a weight of `[G, T·C/G, O/G]` into `[O, C/G, T]`.
pub(super) fn unpack(packed: &[f32], channels: Channels, n_taps: usize) -> Vec<f32> {
    let mut weight = vec![0.0; packed.len()];
    let taps = Taps::identity(n_taps);
    for_each_weight(channels, &taps, output_major(channels), |to, from| weight[to] = packed[from]);
    weight
}

/// Reorders some taps of a weight of `[O, C/G, T]` into `[G, T'·O/G, C/G]`, the weight of the
/// convolution that computes the input gradient; taps of the result that get no weight are zero.
/// `channels` are those of the forward convolution.
pub(super) fn transpose<W: Number>(weight: &[W], channels: Channels, taps: &Taps) -> Vec<W> {
    let mut transposed = vec![W::default(); weight.len() / taps.n_from * taps.n_to];
    for_each_weight(channels, taps, input_major(channels), |from, to| transposed[to] = weight[from]);
    transposed
}

/// A mapping of the taps of one kernel to those of another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Taps {
    /// Number of taps of the kernel.
    pub n_from: usize,
    /// Number of taps of the other kernel.
    pub n_to: usize,
    /// Index of each mapped tap, and its index in the other kernel.
    pub moves: Vec<[usize; 2]>,
}

impl Taps {
    /// Returns the identity of `n_taps` taps.
    fn identity(n_taps: usize) -> Self {
        Self { n_from: n_taps, n_to: n_taps, moves: (0..n_taps).map(|tap| [tap, tap]).collect() }
    }
}

/// Returns a function from tap, output and input channel to the index in a group of `[T·C/G, O/G]`.
fn output_major(channels: Channels) -> impl Fn([usize; 3]) -> usize {
    let [c, o] = channels.per_group();
    move |[tap, out, input]| (tap * c + input) * o + out
}

/// Returns a function from tap, output and input channel to the index in a group of `[T·O/G, C/G]`.
fn input_major(channels: Channels) -> impl Fn([usize; 3]) -> usize {
    let [c, o] = channels.per_group();
    move |[tap, out, input]| (tap * o + out) * c + input
}

/// Calls `f` for every weight of the mapped `taps`, with its index in `[O, C/G, T]` and its index
/// in groups whose order is given by `index_in_group`. It proceeds by squares of output and input
/// channels, so that the cache lines of a square, with up to nine taps, stay in the L1 cache.
#[inline(always)]
fn for_each_weight(
    channels: Channels,
    taps: &Taps,
    index_in_group: impl Fn([usize; 3]) -> usize,
    mut f: impl FnMut(usize, usize),
) {
    let [c, o] = channels.per_group();
    for group in 0..channels.groups {
        for outs in squares(o) {
            for inputs in squares(c) {
                for &[from, to] in &taps.moves {
                    for out in outs.clone() {
                        let row = (group * o + out) * c;
                        let group_start = group * taps.n_to * c * o;
                        for input in inputs.clone() {
                            let index = group_start + index_in_group([to, out, input]);
                            f((row + input) * taps.n_from + from, index);
                        }
                    }
                }
            }
        }
    }
}

/// Splits `n` channels into ranges of at most [`SQUARE`].
#[inline(always)]
fn squares(n: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n).step_by(SQUARE).map(move |first| first..n.min(first + SQUARE))
}
