//! All backbones, by their names in recipes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{BackboneConfig, Levels, Readout, check_channels, convnext, regnet, resnet, vit};
use crate::unit::Unit;

/// Declares [`ModelConfig`] with a variant for each backbone: its documentation, its name and its
/// module.
macro_rules! backbones {
    ($($(#[doc = $doc:expr])* $(#[cfg($cfg:meta)])? $name:ident => $module:ident,)*) => {
        /// A backbone, as a recipe writes it under `[model]`.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(tag = "arch", rename_all = "snake_case")]
        pub enum ModelConfig {
            $($(#[doc = $doc])* $(#[cfg($cfg)])? $name($module::Config),)*
        }

        impl ModelConfig {
            fn config(&self) -> &dyn BackboneConfig {
                match self {
                    $($(#[cfg($cfg)])? Self::$name(config) => config,)*
                }
            }

            fn config_mut(&mut self) -> &mut dyn BackboneConfig {
                match self {
                    $($(#[cfg($cfg)])? Self::$name(config) => config,)*
                }
            }

            /// Returns the names of the backbones whose weights may have adapters of low rank, as
            /// recipes write them.
            pub fn names_with_adapters() -> Vec<String> {
                let mut names = Vec::new();
                $($(#[cfg($cfg)])? names.extend(named_if_adaptable::<$module::Config>(stringify!($name)));)*
                names
            }

            /// Returns small backbones of every kind.
            #[cfg(feature = "testing")]
            pub fn examples() -> Vec<Self> {
                let mut all = Vec::new();
                $($(#[cfg($cfg)])? all.extend($module::Config::examples().into_iter().map(Self::$name));)*
                all
            }
        }
    };
}

backbones! {
    /// Vision transformer.
    Vit => vit,
    /// Residual network.
    Resnet => resnet,
    /// RegNetY.
    RegnetY => regnet,
    /// ConvNeXt.
    Convnext => convnext,
    /// Linear projections and a batch normalization: for tests.
    #[cfg(feature = "testing")]
    Toy => toy,
}

#[cfg(feature = "testing")]
use super::toy;

/// Returns the name of the backbone `variant`, as recipes write it, if it takes adapters.
fn named_if_adaptable<C: BackboneConfig>(variant: &str) -> Option<String> {
    C::takes_adapters().then(|| snake_case(variant))
}

/// Converts the name of a variant to that which recipes write.
fn snake_case(variant: &str) -> String {
    let mut name = String::new();
    for letter in variant.chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(letter.to_lowercase());
    }
    name
}

impl ModelConfig {
    /// Checks the settings that the units rely on.
    ///
    /// # Errors
    /// The key and the reason, in words.
    pub fn validate(&self) -> Result<(), String> {
        check_channels(self.n_channels())?;
        self.config().validate()
    }

    /// Returns the units from pixels to features.
    pub fn units(&self, readout: Readout) -> Vec<Box<dyn Unit>> {
        self.config().units(readout)
    }

    /// Returns the units with a mask token in place of masked patches; `None` for a backbone
    /// without tokens.
    pub fn masked_units(&self, readout: Readout) -> Option<Vec<Box<dyn Unit>>> {
        self.config().masked_units(readout)
    }

    /// Returns whether a view is read from a class token, and not as the mean of its cells.
    pub fn has_class_token(&self) -> bool {
        self.config().has_class_token()
    }

    /// Returns the key of a setting that takes effect only in training with masked patches and with
    /// smaller views, if such a setting is used.
    pub fn setting_of_masks(&self) -> Option<&'static str> {
        self.config().setting_of_masks()
    }

    /// Returns the levels at which evaluation may read features, with the units of
    /// [`Readout::All`].
    pub fn levels(&self) -> Levels {
        self.config().levels()
    }

    /// Returns the names of all parameters in exports, and their shapes.
    pub fn params(&self) -> Vec<(String, Vec<usize>)> {
        let mut params = Vec::new();
        for unit in self.units(Readout::All) {
            let layout = unit.layout(1);
            for slot in &layout.params {
                params.push((layout.full_name(slot), slot.spec.shape.clone()));
            }
        }
        params
    }

    /// Returns the number of elements of the parameters of all units.
    pub fn n_params(&self) -> usize {
        let units = self.units(Readout::All);
        units.iter().flat_map(|unit| unit.params()).map(|param| param.numel()).sum()
    }

    /// Returns the number of channels of the features.
    pub fn width(&self) -> usize {
        self.config().width()
    }

    /// Returns the number of channels of an image.
    pub fn n_channels(&self) -> usize {
        self.config().n_channels()
    }

    /// Returns the backbone for images of `n_channels`.
    pub fn with_channels(mut self, n_channels: usize) -> Self {
        self.config_mut().set_n_channels(n_channels);
        self
    }

    /// Returns the side of a cell of the input, in which pixels reach the first unit, in pixels.
    pub fn cell_px(&self) -> usize {
        self.config().cell_px()
    }

    /// Returns the side of the pixels that a cell of the output covers; every view's side is a
    /// multiple of it.
    pub fn stride_px(&self) -> usize {
        self.config().stride_px()
    }

    /// Returns the side of the images that the backbone is made for, in pixels.
    pub fn image_px(&self) -> usize {
        self.config().image_px()
    }
}
