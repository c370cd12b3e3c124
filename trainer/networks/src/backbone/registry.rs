//! All backbones, by the names that recipes have for them.

use serde::{Deserialize, Serialize};

use super::{BackboneConfig, Levels, Readout, regnet, resnet, vit};
use crate::layout::{ParamSlot, UnitLayout};
use crate::unit::Unit;

/// Declares [`ModelConfig`] with a variant for each backbone: its documentation, its name and its module.
macro_rules! backbones {
    ($($(#[doc = $doc:expr])* $(#[cfg($cfg:meta)])? $name:ident => $module:ident,)*) => {
        /// A backbone, as a recipe writes it under `[model]`.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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

            /// Small backbones of every kind.
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
    /// Convolution without a kernel and batch normalization: for tests.
    #[cfg(feature = "testing")]
    Toy => toy,
}

#[cfg(feature = "testing")]
use super::toy;

impl ModelConfig {
    /// Checks what the units rely on.
    ///
    /// # Errors
    /// The key and what is wrong with it.
    pub fn validate(&self) -> Result<(), String> {
        self.config().validate()
    }

    /// The units from pixels to features.
    pub fn units(&self, readout: Readout) -> Vec<Box<dyn Unit>> {
        self.config().units(readout)
    }

    /// The same units with a token of their own in the place of masked patches; none of a backbone without tokens.
    pub fn masked_units(&self, readout: Readout) -> Option<Vec<Box<dyn Unit>>> {
        self.config().masked_units(readout)
    }

    /// Where evaluation may read features, with the units of [`Readout::All`].
    pub fn levels(&self) -> Levels {
        self.config().levels()
    }

    /// Names of all parameters in exports, and their shapes.
    pub fn params(&self) -> Vec<(String, Vec<usize>)> {
        let layouts = self.units(Readout::All).into_iter().map(|unit| unit.layout(1));
        let of_unit = |layout: UnitLayout| {
            let named = |slot: &ParamSlot| (layout.full_name(slot), slot.spec.shape.clone());
            layout.params.iter().map(named).collect::<Vec<_>>()
        };
        layouts.flat_map(of_unit).collect()
    }

    /// Parameters of all units.
    pub fn n_params(&self) -> usize {
        let units = self.units(Readout::All);
        units.iter().flat_map(|unit| unit.params()).map(|param| param.numel()).sum()
    }

    /// Channels of the features.
    pub fn width(&self) -> usize {
        self.config().width()
    }

    /// Side of a cell of the input, in which pixels reach the first unit.
    pub fn cell_px(&self) -> usize {
        self.config().cell_px()
    }

    /// Side of what a cell of the output stands for, of which every view's side is a multiple.
    pub fn stride_px(&self) -> usize {
        self.config().stride_px()
    }

    /// Side of the images that the backbone is made for.
    pub fn image_px(&self) -> usize {
        self.config().image_px()
    }
}
