//! Channels of a convolution, and its weights in the orders that its passes read them.

use crate::ops::number::Number;

/// Input and output channels along a side of the squares in which weights are reordered.
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
    /// Returns the channels of the convolution that computes this one's input gradient.
    pub(super) fn turned(self) -> Self {
        Self { input: self.output, output: self.input, ..self }
    }

    /// Returns the numbers of input and output channels of one group.
    pub(super) fn each(self) -> [usize; 2] {
        [self.input / self.groups, self.output / self.groups]
    }
}

/// Reorders `[O, C/G, T]` into `[G, T·C/G, O/G]`.
pub(super) fn packed<W: Number>(weight: &[W], channels: Channels, n_taps: usize) -> Vec<W> {
    let mut packed = vec![W::default(); weight.len()];
    let taps = Taps::all(n_taps);
    for_each_weight(channels, &taps, by_output(channels), |from, to| packed[to] = weight[from]);
    packed
}

/// Reorders `[G, T·C/G, O/G]` into `[O, C/G, T]`.
pub(super) fn unpacked(packed: &[f32], channels: Channels, n_taps: usize) -> Vec<f32> {
    let mut weight = vec![0.0; packed.len()];
    let taps = Taps::all(n_taps);
    for_each_weight(channels, &taps, by_output(channels), |to, from| weight[to] = packed[from]);
    weight
}

/// Reorders `taps` of `[O, C/G, T]` into `[G, T'·O/G, C/G]`, to convolve an output gradient with;
/// taps of the result that get no weight are zero. `channels` are those of the convolution.
pub(super) fn turned<W: Number>(weight: &[W], channels: Channels, taps: &Taps) -> Vec<W> {
    let mut turned = vec![W::default(); weight.len() / taps.n_from * taps.n_to];
    for_each_weight(channels, taps, by_input(channels), |from, to| turned[to] = weight[from]);
    turned
}

/// Taps of a kernel, and their places in another kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Taps {
    /// Number of taps of the kernel.
    pub n_from: usize,
    /// Number of taps of the other kernel.
    pub n_to: usize,
    /// Index of each tap that moves, and its index in the other kernel.
    pub moves: Vec<[usize; 2]>,
}

impl Taps {
    /// Returns `n_taps` that stay where they are.
    fn all(n_taps: usize) -> Self {
        Self { n_from: n_taps, n_to: n_taps, moves: (0..n_taps).map(|tap| [tap, tap]).collect() }
    }
}

/// Returns the index of a tap, output and input channel in a group of `[T·C/G, O/G]`.
fn by_output(channels: Channels) -> impl Fn([usize; 3]) -> usize {
    let [c, o] = channels.each();
    move |[tap, out, input]| (tap * c + input) * o + out
}

/// Returns the index of a tap, output and input channel in a group of `[T·O/G, C/G]`.
fn by_input(channels: Channels) -> impl Fn([usize; 3]) -> usize {
    let [c, o] = channels.each();
    move |[tap, out, input]| (tap * o + out) * c + input
}

/// Calls `f` for every weight of the `taps` that move, with its index in `[O, C/G, T]` and its
/// index in groups ordered by `place`. It proceeds by squares of output and input channels, so that
/// the cache lines of a square, with up to nine taps, stay in the L1 cache.
#[inline(always)]
fn for_each_weight(
    channels: Channels,
    taps: &Taps,
    place: impl Fn([usize; 3]) -> usize,
    mut f: impl FnMut(usize, usize),
) {
    let [c, o] = channels.each();
    let squares = |n: usize| (0..n).step_by(SQUARE).map(move |first| first..n.min(first + SQUARE));
    for group in 0..channels.groups {
        for outs in squares(o) {
            for inputs in squares(c) {
                for &[from, to] in &taps.moves {
                    for out in outs.clone() {
                        let row = (group * o + out) * c;
                        let of_group = group * taps.n_to * c * o;
                        for input in inputs.clone() {
                            f((row + input) * taps.n_from + from, of_group + place([to, out, input]));
                        }
                    }
                }
            }
        }
    }
}
