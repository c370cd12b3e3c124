//! Heads that runs train beside their backbones, and that are scored and exported with them.

use networks::{ClassHead, NamedTensor, NetworkError, PixelHead};
use trainer::Recipe;
use weights::HeadKind;

/// A head of a network that has learned from labels or from masks.
pub(crate) enum TrainedHead {
    /// Classifies images.
    Classifier(ClassHead),
    /// Labels pixels.
    Decoder(PixelHead),
}

impl TrainedHead {
    /// Takes the head from `tensors`, the parameters of a network of a run of `recipe` with its
    /// heads; `None` if such runs learn without labels and masks.
    ///
    /// # Errors
    /// [`NetworkError::Weights`] for a parameter that is missing or has another shape.
    pub(crate) fn find(recipe: &Recipe, tensors: &[NamedTensor]) -> Result<Option<Self>, NetworkError> {
        let method = &recipe.method;
        let width = recipe.model.width();
        if let Some(classes) = method.classes() {
            let is_multi_label = method.is_multi_label();
            let head = ClassHead::from_tensors(classes.to_vec(), is_multi_label, width, tensors)?;
            return Ok(Some(Self::Classifier(head)));
        }
        let Some(decoder) = method.pixel_decoder() else { return Ok(None) };
        let classes = method.pixel_classes().unwrap_or_default().to_vec();
        Ok(Some(Self::Decoder(PixelHead::from_tensors(classes, decoder, width, tensors)?)))
    }

    /// Returns a head of zeros of the form that runs of `recipe` train; `None` if they learn
    /// without labels and masks.
    pub(crate) fn zeros(recipe: &Recipe) -> Option<Self> {
        let method = &recipe.method;
        let width = recipe.model.width();
        if let Some(classes) = method.classes() {
            let weight = vec![0.0; classes.len() * width];
            let bias = vec![0.0; classes.len()];
            let is_multi_label = method.is_multi_label();
            return Some(Self::Classifier(ClassHead {
                classes: classes.to_vec(),
                weight,
                bias,
                is_multi_label,
            }));
        }
        let decoder = method.pixel_decoder()?;
        let classes = method.pixel_classes().unwrap_or_default().to_vec();
        Some(Self::Decoder(PixelHead::zeros(classes, decoder, width)))
    }
}

/// Returns what runs of `recipe` train with the backbone and export with it.
pub fn trained_head(recipe: &Recipe) -> Option<HeadKind> {
    if recipe.method.classes().is_some() {
        Some(HeadKind::Classifier)
    } else if recipe.method.pixel_classes().is_some() {
        Some(HeadKind::Decoder)
    } else {
        None
    }
}
