//! Exchange of the backbone that is for tests only, with a library that stores it under other names.

use networks::{ModelConfig, ToyConfig};

use super::renamed::renamed;
use super::{Drawn, Exchange, Recognized, no_such};
use crate::export::Export;
use crate::file::Arrays;
use crate::library::Library;
use crate::onnx::{Graph, PIXELS, Setting};
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
        let model = ModelConfig::Toy(Self { width });
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

    fn draw(&self, graph: &mut Graph<'_>, _: usize) -> Result<Drawn, String> {
        // The mean color in place of the network: enough for a graph with two outputs.
        let embedding = graph.node("GlobalAveragePool", &[&PIXELS.to_string()], &[]);
        let patches = graph.node("Flatten", &[&embedding], &[Setting::Int("axis", 1)]);
        Ok(Drawn { embedding: patches.clone(), patches, has_fixed_size: false })
    }
}

/// Returns the names in timm, which has the stem under another name and the last layer in two halves.
fn in_timm(name: &str) -> Vec<String> {
    match name.split_once('.') {
        Some(("stem", rest)) => vec![format!("toy_stem.{rest}")],
        Some(("project", rest)) => ["a", "b"].map(|half| format!("project_{half}.{rest}")).into(),
        _ => vec![name.to_string()],
    }
}
