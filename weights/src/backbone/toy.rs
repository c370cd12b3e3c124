//! Exchange of the backbone for tests, with a library that stores it under other names.

use networks::{ModelConfig, RGB_CHANNELS, ToyConfig};
use serde_json::json;

use super::renamed::renamed_arrays;
use super::{Exchange, Recognized, TimmModel, no_such_network};
use crate::export::Export;
use crate::file::Arrays;
use crate::library::Library;
use crate::pretrained::Hints;
use crate::source::{BackboneTensors, Source};

/// Name of the first layer's weight.
const ANCHOR: &str = "toy_stem.weight";

impl Exchange for ToyConfig {
    fn kind() -> &'static str {
        "toy"
    }

    fn anchors() -> &'static [&'static str] {
        &[ANCHOR]
    }

    fn recognize(
        tensors: &mut BackboneTensors,
        _: &Source,
        _: &Hints,
        _: &mut Vec<String>,
    ) -> Result<Recognized, String> {
        let Some(&[width, 48]) = tensors.shape(ANCHOR) else {
            return Err(format!("{ANCHOR} has shape {:?}, not [D, 48]", tensors.shape(ANCHOR)));
        };
        let model = ModelConfig::Toy(Self { width, channels: RGB_CHANNELS });
        Ok(Recognized {
            size_px: model.image_px(),
            model,
            library: Library::Timm,
            names: Box::new(timm_names),
            activation: "gelu",
        })
    }

    fn arrays(&self, library: Library, export: &Export<'_>) -> Result<Arrays, String> {
        match library {
            Library::Timm => Ok(renamed_arrays(export, timm_names)),
            _ => Err(no_such_network(library)),
        }
    }

    fn classifier(&self, library: Library) -> Option<&'static str> {
        match library {
            Library::Timm => Some("head"),
            _ => None,
        }
    }

    fn timm(&self, _: &Export<'_>) -> Result<TimmModel, String> {
        Ok(TimmModel {
            architecture: "toy",
            arguments: json!({ "width": self.width }),
            first_conv: Some("toy_stem"),
            pool: "avg",
        })
    }
}

/// Returns the names in timm, where the stem has another name and the last layer is stored in two
/// halves.
fn timm_names(name: &str) -> Vec<String> {
    match name.split_once('.') {
        Some(("stem", rest)) => vec![format!("toy_stem.{rest}")],
        Some(("project", rest)) => ["a", "b"].map(|half| format!("project_{half}.{rest}")).into(),
        _ => vec![name.to_string()],
    }
}
