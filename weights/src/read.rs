//! Reading a network's configuration and parameters from files of weights.

use std::path::Path;

use networks::{ModelConfig, Normalization, Pixels, Positions};

use crate::backbone::{Reader, exchange_of, readers};
use crate::error::WeightsError;
use crate::exported::exported;
use crate::library::Library;
use crate::metadata::{PREPROCESSING, UNNAMED};
use crate::preprocessing::Preprocessing;
use crate::pretrained::{Hints, Pretrained};
use crate::source::{Found, Source, config, unsupported};

/// Reads the backbone in `path`: a file of `ocelli export`, a library's weights (safetensors or
/// `torch.save`), or a folder of weights and their configuration.
///
/// # Errors
/// [`WeightsError::Malformed`], and [`WeightsError::Unknown`] for a network that cannot be built
/// here.
pub fn read(path: &Path, hints: &Hints) -> Result<Pretrained, WeightsError> {
    let source = Source::open(path)?;
    if let Some(read) = exported(&source, hints)? {
        return checked(path, read);
    }
    let unknown = |reason: String| WeightsError::unknown(path, reason);
    let read = recognized(&source, hints).and_then(|(reader, found)| foreign(&reader, found, &source, hints));
    let read = read.map_err(|reason| {
        unknown(match unsupported(&source.arrays) {
            Some(network) => format!("it seems to be {network}, which is not supported: {reason}"),
            None => reason,
        })
    })?;
    checked(path, read)
}

/// Finds the backbone among the tensors of `source`, and the reader of its kind.
fn recognized(source: &Source, hints: &Hints) -> Result<(Reader, Found), String> {
    let mut kinds = Vec::new();
    let mut refused = None;
    for reader in readers() {
        for anchor in reader.anchors {
            match Found::of(source, anchor, hints.network.as_deref()) {
                Ok(Some(found)) if (reader.recognizes)(&found) => return Ok((reader, found)),
                Ok(_) => {}
                // The network may be of another kind.
                Err(reason) => refused = refused.or(Some(reason)),
            }
        }
        kinds.push(reader.kind);
    }
    if let Some(reason) = refused {
        return Err(reason);
    }
    let last = kinds.pop().unwrap_or_default();
    let names: Vec<&str> = source.arrays.keys().take(3).map(String::as_str).collect();
    Err(format!(
        "no {} or {last} is among its {} tensors ({}, …)",
        kinds.join(", "),
        source.arrays.len(),
        names.join(", ")
    ))
}

/// Reads the parameters in `found`, which another library has written.
fn foreign(reader: &Reader, mut found: Found, source: &Source, hints: &Hints) -> Result<Pretrained, String> {
    let mut assumed: Vec<String> = found.told().into_iter().collect();
    let recognized = (reader.recognized)(&mut found, source, hints, &mut assumed)?;
    let library = recognized.library;
    // Before anything is allocated by its sizes.
    recognized.model.validate()?;
    // ImageNet's constants are those of three channels; of others, a file or a hint must tell.
    let otherwise =
        Preprocessing::of_size(u32::try_from(recognized.size_px).unwrap_or(u32::MAX), Pixels::default());
    let mut otherwise = otherwise;
    let is_satellite = is_satellite(&source.path, &recognized.model);
    if is_satellite {
        otherwise.pixels.normalization =
            Normalization { mean: SATELLITE_MEAN.to_vec(), std: SATELLITE_STD.to_vec() };
        assumed.push(
            "its name is that of DINOv3's networks of satellite images, whose constants of colors are taken"
                .into(),
        );
    }
    let is_known = matches!(library, Library::Dino | Library::Dinov2 | Library::Torchvision)
        || hints.normalization.is_some()
        || is_satellite;
    config::check_activation(source, recognized.activation)?;
    config::check_sizes(source, &recognized.model)?;
    let mut preprocessing = config::preprocessing(source, otherwise, is_known, &mut assumed)?;
    if let Some(normalization) = &hints.normalization {
        preprocessing.pixels.normalization = for_channels(normalization, recognized.model.n_channels());
    }
    let stated = stated(source);
    let stated_depth = stated.as_ref().map(|stated| stated.pixels.depth);
    preprocessing.pixels.depth = hints.depth.or(stated_depth).unwrap_or(preprocessing.pixels.depth);
    preprocessing.decoding = stated.map_or(preprocessing.decoding, |stated| stated.decoding);
    if library == Library::Torchvision {
        assumed.push("torchvision resizes bilinearly; images are resized bicubically here".into());
    }
    let model = recognized.model;
    assumed.extend(other_pooling(source, &model));
    let tensors = found.parameters(&model, recognized.names)?;
    Ok(Pretrained { model, preprocessing, tensors, which: UNNAMED.into(), origin: library.name(), assumed })
}

/// Says that a configuration of timm pools otherwise than the vectors here do, if it does.
fn other_pooling(source: &Source, model: &ModelConfig) -> Option<String> {
    let config = source.config.as_ref()?;
    let places =
        [&config["global_pool"], &config["model_args"]["global_pool"], &config["pretrained_cfg"]["pool"]];
    let said = places.into_iter().find_map(|said| said.as_str())?;
    let pooling = exchange_of(model).pooling();
    let is_same = match said {
        "token" => pooling.contains("token"),
        "avg" => pooling.starts_with("mean"),
        // The network returns what it has not pooled.
        "" => true,
        _ => false,
    };
    if is_same {
        return None;
    }
    let hint = if said == "avg" {
        "; `embed --average` adds the mean of patch tokens, `--patches` writes all"
    } else {
        ""
    };
    Some(format!("its configuration pools by {said:?}, and vectors are the {pooling} here{hint}"))
}

/// Mean of the channels of the satellite images that DINOv3 was trained on, as its README states
/// it.
const SATELLITE_MEAN: [f32; 3] = [0.430, 0.411, 0.296];

/// Deviation of the channels of the same images.
const SATELLITE_STD: [f32; 3] = [0.213, 0.156, 0.143];

/// Returns whether a file or its folder has the name of a network of satellite images, and the
/// network is one of DINOv3's.
fn is_satellite(path: &Path, model: &ModelConfig) -> bool {
    let has_positions = matches!(model, ModelConfig::Vit(config) if config.positions == Positions::Rope);
    let names = [path.file_name(), path.parent().and_then(Path::file_name)];
    has_positions
        && model.n_channels() == 3
        && names.into_iter().flatten().any(|name| name.to_string_lossy().to_lowercase().contains("sat493m"))
}

/// Returns `normalization` for `n_channels` if it has the same constants for all of its channels.
fn for_channels(normalization: &Normalization, n_channels: usize) -> Normalization {
    let Normalization { mean, std } = normalization;
    let is_even = |values: &[f32]| values.windows(2).all(|pair| pair[0] == pair[1]);
    match (is_even(mean) && is_even(std), mean.first(), std.first()) {
        (true, Some(mean), Some(std)) => {
            Normalization { mean: vec![*mean; n_channels], std: vec![*std; n_channels] }
        }
        _ => normalization.clone(),
    }
}

/// Returns the preprocessing that the file states, if this program wrote it.
fn stated(source: &Source) -> Option<Preprocessing> {
    serde_json::from_str(source.metadata.get(PREPROCESSING)?).ok()
}

/// Weights are smaller: the square of a larger one is infinite.
const LARGEST_WEIGHT: f32 = 1e18;

/// Checks the preprocessing, that it has constants for the channels of the network, and that all
/// values are finite: a single other value makes all features meaningless.
fn checked(path: &Path, read: Pretrained) -> Result<Pretrained, WeightsError> {
    read.preprocessing.validate().map_err(|reason| WeightsError::malformed(path, reason))?;
    let n_channels = read.model.n_channels();
    let n_constants = read.preprocessing.pixels.normalization.n_channels();
    if n_constants != n_channels {
        let reason = format!(
            "its images have {n_channels} channels, and {n_constants} means and deviations are known: --normalization gives them"
        );
        return Err(WeightsError::unknown(path, reason));
    }
    let mut values = read.tensors.iter().flat_map(|tensor| tensor.values.iter().map(move |v| (tensor, v)));
    match values.find(|(_, value)| value.is_nan() || value.abs() >= LARGEST_WEIGHT) {
        Some((tensor, value)) => {
            let reason = if value.is_finite() {
                format!("its parameter {} holds {value}, too large to compute with", tensor.name)
            } else {
                format!("its parameter {} holds numbers that are not finite", tensor.name)
            };
            Err(WeightsError::malformed(path, reason))
        }
        None => Ok(read),
    }
}
