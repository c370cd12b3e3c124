//! Backbones: lists of units from pixels to features.
//!
//! A new backbone is one file, with a `Config` that is a [`BackboneConfig`], and one line in
//! `registry`.

mod branch;
mod convnext;
mod convolution;
mod excitation;
pub(crate) mod kinds;
mod registry;
mod regnet;
mod resnet;
#[cfg(feature = "testing")]
mod toy;
mod vit;

pub use registry::ModelConfig;

pub use crate::readout::Readout;

use augment::{Depth, PixelFormat};

use super::unit::Unit;

/// Number of channels of photographs.
pub const RGB_CHANNELS: usize = 3;

/// Returns [`RGB_CHANNELS`], the default of every backbone.
fn rgb_channels() -> usize {
    RGB_CHANNELS
}

/// Returns whether this is the number of channels of photographs, which configurations omit.
fn is_rgb(n_channels: &usize) -> bool {
    *n_channels == RGB_CHANNELS
}

/// Returns whether this is the default of its type, which configurations omit.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Checks the number of channels of an image.
///
/// # Errors
/// The reason, with the key in the message.
fn check_channels(n_channels: usize) -> Result<(), String> {
    PixelFormat { n_channels, depth: Depth::default() }
        .validate()
        .map_err(|reason| format!("model.channels: {reason}"))
}

/// Levels at which features can be read between the units.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Levels {
    /// Units that end a level, from the first level to the last.
    pub units: Vec<usize>,
    /// Unit that the features of a level pass through, such as a last norm.
    pub readout: Option<usize>,
}

impl Levels {
    /// Creates one level for each stage of a network, given the numbers of units of the stages,
    /// which follow a stem of one unit.
    fn from_depths(depths: &[usize]) -> Self {
        let mut units = Vec::with_capacity(depths.len());
        let mut last = 0;
        for depth in depths {
            last += depth;
            units.push(last);
        }
        Self { units, readout: None }
    }
}

/// Settings of one kind of backbone, as a recipe writes them under `[model]`.
pub trait BackboneConfig {
    /// Checks the settings that the units rely on.
    ///
    /// # Errors
    /// The key and the reason, in words.
    fn validate(&self) -> Result<(), String>;

    /// Returns the units, of which the first takes cells of `cell_px` × `cell_px` pixels as vectors
    /// `[B·V·N, C·p·p]` ([`super::patches`]).
    fn units(&self, readout: Readout) -> Vec<Box<dyn Unit>>;

    /// Returns the units with a mask token in place of masked patches; `None` for a backbone
    /// without tokens.
    fn masked_units(&self, readout: Readout) -> Option<Vec<Box<dyn Unit>>> {
        let _ = readout;
        None
    }

    /// Returns whether a view is read from a class token, and not as the mean of its cells.
    fn has_class_token(&self) -> bool {
        false
    }

    /// Returns the key of a setting that takes effect only in training with masked patches and with
    /// smaller views, if such a setting is used.
    fn setting_of_masks(&self) -> Option<&'static str> {
        None
    }

    /// Returns the levels that evaluation may read: a transformer's blocks, a convolutional
    /// network's stages.
    fn levels(&self) -> Levels;

    /// Returns the number of channels of the features.
    fn width(&self) -> usize;

    /// Returns the number of channels of an image.
    fn n_channels(&self) -> usize;

    /// Sets the number of channels of an image.
    fn set_n_channels(&mut self, n_channels: usize);

    /// Returns the side of a cell of the input, in pixels.
    fn cell_px(&self) -> usize;

    /// Returns the side of the pixels that a cell of the output covers; every view's side is a
    /// multiple of it.
    fn stride_px(&self) -> usize;

    /// Returns the side of the images that the backbone is made for, in pixels.
    fn image_px(&self) -> usize;

    /// Returns whether weights of the units may have adapters of low rank ([`crate::adapter`]).
    fn takes_adapters() -> bool
    where
        Self: Sized,
    {
        false
    }

    /// Returns small configurations that together use all options of the backbone, for the
    /// conformance tests.
    #[cfg(feature = "testing")]
    fn examples() -> Vec<Self>
    where
        Self: Sized;
}
