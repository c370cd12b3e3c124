//! Reading a network's configuration and parameters from weights files.

use std::path::Path;

use networks::{ClassHead, ModelConfig, Normalization, Pixels, Positions};

use crate::backbone::{Reader, exchange_of, readers};
use crate::error::WeightsError;
use crate::exported::read_exported;
use crate::library::Library;
use crate::metadata::{PREPROCESSING, UNNAMED};
use crate::preprocessing::Preprocessing;
use crate::pretrained::{Hints, Pretrained};
use crate::source::{BackboneTensors, Source, config, unsupported};

/// What can be done with weights of a network that cannot be built here.
const REMEDY: &str = "begin with weights that docs/weights.md lists, or compute features with the network's \
                      own library, for `ocelli curate --features`";

/// Reads the backbone in `path`: a file of `ocelli export`, a library's weights (safetensors or
/// `torch.save`), or a folder of weights and their configuration.
///
/// # Errors
/// [`WeightsError::Malformed`], and [`WeightsError::Unknown`] for a network that cannot be built
/// here.
pub fn read(path: &Path, hints: &Hints) -> Result<Pretrained, WeightsError> {
    let source = Source::open(path)?;
    let pretrained = match read_exported(&source, hints)? {
        Some(pretrained) => pretrained,
        None => read_foreign(&source, hints).map_err(|reason| refuse(&source, reason))?,
    };
    check(path, &pretrained)?;
    Ok(pretrained)
}

/// Returns the error about `source`, which cannot be read for `reason`: names its network if that
/// is known.
fn refuse(source: &Source, reason: String) -> WeightsError {
    let Some(network) = unsupported(&source.arrays) else {
        return WeightsError::unknown(&source.path, reason);
    };
    let reason = reason.trim_end_matches(", which is not supported");
    let reason = format!("it seems to be {network}, which is not supported: {reason}; {REMEDY}");
    WeightsError::unknown(&source.path, reason)
}

/// Finds the backbone among the tensors of `source`, and the reader of its kind.
fn find_backbone(source: &Source, hints: &Hints) -> Result<(Reader, BackboneTensors), String> {
    let mut kinds = Vec::new();
    let mut first_error = None;
    for reader in readers() {
        for anchor in reader.anchors {
            match BackboneTensors::find(source, anchor, hints.network.as_deref()) {
                Ok(Some(tensors)) if (reader.matches)(&tensors) => return Ok((reader, tensors)),
                Ok(_) => {}
                // The network may be of another kind.
                Err(reason) => first_error = first_error.or(Some(reason)),
            }
        }
        kinds.push(reader.kind);
    }
    if let Some(reason) = first_error {
        return Err(reason);
    }
    let last = kinds.pop().unwrap_or_default();
    let names: Vec<&str> = source.arrays.keys().take(3).map(String::as_str).collect();
    Err(format!(
        "no {} or {last} among its {} tensors ({}, …)",
        kinds.join(", "),
        source.arrays.len(),
        names.join(", ")
    ))
}

/// Reads a backbone that another library has written.
fn read_foreign(source: &Source, hints: &Hints) -> Result<Pretrained, String> {
    let (reader, mut backbone_tensors) = find_backbone(source, hints)?;
    let mut assumed: Vec<String> = backbone_tensors.selection_note().into_iter().collect();
    let recognized = (reader.recognize)(&mut backbone_tensors, source, hints, &mut assumed)?;
    let library = recognized.library;
    // Before anything is allocated by its sizes.
    recognized.model.validate()?;
    // ImageNet's constants are for three channels; for others, a file or a hint must state them.
    let mut default_preprocessing =
        Preprocessing::with_size(u32::try_from(recognized.size_px).unwrap_or(u32::MAX), Pixels::default());
    let is_satellite = is_satellite(&source.path, &recognized.model);
    if is_satellite {
        default_preprocessing.pixels.normalization =
            Normalization { mean: SATELLITE_MEAN.to_vec(), std: SATELLITE_STD.to_vec() };
        assumed
            .push("its name is that of a DINOv3 satellite network; assuming its color normalization".into());
    }
    let is_normalization_known = matches!(library, Library::Dino | Library::Dinov2 | Library::Torchvision)
        || hints.normalization.is_some()
        || is_satellite;
    config::check_activation(source, recognized.activation)?;
    config::check_sizes(source, &recognized.model)?;
    let mut preprocessing =
        config::preprocessing(source, default_preprocessing, is_normalization_known, &mut assumed)?;
    if let Some(normalization) = &hints.normalization {
        preprocessing.pixels.normalization = for_channels(normalization, recognized.model.n_channels());
    }
    let stated = stated_preprocessing(source);
    let stated_depth = stated.as_ref().map(|stated| stated.pixels.depth);
    preprocessing.pixels.depth = hints.depth.or(stated_depth).unwrap_or(preprocessing.pixels.depth);
    if let Some(stated) = stated {
        preprocessing.decoding = stated.decoding;
    }
    if library == Library::Torchvision {
        assumed.push("torchvision resizes bilinearly; Ocelli resizes bicubically".into());
    }
    let model = recognized.model;
    assumed.extend(pooling_note(source, &model));
    let tensors = backbone_tensors.into_parameters(&model, recognized.names)?;
    Ok(Pretrained {
        model,
        preprocessing,
        tensors,
        // Only files of Ocelli name the classes in a way that is known.
        classifier: None,
        decoder: None,
        network_name: UNNAMED.into(),
        origin: library.name(),
        license: source.license(),
        began_with: source.origins(),
        assumed,
    })
}

/// Returns a sentence about the pooling in a configuration of timm, if Ocelli pools differently.
fn pooling_note(source: &Source, model: &ModelConfig) -> Option<String> {
    let config = source.config.as_ref()?;
    let settings =
        [&config["global_pool"], &config["model_args"]["global_pool"], &config["pretrained_cfg"]["pool"]];
    let stated = settings.into_iter().find_map(|setting| setting.as_str())?;
    let pooling = exchange_of(model).pooling();
    let is_same = match stated {
        "token" => pooling.contains("token"),
        "avg" => pooling.starts_with("mean"),
        // The network returns features that are not pooled.
        "" => true,
        _ => false,
    };
    if is_same {
        return None;
    }
    let hint = if stated == "avg" {
        "; `embed --average` adds the mean of patch tokens, `--patches` writes all"
    } else {
        ""
    };
    Some(format!("its configuration pools by {stated:?}, but vectors of Ocelli are the {pooling}{hint}"))
}

/// Mean of the channels of the satellite images that DINOv3 was trained on, from its README.
const SATELLITE_MEAN: [f32; 3] = [0.430, 0.411, 0.296];

/// Standard deviation of the channels of the same images.
const SATELLITE_STD: [f32; 3] = [0.213, 0.156, 0.143];

/// Returns whether a file or its folder is named like DINOv3's networks of satellite images, and
/// the network could be one of them.
fn is_satellite(path: &Path, model: &ModelConfig) -> bool {
    let is_rotary = matches!(model, ModelConfig::Vit(config) if config.positions == Positions::Rope);
    let names = [path.file_name(), path.parent().and_then(Path::file_name)];
    is_rotary
        && model.n_channels() == 3
        && names.into_iter().flatten().any(|name| name.to_string_lossy().to_lowercase().contains("sat493m"))
}

/// Returns `normalization` for `n_channels` if it has the same constants for all of its channels.
fn for_channels(normalization: &Normalization, n_channels: usize) -> Normalization {
    match (common_value(&normalization.mean), common_value(&normalization.std)) {
        (Some(mean), Some(std)) => Normalization { mean: vec![mean; n_channels], std: vec![std; n_channels] },
        _ => normalization.clone(),
    }
}

/// Returns the value that all `values` have; `None` if they differ or there are none.
fn common_value(values: &[f32]) -> Option<f32> {
    let is_constant = values.windows(2).all(|pair| pair[0] == pair[1]);
    values.first().copied().filter(|_| is_constant)
}

/// Returns the preprocessing that the file states, if this program wrote it.
fn stated_preprocessing(source: &Source) -> Option<Preprocessing> {
    serde_json::from_str(source.metadata.get(PREPROCESSING)?).ok()
}

/// Upper bound of the magnitude of weights: the square of a larger one is infinite.
const LARGEST_WEIGHT: f32 = 1e18;

/// Checks the preprocessing, that it has constants for the channels of the network, and that all
/// weights are finite, because a single one that is not makes all features meaningless.
fn check(path: &Path, pretrained: &Pretrained) -> Result<(), WeightsError> {
    pretrained.preprocessing.validate().map_err(|reason| WeightsError::malformed(path, reason))?;
    let n_channels = pretrained.model.n_channels();
    let n_constants = pretrained.preprocessing.pixels.normalization.n_channels();
    if n_constants != n_channels {
        let reason = format!(
            "its images have {n_channels} channels, but {n_constants} means and deviations are known; give \
             them with --normalization"
        );
        return Err(WeightsError::unknown(path, reason));
    }
    for tensor in &pretrained.tensors {
        check_values(path, &tensor.name, &tensor.values)?;
    }
    if let Some(head) = &pretrained.classifier {
        check_values(path, ClassHead::WEIGHT, &head.weight)?;
        check_values(path, ClassHead::BIAS, &head.bias)?;
    }
    for tensor in pretrained.decoder.iter().flat_map(|head| &head.tensors) {
        check_values(path, &tensor.name, &tensor.values)?;
    }
    Ok(())
}

/// Checks that the values of the parameter `name` are finite, and not too large to compute with.
fn check_values(path: &Path, name: &str, values: &[f32]) -> Result<(), WeightsError> {
    let bad = values.iter().find(|value| value.is_nan() || value.abs() >= LARGEST_WEIGHT);
    let Some(value) = bad else { return Ok(()) };
    let reason = if value.is_finite() {
        format!("its parameter {name} holds {value}, too large to compute with")
    } else {
        format!("its parameter {name} holds numbers that are not finite")
    };
    Err(WeightsError::malformed(path, reason))
}
