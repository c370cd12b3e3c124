//! Reading files that `ocelli export` has written in its own formats, which state everything about
//! their network.

use std::borrow::Cow;

use networks::{ModelConfig, NamedTensor, Normalization};

use crate::backbone::exchange_of;
use crate::error::WeightsError;
use crate::metadata;
use crate::preprocessing::Preprocessing;
use crate::pretrained::{Hints, Pretrained};
use crate::source::Source;

/// Returns the backbone in `source`, if `ocelli export` wrote the file.
///
/// # Errors
/// [`WeightsError::Malformed`], and [`WeightsError::Unknown`] if `hints` name another network.
pub(crate) fn exported(source: &Source, hints: &Hints) -> Result<Option<Pretrained>, WeightsError> {
    let Some(text) = source.metadata.get(metadata::MODEL) else { return Ok(None) };
    let which = source.metadata.get(metadata::NETWORK).map_or(metadata::UNNAMED, String::as_str);
    if let Some(wanted) = hints.network.as_deref().filter(|wanted| *wanted != which) {
        let reason = format!("an exported file holds one network, here {which}: it has no {wanted}");
        return Err(WeightsError::unknown(&source.path, reason));
    }
    let bad = |error: serde_json::Error| WeightsError::malformed(&source.path, error.to_string());
    let mut model: ModelConfig = serde_json::from_str(text).map_err(bad)?;
    let malformed = |reason: String| WeightsError::malformed(&source.path, reason);
    model.validate().map_err(malformed)?;
    let mut arrays = Cow::Borrowed(&source.arrays);
    if source.is_graph {
        let changed = exchange_of(&model).separated(arrays.to_mut()).map_err(malformed)?;
        model = changed.unwrap_or(model);
        model.validate().map_err(malformed)?;
    }
    let entry = |key: &str| source.metadata.get(key);
    let preprocessing = match entry(metadata::PREPROCESSING) {
        Some(text) => serde_json::from_str(text).map_err(bad)?,
        // Older files have only the color normalization, or nothing.
        None => {
            let normalization: Option<Normalization> = entry(metadata::NORMALIZATION)
                .map(|text| serde_json::from_str(text))
                .transpose()
                .map_err(bad)?;
            Preprocessing::of_size(model.image_px() as u32, normalization.unwrap_or_default())
        }
    };
    let named = |(name, shape): (String, Vec<usize>)| {
        let array = arrays
            .get(&name)
            .ok_or_else(|| WeightsError::malformed(&source.path, format!("it has no tensor {name}")))?;
        if array.shape != shape {
            let reason = format!("its tensor {name} has shape {:?}, not {shape:?}", array.shape);
            return Err(WeightsError::malformed(&source.path, reason));
        }
        Ok(NamedTensor { name, shape, values: array.values.clone() })
    };
    let params = model.params();
    // Constants of a graph are among its arrays.
    if !source.is_graph
        && let Some(name) = arrays.keys().find(|name| !params.iter().any(|(known, _)| known == *name))
    {
        let reason = format!("its tensor {name} is no parameter of the network that its metadata describe");
        return Err(WeightsError::malformed(&source.path, reason));
    }
    let tensors: Result<Vec<_>, WeightsError> = params.into_iter().map(named).collect();
    Ok(Some(Pretrained {
        model,
        preprocessing,
        tensors: tensors?,
        which: which.to_string(),
        origin: "ocelli",
        assumed: Vec::new(),
    }))
}
