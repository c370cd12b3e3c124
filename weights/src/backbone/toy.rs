//! Exchange of the backbone that is for tests only, with a library that stores it under other
//! names.

use networks::{ModelConfig, RGB_CHANNELS, ToyConfig};
use serde_json::json;

use super::renamed::renamed;
use super::{Exchange, Recognized, TimmModel, no_such};
use crate::export::Export;
use crate::file::Arrays;
use crate::library::Library;
use crate::pretrained::Hints;
use crate::source::{Found, Source};

/// Name of the first layer's weight.
const ANCHOR: &str = "toy_stem.weight";

impl Exchange for ToyConfig {
    fn kind() -> &'static str {
        "toy"
    }

    fn anchors() -> &'static [&'static str] {
        &[ANCHOR]
    }

    fn recognized(
        found: &mut Found,
        _: &Source,
        _: &Hints,
        _: &mut Vec<String>,
    ) -> Result<Recognized, String> {
        let Some(&[width, 48]) = found.shape(ANCHOR) else {
            return Err(format!("{ANCHOR} has shape {:?}, not [D, 48]", found.shape(ANCHOR)));
        };
        let model = ModelConfig::Toy(Self { width, channels: RGB_CHANNELS });
        Ok(Recognized {
            size_px: model.image_px(),
            model,
            library: Library::Timm,
            names: Box::new(in_timm),
            activation: "gelu",
        })
    }

    fn arrays(&self, library: Library, export: &Export<'_>) -> Result<Arrays, String> {
        match library {
            Library::Timm => Ok(renamed(export, in_timm)),
            _ => Err(no_such(library)),
        }
    }

    fn timm(&self, _: &Export<'_>) -> Result<TimmModel, String> {
        Ok(TimmModel {
            architecture: "toy",
            arguments: json!({ "width": self.width }),
            first_conv: Some("toy_stem"),
            classifier: "head",
            pool: "avg",
        })
    }
}

/// Returns the names in timm, which has the stem under another name and the last layer in two
/// halves.
fn in_timm(name: &str) -> Vec<String> {
    match name.split_once('.') {
        Some(("stem", rest)) => vec![format!("toy_stem.{rest}")],
        Some(("project", rest)) => ["a", "b"].map(|half| format!("project_{half}.{rest}")).into(),
        _ => vec![name.to_string()],
    }
}
