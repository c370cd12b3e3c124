//! Protocols that score features on labels, one file each.
//!
//! A new protocol is a file with a struct of settings that implements `Default` and [`Rules`], and
//! one line in `registry`.

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

use augment::Transform;

use crate::EvalError;
use crate::images::ImageSet;
use task::{Scored, Task};

/// Rules of a protocol, implemented by its settings.
pub(crate) trait Rules {
    /// Returns the features and classes that the protocol needs.
    fn needs(&self) -> Needs;

    /// Describes `numbers`, which are this protocol's, and states which published numbers they
    /// compare with. `is_published` is set if all settings are the published ones.
    fn in_words(&self, numbers: &[Scored], is_published: bool) -> String;

    /// Returns the transform of the protocol's script; `usual` is the default of evaluation.
    fn transform(&self, usual: Transform) -> Transform {
        usual
    }

    /// Checks that the training images suffice for the protocol.
    ///
    /// # Errors
    /// An [`EvalError`] that names what is missing.
    fn check(&self, train: &ImageSet) -> Result<(), EvalError> {
        let _ = train;
        Ok(())
    }

    /// Computes the protocol's numbers.
    ///
    /// # Errors
    /// Errors of the protocol, such as images that cannot be read.
    fn score(&self, task: &Task<'_>) -> Result<Vec<Scored>, EvalError>;
}

/// Features and classes that a protocol needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Number of last levels whose vectors are used.
    pub n_levels: usize,
    /// Set if the mean patch token is used.
    pub average: bool,
    /// Classes per image.
    pub classes: Classes,
    /// Set if the protocol is fast enough to score raw pixels as well.
    pub is_cheap: bool,
}

/// Number of classes per image that a protocol supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Classes {
    /// No classes: the protocol uses the images themselves.
    Unused,
    /// One for each image.
    One,
    /// One or several for each image.
    Several,
}

impl Needs {
    /// One vector and one class per image.
    pub(crate) const VECTORS: Self =
        Self { n_levels: 1, average: false, classes: Classes::One, is_cheap: false };

    /// Returns whether images must have classes.
    pub fn has_classes(self) -> bool {
        self.classes != Classes::Unused
    }
}

/// Formats `as DINO's`, with a remark if settings differ from the published ones.
pub(crate) fn as_published(whose: &str, is_plural: bool, is_published: bool) -> String {
    if is_published {
        format!("as {whose}")
    } else if is_plural {
        format!("as {whose}, but for their settings")
    } else {
        format!("as {whose}, but for its settings")
    }
}
