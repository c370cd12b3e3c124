//! Files of weights into a network's configuration and parameters.

mod config;
mod convnet;
mod found;
mod pretrained;
mod source;
mod transformer;

use std::path::Path;

use crate::error::WeightsError;
use source::Source;

pub use pretrained::{Hints, Pretrained};
pub use source::is_weights;
pub(crate) use source::{CONFIGURATIONS, IN_FOLDERS};

/// The backbone in `path`: a file of `ocelli export`, or of a library's weights (safetensors or `torch.save`), or a folder
/// with one and its configuration.
///
/// # Errors
/// [`WeightsError::Malformed`], and [`WeightsError::Unknown`] for a network that cannot be built here.
pub fn read(path: &Path, hints: &Hints) -> Result<Pretrained, WeightsError> {
    let source = Source::open(path)?;
    if let Some(exported) = source.exported(hints)? {
        return checked(path, exported);
    }
    let unknown = |reason: String| WeightsError::unknown(path, reason);
    let found = found::Found::of(&source, hints.network.as_deref()).map_err(unknown)?;
    let mut read = match found.is_transformer() {
        true => transformer::read(found, &source, hints),
        false => convnet::read(found, &source, hints),
    }
    .map_err(unknown)?;
    read.model.validate().map_err(|reason| WeightsError::unknown(path, reason))?;
    if let Some(normalization) = hints.normalization {
        read.preprocessing.normalization = normalization;
    }
    checked(path, read)
}

/// Checks the values of what was read: one number that is not finite makes all features meaningless.
fn checked(path: &Path, read: Pretrained) -> Result<Pretrained, WeightsError> {
    read.preprocessing.validate().map_err(|reason| WeightsError::malformed(path, reason))?;
    match read.tensors.iter().find(|tensor| !tensor.values.iter().all(|value| value.is_finite())) {
        Some(tensor) => {
            let reason = format!("its parameter {} holds numbers that are not finite", tensor.name);
            Err(WeightsError::malformed(path, reason))
        }
        None => Ok(read),
    }
}
