//! All kinds of backbones that can be exchanged.

use networks::{ConvnextConfig, ModelConfig, RegnetConfig, ResnetConfig, VitConfig};

use super::{Exchange, Reader};

/// Declares how each variant of [`ModelConfig`] is exchanged: the variant, and its configuration
/// with an [`Exchange`].
macro_rules! backbones {
    ($($(#[cfg($cfg:meta)])? $variant:ident => $config:ty,)*) => {
        /// Returns the exchange of `model`.
        pub(crate) fn exchange_of(model: &ModelConfig) -> &dyn Exchange {
            match model {
                $($(#[cfg($cfg)])? ModelConfig::$variant(config) => config,)*
            }
        }

        /// Returns the readers of all kinds. If two kinds recognize the same tensors, the first one
        /// reads them.
        pub(crate) fn readers() -> Vec<Reader> {
            vec![$($(#[cfg($cfg)])? Reader::new::<$config>(),)*]
        }
    };
}

backbones! {
    Vit => VitConfig,
    Convnext => ConvnextConfig,
    RegnetY => RegnetConfig,
    Resnet => ResnetConfig,
    #[cfg(feature = "testing")]
    Toy => networks::ToyConfig,
}
