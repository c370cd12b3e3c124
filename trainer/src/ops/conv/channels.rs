//! Channels of a convolution, and its weights in the orders that its passes take them.

/// Channels of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Channels {
    /// That come.
    pub input: usize,
    /// That go.
    pub output: usize,
    /// Groups of both.
    pub groups: usize,
}

impl Channels {
    /// Of the convolution that gives this one's gradient.
    pub(super) fn turned(self) -> Self {
        Self { input: self.output, output: self.input, ..self }
    }

    /// Of a group: that come, and that go.
    pub(super) fn each(self) -> [usize; 2] {
        [self.input / self.groups, self.output / self.groups]
    }
}

/// `[O, C/G, T]` into `[G, T·C/G, O/G]`.
pub(super) fn packed(weight: &[f32], channels: Channels, n_taps: usize) -> Vec<f32> {
    let [c, o] = channels.each();
    let mut packed = vec![0.0; weight.len()];
    for (group, packed) in packed.chunks_exact_mut((n_taps * c * o).max(1)).enumerate() {
        for (out, of_out) in weight[group * o * c * n_taps..].chunks_exact(c * n_taps).take(o).enumerate() {
            for (input, taps) in of_out.chunks_exact(n_taps).enumerate() {
                for (tap, value) in taps.iter().enumerate() {
                    packed[(tap * c + input) * o + out] = *value;
                }
            }
        }
    }
    packed
}

/// `[G, T·C/G, O/G]` into `[O, C/G, T]`.
pub(super) fn unpacked(packed: &[f32], channels: Channels, n_taps: usize) -> Vec<f32> {
    let [c, o] = channels.each();
    let mut weight = vec![0.0; packed.len()];
    for (group, packed) in packed.chunks_exact((n_taps * c * o).max(1)).enumerate() {
        let of_group = weight[group * o * c * n_taps..].chunks_exact_mut(c * n_taps).take(o);
        for (out, of_out) in of_group.enumerate() {
            for (input, taps) in of_out.chunks_exact_mut(n_taps).enumerate() {
                for (tap, value) in taps.iter_mut().enumerate() {
                    *value = packed[(tap * c + input) * o + out];
                }
            }
        }
    }
    weight
}

/// `[O, C/G, T]` into `[G, T·O/G, C/G]` with the taps in reverse: what a gradient of the output is convolved with.
pub(super) fn turned(weight: &[f32], channels: Channels, n_taps: usize) -> Vec<f32> {
    let [c, o] = channels.each();
    let mut turned = vec![0.0; weight.len()];
    for (group, turned) in turned.chunks_exact_mut((n_taps * c * o).max(1)).enumerate() {
        for (out, of_out) in weight[group * o * c * n_taps..].chunks_exact(c * n_taps).take(o).enumerate() {
            for (input, taps) in of_out.chunks_exact(n_taps).enumerate() {
                for (tap, value) in taps.iter().rev().enumerate() {
                    turned[(tap * o + out) * c + input] = *value;
                }
            }
        }
    }
    turned
}

/// `[O, C/G, T]` into `[G, T·O/G, C/G]`, taps in their order.
pub(super) fn by_tap(weight: &[f32], channels: Channels, n_taps: usize) -> Vec<f32> {
    let [c, o] = channels.each();
    let mut by_tap = vec![0.0; weight.len()];
    for (group, by_tap) in by_tap.chunks_exact_mut((n_taps * c * o).max(1)).enumerate() {
        for (out, of_out) in weight[group * o * c * n_taps..].chunks_exact(c * n_taps).take(o).enumerate() {
            for (input, taps) in of_out.chunks_exact(n_taps).enumerate() {
                for (tap, value) in taps.iter().enumerate() {
                    by_tap[(tap * o + out) * c + input] = *value;
                }
            }
        }
    }
    by_tap
}
