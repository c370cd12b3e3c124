//! Registry of all methods, by their names in recipes.

use networks::head::pixels::PixelDecoder;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::network::FrozenEntry;
use super::{
    LabelFacts, Method, MethodContext, MethodRecipe, barlowtwins, byol, classification, data2vec, dino,
    dinov2, dinov3, dinov3distillation, distillation, ibot, ijepa, lejepa, mae, mocov3, segmentation, simclr,
    swav, vicreg,
};
#[cfg(test)]
use super::{toy, toymasked};

/// Declares [`MethodConfig`] with a variant for each method: its documentation, its name and its
/// module. The `mod` lines are written by hand in `method`, since rustfmt and the checks of
/// dependencies do not find files that a macro declares.
macro_rules! methods {
    ($($(#[doc = $doc:expr])* $(#[cfg($cfg:meta)])? $name:ident => $module:ident,)*) => {
        /// A method, as a recipe writes it under `[method]`.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(tag = "name", rename_all = "snake_case")]
        pub enum MethodConfig {
            $($(#[doc = $doc])* $(#[cfg($cfg)])? $name($module::Config),)*
        }

        impl MethodConfig {
            /// Builds the method.
            ///
            /// # Errors
            /// A message with the key and the reason.
            pub fn build(&self, cx: &MethodContext) -> Result<Box<dyn Method>, String> {
                match self {
                    $($(#[cfg($cfg)])? Self::$name(config) => config.build(cx),)*
                }
            }

            /// Returns the name of the method as publications write it.
            pub fn title(&self) -> &'static str {
                match self {
                    $($(#[cfg($cfg)])? Self::$name(_) => $module::Config::TITLE,)*
                }
            }

            /// Returns the frozen networks that the recipe names.
            pub fn frozen(&mut self) -> Vec<FrozenEntry<'_>> {
                match self {
                    $($(#[cfg($cfg)])? Self::$name(config) => config.frozen(),)*
                }
            }

            /// Returns the names of the classes, by number, if the method learns from labels: none
            /// before the labels have been read, unless the recipe lists them.
            pub fn classes(&self) -> Option<&[String]> {
                match self {
                    $($(#[cfg($cfg)])? Self::$name(config) => config.classes(),)*
                }
            }

            /// Returns whether an image may have several classes, or none, if the method learns
            /// from labels.
            pub fn is_multi_label(&self) -> bool {
                match self {
                    $($(#[cfg($cfg)])? Self::$name(config) => config.is_multi_label(),)*
                }
            }

            /// Returns the facts about labels that are to be recorded, if the method learns from
            /// labels.
            pub fn labels(&mut self) -> Option<LabelFacts<'_>> {
                match self {
                    $($(#[cfg($cfg)])? Self::$name(config) => config.labels(),)*
                }
            }

            /// Returns the names of the classes of pixels, by their values in masks, if the method
            /// learns from masks: none before the masks have been read, unless the recipe lists
            /// them.
            pub fn pixel_classes(&self) -> Option<&[String]> {
                match self {
                    $($(#[cfg($cfg)])? Self::$name(config) => config.pixel_classes(),)*
                }
            }

            /// Returns the layers of the decoder that scores the classes of pixels, if the method
            /// learns from masks.
            pub fn pixel_decoder(&self) -> Option<PixelDecoder> {
                match self {
                    $($(#[cfg($cfg)])? Self::$name(config) => config.pixel_decoder(),)*
                }
            }

            /// Returns the facts about masks that are to be recorded, if the method learns from
            /// masks.
            pub fn pixel_labels(&mut self) -> Option<LabelFacts<'_>> {
                match self {
                    $($(#[cfg($cfg)])? Self::$name(config) => config.pixel_labels(),)*
                }
            }

            /// Adapts settings that count images to a batch of `batch_size`, which differs from
            /// that of the recipe.
            pub fn fit_batch(&mut self, batch_size: usize) {
                match self {
                    $($(#[cfg($cfg)])? Self::$name(config) => config.fit_batch(batch_size),)*
                }
            }

            /// Small examples of every method, each with its views.
            #[cfg(test)]
            pub(crate) fn examples() -> Vec<(Self, augment::MultiCrop)> {
                let mut all = Vec::new();
                $(
                    $(#[cfg($cfg)])?
                    all.extend($module::Config::examples().into_iter().map(|(c, views)| (Self::$name(c),
                        views)));
                )*
                all
            }
        }
    };
}

methods! {
    /// Self-distillation with no labels.
    Dino => dino,
    /// Self-distillation of views and masked patches, with a regularizer that spreads embeddings.
    Dinov2 => dinov2,
    /// Self-distillation of views and masked patches, with Gram anchoring, which preserves
    /// similarities between patches.
    Dinov3 => dinov3,
    /// Distillation of a frozen network that DINOv3 or DINOv2 trained, with its heads.
    Dinov3Distillation => dinov3distillation,
    /// Distillation of a frozen network.
    Distillation => distillation,
    /// Self-distillation of views and masked patches.
    Ibot => ibot,
    /// Joint embeddings that are normally distributed.
    Lejepa => lejepa,
    /// Momentum contrast.
    MocoV3 => mocov3,
    /// Contrast between views.
    Simclr => simclr,
    /// Swapped assignments between views.
    Swav => swav,
    /// Prediction of the features of blocks of patches from those around them.
    Ijepa => ijepa,
    /// Prediction of the pixels of masked patches.
    Mae => mae,
    /// Prediction of what the last blocks of a moving average output for masked patches.
    Data2vec => data2vec,
    /// Joint embeddings whose channels are equal in two views and differ from one another.
    BarlowTwins => barlowtwins,
    /// Prediction of a moving average's projections of another view.
    Byol => byol,
    /// Joint embeddings of equal views, whose channels vary, each by itself.
    Vicreg => vicreg,
    /// Classification: the classes of images are learned from labels.
    Classification => classification,
    /// Semantic segmentation: the classes of pixels are learned from masks.
    Segmentation => segmentation,
    /// Prediction of the scores of other views: for tests.
    #[cfg(test)]
    Toy => toy,
    /// Prediction of masked patches: for tests.
    #[cfg(test)]
    ToyMasked => toymasked,
}
