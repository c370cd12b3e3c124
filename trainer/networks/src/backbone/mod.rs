//! Backbones: lists of units from pixels to features.
//!
//! A new backbone is one file, with a `Config` that is a [`BackboneConfig`], and one line in `registry`.

mod convolution;
mod excitation;
pub(crate) mod kinds;
mod registry;
mod regnet;
mod resnet;
#[cfg(feature = "testing")]
mod toy;
mod transformer;
mod vit;

pub use registry::ModelConfig;

use super::unit::Unit;

/// Which features leave a backbone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readout {
    /// One vector a view is enough, `[B·V, 1, D]`.
    Pooled,
    /// All tokens, `[B·V, P + N, D]`.
    All,
}

/// Where features can be read on their way through the units.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Levels {
    /// Units that end a level, from the first level to the last.
    pub units: Vec<usize>,
    /// The unit that what is read goes through too, such as a last norm.
    pub readout: Option<usize>,
}

impl Levels {
    /// The last unit of each stage, where stages of so many units follow a stem of one.
    fn of_stages(depths: &[usize]) -> Self {
        let ends = depths.iter().scan(0, |end, depth| {
            *end += depth;
            Some(*end)
        });
        Self { units: ends.collect(), readout: None }
    }
}

/// What a recipe writes under `[model]` for one kind of backbone.
pub trait BackboneConfig {
    /// Checks what the units rely on.
    ///
    /// # Errors
    /// The key and what is wrong with it.
    fn validate(&self) -> Result<(), String>;

    /// The units, of which the first takes cells of `cell_px` × `cell_px` pixels as vectors `[B·V, N, 3·p·p]`
    /// ([`super::patches`]).
    fn units(&self, readout: Readout) -> Vec<Box<dyn Unit>>;

    /// The same units with a token of their own in the place of masked patches; none of a backbone without tokens.
    fn masked_units(&self, readout: Readout) -> Option<Vec<Box<dyn Unit>>> {
        let _ = readout;
        None
    }

    /// Where evaluation may read features: blocks of a transformer, resolutions of a convolutional network.
    fn levels(&self) -> Levels;

    /// Channels of the features.
    fn width(&self) -> usize;

    /// Side of a cell of the input.
    fn cell_px(&self) -> usize;

    /// Side of what a cell of the output stands for, of which every view's side is a multiple.
    fn stride_px(&self) -> usize;

    /// Side of the images that it is made for.
    fn image_px(&self) -> usize;

    /// Small ones that between them use everything that the backbone can do, for the conformance tests.
    #[cfg(feature = "testing")]
    fn examples() -> Vec<Self>
    where
        Self: Sized;
}
