//! Exchange of backbones with other libraries.
//!
//! Each kind of backbone is one file or folder here, with an [`Exchange`] for its configuration,
//! and one line in `registry`: its names in every library, how it is recognized among the tensors
//! of a file, its configuration for timm and transformers, and its ONNX graph.

mod convnext;
mod convolutional;
mod layers;
mod registry;
mod regnet;
mod renamed;
mod resnet;
#[cfg(feature = "testing")]
mod toy;
mod vit;

use networks::{ModelConfig, NamedTensor, RGB_CHANNELS};
use serde_json::{Map, Value};

use crate::export::Export;
use crate::file::Arrays;
use crate::library::Library;
use crate::onnx;
use crate::pretrained::Hints;
use crate::source::{Found, Source};

pub(crate) use registry::{exchange_of, readers};
pub(crate) use renamed::ours;

/// Exchange of one kind of backbone with other libraries. A method that is not implemented refuses,
/// or changes nothing.
pub(crate) trait Exchange {
    /// Name of the kind in messages.
    fn kind() -> &'static str
    where
        Self: Sized;

    /// Names of the first layer's weight in all libraries, by which the kind is found among the
    /// tensors of a file.
    fn anchors() -> &'static [&'static str]
    where
        Self: Sized;

    /// Returns `true` if the tensors in `found` belong to this kind rather than to another one with
    /// the same anchor.
    fn recognizes(found: &Found) -> bool
    where
        Self: Sized,
    {
        let _ = found;
        true
    }

    /// Determines the configuration from the shapes in `found` and from what `source` and `hints`
    /// state; adds a sentence to `assumed` for each assumption.
    ///
    /// # Errors
    /// A message that says which part of the network cannot be built here.
    fn recognized(
        found: &mut Found,
        source: &Source,
        hints: &Hints,
        assumed: &mut Vec<String>,
    ) -> Result<Recognized, String>
    where
        Self: Sized;

    /// Returns the parameters of `export` under the names of `library`.
    ///
    /// # Errors
    /// A message, if `library` has no such network.
    fn arrays(&self, library: Library, export: &Export<'_>) -> Result<Arrays, String> {
        let _ = export;
        Err(no_such(library))
    }

    /// Returns timm's constructor of the network.
    ///
    /// # Errors
    /// A message, if timm has no such network.
    fn timm(&self, export: &Export<'_>) -> Result<TimmModel, String> {
        let _ = export;
        Err(no_such(Library::Timm))
    }

    /// Returns the contents of `config.json` for transformers.
    ///
    /// # Errors
    /// A message, if transformers has no such network.
    fn transformers(&self) -> Result<Value, String> {
        Err(no_such(Library::Transformers))
    }

    /// Returns the part of a model's output in transformers that is an image's feature, as Python
    /// code.
    fn feature_in_transformers(&self) -> &'static str {
        "last_hidden_state.mean((2, 3))"
    }

    /// Returns Python code that builds the network with the code of `library`; `None` if there is
    /// none, or if `library` is timm, whose constructor [`Exchange::timm`] returns.
    fn python(&self, library: Library) -> Option<PythonNetwork> {
        let _ = library;
        None
    }

    /// Adds the network's nodes for images of `px` pixels to `graph`.
    ///
    /// # Errors
    /// A message, if a parameter is missing or there is no graph.
    fn draw(&self, graph: &mut onnx::Graph<'_>, px: usize) -> Result<Drawn, String> {
        let _ = (graph, px);
        Err("ONNX export is not implemented for it".into())
    }

    /// Restores the parameters that the network's graph merges, among the constants `arrays` of
    /// that graph; returns the configuration if the graph is made for images of another size.
    ///
    /// # Errors
    /// A message, if a constant is missing or has another shape.
    fn separated(&self, arrays: &mut Arrays) -> Result<Option<ModelConfig>, String> {
        let _ = arrays;
        Ok(None)
    }

    /// Adapts `tensors` to images of `px` pixels, so that the network computes the features that it
    /// computed for them before; returns its configuration. `None` if the network takes images of
    /// any size as it is.
    fn resized(&self, tensors: &mut [NamedTensor], px: usize) -> Option<ModelConfig> {
        let _ = (tensors, px);
        None
    }

    /// Removes the keys of its configuration that do not change what given weights compute, and
    /// writes equivalent values in one way.
    fn comparable(&self, keys: &mut Map<String, Value>) {
        let _ = keys;
    }

    /// Pooling that makes one vector of an image's features, in words.
    fn pooling(&self) -> &'static str {
        "mean over the last feature map"
    }
}

/// Function from Ocelli's name of a parameter to its names in a library. The tensors of several
/// names are joined along their first dimension.
type Names = Box<dyn Fn(&str) -> Vec<String>>;

/// Configuration of a network that was recognized, and the names of its parameters.
pub(crate) struct Recognized {
    /// Configuration of the network.
    pub model: ModelConfig,
    /// Library whose code made the file.
    pub library: Library,
    /// Names of the parameters in the file.
    pub names: Names,
    /// Side of the images on which the network is evaluated, unless the file states another.
    pub size_px: usize,
    /// Activation of such networks, which a configuration may name.
    pub activation: &'static str,
}

/// A call of `timm.create_model`.
pub(crate) struct TimmModel {
    /// Name of the architecture.
    pub architecture: &'static str,
    /// Arguments that differ from the architecture's.
    pub arguments: Value,
    /// Name of the first convolution, whose kernels timm may convert from three channels to others.
    pub first_conv: Option<&'static str>,
    /// Name of the classifier.
    pub classifier: &'static str,
    /// Pooling: `token` or `avg`.
    pub pool: &'static str,
}

/// Python code that builds a network.
pub(crate) struct PythonNetwork {
    /// Import statements, each with its newline.
    pub imports: &'static str,
    /// Expression whose value is the network.
    pub expression: String,
    /// Statement that removes the classifier, with its newline; empty if there is no classifier.
    pub without_classifier: &'static str,
}

/// Outputs of a graph.
pub(crate) struct Drawn {
    /// One vector an image, `[B, D]`.
    pub embedding: onnx::Value,
    /// Features of each cell, `[B, N, D]`.
    pub patches: onnx::Value,
    /// Whether the graph takes images of one size only.
    pub has_fixed_size: bool,
}

/// Reader of one kind of backbone.
pub(crate) struct Reader {
    pub kind: &'static str,
    pub anchors: &'static [&'static str],
    pub recognizes: fn(&Found) -> bool,
    pub recognized: fn(&mut Found, &Source, &Hints, &mut Vec<String>) -> Result<Recognized, String>,
}

impl Reader {
    fn of<E: Exchange>() -> Self {
        Self { kind: E::kind(), anchors: E::anchors(), recognizes: E::recognizes, recognized: E::recognized }
    }
}

/// Returns timm's constructor of the network in `export`, with the channels of its images.
///
/// # Errors
/// A message, if timm has no such network.
pub(crate) fn timm_model(export: &Export<'_>) -> Result<TimmModel, String> {
    let mut model = exchange_of(export.model).timm(export)?;
    let channels = export.model.n_channels();
    if channels != RGB_CHANNELS {
        if let Value::Object(arguments) = &mut model.arguments {
            arguments.insert("in_chans".into(), channels.into());
        }
        // timm would repeat the kernels of the first convolution, as if they were for three
        // channels.
        model.first_conv = None;
    }
    Ok(model)
}

/// Returns the argument of a constructor for images of `channels`, with a comma after it; nothing
/// for three, the default everywhere.
fn in_chans(channels: usize) -> String {
    if channels == RGB_CHANNELS { String::new() } else { format!("in_chans={channels}, ") }
}

fn no_such(library: Library) -> String {
    format!("{} has no such network", library.name())
}
