//! Reading files that `ocelli export` has written in its own formats, which describe their network
//! completely.

use std::borrow::Cow;
use std::collections::BTreeSet;

use augment::IGNORED_CLASS;
use networks::head::pixels::{HIDDEN, PixelDecoder};
use networks::{ClassHead, ModelConfig, NamedTensor, Normalization, PixelHead};
use serde::de::DeserializeOwned;

use crate::backbone::exchange_of;
use crate::error::WeightsError;
use crate::file::Arrays;
use crate::metadata;
use crate::preprocessing::Preprocessing;
use crate::pretrained::{Hints, Pretrained};
use crate::source::Source;

/// Reads the backbone in `source`; `None` if `ocelli export` did not write the file.
///
/// # Errors
/// [`WeightsError::Malformed`], and [`WeightsError::Unknown`] if `hints` name another network.
pub(crate) fn read_exported(source: &Source, hints: &Hints) -> Result<Option<Pretrained>, WeightsError> {
    let Some(text) = source.metadata.get(metadata::MODEL) else { return Ok(None) };
    let network_name = source.metadata.get(metadata::NETWORK).map_or(metadata::UNNAMED, String::as_str);
    if let Some(wanted) = hints.network.as_deref()
        && wanted != network_name
    {
        let reason = format!("this exported file holds only the network {network_name}, not {wanted}");
        return Err(WeightsError::unknown(&source.path, reason));
    }
    let mut model: ModelConfig = parse_json(source, text)?;
    model.validate().map_err(|reason| WeightsError::malformed(&source.path, reason))?;
    let mut arrays = Cow::Borrowed(&source.arrays);
    if source.is_graph {
        let resized = exchange_of(&model)
            .restore_merged(arrays.to_mut())
            .map_err(|reason| WeightsError::malformed(&source.path, reason))?;
        model = resized.unwrap_or(model);
        model.validate().map_err(|reason| WeightsError::malformed(&source.path, reason))?;
    }
    let preprocessing: Preprocessing = match source.metadata.get(metadata::PREPROCESSING) {
        Some(text) => parse_json(source, text)?,
        // Older files have only the color normalization, or nothing.
        None => {
            let normalization: Normalization = match source.metadata.get(metadata::NORMALIZATION) {
                Some(text) => parse_json(source, text)?,
                None => Normalization::default(),
            };
            Preprocessing::with_size(model.image_px() as u32, normalization)
        }
    };
    let params = model.params();
    let classifier = match source.metadata.get(metadata::CLASSES) {
        Some(text) => Some(read_classifier(source, text, &arrays, model.width())?),
        None => None,
    };
    let mut known: BTreeSet<&str> = params.iter().map(|(name, _)| name.as_str()).collect();
    if classifier.is_some() {
        known.extend([ClassHead::WEIGHT, ClassHead::BIAS]);
    }
    let decoder = match source.metadata.get(metadata::PIXEL_CLASSES) {
        Some(text) => Some(read_decoder(source, text, &arrays, model.width())?),
        None => None,
    };
    known.extend(decoder.iter().flat_map(|head| &head.tensors).map(|tensor| tensor.name.as_str()));
    // Constants of a graph are among its arrays.
    if !source.is_graph
        && let Some(name) = arrays.keys().find(|name| !known.contains(name.as_str()))
    {
        let reason =
            format!("its tensor {name} is not a parameter of the network that its metadata describe");
        return Err(WeightsError::malformed(&source.path, reason));
    }
    let mut tensors = Vec::with_capacity(params.len());
    for (name, shape) in params {
        let Some(array) = arrays.get(&name) else {
            return Err(WeightsError::malformed(&source.path, format!("it has no tensor {name}")));
        };
        if array.shape != shape {
            let reason = format!("its tensor {name} has shape {:?}, not {shape:?}", array.shape);
            return Err(WeightsError::malformed(&source.path, reason));
        }
        tensors.push(NamedTensor { name, shape, values: array.values.clone() });
    }
    Ok(Some(Pretrained {
        model,
        preprocessing,
        tensors,
        classifier,
        decoder,
        network_name: network_name.to_string(),
        origin: "ocelli",
        license: source.license(),
        began_with: source.origins(),
        assumed: Vec::new(),
    }))
}

/// Reads the classifier of the classes `text` among `arrays`, on features of `width` channels.
fn read_classifier(
    source: &Source,
    text: &str,
    arrays: &Arrays,
    width: usize,
) -> Result<ClassHead, WeightsError> {
    let classes: Vec<String> = parse_json(source, text)?;
    if classes.is_empty() {
        return Err(WeightsError::malformed(&source.path, "its classifier has no classes"));
    }
    let is_multi_label = match source.metadata.get(metadata::PROBABILITIES).map(String::as_str) {
        None => false,
        Some(metadata::SIGMOID) => true,
        Some(other) => {
            let reason = format!("its classifier has probabilities by an unknown function, {other}");
            return Err(WeightsError::malformed(&source.path, reason));
        }
    };
    let mut tensors = Vec::new();
    for name in [ClassHead::WEIGHT, ClassHead::BIAS] {
        if let Some(array) = arrays.get(name) {
            let shape = array.shape.clone();
            tensors.push(NamedTensor { name: name.into(), shape, values: array.values.clone() });
        }
    }
    ClassHead::from_tensors(classes, is_multi_label, width, &tensors)
        .map_err(|error| WeightsError::malformed(&source.path, error.to_string()))
}

/// Reads the decoder of the classes `text` among `arrays`, on features of `width` channels.
fn read_decoder(
    source: &Source,
    text: &str,
    arrays: &Arrays,
    width: usize,
) -> Result<PixelHead, WeightsError> {
    let classes: Vec<String> = parse_json(source, text)?;
    let layers = source.metadata.get(metadata::DECODER).map_or("", String::as_str);
    let decoder: PixelDecoder = parse_json(source, layers)?;
    if classes.is_empty() {
        return Err(WeightsError::malformed(&source.path, "its decoder has no classes"));
    }
    // The numbers of classes are bytes of a mask, the last of which is no class.
    let most = usize::from(IGNORED_CLASS);
    if classes.len() > most {
        let reason = format!("its decoder has {} classes, and masks have at most {most}", classes.len());
        return Err(WeightsError::malformed(&source.path, reason));
    }
    if let PixelDecoder::Conv { width: stated } = decoder {
        // Nothing of a stated size is made before the file is known to have it.
        let array = arrays.get(&format!("{HIDDEN}.conv.weight"));
        if array.and_then(|array| array.shape.first()) != Some(&stated) {
            let reason = format!("its decoder has no convolution of {stated} channels");
            return Err(WeightsError::malformed(&source.path, reason));
        }
    }
    let mut tensors = Vec::new();
    for (name, array) in arrays.iter().filter(|(name, _)| name.starts_with(PixelHead::PREFIX)) {
        let shape = array.shape.clone();
        tensors.push(NamedTensor { name: name.clone(), shape, values: array.values.clone() });
    }
    PixelHead::from_tensors(classes, decoder, width, &tensors)
        .map_err(|error| WeightsError::malformed(&source.path, error.to_string()))
}

/// Parses `text`, an entry of the metadata of `source`.
fn parse_json<T: DeserializeOwned>(source: &Source, text: &str) -> Result<T, WeightsError> {
    serde_json::from_str(text).map_err(|error| WeightsError::malformed(&source.path, error.to_string()))
}
