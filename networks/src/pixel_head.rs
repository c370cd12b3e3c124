//! The decoder of a network that was trained to label pixels, outside of any unit.

use burn_tensor::{Device, Tensor, TensorData};

use crate::error::NetworkError;
use crate::head::pixels::{DecoderSizes, PixelDecoder};
use crate::inference::with_evaluation_context;
use crate::layout::UnitLayout;
use crate::leaves::Leaves;
use crate::tensor::{NamedTensor, by_name, values_of};
use crate::tokens::Tokens;
use crate::unit::Unit;

/// A decoder with its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct PixelHead {
    /// Names of the classes, by their values in masks.
    pub classes: Vec<String>,
    /// Layers of the decoder.
    pub decoder: PixelDecoder,
    /// Parameters of the decoder.
    pub tensors: Vec<NamedTensor>,
}

/// A decoder on a device.
pub struct PixelScorer {
    units: Vec<Box<dyn Unit>>,
    layouts: Vec<UnitLayout>,
    flats: Vec<Tensor<1>>,
}

impl PixelHead {
    /// Prefix of the names of its parameters.
    pub const PREFIX: &str = "decoder.";

    /// Takes the parameters of `decoder` for `classes` from `tensors`, the parameters of a network
    /// with its heads, whose features have `width` channels.
    ///
    /// # Errors
    /// [`NetworkError::Weights`] for a parameter that is missing or has another shape.
    pub fn from_tensors(
        classes: Vec<String>,
        decoder: PixelDecoder,
        width: usize,
        tensors: &[NamedTensor],
    ) -> Result<Self, NetworkError> {
        let tensors = by_name(tensors);
        let mut taken = Vec::new();
        for layout in layouts(&units(decoder, width, classes.len())) {
            for slot in &layout.params {
                let name = layout.full_name(slot);
                let values = values_of(&tensors, &name, &slot.spec)?.to_vec();
                taken.push(NamedTensor { name, shape: slot.spec.shape.clone(), values });
            }
        }
        Ok(Self { classes, decoder, tensors: taken })
    }

    /// Returns a decoder for features of `width` channels whose parameters are all zero.
    pub fn zeros(classes: Vec<String>, decoder: PixelDecoder, width: usize) -> Self {
        let mut tensors = Vec::new();
        for layout in layouts(&units(decoder, width, classes.len())) {
            for slot in &layout.params {
                let name = layout.full_name(slot);
                let values = vec![0.0; slot.spec.numel()];
                tensors.push(NamedTensor { name, shape: slot.spec.shape.clone(), values });
            }
        }
        Self { classes, decoder, tensors }
    }

    /// Returns the decoder on `device`, for features of `width` channels.
    ///
    /// # Errors
    /// [`NetworkError::Weights`] for a parameter that is missing or has another shape.
    pub fn scorer(&self, width: usize, device: &Device) -> Result<PixelScorer, NetworkError> {
        let units = units(self.decoder, width, self.classes.len());
        let layouts = layouts(&units);
        let tensors = by_name(&self.tensors);
        let mut flats = Vec::with_capacity(layouts.len());
        for layout in &layouts {
            let values = layout.flat_values(&tensors)?;
            flats.push(Tensor::from_data(TensorData::new(values, [layout.padded]), device));
        }
        Ok(PixelScorer { units, layouts, flats })
    }
}

impl PixelScorer {
    /// Returns the scores of the classes of the cells of images, `[B, N, C]`, whose features are
    /// `tokens`.
    pub fn scores(&self, tokens: &Tokens) -> Tensor<3> {
        let mut streams = vec![tokens.in_f32().patches()];
        for ((unit, layout), flat) in self.units.iter().zip(&self.layouts).zip(&self.flats) {
            let leaves = Leaves::new(layout, flat, false);
            streams = with_evaluation_context(&leaves, 1, |cx| unit.forward(0, streams, cx).streams);
        }
        streams[0].by_sequence()
    }
}

/// Returns the units of a decoder, whose initial weights and costs do not matter.
fn units(decoder: PixelDecoder, width: usize, n_classes: usize) -> Vec<Box<dyn Unit>> {
    decoder.units(DecoderSizes { width, n_classes, n_pixels: 1, init_std: 0.0 })
}

/// Returns the layouts of `units`.
fn layouts(units: &[Box<dyn Unit>]) -> Vec<UnitLayout> {
    units.iter().map(|unit| unit.layout(1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::Sequences;
    use kernels::device::host::to_host;

    /// Returns a tensor whose elements are all `value`.
    fn constant(name: &str, shape: &[usize], value: f32) -> NamedTensor {
        NamedTensor { name: name.into(), shape: shape.to_vec(), values: vec![value; shape.iter().product()] }
    }

    fn classes() -> Vec<String> {
        vec!["sky".into(), "sea".into(), "land".into()]
    }

    /// Prefix tokens are not scored.
    #[test]
    fn a_linear_decoder_scores_every_cell() {
        let weight = NamedTensor {
            name: "decoder.scores.weight".into(),
            shape: vec![3, 2],
            values: vec![1.0, 0.0, 0.0, 1.0, 1.0, 1.0],
        };
        let bias =
            NamedTensor { name: "decoder.scores.bias".into(), shape: vec![3], values: vec![0.0, 0.0, 0.5] };
        let tensors = [constant("norm.weight", &[2], 7.0), weight, bias];
        let head = PixelHead::from_tensors(classes(), PixelDecoder::Linear, 2, &tensors).unwrap();
        assert!(head.tensors.iter().all(|tensor| tensor.name.starts_with(PixelHead::PREFIX)), "{head:?}");
        let scorer = head.scorer(2, &Device::flex()).unwrap();
        let x = TensorData::new(vec![9.0f32, 9.0, 1.0, 2.0, 3.0, 4.0], [3, 2]);
        let x = Tensor::from_data(x, &Device::flex());
        let group = Sequences { n_prefix: 1, ..Sequences::on_grid(1, [1, 2]) };
        let scores = scorer.scores(&Tokens::new(x, vec![group]));
        assert_eq!(scores.dims(), [1, 2, 3]);
        assert_eq!(to_host(scores.reshape([-1])), [1.0, 2.0, 3.5, 3.0, 4.0, 7.5]);
    }

    /// Of a constant convolution, the norm leaves nothing but its bias.
    #[test]
    fn a_convolution_is_normalized_by_cell() {
        let tensors = [
            constant("decoder.hidden.conv.weight", &[4, 2, 3, 3], 0.5),
            constant("decoder.hidden.norm.weight", &[4], 1.0),
            constant("decoder.hidden.norm.bias", &[4], 10.0),
            constant("decoder.scores.weight", &[3, 4], 0.25),
            constant("decoder.scores.bias", &[3], 1.0),
        ];
        let decoder = PixelDecoder::Conv { width: 4 };
        let head = PixelHead::from_tensors(classes(), decoder, 2, &tensors).unwrap();
        let x = TensorData::new(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [1, 4, 2]);
        let x = Tensor::from_data(x, &Device::flex());
        let scores = head.scorer(2, &Device::flex()).unwrap().scores(&Tokens::on_grid(x, [2, 2]));
        let scores = to_host(scores.reshape([-1]));
        assert!(scores.iter().all(|score| (score - 11.0).abs() < 1e-3), "{scores:?}");
        let zeros = PixelHead::zeros(classes(), decoder, 2);
        assert_eq!(PixelHead::from_tensors(classes(), decoder, 2, &zeros.tensors).unwrap(), zeros);
        let wrong = [&tensors[..4], &[constant("decoder.scores.bias", &[4], 1.0)]].concat();
        let error = PixelHead::from_tensors(classes(), decoder, 2, &wrong).unwrap_err().to_string();
        assert!(error.contains("decoder.scores.bias has shape [4], not [3]"), "{error}");
    }
}
