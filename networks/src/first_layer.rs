//! Kernels of a first layer for images of other channels.
//!
//! ```text
//! repeat   w'[·, c] = w[·, c mod n] · n / m        from n channels to m
//! mean     w'[·, c] = Σ_i w[·, i] / m
//! ```
//!
//! With `mean`, and with `repeat` if n divides m, an image whose channels are all equal has the
//! features that it had before, given the same constants. For one channel both are the sum, as in
//! timm.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::backbone::ModelConfig;
use crate::tensor::NamedTensor;

/// Rule by which the kernels of a first layer become those of other channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FirstLayer {
    /// Each channel takes the kernel of red, green or blue in turn, as in timm.
    Repeat,
    /// Each channel takes the mean of the kernels.
    Mean,
}

impl FirstLayer {
    /// Converts `tensors`, the parameters of `model`, to images of `n_channels`; returns the
    /// configuration of the network.
    pub fn convert(
        self,
        model: &ModelConfig,
        mut tensors: Vec<NamedTensor>,
        n_channels: usize,
    ) -> (ModelConfig, Vec<NamedTensor>) {
        let converted = model.clone().with_channels(n_channels);
        for ((name, before), (_, after)) in model.params().into_iter().zip(converted.params()) {
            if before != after
                && let Some(tensor) = tensors.iter_mut().find(|tensor| tensor.name == name)
            {
                tensor.values = self.kernels(&tensor.values, before[0], model.n_channels(), n_channels);
                tensor.shape = after;
            }
        }
        (converted, tensors)
    }

    /// Converts kernels of `n_outputs` outputs from `n` channels to `m`.
    fn kernels(self, values: &[f32], n_outputs: usize, n: usize, m: usize) -> Vec<f32> {
        let len = values.len() / (n_outputs * n).max(1);
        let mut converted = Vec::with_capacity(n_outputs * m * len);
        for output in values.chunks_exact((n * len).max(1)) {
            for channel in 0..m {
                for i in 0..len {
                    converted.push(match self {
                        Self::Repeat if m > 1 => output[channel % n * len + i] * n as f32 / m as f32,
                        Self::Repeat | Self::Mean => {
                            (0..n).map(|channel| output[channel * len + i]).sum::<f32>() / m as f32
                        }
                    });
                }
            }
        }
        converted
    }
}

/// Formats the rule as it is described on a model card.
impl std::fmt::Display for FirstLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Repeat => "each channel took the kernel of red, green or blue in turn",
            Self::Mean => "each channel took the mean of the kernels",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inference::Network;
    use crate::patches::{Normalization, Pixels};
    use burn_tensor::Device;

    /// Returns the features of an image whose channels are all equal.
    fn embed_gray_image(model: &ModelConfig, tensors: &[NamedTensor], device: &Device) -> Vec<f32> {
        let n_channels = model.n_channels();
        let size = model.image_px();
        let plane: Vec<u8> = (0..size * size).map(|i| (i * 37 % 251) as u8).collect();
        let pixels = Pixels::from(Normalization::half(n_channels));
        let network = Network::new(model, pixels, tensors, 1, device).expect("a network");
        let features = network.embed(&[&plane.repeat(n_channels)], size);
        features.into_data().try_to_vec().expect("features")
    }

    /// A gray image has the same features in any number of channels, in every backbone.
    #[test]
    fn gray_images_keep_their_features() {
        let device = Device::flex();
        for model in ModelConfig::examples() {
            let n = model.n_channels();
            let m = 2 * model.n_channels();
            let pixels = Pixels::from(Normalization::half(n));
            let tensors = Network::random(&model, pixels, 3, 1, &device).tensors();
            let before = embed_gray_image(&model, &tensors, &device);
            for rule in [FirstLayer::Repeat, FirstLayer::Mean] {
                let (wider, converted) = rule.convert(&model, tensors.clone(), m);
                assert_eq!(wider.n_channels(), m);
                let after = embed_gray_image(&wider, &converted, &device);
                let scale = before.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                assert!(
                    before.iter().zip(&after).all(|(a, b)| (a - b).abs() < 1e-4 * scale.max(1.0)),
                    "{model:?} {rule:?}"
                );
            }
        }
    }

    #[test]
    fn kernels_are_repeated_or_averaged() {
        let values = [1.0, 2.0, 6.0, 10.0, 20.0, 60.0];
        assert_eq!(
            FirstLayer::Repeat.kernels(&values, 2, 3, 4),
            [0.75, 1.5, 4.5, 0.75, 7.5, 15.0, 45.0, 7.5]
        );
        assert_eq!(FirstLayer::Mean.kernels(&values, 2, 3, 1), [9.0, 90.0]);
        assert_eq!(FirstLayer::Repeat.kernels(&values, 2, 3, 1), [9.0, 90.0]);
    }
}
