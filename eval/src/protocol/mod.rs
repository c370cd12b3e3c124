//! Protocols that say what features are worth, one file each.
//!
//! A new one is a file with a struct of settings that has a default and is [`Rules`], and one line in `registry`.

mod batches;
mod bilinear;
mod few_shot;
mod heads;
pub(crate) mod knn;
mod lbfgs;
mod linear_dino;
mod linear_dinov2;
mod linear_honest;
mod logreg;
mod registry;
mod segmentation;
pub(crate) mod task;
#[cfg(test)]
mod toy;
pub(crate) mod views;

pub use registry::Protocol;

use crate::EvalError;
use crate::images::ImageSet;
use crate::images::transform::Transform;
use task::{Scored, Task};

/// The rules of a protocol: its settings, what it looks at, and its numbers.
pub(crate) trait Rules {
    /// What the protocol looks at.
    fn needs(&self) -> Needs;

    /// Description of `numbers`, which are this protocol's, and of what they can be compared with. `is_published` says that
    /// all settings are the published ones.
    fn in_words(&self, numbers: &[Scored], is_published: bool) -> String;

    /// Transform of the protocol's script, where evaluation usually sees images through `usual`.
    fn transform(&self, usual: Transform) -> Transform {
        usual
    }

    /// Checks that the images of train are enough.
    ///
    /// # Errors
    /// [`EvalError`] that names what is missing.
    fn check(&self, train: &ImageSet) -> Result<(), EvalError> {
        let _ = train;
        Ok(())
    }

    /// The numbers.
    ///
    /// # Errors
    /// Errors of protocols that look at images.
    fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError>;
}

/// What a protocol looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Last levels whose vectors it looks at.
    pub n_levels: usize,
    /// Whether it looks at the mean patch token.
    pub average: bool,
    /// Classes of images.
    pub classes: Classes,
    /// Whether it takes so little time that raw pixels are scored as well.
    pub is_cheap: bool,
}

/// Classes of images that a protocol takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Classes {
    /// None: it looks at the images themselves.
    Unused,
    /// One for each image.
    One,
    /// One or several for each image.
    Several,
}

impl Needs {
    /// One vector and one class an image.
    pub(crate) const VECTORS: Self =
        Self { n_levels: 1, average: false, classes: Classes::One, is_cheap: false };

    /// Whether images must have classes.
    pub fn has_classes(self) -> bool {
        self.classes != Classes::Unused
    }
}

/// `as DINO's`, with a remark where settings are others.
pub(crate) fn as_published(whose: &str, is_plural: bool, is_published: bool) -> String {
    match (is_published, is_plural) {
        (true, _) => format!("as {whose}"),
        (false, true) => format!("as {whose}, but for their settings"),
        (false, false) => format!("as {whose}, but for its settings"),
    }
}
